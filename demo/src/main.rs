//! Trains a small classifier over netsum.
fn main() {}
