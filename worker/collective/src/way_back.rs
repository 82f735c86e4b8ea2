//! When ranks that sum by themselves try the box again: rank 0 decides. Pure; the time is passed
//! in.
//!
//! A try costs a reconnection, and with a box that swallows everything three tenths of the
//! time-out. So each try that does not last makes the wait before the next one longer. What the box
//! does not say about itself, whether it will sum, only a try can tell.

use std::time::{Duration, Instant};

/// From a fall-back to the first try.
const FIRST: Duration = Duration::from_secs(1);
/// How much longer each next wait is.
const FACTOR: u32 = 4;
/// The longest wait.
const MOST: Duration = Duration::from_secs(600);
/// A box that has summed for so long begins anew with the first wait.
const STEADY: Duration = Duration::from_secs(60);

/// What the daemon has said last.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Wish {
    /// The ranks are to connect anew, whoever sums.
    pub renew: bool,
    /// The number of the box's programs, others after every start of its daemon; 0 where it is not
    /// there.
    pub programs: u64,
}

/// How the ranks stand with the box.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Standing {
    /// It sums.
    Trusted,
    /// It was given up.
    GivenUp,
    /// It was given up, and some rank has received a sum that was wrong.
    Wrong,
}

/// What rank 0 remembers over all connections.
#[derive(Clone, Copy, Debug)]
pub struct WayBack {
    /// The programs that were there while the box summed.
    programs: u64,
    /// When the present connections were made, or could not be replaced.
    since: Instant,
    /// The next wait.
    wait: Duration,
    /// When to try.
    due: Option<Instant>,
    /// Not before, whoever wishes it: the last time it was in vain.
    rest: Option<Instant>,
}

impl WayBack {
    pub fn new(now: Instant) -> Self {
        Self { programs: 0, since: now, wait: FIRST, due: None, rest: None }
    }

    /// All ranks have connected.
    pub fn connected(&mut self, now: Instant) {
        (self.since, self.due, self.rest) = (now, None, None);
    }

    /// The ranks could not join, and go on as before.
    pub fn in_vain(&mut self, now: Instant) {
        self.since = now;
        self.rest = Some(self.put_off(now));
    }

    fn put_off(&mut self, now: Instant) -> Instant {
        let due = now + self.wait;
        self.wait = (self.wait * FACTOR).min(MOST);
        self.due = Some(due);
        due
    }

    /// Whether the ranks should connect anew now.
    pub fn is_due(&mut self, now: Instant, wish: Wish, standing: Standing) -> bool {
        if self.rest.is_some_and(|rest| now < rest) {
            return false;
        }
        if standing == Standing::Trusted {
            if wish.programs != 0 {
                self.programs = wish.programs;
            }
            return wish.renew;
        }
        if self.due.is_none() {
            if now.saturating_duration_since(self.since) >= STEADY {
                self.wait = FIRST;
            }
            self.put_off(now);
        }
        // A box that is there as it was, and has summed wrong, is for people to look at.
        let other = standing != Standing::Wrong || wish.programs != self.programs;
        wish.renew || wish.programs != 0 && other && self.due.is_some_and(|due| now >= due)
    }
}

#[cfg(test)]
mod tests {
    use super::Standing::{GivenUp, Trusted, Wrong};
    use super::*;

    const NONE: Wish = Wish { renew: false, programs: 0 };
    const THERE: Wish = Wish { renew: false, programs: 7 };
    const ANOTHER: Wish = Wish { renew: false, programs: 8 };
    const ASKED: Wish = Wish { renew: true, programs: 7 };

    /// Milliseconds after the start.
    fn at(start: Instant, ms: u64) -> Instant {
        start + Duration::from_millis(ms)
    }

    /// The milliseconds at which `standing` leads to a try, looked at every 100, where each try
    /// connects and lasts for `lasts`.
    fn tries(
        mut way: WayBack,
        start: Instant,
        wish: Wish,
        standing: Standing,
        lasts: u64,
    ) -> Vec<u64> {
        let (mut tries, mut ms) = (Vec::new(), 0);
        while ms < 1_500_000 {
            if way.is_due(at(start, ms), wish, standing) {
                tries.push(ms);
                way.connected(at(start, ms));
                assert!(!way.is_due(at(start, ms), wish, Trusted));
                ms += lasts;
            }
            ms += 100;
        }
        tries
    }

    #[test]
    fn a_box_that_sums_is_left_in_peace_and_one_that_is_not_there_is_not_tried() {
        let start = Instant::now();
        let mut way = WayBack::new(start);
        for s in 0..1000 {
            assert!(!way.is_due(at(start, s * 1000), THERE, Trusted));
        }
        assert_eq!(tries(way, start, NONE, GivenUp, 0), [0; 0]);
    }

    #[test]
    fn a_box_that_was_away_for_longer_than_the_first_wait_is_tried_as_soon_as_it_is_there() {
        let start = Instant::now();
        let mut way = WayBack::new(start);
        assert!(!way.is_due(at(start, 100), NONE, GivenUp));
        assert!(!way.is_due(at(start, 1050), NONE, GivenUp));
        assert!(way.is_due(at(start, 1200), THERE, GivenUp));
    }

    #[test]
    fn a_box_that_does_not_sum_is_tried_ever_more_rarely() {
        let start = Instant::now();
        let found = tries(WayBack::new(start), start, THERE, GivenUp, 0);
        let waits: Vec<u64> = found.windows(2).map(|w| w[1] - w[0]).collect();
        assert_eq!(found[0], 1000);
        // The fall-back is seen 100 ms after the try.
        assert_eq!(waits, [4100, 16_100, 64_100, 256_100, 600_100]);
        // Nor more often if it sums for a moment each time.
        assert!(tries(WayBack::new(start), start, THERE, GivenUp, 5000).len() <= found.len());
    }

    #[test]
    fn a_box_that_has_summed_for_a_minute_begins_anew() {
        let start = Instant::now();
        let found = tries(WayBack::new(start), start, THERE, GivenUp, 61_000);
        assert!(found.windows(2).all(|w| w[1] - w[0] == 62_100), "{found:?}");
    }

    #[test]
    fn a_box_that_has_summed_wrong_is_tried_only_when_it_is_another_or_somebody_asks() {
        let start = Instant::now();
        let mut way = WayBack::new(start);
        way.is_due(start, THERE, Trusted);
        assert_eq!(tries(way, start, THERE, Wrong, 0), [0; 0]);
        assert_eq!(tries(way, start, NONE, Wrong, 0), [0; 0]);
        assert_eq!(tries(way, start, ANOTHER, Wrong, 0)[0], 1000);
        assert!(way.is_due(at(start, 100), ASKED, Wrong));
    }

    #[test]
    fn who_asks_waits_for_nothing_but_after_a_try_in_vain() {
        let start = Instant::now();
        let mut way = WayBack::new(start);
        assert!(way.is_due(start, ASKED, Trusted) && way.is_due(start, ASKED, GivenUp));
        way.in_vain(at(start, 100));
        let wait = FIRST.as_millis() as u64 * u64::from(FACTOR);
        for standing in [Trusted, GivenUp] {
            assert!(!way.is_due(at(start, 99 + wait), ASKED, standing));
            assert!(way.is_due(at(start, 100 + wait), ASKED, standing));
        }
    }
}
