//! The toolchain for BPF: a nightly compiler, bpf-linker, and the source of `core`. Sets up what is
//! missing.
//!
//! Everything is in the target folder, except for a link from the nightly's sysroot to the source
//! of `core`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::debian::{self, Archive};
use crate::paths::{self, output};

/// Must fit the LLVM of the nightly compiler (22); later versions want an LLVM of their own.
const BPF_LINKER: &str = "0.10.3";
/// The Debian suite whose `rust-src` is close enough to the nightly compiler for `core`.
const SUITE: &str = "forky";

/// A complete toolchain.
#[derive(Debug)]
pub struct Toolchain {
    pub linker: PathBuf,
    /// The source of `core`.
    pub library: PathBuf,
    pub version: String,
}

impl Toolchain {
    /// Looks for the parts, and fetches those that are missing.
    ///
    /// # Errors
    /// The part that is missing and cannot be fetched, with the reason.
    pub fn set_up() -> Result<Self> {
        let sysroot = output(nightly("rustc").args(["--print", "sysroot"]))
            .context("no nightly Rust (`rustup toolchain install nightly`)")?;
        let version = output(nightly("rustc").arg("--version"))?.trim().to_owned();
        let home = paths::target_dir()?.join("ebpf-toolchain");
        fs::create_dir_all(&home).with_context(|| home.display().to_string())?;
        let linker = bpf_linker(&home).with_context(|| format!("no bpf-linker {BPF_LINKER}"))?;
        let library =
            rust_src(&home, Path::new(sysroot.trim())).context("no source of Rust's `core`")?;
        Ok(Self { linker, library, version })
    }
}

/// A command of the nightly toolchain, without the variables that `cargo run` sets for stable.
pub fn nightly(program: &str) -> Command {
    let mut command = Command::new(program);
    command.arg("+nightly");
    // Asking for a version must not install a nightly toolchain.
    command.env("RUSTUP_AUTO_INSTALL", "0");
    for name in [
        "RUSTUP_TOOLCHAIN",
        "LD_LIBRARY_PATH",
        "CARGO",
        "RUSTC",
        "RUSTFLAGS",
        "CARGO_ENCODED_RUSTFLAGS",
    ] {
        command.env_remove(name);
    }
    command
}

fn bpf_linker(home: &Path) -> Result<PathBuf> {
    let linker = home.join("bin/bpf-linker");
    let right = |path: &Path| {
        output(Command::new(path).arg("--version"))
            .is_ok_and(|v| v.split_whitespace().any(|w| w == BPF_LINKER))
    };
    if !right(&linker) {
        println!(
            "installing bpf-linker {BPF_LINKER} into {}: it links BPF objects (about a minute)",
            home.display()
        );
        output(
            nightly("cargo")
                .args(["install", "--quiet", "--locked", "--force", "--root"])
                .arg(home)
                .args([
                    "--target-dir",
                    &home.join("build").display().to_string(),
                    &format!("bpf-linker@{BPF_LINKER}"),
                ]),
        )?;
    }
    Ok(linker)
}

/// The source of `core` where cargo's `build-std` looks for it.
fn rust_src(home: &Path, sysroot: &Path) -> Result<PathBuf> {
    let place = sysroot.join("lib/rustlib/src/rust/library");
    let usable = |library: &Path| library.join("core/src/lib.rs").is_file();
    if usable(&place) {
        return Ok(place);
    }
    let unpacked = home.join("rust-src");
    if unpacked_library(&unpacked).is_none() {
        download_rust_src(home, &unpacked)?;
    }
    let library = unpacked_library(&unpacked).with_context(|| {
        format!("the package rust-src has no usr/src/rustc-*/library: {}", unpacked.display())
    })?;
    println!("linking {} to {}", place.display(), library.display());
    fs::create_dir_all(place.parent().context("sysroot")?)?;
    if place.symlink_metadata().is_ok_and(|m| m.is_symlink()) {
        // A link to a removed workspace.
        fs::remove_file(&place)?;
    }
    std::os::unix::fs::symlink(&library, &place)
        .with_context(|| format!("cannot link {}", place.display()))?;
    Ok(place)
}

fn unpacked_library(unpacked: &Path) -> Option<PathBuf> {
    fs::read_dir(unpacked.join("usr/src"))
        .ok()?
        .filter_map(|entry| Some(entry.ok()?.path().join("library")))
        .find(|library| library.join("core/src/lib.rs").is_file())
}

/// Fetches Debian's package `rust-src`.
fn download_rust_src(home: &Path, unpacked: &Path) -> Result<()> {
    println!("fetching the package rust-src of Debian {SUITE}: the source of `core` (about 65 MB)");
    let archive = Archive::open(&home.join("apt"), &[SUITE])?;
    archive
        .download(&["rust-src"])?
        .iter()
        .try_for_each(|package| debian::unpack(package, unpacked))
}
