//! `cargo xtask demo`: hosts train a model together, and the box between them adds up their
//! gradients. `demo/src/lab` does it.

use anyhow::Result;

use crate::{programs, python, setup};

/// Arguments of `cargo xtask demo`.
#[derive(clap::Args, Debug)]
pub struct DemoArgs {
    /// Hosts, epochs, losses and more; `--help` shows them. With --torch, PyTorch trains; see
    /// `--torch --help`.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<String>,
}

/// Runs `cargo xtask demo`.
///
/// # Errors
/// If this machine lacks something, a step fails, or a promise of the demo is not kept.
pub fn run(args: DemoArgs) -> Result<()> {
    let helps = args.args.iter().any(|arg| arg == "--help" || arg == "-h");
    if !helps {
        setup::require_bpf()?;
    }
    println!("building the daemon and the demo (a few minutes the first time)");
    let (torch, rest): (Vec<String>, Vec<String>) =
        args.args.into_iter().partition(|arg| arg == "--torch");
    let mut arguments = vec![if torch.is_empty() { "hosts" } else { "torch" }.to_owned()];
    if !torch.is_empty() && !helps {
        arguments.extend(["--python".to_owned(), python::with_torch()?.display().to_string()]);
    }
    arguments.extend(rest);
    programs::run("netsum-demo", &["netsum", "netsum-demo"], &arguments)
}
