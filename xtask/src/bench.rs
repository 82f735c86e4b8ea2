//! `cargo xtask bench`.

/// Arguments of `cargo xtask bench`.
#[derive(clap::Args, Debug)]
pub struct BenchArgs {}

/// Runs a benchmark.
pub fn run(_args: BenchArgs) -> anyhow::Result<()> {
    anyhow::bail!("the benchmark is not there yet")
}
