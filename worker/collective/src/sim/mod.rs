//! Whole jobs without sockets and clocks: N ranks' engines and endpoints, a network that loses,
//! doubles, delays and corrupts, and a box that sums real packets with the slot state machine of
//! `common`. Everything follows from a seed.
//!
//! | module | what lives there |
//! | --- | --- |
//! | [`rng`], [`vector`] | chance; what is summed |
//! | [`network`] | links, and all that happens to packets on them |
//! | [`aggregator`] | the box |
//! | [`job`] | hosts, network, box and clock |
//! | [`inflight`] | several operations in flight |
//! | [`renewal`] | ranks that leave together, to connect anew |
//! | [`strays`] | sums of earlier runs and of other rings |
//! | [`scenario`] | from a seed to a job with faults, and what must hold |
//! | [`shaped`] | links of all rates, without loss |
//! | [`fluid`] | the same in a network of fluids, which takes as long |
//! | [`tests`] | what must hold in cases that are worth a name |

mod aggregator;
#[cfg(test)]
mod fluid;
#[cfg(test)]
mod inflight;
mod job;
mod network;
#[cfg(test)]
mod renewal;
mod rng;
mod scenario;
#[cfg(test)]
mod shaped;
#[cfg(test)]
mod strays;
#[cfg(test)]
mod table;
#[cfg(test)]
mod tests;
mod vector;

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

pub use scenario::Summary;

/// A case in which something did not hold.
#[derive(Clone, Debug)]
pub struct Failure {
    /// Its seed, which replays it.
    pub seed: u64,
    /// What it is about, in one line.
    pub scenario: String,
    /// What did not hold.
    pub reason: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "seed {}: {}\n  {}", self.seed, self.scenario, self.reason)
    }
}

/// What the case of a seed is about, in one line.
pub fn describe(seed: u64) -> String {
    scenario::Scenario::new(seed).to_string()
}

/// Runs the case of a seed.
///
/// # Errors
/// What did not hold; also a panic.
pub fn simulate(seed: u64) -> Result<Summary, Failure> {
    let scenario = scenario::Scenario::new(seed);
    let outcome = catch_unwind(AssertUnwindSafe(|| scenario.run())).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        Err(text
            .or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()))
            .unwrap_or_default())
    });
    outcome.map_err(|reason| Failure { seed, scenario: scenario.to_string(), reason })
}
