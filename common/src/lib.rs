//! Code that box, hosts and tests share: no I/O, no allocation, `no_std`.
//!
//! | module | contents |
//! | --- | --- |
//! | [`serial`] | 24-bit numbers: PSNs and their arithmetic, queue pair numbers |
//! | [`wire`] | RoCEv2 headers, parsing of frames |
//! | [`icrc`] | the invariant CRC: computing, verifying, patching |
//! | [`limits`] | limits of ranks, rings, slots and other resources |
//! | [`ring`] | a ring as user space sets it up |
//! | [`slot`] | the slot state machine |
//! | [`abi`] | map keys and values, the interface of kernel and user space |
//! | [`counters`] | every counter, with its name and meaning |
//! | [`timing`] | how long sums take, and which rank they wait for |
//! | [`lanes`] | the check lanes of verified sums |
//! | [`unmanaged`] | connection numbers without a daemon |
//! | [`size`] | sizes in bytes as text |
//! | [`float`] | float lanes: order-independent sums of f32 |
//! | [`defaults`] | defaults of a job |
//!
//! Nothing here may read a clock, a socket or a map.
#![cfg_attr(not(test), no_std)]
#![cfg_attr(target_arch = "bpf", feature(asm_experimental_arch))]

pub mod abi;
pub mod counters;
pub mod defaults;
pub mod float;
pub mod icrc;
pub mod lanes;
pub mod limits;
pub mod ring;
pub mod serial;
pub mod size;
pub mod slot;
pub mod timing;
pub mod unmanaged;
pub mod wire;
