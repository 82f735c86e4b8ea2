//! `netsum-perf`.
fn main() {}
