//! The project's other programs, which commands of this one are handed over to.

use std::os::unix::process::CommandExt;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::paths;

/// Builds the programs of some packages as this one has been built, and becomes one of them.
///
/// # Errors
/// If one cannot be built.
pub fn run(program: &str, packages: &[&str], arguments: &[String]) -> Result<()> {
    let folder =
        std::env::current_exe()?.parent().context("this program is in no folder")?.to_owned();
    let mut cargo = paths::cargo()?;
    cargo
        .args(["build", "--bins", "--profile", paths::profile()?])
        .arg("--target-dir")
        .arg(paths::target_dir()?);
    cargo.args(packages.iter().flat_map(|package| ["--package", package]));
    ensure!(
        cargo.status().context("cannot start cargo")?.success(),
        "{} cannot be built",
        packages.join(" and ")
    );
    Err(Command::new(folder.join(program)).args(arguments).exec())
        .with_context(|| program.to_owned())
}
