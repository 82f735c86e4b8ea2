//! Evaluates bandwidth probes of a link, and decides when plans use the result: pure.

use netsum_core::bandwidth::MAX_PROBE_BYTES;

/// A probe occupies a link for at most a second divided by this.
const SECOND_DIVISOR: u64 = 10;
/// Probes in each direction, after a short first one that determines their length.
pub const PROBES: usize = 3;
/// Bytes of the first probe.
pub const FIRST: u32 = 256 << 10;
/// Rates that differ by at most this count as equal, in percent.
const EQUAL_PERCENT: u64 = 10;

/// Rate of a link in bits per second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Capacity {
    /// The link limited the rate.
    Exactly(u64),
    /// The sender limited the rate.
    AtLeast(u64),
}

/// Result of the probes in one direction. Each has the rate at which it left and the rate at which
/// it arrived; `None` if too few frames arrived. The fastest counts: other traffic or a delayed
/// sender makes a probe slower, and little makes one faster.
pub fn direction(probes: &[(u64, u64)]) -> Option<Capacity> {
    let rate = probes.iter().map(|(_, came)| *came).filter(|came| *came > 0).max()?;
    // Frames that arrive about as fast as they left met no queue. A shortage of CPU time can halve
    // the rate. One probe that met a queue is enough: the sender of the fastest may have been slow.
    let queued = |&(sent, came): &(u64, u64)| came < sent / 2 && is_same(rate, came);
    Some(if probes.iter().any(queued) { Capacity::Exactly(rate) } else { Capacity::AtLeast(rate) })
}

fn is_same(used: u64, rate: u64) -> bool {
    u128::from(used.abs_diff(rate)) * 100 <= u128::from(used) * u128::from(EQUAL_PERCENT)
}

/// Rate of a link in both directions together, which sums need.
pub fn both(up: Capacity, down: Capacity) -> Capacity {
    match (up, down) {
        (Capacity::Exactly(a), Capacity::Exactly(b)) => Capacity::Exactly(a.min(b)),
        (Capacity::Exactly(a), Capacity::AtLeast(_))
        | (Capacity::AtLeast(_), Capacity::Exactly(a)) => Capacity::Exactly(a),
        (Capacity::AtLeast(a), Capacity::AtLeast(b)) => Capacity::AtLeast(a.min(b)),
    }
}

/// Length of a probe in bytes on a link of about this rate.
pub fn bytes(rate: u64) -> u32 {
    (rate / 8 / SECOND_DIVISOR).min(MAX_PROBE_BYTES as u64) as u32
}

/// The rate that replaces the nominal one in plans from now on, if any. Noise does not cause
/// another plan.
pub fn settle(nominal: Option<u64>, before: Option<u64>, carries: Capacity) -> Option<u64> {
    match (before.or(nominal), carries) {
        (Some(used), Capacity::Exactly(rate)) if is_same(used, rate) => before,
        (_, Capacity::Exactly(rate)) => Some(rate),
        // The link may be faster than observed; the nominal rate may be right again.
        (_, Capacity::AtLeast(rate)) => before.filter(|used| *used >= rate || is_same(*used, rate)),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_fastest_probe_gives_the_rate() {
        assert_eq!(direction(&[(8, 0), (8, 0)]), None);
        assert_eq!(
            direction(&[(8000, 250), (8000, 180), (8000, 251)]),
            Some(Capacity::Exactly(251))
        );
        assert_eq!(
            direction(&[(8000, 7900), (8000, 250), (8000, 8100)]),
            Some(Capacity::AtLeast(8100))
        );
        assert_eq!(
            direction(&[(8000, 399), (700, 401), (8000, 180)]),
            Some(Capacity::Exactly(401)),
            "the sender of the fastest was slow, another probe queued before the link"
        );
        assert_eq!(both(Capacity::Exactly(5), Capacity::AtLeast(9)), Capacity::Exactly(5));
        assert_eq!(both(Capacity::Exactly(5), Capacity::Exactly(4)), Capacity::Exactly(4));
    }

    #[test]
    fn probes_are_short_on_slow_links_and_bounded_on_fast_ones() {
        assert_eq!([bytes(50_000_000), bytes(100_000_000_000)], [625_000, 2 << 20]);
    }

    #[test]
    fn a_link_that_is_fast_again_has_its_nominal_rate() {
        let slow = settle(Some(10_000), None, Capacity::Exactly(250));
        assert_eq!(slow, Some(250));
        assert_eq!(settle(Some(10_000), slow, Capacity::AtLeast(5_000)), None);
        assert_eq!(settle(Some(10_000), slow, Capacity::AtLeast(240)), slow);
        assert_eq!(
            settle(None, None, Capacity::AtLeast(5_000)),
            None,
            "not known, and at least something"
        );
    }

    proptest! {
        #[test]
        fn ten_percent_more_or_less_change_nothing(
            used in 1_000_000u64..1_000_000_000_000, of_1000 in 901u64..1099, is_nominal: bool,
        ) {
            let rate = used / 1000 * of_1000;
            let (nominal, before) = if is_nominal { (Some(used), None) } else { (Some(7), Some(used)) };
            prop_assert_eq!(settle(nominal, before, Capacity::Exactly(rate)), before);
        }

        #[test]
        fn only_changes_of_over_ten_percent_count(
            used in 1_000_000u64..1_000_000_000_000, of_1000 in prop_oneof![1u64..899, 1102u64..5000],
        ) {
            let rate = used / 1000 * of_1000;
            let settled = settle(Some(used), None, Capacity::Exactly(rate));
            prop_assert_eq!(settled, Some(rate));
            prop_assert_eq!(settle(Some(used), settled, Capacity::Exactly(rate)), settled);
        }

        #[test]
        fn noise_of_less_than_five_percent_changes_a_rate_once_at_most(
            rate in 1_000_000u64..1_000_000_000_000,
            nominal in proptest::option::of(1u64..1_000_000_000_000),
            noise in proptest::collection::vec(955u64..1045, 1..50),
        ) {
            let mut settled = None;
            let mut changes = 0;
            for of_1000 in noise {
                let now = settle(nominal, settled, Capacity::Exactly(rate / 1000 * of_1000));
                changes += u32::from(now != settled);
                settled = now;
            }
            prop_assert!(changes <= 1, "{changes}");
        }
    }
}
