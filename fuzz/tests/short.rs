//! Every target that needs neither root nor BPF, for a few seconds: committed inputs, then
//! generated ones. `cargo xtask fuzz` runs for longer and measures coverage.

use std::time::Duration;

use netsum_fuzz::{seeded, target};

fn short(name: &str) {
    let ran = seeded::run(target(name).expect("a target"), Duration::from_secs(2));
    println!("{name}: {ran} inputs");
    assert!(ran >= 100);
}

#[test]
fn parser() {
    short("parser");
}

#[test]
fn rc() {
    short("rc");
}

#[test]
fn frames() {
    short("frames");
}

#[test]
fn config() {
    short("config");
}

#[test]
fn api() {
    short("api");
}
