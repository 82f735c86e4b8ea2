//! Hands a command over to another of the project's programs.

use std::os::unix::process::CommandExt;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::paths;

/// Builds the programs of some packages with this program's profile, and replaces itself by one.
///
/// # Errors
/// If a package cannot be built.
pub fn run(program: &str, packages: &[&str], arguments: &[String]) -> Result<()> {
    let folder =
        std::env::current_exe()?.parent().context("this program has no folder")?.to_owned();
    let mut cargo = paths::cargo()?;
    cargo
        .args(["build", "--bins", "--profile", paths::profile()?])
        .arg("--target-dir")
        .arg(paths::target_dir()?);
    cargo.args(packages.iter().flat_map(|package| ["--package", package]));
    ensure!(
        cargo.status().context("cannot start cargo")?.success(),
        "building {} failed, see above",
        packages.join(" and ")
    );
    Err(Command::new(folder.join(program)).args(arguments).exec())
        .with_context(|| program.to_owned())
}
