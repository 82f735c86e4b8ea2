//! Benchmarks: programs and whole all-reduces, measured in the lab. `cargo xtask bench` runs them.
//!
//! | module | content |
//! | --- | --- |
//! | [`dataplane`] | the cost of the data plane, packet by packet and with live frames |
//! | [`contest`] | netsum compared with its peers |
//! | [`control`] | a fabric manager with many boxes and ranks; the call that starts an operation |
//! | [`host`] | a host alone, against a reflector that plays box and peer |
//! | [`keep`] | files of figures |
//! | [`plot`] | pictures of figures |
//!
//! `ebpf/` has the BPF programs of the benchmarks of data plane and host.

pub mod contest;
pub mod control;
pub mod dataplane;
pub mod host;
pub mod keep;
pub mod plot;
