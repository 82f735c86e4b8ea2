//! The list of targets. `cargo xtask fuzz` shares this file, without the targets themselves.

/// A target.
pub struct Target {
    pub name: &'static str,
    /// The longest sensible input, in bytes.
    pub longest: usize,
}

pub const TARGETS: [Target; 6] = [
    Target { name: "parser", longest: 400 },
    Target { name: "rc", longest: 600 },
    Target { name: "frames", longest: 400 },
    Target { name: "config", longest: 400 },
    Target { name: "api", longest: 600 },
    Target { name: "xdp", longest: 2000 },
];
