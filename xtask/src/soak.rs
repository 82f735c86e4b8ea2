//! `cargo xtask soak`: a long run under loss.

use anyhow::{Context, Result, bail};

use crate::harness::test_programs;
use crate::setup;

/// Arguments of `cargo xtask soak`.
#[derive(clap::Args, Debug)]
pub struct SoakArgs {
    /// Sums of fragments that the box releases before it is over.
    #[arg(long, default_value_t = 1_000_000)]
    fragments: u64,
}

/// Runs `cargo xtask soak`: a test of tests/tests/faults.rs, which is short otherwise.
///
/// # Errors
/// If a sum is wrong, or anything else that the test checks.
pub fn run(args: &SoakArgs) -> Result<()> {
    setup::require_bpf()?;
    let programs = test_programs()?;
    let program =
        programs.iter().find(|p| p.needs_lab() && p.name == "faults").context("no test `faults`")?;
    let status = program
        .command(&["--include-ignored", "--nocapture"], Some("a_long_run_at_one_percent_loss"))
        .env("NETSUM_SOAK_FRAGMENTS", args.fragments.to_string())
        .status()?;
    if !status.success() {
        bail!("the run has failed: {status}");
    }
    Ok(())
}
