//! `cargo xtask lab`: a lab for experiments that stays until it is taken down.
//! `lab/src/bin/netsum-lab.rs` builds it.

use anyhow::Result;

use crate::vm::Kernel;
use crate::{programs, setup};

/// Arguments of `cargo xtask lab`.
#[derive(clap::Args, Debug)]
pub struct LabArgs {
    /// `up`, `vm`, `down` or `exec`; `--help` shows their arguments.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<String>,
}

/// Runs `cargo xtask lab`.
///
/// # Errors
/// If this machine lacks something, or the lab fails.
pub fn run(args: &LabArgs) -> Result<()> {
    let has = |word: &str| args.args.iter().any(|arg| arg == word);
    let help = has("--help") || has("-h");
    match args.args.first().map(String::as_str) {
        Some("up") if !help => setup::require_lab()?,
        Some("vm") if !help => {
            let named =
                |kernel: &&Kernel| args.args.iter().any(|arg| arg.ends_with(&kernel.to_string()));
            let kernels: Vec<Kernel> = if has("--prepare") {
                Kernel::ALL.to_vec()
            } else {
                vec![Kernel::EVERY.iter().rev().find(named).copied().unwrap_or_default()]
            };
            setup::require_vms(&kernels)?;
        }
        _ => {}
    }
    programs::run("netsum-lab", &["netsum-lab"], &args.args)
}
