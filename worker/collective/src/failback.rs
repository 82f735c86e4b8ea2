//! Decides when ranks that have fallen back try the box again. Only rank 0 decides. Pure; the time
//! is passed in.
//!
//! A try costs a reconnect, and three tenths of the timeout if the box drops everything. So each
//! try that does not last makes the wait before the next one longer. The controller cannot report
//! whether the box will sum: only a try shows it.

use std::time::{Duration, Instant};

/// Time from a fallback to the first try.
const FIRST: Duration = Duration::from_secs(1);
/// How much longer each next wait is.
const FACTOR: u32 = 4;
/// The longest wait.
const MAX_WAIT: Duration = Duration::from_secs(600);
/// After a box has summed for this long, the next wait is the first one again.
const STEADY: Duration = Duration::from_secs(60);

/// The controller's last reply.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ReconnectRequest {
    /// The ranks are to reconnect, whether or not the box sums.
    pub reconnect: bool,
    /// The number of the box's programs, which changes when they are loaded or attached again; 0
    /// where there is no box.
    pub program_generation: u64,
}

/// Whether the ranks trust the box.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BoxTrust {
    /// It sums.
    Trusted,
    /// It was given up.
    GivenUp,
    /// It was given up, and some rank has received a sum that was wrong.
    Wrong,
}

/// Rank 0's state over all sessions.
#[derive(Clone, Copy, Debug)]
pub struct Failback {
    /// The number of the programs while the box summed.
    program_generation: u64,
    /// When the present connections were made, or when a reconnect failed.
    since: Instant,
    /// The next wait.
    wait: Duration,
    /// When to try.
    due: Option<Instant>,
    /// No try before this, not even for an administrator, because the last one failed.
    not_before: Option<Instant>,
}

impl Failback {
    pub fn new(now: Instant) -> Self {
        Self { program_generation: 0, since: now, wait: FIRST, due: None, not_before: None }
    }

    /// All ranks have connected, with these programs at the box. The path test has used them, so a
    /// wrong sum of it is theirs.
    pub fn connected(&mut self, now: Instant, program_generation: u64) {
        (self.since, self.due, self.not_before) = (now, None, None);
        if program_generation != 0 {
            self.program_generation = program_generation;
        }
    }

    /// The ranks could not join, and keep their connections.
    pub fn failed(&mut self, now: Instant) {
        self.since = now;
        self.not_before = Some(self.put_off(now));
    }

    fn put_off(&mut self, now: Instant) -> Instant {
        let due = now + self.wait;
        self.wait = (self.wait * FACTOR).min(MAX_WAIT);
        self.due = Some(due);
        due
    }

    /// Whether the ranks should reconnect now.
    pub fn is_due(&mut self, now: Instant, request: ReconnectRequest, trust: BoxTrust) -> bool {
        if self.not_before.is_some_and(|not_before| now < not_before) {
            return false;
        }
        if trust == BoxTrust::Trusted {
            if request.program_generation != 0 {
                self.program_generation = request.program_generation;
            }
            return request.reconnect;
        }
        if self.due.is_none() {
            if now.saturating_duration_since(self.since) >= STEADY {
                self.wait = FIRST;
            }
            self.put_off(now);
        }
        // An unchanged box that has summed wrong needs an administrator.
        let other =
            trust != BoxTrust::Wrong || request.program_generation != self.program_generation;
        request.reconnect
            || request.program_generation != 0 && other && self.due.is_some_and(|due| now >= due)
    }
}

#[cfg(test)]
mod tests {
    use super::BoxTrust::{GivenUp, Trusted, Wrong};
    use super::*;

    const NONE: ReconnectRequest = ReconnectRequest { reconnect: false, program_generation: 0 };
    const THERE: ReconnectRequest = ReconnectRequest { reconnect: false, program_generation: 7 };
    const ANOTHER: ReconnectRequest = ReconnectRequest { reconnect: false, program_generation: 8 };
    const ASKED: ReconnectRequest = ReconnectRequest { reconnect: true, program_generation: 7 };

