//! Benchmarks: programs and whole all-reduces, measured in the lab. `cargo xtask bench` runs them.
//!
//! | module | content |
//! | --- | --- |
//! | [`dataplane`] | the cost of the data plane, packet by packet and with live frames |
//! | [`contest`] | netsum compared with its peers |
//! | [`control`] | a fabric manager with many boxes and ranks; the call that starts an operation |
//! | [`keep`] | files of figures |
//! | [`plot`] | pictures of figures |
//!
//! `ebpf/` has the BPF programs of the data plane's benchmark.

pub mod contest;
pub mod control;
pub mod dataplane;
pub mod keep;
pub mod plot;
