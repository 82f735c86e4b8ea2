//! `cargo xtask papers`: what the papers promise, computed anew.

use anyhow::{Context, Result, ensure};

use crate::paths;

/// Runs `cargo xtask papers`.
///
/// # Errors
/// If it cannot be built, or a file cannot be written.
pub fn run() -> Result<()> {
    let status = paths::cargo()?
        .args(["run", "--quiet", "--release", "--package", "netsum-plan", "--features", "papers"])
        .args(["--bin", "netsum-papers", "--"])
        .arg(paths::target_dir()?.join("papers"))
        .status()
        .context("cannot run cargo")?;
    ensure!(status.success(), "the tables could not be made");
    Ok(())
}
