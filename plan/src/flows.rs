//! Flows that are not summed, spread over uplinks as Ethereal does (arXiv 2407.00550): all uplinks
//! carry the same bytes, and the fewest flows are cut.
//!
//! n flows of one size over s uplinks leave r = n mod s when each uplink has as many whole flows.
//! With g = gcd(r, s), each of these r is cut into s/g pieces. That makes r s/g pieces, r/g for
//! each uplink.

use std::collections::BTreeSet;

/// A flow, or a piece of one, and its uplink.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Piece {
    /// The flow, from 0.
    pub flow: usize,
    /// The number of the piece, out of `of` equal ones.
    pub piece: usize,
    pub of: usize,
    pub uplink: usize,
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Spreads `flows` equal flows over `uplinks`. `first` is the uplink of flow 0; different values
/// keep several senders from starting with the same uplink.
pub fn spread(flows: usize, uplinks: usize, first: usize) -> Vec<Piece> {
    if uplinks == 0 {
        return Vec::new();
    }
    let left = flows % uplinks;
    let of = uplinks / gcd(left, uplinks);
    let whole = (0..flows - left).map(|flow| Piece {
        flow,
        piece: 0,
        of: 1,
        uplink: (first + flow) % uplinks,
    });
    let cut =
        (flows - left..flows).flat_map(|flow| (0..of).map(move |piece| (flow, piece))).enumerate();
    let cut =
        cut.map(|(n, (flow, piece))| Piece { flow, piece, of, uplink: (first + n) % uplinks });
    whole.chain(cut).collect()
}

/// Moves the flows of failed uplinks to the others, and leaves the rest where they are. Moved
/// pieces are spread again as if they were flows of their own; a piece may be cut once more. The
/// result is empty if all uplinks have failed.
pub fn without(pieces: &[Piece], uplinks: usize, failed: &BTreeSet<usize>) -> Vec<Piece> {
    let left: Vec<usize> = (0..uplinks).filter(|uplink| !failed.contains(uplink)).collect();
    let (moved, mut all): (Vec<Piece>, Vec<Piece>) =
        pieces.iter().partition(|piece| failed.contains(&piece.uplink));
    // Pieces of one size are spread together.
    let sizes: BTreeSet<usize> = moved.iter().map(|piece| piece.of).collect();
    let mut first = 0;
    for size in sizes {
        let same: Vec<&Piece> = moved.iter().filter(|piece| piece.of == size).collect();
        let pieces = spread(same.len(), left.len(), first);
        first += pieces.len();
        all.extend(pieces.into_iter().map(|p| {
            let Piece { flow, piece, of, .. } = *same[p.flow];
            Piece { flow, piece: piece * p.of + p.piece, of: of * p.of, uplink: left[p.uplink] }
        }));
    }
    all.sort_unstable();
    all
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    /// The load of each uplink, in units of 1/lcm of a flow.
    fn carried(pieces: &[Piece], unit: usize) -> BTreeMap<usize, usize> {
        let mut sums = BTreeMap::new();
        pieces.iter().for_each(|p| *sums.entry(p.uplink).or_insert(0) += unit / p.of);
        sums
    }

    /// Whether each flow occurs once, whole or in pieces.
    fn whole(pieces: &[Piece], flows: usize, unit: usize) -> bool {
        let mut sums = vec![0; flows];
        let all: BTreeSet<(usize, usize, usize)> =
            pieces.iter().map(|p| (p.flow, p.of, p.piece)).collect();
        pieces.iter().for_each(|p| sums[p.flow] += unit / p.of);
        all.len() == pieces.len()
            && pieces.iter().all(|p| p.piece < p.of)
            && sums.iter().all(|&sum| sum == unit)
    }

    #[test]
    fn the_papers_rule() {
        let of = |flows, uplinks| {
            let pieces = spread(flows, uplinks, 0);
            (
                pieces.iter().filter(|p| p.of == 1).count(),
                pieces.iter().filter(|p| p.of > 1).count(),
            )
        };
        assert_eq!(
            [of(8, 4), of(6, 4), of(5, 4), of(3, 4), of(0, 4), of(3, 0)],
            [(8, 0), (4, 4), (4, 4), (0, 12), (0, 0), (0, 0)]
        );
    }

    #[test]
    fn flows_of_a_failed_uplink_move_and_the_rest_stays() {
        let before = spread(8, 4, 0);
        let after = without(&before, 4, &[1].into());
        assert!(before.iter().filter(|p| p.uplink != 1).all(|p| after.contains(p)));
        // Two flows over three uplinks: both are cut into three.
        assert_eq!(carried(&after, 3), [(0, 8), (2, 8), (3, 8)].into());
        assert!(whole(&after, 8, 3));
    }

    /// The fewest pieces of cut flows with which all uplinks carry the same: none of the remaining
    /// flows can be whole, and a piece is at most the capacity that its uplink has left.
    fn fewest(flows: usize, uplinks: usize) -> usize {
        let left = flows % uplinks;
        // Pieces of r unit flows fill s bins of r/s each: the minimum is r + s - gcd(r, s) if they
        // may differ in size, and r s / gcd if not.
        left * uplinks / gcd(left, uplinks)
    }

    proptest! {
        #[test]
        fn all_uplinks_carry_the_same(
            flows in 0usize..40,
            uplinks in 1usize..17,
            first in 0usize..20,
        ) {
            let pieces = spread(flows, uplinks, first);
            prop_assert!(whole(&pieces, flows, uplinks));
            let carried = carried(&pieces, uplinks);
            prop_assert!(carried.values().all(|&sum| sum == flows), "{carried:?}");
            prop_assert!(flows == 0 || carried.len() == uplinks);
            // A smaller number of equal pieces is not enough.
            let cut = pieces.iter().filter(|p| p.of > 1).count();
            let left = flows % uplinks;
            prop_assert!(left == 0 || (1..pieces.last().unwrap().of)
                .all(|of| (left * of) % uplinks != 0));
            prop_assert_eq!(cut, if left == 0 { 0 } else { fewest(flows, uplinks) });
        }

        #[test]
        fn a_failed_uplinks_load_moves_to_the_others(
            flows in 1usize..20,
            uplinks in 2usize..9,
            lost in 0usize..8,
        ) {
            let before = spread(flows, uplinks, 0);
            let lost = lost % uplinks;
            let after = without(&before, uplinks, &[lost].into());
            let unit = uplinks * (uplinks - 1);
            prop_assert!(whole(&after, flows, unit));
            prop_assert!(after.iter().all(|p| p.uplink != lost));
            prop_assert!(before.iter().filter(|p| p.uplink != lost).all(|p| after.contains(p)));
            // The loads were even before, so they are afterwards.
            let carried: BTreeSet<usize> = carried(&after, unit).into_values().collect();
            prop_assert_eq!(carried.len(), 1);
        }
    }
}
