//! `cargo xtask bench`: measurements, as figures to compare within one run.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use clap::Subcommand;

use crate::{paths, setup};

/// Where the record of the data plane's figures is.
const DATAPLANE: &str = "benchmarks/dataplane.txt";
/// Where that of whole all-reduces is, without the endings.
const ALLREDUCE: &str = "benchmarks/allreduce";

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
    /// What a rank does to every byte of a message, beside a copy.
    Numeric,
    /// All-reduces of netsum with and without its box, Gloo and Open MPI, in turns, each in a lab of its own. Installs what is missing.
    Allreduce {
        /// Also writes figures and a picture, with machine and kernel, to benchmarks/allreduce.{txt,json,svg}.
        #[arg(long)]
        save: bool,
        /// Arguments of the benchmark itself; `-- --help` lists them.
        #[arg(last = true)]
        arguments: Vec<String>,
    },
}

/// Runs a benchmark.
pub fn run(args: BenchArgs) -> Result<()> {
    match args.what {
        What::Dataplane { json, save } => {
            setup::require_bpf()?;
            let json_option = if json { vec!["--json".to_owned()] } else { Vec::new() };
            let text = bench("bench-dataplane", &json_option)?;
            if save { write(DATAPLANE, "$ cargo xtask bench dataplane --save", &text) } else { Ok(()) }
        }
        What::Numeric => {
            let mut cargo = paths::cargo()?;
            cargo.args(["bench", "--quiet", "--package", "netsum-worker", "--bench", "numeric"]);
            let status = cargo.status().context("cargo")?;
            ensure!(status.success(), "the benchmark failed: {status}");
            Ok(())
        }
        What::Allreduce { save, mut arguments } => {
            setup::require_bpf()?;
            // Without them the benchmark says who is missing.
            if let Err(error) = setup::require_rivals() {
                println!("{error:#}");
            }
            let said = ["$ cargo xtask bench allreduce --save".to_owned()].into_iter();
            let said = said.chain((!arguments.is_empty()).then(|| format!("-- {}", arguments.join(" "))));
            let said = said.collect::<Vec<_>>().join(" ");
            if save {
                for kind in ["json", "svg"] {
                    let path = paths::root()?.join(format!("{ALLREDUCE}.{kind}"));
                    arguments.extend([format!("--{kind}"), path.display().to_string()]);
                }
            }
            let text = bench("bench-allreduce", &arguments)?;
            if save { write(&format!("{ALLREDUCE}.txt"), &said, &text) } else { Ok(()) }
        }
    }
}

/// Builds a benchmark and runs it; what it printed, which has been shown.
fn bench(program: &str, arguments: &[String]) -> Result<String> {
    // The programs that it starts are built with it.
    let mut build = paths::cargo()?;
    build.args(["build", "--quiet", "--release", "--bins"]);
    build.args(["--package", "netsum-lab", "--package", "netsum-aggregator", "--package", "netsum-worker"]);
    ensure!(build.status().context("cargo")?.success(), "the benchmark cannot be built");
    let path = paths::target_dir()?.join("release").join(program);
    let mut command = Command::new(path);
    let mut child = command.args(arguments).stdout(Stdio::piped()).spawn().context(program.to_owned())?;
    let mut text = String::new();
    for line in BufReader::new(child.stdout.take().context("stdout")?).lines() {
        let line = line?;
        println!("{line}");
        text += &line;
        text.push('\n');
    }
    let status = child.wait()?;
    ensure!(status.success(), "the benchmark failed: {status}");
    Ok(text)
}

fn write(file: &str, command: &str, text: &str) -> Result<()> {
    let path = paths::root()?.join(file);
    std::fs::create_dir_all(path.parent().context("a folder")?)?;
    let head = format!("{command}\n{}\n\n", machine()?);
    std::fs::write(&path, head + text).with_context(|| path.display().to_string())?;
    println!("\nwritten to {file}");
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
