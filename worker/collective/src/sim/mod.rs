//! Whole jobs without sockets and clocks: N ranks' engines and endpoints, a network that loses,
//! duplicates, delays and corrupts packets, and a box that sums real packets with the slot state
//! machine of `common`. Each case is generated from a seed.
//!
//! | module | what lives there |
//! | --- | --- |
//! | [`rng`], [`vector`] | random numbers; data |
//! | [`network`] | links and their faults |
//! | [`aggregator`], [`ring_box`] | the box; its side of one ring |
//! | [`job`] | hosts, network, box and clock |
//! | [`inflight`] | several operations in flight |
//! | [`reconnect`] | ranks that reconnect together |
//! | [`strays`] | sums of earlier sessions and of other rings |
//! | [`scenario`] | generates a job with faults from a seed, and checks its result |
//! | [`shaped`] | links of all rates, without loss |
//! | [`fluid`] | comparison with a fluid network |
//! | [`tests`] | named cases |

mod aggregator;
#[cfg(test)]
mod fluid;
#[cfg(test)]
mod inflight;
mod job;
mod network;
#[cfg(test)]
mod reconnect;
mod ring_box;
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

/// A case that failed.
#[derive(Clone, Debug)]
pub struct Failure {
    /// Its seed, which replays it.
    pub seed: u64,
    /// Its description, in one line.
    pub scenario: String,
    /// The condition that did not hold.
    pub reason: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "seed {}: {}\n  {}", self.seed, self.scenario, self.reason)
    }
}

/// The description of a seed's case, in one line.
pub fn describe(seed: u64) -> String {
    scenario::Scenario::new(seed).to_string()
}

/// Runs the case of a seed.
///
/// # Errors
/// The condition that did not hold, or a panic.
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
