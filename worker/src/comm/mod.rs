//! Drivers of the collective (`netsum-collective`): its connections, its clock, and the
//! application's threads.
//!
//! | module | what lives there |
//! | --- | --- |
//! | [`config`] | configuration |
//! | [`network`] | what the connections run over, and [`transport`], which opens what the configuration asks for |
//! | [`sockets`] | sockets, of UDP and AF_XDP, and [`numbers`] for their queue pairs |
//! | `verbs` | an RDMA adapter; with the feature `verbs` |
//! | [`bootstrap`] | addresses and numbers, from a daemon or a list |
//! | [`turns`] | who drives, the caller or the keeper thread |
//! | [`core`] | engine, connections and the daemon's word, for whoever drives |
//! | [`session`] | a [`core`] after the other, as the ranks connect anew; the keeper thread |
//! | `collectives` | operations other than the all-reduce |
//! | `settings` | a configuration of names and texts, as in the environment |
//! | [`pending`] | an operation in flight; [`promise`], its outcome |
//! | [`communicator`] | all of it, for the application |

mod bootstrap;
mod collectives;
pub mod communicator;
pub mod config;
mod core;
mod network;
mod numbers;
pub mod pending;
mod promise;
mod session;
mod settings;
mod sockets;
mod transport;
pub(crate) mod turns;
#[cfg(feature = "verbs")]
mod verbs;

/// Whether this is still the process that connected: threads and locks are not there in one that
/// was forked from it.
fn forked(process: u32) -> Result<(), netsum_collective::error::Error> {
    if process == std::process::id() {
        Ok(())
    } else {
        Err(netsum_collective::error::Error::Forked)
    }
}

/// The locks under [`turns`].
mod sync {
    pub use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
}

pub use communicator::Communicator;
pub use config::{AdapterRetry, Bootstrap, CommConfig, Tls, Transport};
pub use pending::{Pending, Room};
pub use settings::Settings;
