//! The order of a job's ranks in its rings.

use std::collections::BTreeMap;
use std::net::IpAddr;

use crate::Rank;

/// A rank, and where it is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Location<'a> {
    pub rank: Rank,
    /// The box that it is behind; `None` if there is a single one.
    pub behind: Option<&'a str>,
    pub ip: IpAddr,
}

/// From rank 0 on. Ranks behind one box follow each other, so only one connection leaves the box.
/// Among them, ranks with one address are apart from each other, if they are half of them or fewer:
/// what a host sends to itself does not reach a box. Ranks with addresses of their own stay in
/// order.
pub(super) fn ring_order(ranks: &[Location<'_>]) -> Vec<Rank> {
    // By their first ranks.
    let mut groups: Vec<(Option<&str>, Vec<Location<'_>>)> = Vec::new();
    for location in ranks {
        match groups.iter_mut().find(|(behind, _)| *behind == location.behind) {
            Some((_, group)) => group.push(*location),
            None => groups.push((location.behind, vec![*location])),
        }
    }
    groups.iter().flat_map(|(_, group)| apart(group)).collect()
}

/// Fills all even places in turn, then all odd ones, beginning with the hosts that have the most
/// ranks.
fn apart(group: &[Location<'_>]) -> Vec<Rank> {
    let mut by_host: BTreeMap<IpAddr, Vec<Rank>> = BTreeMap::new();
    group.iter().for_each(|l| by_host.entry(l.ip).or_default().push(l.rank));
    if by_host.len() == group.len() {
        return group.iter().map(|l| l.rank).collect();
    }
    let mut hosts: Vec<Vec<Rank>> = by_host.into_values().collect();
    hosts.sort_by_key(|ranks| (std::cmp::Reverse(ranks.len()), ranks[0]));
    let mut order = vec![Rank(0); group.len()];
    let places = (0..group.len()).step_by(2).chain((1..group.len()).step_by(2));
    places.zip(hosts.into_iter().flatten()).for_each(|(place, rank)| order[place] = rank);
    // It remains right as a circle.
    let first = order.iter().position(|rank| *rank == group[0].rank).unwrap_or(0);
    order.rotate_left(first);
    order
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The order of ranks on hosts, each behind a box.
    fn order(hosts: &[(Option<&'static str>, u8)]) -> Vec<u32> {
        let location = |(rank, &(behind, host))| Location {
            rank: Rank(rank),
            behind,
            ip: IpAddr::from([10, 0, 0, host]),
        };
        let all: Vec<_> = (0..).zip(hosts).map(location).collect();
        ring_order(&all).into_iter().map(|rank| rank.0).collect()
    }

    #[test]
    fn hosts_take_turns() {
        let on = |hosts: &[u8]| order(&hosts.iter().map(|host| (None, *host)).collect::<Vec<_>>());
        assert_eq!(on(&[1, 2, 3]), [0, 1, 2], "one rank a host: as they are");
        assert_eq!(on(&[1, 1, 2, 2]), [0, 2, 1, 3]);
        assert_eq!(on(&[1, 2, 2, 3]), [0, 2, 3, 1]);
        assert_eq!(on(&[1, 1, 2, 2, 3, 3]), [0, 3, 1, 4, 2, 5]);
    }

    #[test]
    fn ranks_behind_one_box_follow_each_other() {
        let (a, b) = (Some("a"), Some("b"));
        assert_eq!(order(&[(b, 1), (a, 2), (b, 3), (a, 4)]), [0, 2, 1, 3]);
        let two = [(a, 1), (a, 1), (b, 3), (b, 3), (a, 2), (a, 2), (b, 4), (b, 4)];
        assert_eq!(order(&two), [0, 4, 1, 5, 2, 6, 3, 7]);
    }

    proptest! {
        #[test]
        fn no_host_is_its_own_neighbour_if_it_has_at_most_half_of_the_ranks(
            hosts in prop::collection::vec(1u8..6, 2..64),
        ) {
            let most = (1..6).map(|h| hosts.iter().filter(|o| **o == h).count()).max().unwrap();
            let ring = order(&hosts.iter().map(|host| (None, *host)).collect::<Vec<_>>());
            prop_assert_eq!(ring[0], 0);
            let mut sorted = ring.clone();
            sorted.sort_unstable();
            prop_assert!(sorted.into_iter().eq(0..hosts.len() as u32), "each rank once");
            let neighbours = ring.iter().zip(ring.iter().cycle().skip(1));
            let host = |rank: &u32| hosts[*rank as usize];
            if 2 * most <= hosts.len() {
                neighbours.into_iter().for_each(|(a, b)| assert_ne!(host(a), host(b), "{ring:?}"));
            }
        }
    }
}
