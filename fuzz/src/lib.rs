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
//! [`seeded`] makes inputs out of a number, on any toolchain, as a part of the tests. `bin/fuzz`
//! has libFuzzer under it, which looks at coverage; `cargo xtask fuzz TARGET` builds and runs it.
//! `corpus/` has small inputs that reach far, `regressions/` those that once found something, by
//! name.

pub mod api;
pub mod config;
pub mod files;
pub mod parser;
pub mod rc;
pub mod seeded;
pub mod slots;
mod targets;
pub mod xdp;

/// What runs an input.
pub type Run = Box<dyn FnMut(&[u8])>;

pub use targets::{TARGETS, Target};

/// Makes what runs inputs of a target, once.
///
/// # Errors
/// If there is no such target, or this machine lacks what it needs.
pub fn start(name: &str) -> anyhow::Result<Run> {
    Ok(match name {
        "parser" => Box::new(parser::run),
        "slots" => Box::new(slots::run),
        "rc" => Box::new(rc::run),
        "config" => Box::new(config::run),
        "api" => Box::new(api::run),
        "xdp" => xdp::start()?,
        _ => anyhow::bail!("no target `{name}`"),
    })
}

pub fn target(name: &str) -> Option<&'static Target> {
    TARGETS.iter().find(|t| t.name == name)
}
