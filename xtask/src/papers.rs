//! `cargo xtask papers`: computes the results that papers promise.

use anyhow::{Context, Result, ensure};

use crate::paths;

/// Runs `cargo xtask papers`.
///
/// # Errors
/// If the program cannot be built, or a file cannot be written.
pub fn run() -> Result<()> {
    let status = paths::cargo()?
        .args(["run", "--quiet", "--release", "--package", "netsum-papers", "--features", "draw"])
        .arg("--")
        .arg(paths::target_dir()?.join("papers"))
        .status()
        .context("cannot run cargo")?;
    ensure!(status.success(), "computing the tables failed, see above");
    Ok(())
}
