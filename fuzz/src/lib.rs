//! Fuzzing. A target takes any bytes and panics if a check fails.
//!
//! | target | input | compared with |
//! | --- | --- | --- |
//! | [`parser`] | frames, headers, ICRC | a naive parser and CRC |
//! | [`rc`] | two endpoints with a lossy network or a forger | the posted messages, in order |
//! | [`frames`] | messages between ranks, in clear and sealed | their written form, the sent ones |
//! | [`config`] | the daemon's configuration, numbers, command lines | their printed form |
//! | [`api`] | requests to the daemon, as bytes and as messages | the data plane's orders |
//! | [`xdp`] | the XDP programs (root) | a model in user space |
//!
//! [`seeded`] makes inputs from a number, on any toolchain, as a part of the tests. `bin/fuzz` uses
//! libFuzzer, which is guided by coverage; `cargo xtask fuzz TARGET` builds and runs it. `corpus/`
//! has small inputs with much coverage, and `regressions/` past findings, by name.

pub mod api;
pub mod config;
pub mod files;
pub mod frames;
pub mod parser;
pub mod rc;
pub mod seeded;
mod targets;
pub mod xdp;

/// Runs an input.
pub type Run = Box<dyn FnMut(&[u8])>;

pub use targets::{TARGETS, Target};

/// Prepares a target, once, and returns the function that runs its inputs.
///
/// # Errors
/// If the target is unknown, or this machine lacks what it needs.
pub fn start(name: &str) -> anyhow::Result<Run> {
    Ok(match name {
        "parser" => Box::new(parser::run),
        "rc" => Box::new(rc::run),
        "frames" => Box::new(frames::run),
        "config" => Box::new(config::run),
        "api" => Box::new(api::run),
        "xdp" => xdp::start()?,
        _ => anyhow::bail!("unknown target `{name}`"),
    })
}

pub fn target(name: &str) -> Option<&'static Target> {
    TARGETS.iter().find(|t| t.name == name)
}
