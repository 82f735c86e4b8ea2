//! Every target that needs nothing special, for a few seconds: committed inputs, then made ones.
//! `cargo xtask fuzz` goes on for longer, and looks at coverage.

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
fn slots() {
    short("slots");
}

#[test]
fn rc() {
    short("rc");
}

#[test]
fn config() {
    short("config");
}

#[test]
fn api() {
    short("api");
}
