//! The XDP programs and their maps, seen from user space.
//!
//! [`DataPlane`] is what the controller asks of it; [`BpfDataPlane`] implements it with aya, tests with something simpler.

mod bpf;
mod cpus;
mod facts;
mod flows;
pub mod held;
pub mod pins;
mod plane;
pub mod replica;
mod takeover;
mod trace;

pub use bpf::{BpfDataPlane, LoadOptions, Logger, OBJECT};
pub use cpus::online_cpus;
pub use plane::{Attached, DataPlane, ProgramFacts, Traced, XdpMode, count};
