//! The XDP programs and their maps, seen from user space.
//!
//! | module | what lives there |
//! | --- | --- |
//! | `plane` | [`DataPlane`], what the controller asks; tests implement it with something simpler |
//! | `bpf` | [`BpfDataPlane`], the loaded programs and their maps; `load`: how they get into the kernel |
//! | `operations` | [`DataPlane`] with aya; `ports`, `rings`, `flows`, `in_band`, `cpus`, `trace`, `facts`: what belongs to each |
//! | [`held`] | a packet for a sum that no packet takes along |
//! | [`pins`] | what outlives the daemon; `takeover`: what the next one makes of it |
//! | [`speed`] | how fast this machine adds |
//! | [`spread`] | flows that are not summed, over a box's uplinks |
//! | [`replica`] | a second instance, for `netsum simulate` |

mod bpf;
mod cpus;
mod facts;
mod flows;
pub mod held;
mod in_band;
mod load;
mod operations;
pub mod pins;
mod plane;
mod ports;
pub mod replica;
mod rings;
pub mod speed;
pub mod spread;
mod takeover;
mod trace;

pub use bpf::{BpfDataPlane, Logger};
pub use cpus::online_cpus;
pub use load::{LoadOptions, OBJECT};
pub use plane::{Attached, DataPlane, EndedRing, ProgramFacts, Traced, count};
