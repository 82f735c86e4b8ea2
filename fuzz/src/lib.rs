//! What is fuzzed. A target takes any bytes and panics where something is not as it must be.
//!
//! | target | what | held against |
//! | --- | --- | --- |
//! | [`parser`] | frames, headers, ICRC | a parser and a CRC written down naively |
//! | [`slots`] | the slot machine, driven by anybody | its rules without slots |
//! | [`rc`] | two endpoints, and what a network or a forger can do | what was posted, in order |
//! | [`config`] | the daemon's configuration, numbers, command lines | what they say when printed |
//! | [`api`] | requests to the daemon's services, as bytes and as messages | what the data plane was told |
//! | [`xdp`] | the XDP programs (root) | a model in user space |
//!
//! [`seeded`] makes inputs out of a number, on any toolchain, as a part of the tests. `bin/fuzz` has libFuzzer under it, which
//! looks at coverage; `cargo xtask fuzz TARGET` builds and runs it. `corpus/` has small inputs that reach far,
//! `regressions/` those that once found something, by name.

pub mod api;
pub mod config;
pub mod files;
pub mod parser;
pub mod rc;
pub mod seeded;
pub mod slots;
pub mod xdp;

/// What runs an input.
pub type Run = Box<dyn FnMut(&[u8])>;

/// Something to be fuzzed.
pub struct Target {
    /// Its name.
    pub name: &'static str,
    /// Makes what runs inputs, once.
    pub start: fn() -> anyhow::Result<Run>,
    /// Longest input that makes sense, in bytes.
    pub longest: usize,
}

/// All targets.
pub const TARGETS: [Target; 6] = [
    Target { name: "parser", start: || Ok(Box::new(parser::run)), longest: 400 },
    Target { name: "slots", start: || Ok(Box::new(slots::run)), longest: 1000 },
    Target { name: "rc", start: || Ok(Box::new(rc::run)), longest: 600 },
    Target { name: "config", start: || Ok(Box::new(config::run)), longest: 400 },
    Target { name: "api", start: || Ok(Box::new(api::run)), longest: 600 },
    Target { name: "xdp", start: xdp::start, longest: 2000 },
];

/// A target by its name.
pub fn target(name: &str) -> Option<&'static Target> {
    TARGETS.iter().find(|t| t.name == name)
}
