//! All-reduce over a ring of reliable connections, with a box that sums or without.
//!
//! | module | what lives there |
//! | --- | --- |
//! | [`config`] | configuration, reports, statistics |
//! | [`error`] | what can go wrong |
//! | [`frame`] | what the ranks tell each other past the box |
//! | [`transport`] | what the engine needs below itself |
//! | [`reduction`] | an ordinary ring all-reduce of one message |
//! | [`engine`] | the collective as a state machine |
//! | [`links`] | queue pairs under the engine |
//! | [`bootstrap`] | addresses and numbers, from a daemon or a list |
//! | [`turns`] | who drives, the caller or the keeper thread |
//! | [`communicator`] | all of it over a socket, driven by the caller or the keeper thread |

mod bootstrap;
pub mod communicator;
pub mod config;
pub(crate) mod engine;
pub mod error;
pub(crate) mod frame;
pub(crate) mod links;
pub(crate) mod reduction;
pub(crate) mod transport;
pub(crate) mod turns;

/// The locks under [`turns`].
mod sync {
    pub use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
}

pub use communicator::Communicator;
pub use config::{Bootstrap, CommConfig, Mode, Report, Statistics, Tls};
pub use error::Error;
