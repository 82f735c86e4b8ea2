//! What can be fuzzed. `cargo xtask fuzz` has this file, too, without all that is fuzzed.

/// Something to be fuzzed.
pub struct Target {
    pub name: &'static str,
    /// Longest input that makes sense, in bytes.
    pub longest: usize,
}

pub const TARGETS: [Target; 6] = [
    Target { name: "parser", longest: 400 },
    Target { name: "slots", longest: 1000 },
    Target { name: "rc", longest: 600 },
    Target { name: "config", longest: 400 },
    Target { name: "api", longest: 600 },
    Target { name: "xdp", longest: 2000 },
];
