//! Builds the libraries that other software loads to sum over netsum, into target/plugins.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

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
    MPIS.iter().map(|name| mpi(name, &library)).collect()
}

/// Builds `libnetsum.so`; returns its path.
fn library(profile: &str) -> Result<PathBuf> {
    output(paths::cargo()?.args(["build", "-q", "-p", "netsum-c", "--profile", profile]))?;
    let folder = if profile == "dev" { "debug" } else { profile };
    Ok(paths::target_dir()?.join(folder).join("libnetsum.so"))
}

fn mpi(name: &str, library: &Path) -> Result<PathBuf> {
    let source = paths::root()?.join("worker/mpi");
    let folder = paths::target_dir()?.join("plugins").join(name);
    std::fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
    // By the name that the plugin looks for, in its own folder. A program may use the old one.
    let (beside, plugin) = (folder.join("libnetsum.so.1"), folder.join("libnetsum-mpi.so"));
    for old in [&beside, &plugin] {
        drop(std::fs::remove_file(old));
    }
    std::fs::copy(library, &beside).with_context(|| beside.display().to_string())?;
    let mut compiler = Command::new(format!("mpicc.{name}"));
    compiler.args(["-std=c11", "-D_DEFAULT_SOURCE", "-O2", "-fPIC", "-shared", "-pthread"]);
    compiler.args(["-Wall", "-Wextra", "-Werror", "-Wl,-z,defs", "-Wl,-rpath,$ORIGIN"]);
    compiler.arg(format!("-Wl,--version-script={}", source.join("plugin.map").display()));
    compiler.arg("-I").arg(paths::root()?.join("worker/c/include"));
    let mut files = Vec::new();
    for entry in std::fs::read_dir(&source)? {
        files.push(entry?.path());
    }
    files.retain(|path| path.extension().is_some_and(|end| end == "c"));
    files.sort();
    if files.is_empty() {
        bail!("no sources in {}", source.display());
    }
    output(compiler.args(files).arg(&beside).arg("-o").arg(&plugin))?;
    Ok(plugin)
}
