//! `cargo xtask simulate`: many jobs with faults in the simulator.

use anyhow::{Context, Result, bail};

use crate::paths;

/// Arguments of `cargo xtask simulate`.
#[derive(clap::Args, Debug)]
pub struct SimulateArgs {
    /// Arguments of `netsum-sim`; `--help` shows them.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<String>,
}

/// Runs `cargo xtask simulate`.
///
/// # Errors
/// If the simulator cannot be built, or a case failed.
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
        bail!("the simulator found a failing case, see above");
    }
    Ok(())
}
