//! Builds the libraries that other software loads to sum over netsum, into target/plugins.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::compile;
use crate::paths::{self, output};
use crate::setup;

/// The MPIs, each with an ABI of its own: their plugin is compiled by `mpicc.NAME`.
const MPIS: [&str; 2] = ["openmpi", "mpich"];

/// Runs `cargo xtask plugins`.
///
/// # Errors
/// If something is missing, or the build fails.
pub fn run() -> Result<()> {
    setup::require_mpi_compilers()?;
    for plugin in build("release")? {
        println!("{}", plugin.display());
    }
    Ok(())
}

/// Builds all plugins, each in a folder with the library that it needs; returns their paths.
///
/// # Errors
/// If the build fails.
pub fn build(profile: &str) -> Result<Vec<PathBuf>> {
    let library = library(profile)?;
    let mut plugins = vec![nccl(profile)?];
    for name in MPIS {
        plugins.push(mpi(name, &library)?);
    }
    Ok(plugins)
}

/// Builds NCCL's plugin; returns its path.
///
/// # Errors
/// If the build fails.
pub fn nccl(profile: &str) -> Result<PathBuf> {
    build_one(compile::nccl(), "nccl", &library(profile)?, "nccl/libnccl-net-netsum.so")
}

/// Builds `libnetsum.so`; returns its path.
fn library(profile: &str) -> Result<PathBuf> {
    output(paths::cargo()?.args(["build", "-q", "-p", "netsum-c", "--profile", profile]))?;
    let folder = if profile == "dev" { "debug" } else { profile };
    Ok(paths::target_dir()?.join(folder).join("libnetsum.so"))
}

fn mpi(name: &str, library: &Path) -> Result<PathBuf> {
    let mut compiler = Command::new(format!("mpicc.{name}"));
    compiler.arg("-D_DEFAULT_SOURCE");
    let map = paths::root()?.join("worker/mpi/plugin.map");
    compiler.arg(format!("-Wl,--version-script={}", map.display()));
    build_one(compiler, "mpi", library, &format!("{name}/libnetsum-mpi.so"))
}

/// Compiles the C files of `worker/SOURCES` to `target/plugins/PLUGIN`.
fn build_one(
    mut compiler: Command,
    sources: &str,
    library: &Path,
    plugin: &str,
) -> Result<PathBuf> {
    let plugin = paths::target_dir()?.join("plugins").join(plugin);
    let folder = plugin.parent().context("no folder")?;
    std::fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    // By the name that the plugin looks for, in its own folder. A program may use the old one.
    let beside = folder.join("libnetsum.so.1");
    for old in [&beside, &plugin] {
        drop(std::fs::remove_file(old));
    }
    std::fs::copy(library, &beside).with_context(|| beside.display().to_string())?;
    let sources = paths::root()?.join("worker").join(sources);
    compile::add(&mut compiler, &sources, &beside, &plugin)
        .with_context(|| sources.display().to_string())?;
    output(&mut compiler)?;
    Ok(plugin)
}
