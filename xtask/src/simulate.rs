//! `cargo xtask simulate`: many jobs with faults in the simulator.

use anyhow::{Context, Result, bail};

use crate::paths;

/// Arguments of `cargo xtask simulate`.
#[derive(clap::Args, Debug)]
pub struct SimulateArgs {
    /// What `netsum-sim` is called with; `--help` shows it.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<String>,
}

/// Runs `cargo xtask simulate`.
///
/// # Errors
/// If it cannot be built, or if anything did not hold in any case.
pub fn run(args: &SimulateArgs) -> Result<()> {
    let status = paths::cargo()?
        .args([
            "run",
            "--quiet",
            "--release",
            "--package",
            "netsum-collective",
            "--features",
            "simulator",
        ])
        .args(["--bin", "netsum-sim", "--"])
        .args(&args.args)
        .status()
        .context("cannot run cargo")?;
    if !status.success() {
        bail!("the simulator found something, see above");
    }
    Ok(())
}
