//! Builds the BPF objects, and compares the committed ones with a rebuild.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};

use crate::objects;
use crate::paths;
use crate::paths::output;
use crate::toolchain::{Toolchain, nightly};

/// The objects, which are committed in [`FOLDER`]: two of the box, and those of the benchmarks,
/// of the lab's lossy links and VLANs, and of an AF_XDP host.
pub const OBJECTS: [&str; 7] = ["netsum", "spread", "bench", "reflector", "faults", "vlan", "host"];
/// The folder of the objects.
const FOLDER: &str = "objects";

/// Runs `cargo xtask build-ebpf`.
pub fn run() -> Result<()> {
    let toolchain = Toolchain::set_up()?;
    println!("building the BPF programs with {}", toolchain.version);
    for (name, built) in build(&toolchain)? {
        let place = paths::root()?.join(place_of(name));
        let new = std::fs::read(&built).with_context(|| built.display().to_string())?;
        let old = std::fs::read(&place).unwrap_or_default();
        let differences =
            objects::differences(&old, &new).unwrap_or_else(|e| vec![format!("{e:#}")]);
        println!(
            "{}: {}",
            place.display(),
            if differences.is_empty() { "same instructions" } else { "changed" }
        );
        for difference in differences {
            println!("    {difference}");
        }
        if old != new {
            std::fs::write(&place, new).with_context(|| place.display().to_string())?;
        }
    }
    Ok(())
}

fn place_of(name: &str) -> String {
    format!("{FOLDER}/{name}.bpf.o")
}

/// Compares a committed object with its rebuild.
///
/// # Errors
/// Where they differ.
pub fn compare(name: &str, built: &PathBuf) -> Result<()> {
    let place = place_of(name);
    let committed = std::fs::read(paths::root()?.join(&place)).with_context(|| place.clone())?;
    let built = std::fs::read(built).with_context(|| built.display().to_string())?;
    let differences = objects::differences(&committed, &built)?;
    if !differences.is_empty() {
        bail!(
            "{place} is not what its sources build to; run `cargo xtask build-ebpf` and commit \
             it:\n    {}",
            differences.join("\n    ")
        );
    }
    Ok(())
}

/// Builds all objects; returns their names and paths.
pub fn build(toolchain: &Toolchain) -> Result<Vec<(&'static str, PathBuf)>> {
    let root = paths::root()?;
    let target = paths::target_dir()?.join("ebpf");
    // The flags for code generation are in aggregator-ebpf/.cargo/config.toml. These make the
    // object independent of the folder in which it is built.
    let cargo_home =
        std::env::var("CARGO_HOME").or_else(|_| std::env::var("HOME").map(|h| h + "/.cargo"))?;
    let library = toolchain.library.canonicalize()?;
    let remap: Vec<String> = [
        (root.display().to_string(), "netsum"),
        (library.display().to_string(), "library"),
        (toolchain.library.display().to_string(), "library"),
        (format!("{cargo_home}/registry/src"), "registry"),
    ]
    .iter()
    .map(|(from, to)| format!("'--remap-path-prefix={from}={to}'"))
    .collect();
    output(
        nightly("cargo")
            .args([
                "build",
                "--quiet",
                "--release",
                "--locked",
                "--workspace",
                "--bins",
                "--config",
            ])
            .arg(format!("build.rustflags=[{}]", remap.join(", ")))
            .arg("--target-dir")
            .arg(&target)
            .env("CARGO_TARGET_BPFEL_UNKNOWN_NONE_LINKER", &toolchain.linker)
            .current_dir(root.join("aggregator-ebpf")),
    )?;
    let release = target.join("bpfel-unknown-none/release");
    Ok(OBJECTS.iter().map(|name| (*name, release.join(name))).collect())
}
