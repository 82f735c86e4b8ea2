//! Benchmarks: programs and whole all-reduces, measured in the lab. `cargo xtask bench` runs them.
//!
//! | module | what lives there |
//! | --- | --- |
//! | [`dataplane`] | what the data plane costs, packet by packet and with live frames |
//! | [`contest`] | netsum beside others who all-reduce |
//! | [`scaling`] | all-reduces with more ranks, rings, jobs, credit, and larger messages |
//! | [`control`] | a fabric's manager with many boxes and ranks |
//! | [`keep`] | where figures go |
//! | [`plot`] | pictures of figures |
//!
//! `ebpf/` has the BPF programs of the data plane's benchmark.

pub mod contest;
pub mod control;
pub mod dataplane;
pub mod keep;
pub mod plot;
pub mod scaling;
pub mod trees;
