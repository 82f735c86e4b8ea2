//! `cargo xtask dist`: man pages, completions, schemas, and the Debian package: `deploy/src`.

use anyhow::Result;

use crate::programs;

/// Arguments of `cargo xtask dist`.
#[derive(clap::Args, Debug)]
pub struct DistArgs {
    /// `--deb`, `--schema`, `--out`; `--help` shows them.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<String>,
}

/// Runs `cargo xtask dist`.
///
/// # Errors
/// If a file cannot be written.
pub fn run(args: &DistArgs) -> Result<()> {
    programs::run("netsum-dist", &["netsum-dist"], &args.args)
}
