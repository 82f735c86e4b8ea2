//! `cargo xtask demo`.

/// Arguments of `cargo xtask demo`.
#[derive(clap::Args, Debug)]
pub struct DemoArgs {}

/// Runs the demo.
pub fn run(_args: DemoArgs) -> anyhow::Result<()> {
    anyhow::bail!("the demo is not there yet")
}
