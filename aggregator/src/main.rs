//! `netsum`: the daemon and its command line.
fn main() {}
