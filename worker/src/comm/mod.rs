//! Drives the collective (`netsum-collective`): its connections, its clock, and the threads of the
//! application.
//!
//! | module | what lives there |
//! | --- | --- |
//! | [`config`] | configuration |
//! | [`network`] | the interface of transports; [`transport`] opens the configured one |
//! | [`sockets`] | UDP and AF_XDP sockets; [`allocator`] for their QPNs and PSNs |
//! | `batching` | when to receive next |
//! | `verbs` | an RDMA adapter; with the feature `verbs` |
//! | [`bootstrap`] | addresses and numbers, from a controller or a list |
//! | [`driver_lock`] | decides which thread drives |
//! | [`progress`] | a session with its progress thread, which drives between calls |
//! | [`core`] | engine, connections and heartbeat of one session |
//! | [`session`] | one [`core`] after the other, as the ranks reconnect |
//! | `collectives` | operations other than the all-reduce |
//! | [`hierarchy`] | sums in two levels: in a host's memory, and between hosts |
//! | `settings` | a configuration from names and texts, as in the environment |
//! | `split` | communicators of some of the ranks |
//! | [`pending`] | an operation in flight; [`promise`], its outcome |
//! | [`communicator`] | the interface for applications |

mod allocator;
mod batching;
mod bootstrap;
mod collectives;
pub mod communicator;
pub mod config;
mod core;
pub(crate) mod driver_lock;
mod hierarchy;
mod network;
pub mod pending;
mod progress;
mod promise;
mod session;
mod settings;
mod sockets;
mod split;
mod transport;
#[cfg(feature = "verbs")]
mod verbs;

/// Returns an error in a process that was forked from the one that connected: it has no copy of the
/// threads, and locks may stay locked.
fn forked(process: u32) -> Result<(), netsum_collective::error::Error> {
    if process == std::process::id() {
        Ok(())
    } else {
        Err(netsum_collective::error::Error::Forked)
    }
}

/// The locks under [`driver_lock`].
mod sync {
    pub use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
}

pub use communicator::Communicator;
pub use config::{AdapterRetry, Bootstrap, CommConfig, Hierarchy, Tls, Transport};
pub use pending::{Pending, Room};
pub use settings::Settings;
