//! The XDP programs and their maps, seen from user space.
//!
//! | module | what lives there |
//! | --- | --- |
//! | `plane` | [`DataPlane`], the controller's interface; tests implement a simpler one |
//! | `bpf` | [`BpfDataPlane`], the loaded programs and their maps |
//! | `load` | loads the programs into the kernel |
//! | `operations` | [`DataPlane`] with aya |
//! | `ports`, `rings`, `flows`, `in_band`, `cpus`, `trace`, `program_info` | its parts |
//! | [`held_back`] | a packet for a complete sum that no packet carries |
//! | [`pins`] | what outlives the daemon |
//! | `takeover` | the next daemon's use of it |
//! | [`aggregation_rate`] | this machine's aggregation rate |
//! | [`spread`] | unsummed flows over a box's uplinks |
//! | [`replica`] | a second instance, for `netsum simulate` |

pub mod aggregation_rate;
mod bpf;
mod cpus;
mod flows;
pub mod held_back;
mod in_band;
mod load;
mod operations;
pub mod pins;
mod plane;
mod ports;
mod program_info;
pub mod replica;
mod rings;
pub mod spread;
mod takeover;
mod trace;

pub use bpf::{BpfDataPlane, Logger};
pub use cpus::online_cpus;
pub use load::OBJECT;
pub use plane::{Attached, DataPlane, EndedRing, ProgramFacts, Traced, count};
