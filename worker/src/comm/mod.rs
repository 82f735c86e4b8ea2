//! All-reduce over a ring of reliable connections, with a box that sums or without.
//!
//! | module | what lives there |
//! | --- | --- |
//! | [`config`] | configuration, reports, statistics |
//! | [`error`] | what can go wrong |
//! | [`frame`] | what the ranks tell each other past the box |
//! | [`transport`] | what the engine needs below itself |
//! | [`buffer`] | memory of a message |
//! | [`reduction`] | an ordinary ring all-reduce of one message |
//! | [`engine`] | the collective as a state machine |
//! | [`network`] | what the connections run over |
//! | [`udp`] | sockets, of UDP and AF_XDP: [`links`], the RC endpoint's queue pairs, and [`numbers`] for them |
//! | `verbs` | an RDMA adapter; with the feature `verbs` |
//! | [`bootstrap`] | addresses and numbers, from a daemon or a list |
//! | [`turns`] | who drives, the caller or the keeper thread |
//! | [`core`] | engine, connections and the daemon's word, for whoever drives |
//! | [`way_back`] | when ranks that sum by themselves try the box again |
//! | [`session`] | a [`core`] after the other, as the ranks connect anew; the keeper thread |
//! | [`pending`] | an all-reduce in flight |
//! | [`communicator`] | all of it, for the application |

mod bootstrap;
pub(crate) mod buffer;
pub mod communicator;
pub mod config;
mod core;
pub(crate) mod engine;
pub mod error;
pub(crate) mod frame;
pub(crate) mod links;
mod network;
mod numbers;
pub mod pending;
pub(crate) mod reduction;
mod session;
pub(crate) mod transport;
pub(crate) mod turns;
mod udp;
#[cfg(feature = "verbs")]
mod verbs;
pub(crate) mod way_back;

/// The locks under [`turns`].
mod sync {
    pub use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
}

pub use communicator::Communicator;
pub use config::{AdapterRetry, Bootstrap, CommConfig, Mode, Report, Statistics, Tls, Traffic, Transport};
pub use error::{Error, Position};
pub use pending::Pending;