    /// Milliseconds after the start.
    fn at(start: Instant, ms: u64) -> Instant {
        start + Duration::from_millis(ms)
    }

    /// The milliseconds at which `standing` leads to a try, checked every 100, where each try
    /// connects and lasts for `lasts`.
    fn tries(
        mut way: Failback,
        start: Instant,
        request: ReconnectRequest,
        trust: BoxTrust,
        lasts: u64,
    ) -> Vec<u64> {
        let (mut tries, mut ms) = (Vec::new(), 0);
        while ms < 1_500_000 {
            if way.is_due(at(start, ms), request, trust) {
                tries.push(ms);
                way.connected(at(start, ms), 0);
                assert!(!way.is_due(at(start, ms), request, Trusted));
                ms += lasts;
            }
            ms += 100;
        }
        tries
    }

    #[test]
    fn a_box_that_sums_or_is_absent_is_not_tried() {
        let start = Instant::now();
        let mut way = Failback::new(start);
        for s in 0..1000 {
            assert!(!way.is_due(at(start, s * 1000), THERE, Trusted));
        }
        assert_eq!(tries(way, start, NONE, GivenUp, 0), [0; 0]);
    }

    #[test]
    fn a_box_that_was_absent_for_long_is_tried_as_soon_as_it_is_there() {
        let start = Instant::now();
        let mut way = Failback::new(start);
        assert!(!way.is_due(at(start, 100), NONE, GivenUp));
        assert!(!way.is_due(at(start, 1050), NONE, GivenUp));
        assert!(way.is_due(at(start, 1200), THERE, GivenUp));
    }

    #[test]
    fn a_box_that_does_not_sum_is_tried_less_and_less_often() {
        let start = Instant::now();
        let found = tries(Failback::new(start), start, THERE, GivenUp, 0);
        let waits: Vec<u64> = found.windows(2).map(|w| w[1] - w[0]).collect();
        assert_eq!(found[0], 1000);
        // The test sees the fallback 100 ms after the try.
        assert_eq!(waits, [4100, 16_100, 64_100, 256_100, 600_100]);
        // A box that sums for a moment each time is not tried more often.
        assert!(tries(Failback::new(start), start, THERE, GivenUp, 5000).len() <= found.len());
    }

    #[test]
    fn a_box_that_has_summed_for_a_minute_is_tried_soon_again() {
        let start = Instant::now();
        let found = tries(Failback::new(start), start, THERE, GivenUp, 61_000);
        assert!(found.windows(2).all(|w| w[1] - w[0] == 62_100), "{found:?}");
    }

    #[test]
    fn a_box_that_has_summed_wrong_is_tried_after_a_change_or_on_request() {
        let start = Instant::now();
        let mut way = Failback::new(start);
        way.is_due(start, THERE, Trusted);
        assert_eq!(tries(way, start, THERE, Wrong, 0), [0; 0]);
        assert_eq!(tries(way, start, NONE, Wrong, 0), [0; 0]);
        assert_eq!(tries(way, start, ANOTHER, Wrong, 0)[0], 1000);
        assert!(way.is_due(at(start, 100), ASKED, Wrong));
        // A path test can find the first sum of a session wrong.
        let mut way = Failback::new(start);
        way.connected(start, THERE.program_generation);
        assert_eq!(tries(way, start, THERE, Wrong, 0), [0; 0]);
    }

    #[test]
    fn a_request_is_due_at_once_except_after_a_failed_try() {
        let start = Instant::now();
        let mut way = Failback::new(start);
        assert!(way.is_due(start, ASKED, Trusted) && way.is_due(start, ASKED, GivenUp));
        way.failed(at(start, 100));
        let wait = FIRST.as_millis() as u64 * u64::from(FACTOR);
        for trust in [Trusted, GivenUp] {
            assert!(!way.is_due(at(start, 99 + wait), ASKED, trust));
            assert!(way.is_due(at(start, 100 + wait), ASKED, trust));
        }
    }
}
