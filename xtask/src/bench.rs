//! `cargo xtask bench`: measurements, as figures to compare within one run.

use anyhow::{Context, Result, bail};
use clap::Subcommand;

use crate::{paths, setup};

/// Where the record of the data plane's figures is.
const DATAPLANE: &str = "benchmarks/dataplane.txt";

/// Arguments of `cargo xtask bench`.
#[derive(clap::Args, Debug)]
pub struct BenchArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand, Debug)]
enum What {
    /// Nanoseconds per packet of each way through the XDP programs, and what the verifier made of them.
    Dataplane {
        /// Prints JSON.
        #[arg(long, conflicts_with = "save")]
        json: bool,
        /// Also writes the figures, with machine and kernel, to benchmarks/dataplane.txt.
        #[arg(long)]
        save: bool,
    },
}

/// Runs a benchmark.
pub fn run(args: BenchArgs) -> Result<()> {
    let What::Dataplane { json, save } = args.what;
    setup::require_bpf()?;
    let mut cargo = paths::cargo()?;
    cargo.args(["run", "--quiet", "--release", "--package", "netsum-lab", "--bin", "bench-dataplane", "--"]);
    if json {
        cargo.arg("--json");
    }
    let output = cargo.stderr(std::process::Stdio::inherit()).output().context("cargo")?;
    let text = String::from_utf8(output.stdout)?;
    print!("{text}");
    if !output.status.success() {
        bail!("the benchmark failed: {}", output.status);
    }
    if save {
        let path = paths::root()?.join(DATAPLANE);
        std::fs::create_dir_all(path.parent().context("a folder")?)?;
        let head = format!("$ cargo xtask bench dataplane --save\n{}\n\n", machine()?);
        std::fs::write(&path, head + &text).with_context(|| path.display().to_string())?;
        println!("\nwritten to {DATAPLANE}");
    }
    Ok(())
}

/// Processor and kernel.
fn machine() -> Result<String> {
    let cpus = std::fs::read_to_string("/proc/cpuinfo")?;
    let model = cpus
        .lines()
        .find_map(|l| l.strip_prefix("model name")?.split_once(": "))
        .map_or("unknown processor", |(_, m)| m);
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease")?;
    // The release without a distributor's suffix.
    let kernel = kernel.trim().split('-').next().unwrap_or_default();
    let count = cpus.lines().filter(|l| l.starts_with("processor")).count();
    Ok(format!("{count} x {model}, Linux {kernel}"))
}
