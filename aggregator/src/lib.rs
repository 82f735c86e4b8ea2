//! The daemon of the box and its command line, as a library, so that tests can use them too.
//!
//! | module | what lives there |
//! | --- | --- |
//! | [`check`] | `netsum check`: a machine before the first start |
//! | [`clock`] | clocks that processes agree on |
//! | [`config`] | the configuration file |
//! | [`core`] | the controller, a pure state machine: the crate `netsum-core` |
//! | [`daemon`] | what is around it: gRPC, netlink, clocks |
//! | [`dataplane`] | loading, attaching and feeding the XDP programs |
//! | [`cli`] | the command line |
#![warn(missing_docs)]

pub mod check;
pub mod cli;
pub mod clock;
pub mod config;
pub mod daemon;
pub mod dataplane;

pub use netsum_core as core;
pub use netsum_core::size;
