//! Host library of netsum: a RoCEv2 endpoint for reliable connections over UDP, and on top of it an
//! all-reduce by a box in the network, or by the ranks themselves where there is no box.
//!
//! | module | what lives there |
//! | --- | --- |
//! | [`rc`] | the endpoint, without I/O |
//! | [`udp`] | a socket under it |
//! | `xdp` | AF_XDP sockets under it; with the feature `xdp` |
//! | `verbs` | RDMA adapters through libibverbs |
//! | [`numeric`] | floats as integers; how data is cut into messages |
//! | [`comm`] | [`Communicator`]: all collectives |
//! | `local` | what the ranks of one host share |
//! | `control` | client of the box's daemon |
//! | [`addresses`] | this machine's addresses, and which to use |
//! | `unshared` | descriptors that forked processes close |
//!
//! A rank uses an RDMA adapter if one has its address, else a UDP socket: see [`Transport`]. The
//! feature `verbs`, on by default, is for adapters; it loads libibverbs when an adapter is opened.
//! The feature `xdp`, also on by default, is for AF_XDP sockets.
//!
//! ```no_run
//! use netsum_worker::{Bootstrap, CommConfig, Communicator};
//! let bootstrap = Bootstrap::Controller {
//!     address: "10.0.0.254:4790".into(),
//!     job: "train".into(),
//!     token: "secret".into(),
//! };
//! let mut comm = Communicator::connect(CommConfig::new(0, 4, "10.0.0.1".parse()?, bootstrap))?;
//! let mut gradient = vec![0.5f32; 1_000_000];
//! let report = comm.all_reduce(&mut gradient)?;
//! println!("summed by the {} in {:?}", report.mode, report.elapsed);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

// Applications use only this crate.
#![warn(missing_docs)]

pub mod addresses;
pub mod comm;
mod control;
mod local;
pub use netsum_collective::numeric;
pub use netsum_rc as rc;
pub mod udp;
mod unshared;
mod verbs;
#[cfg(feature = "xdp")]
pub mod xdp;

pub use comm::{
    AdapterRetry, Bootstrap, CommConfig, Communicator, Hierarchy, Pending, Room, Settings, Tls,
    Transport,
};
pub use half;
pub use netsum_collective::call::Op;
pub use netsum_collective::error::{Error, Position, UnreachableReason};
pub use netsum_collective::report::{Mode, Report, Statistics, Traffic};
pub use netsum_collective::seal::{Secret, TAG_BYTES};
pub use numeric::block::Width;
pub use numeric::element::{Dtype, Element, Owned};
pub use numeric::layout::Layout;
pub use numeric::number::Bool8;
pub use numeric::quant::Underflow;
pub use numeric::reference::{Reference, reference_sum};
