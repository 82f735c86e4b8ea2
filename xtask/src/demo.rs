//! `cargo xtask demo`: hosts train a model together, and the box between them adds up their gradients. `demo/src/lab` does it.

use anyhow::Result;

use crate::{programs, setup};

/// Arguments of `cargo xtask demo`.
#[derive(clap::Args, Debug)]
pub struct DemoArgs {
    /// Hosts, epochs, losses and more; `--help` shows them.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<String>,
}

/// Runs `cargo xtask demo`.
///
/// # Errors
/// What is missing on this machine; what went wrong; which promise of the demo does not hold.
pub fn run(args: DemoArgs) -> Result<()> {
    if !args.args.iter().any(|arg| arg == "--help" || arg == "-h") {
        setup::require_bpf()?;
    }
    let arguments: Vec<String> = std::iter::once("hosts".to_owned()).chain(args.args).collect();
    println!("building the daemon and the demo (a few minutes the first time)");
    programs::run("netsum-demo", &["netsum-aggregator", "netsum-demo"], &arguments)
}
