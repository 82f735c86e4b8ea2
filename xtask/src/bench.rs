//! `cargo xtask bench`: measurements. Compare figures of one run only.

use std::io::{BufRead, BufReader};
use std::process::{Command, ExitStatus, Stdio};

use anyhow::{Context, Result, ensure};
use clap::Subcommand;

use crate::{paths, setup};

/// Folder of the saved figures.
const RECORDS: &str = "benchmarks";

/// Arguments of `cargo xtask bench`.
#[derive(clap::Args, Debug)]
pub struct BenchArgs {
    #[command(subcommand)]
    what: Benchmark,
}

#[derive(Subcommand, Debug)]
enum Benchmark {
    /// Measure the XDP programs: ns per packet on each path, whole fragments by number of ranks,
    /// live frames per core next to the kernel's own cost, memory of rings, and the verifier's
    /// statistics.
    Dataplane {
        /// Print JSON.
        #[arg(long, conflicts_with = "save")]
        json: bool,
        /// Also write figures and a picture, with machine and kernel, to
        /// benchmarks/dataplane.{txt,json,svg}.
        #[arg(long)]
        save: bool,
        /// Arguments of the benchmark itself; `-- --help` lists them.
        #[arg(last = true)]
        arguments: Vec<String>,
    },
    /// Measure the conversion of a message at a rank, next to a copy.
    Numeric,
    /// Measure all-reduces on links with a bandwidth: netsum with and without its box, and its
    /// peers, in turns, each in a lab of its own. About 38 minutes. Installs missing peers.
    Wire {
        /// Also write figures and a picture, with machine and kernel, to
        /// benchmarks/wire.{txt,json,svg}.
        #[arg(long)]
        save: bool,
        /// Arguments of the benchmark itself; `-- --help` lists them.
        #[arg(last = true)]
        arguments: Vec<String>,
    },
    /// Measure the same with 8 hosts in 2 and 4 racks. A spine connects the racks' boxes, over
    /// uplinks that carry all, half or a quarter of what a rack's hosts send. About 12 minutes.
    Racks {
        /// Also write figures and a picture, with machine and kernel, to
        /// benchmarks/racks.{txt,json,svg}.
        #[arg(long)]
        save: bool,
        /// Further arguments of `bench-wire`.
        #[arg(last = true)]
        arguments: Vec<String>,
    },
    /// Measure what a host costs alone: a rank on one CPU, over UDP and AF_XDP, while an XDP program
    /// on the other CPU plays box and peer. Two minutes.
    Host {
        /// Also write figures, with machine and kernel, to benchmarks/host.{txt,json}.
        #[arg(long)]
        save: bool,
        /// Arguments of the benchmark itself; `-- --help` lists them.
        #[arg(last = true)]
        arguments: Vec<String>,
    },
    /// Measure a fabric manager with many boxes and ranks: the time to admit them, to recover after
    /// it was killed, and to lay all jobs out again when a spine has died. Boxes and ranks have no
    /// data plane. Also measure how long the call that starts an operation takes, with and without
    /// another thread that waits, and with a late rank. Five minutes.
    Control {
        /// Also write figures, with machine and kernel, to benchmarks/control.{txt,json}.
        #[arg(long)]
        save: bool,
        /// Arguments of the benchmark itself; `-- --help` lists them.
        #[arg(last = true)]
        arguments: Vec<String>,
    },
}

/// The arguments of `bench-wire` for racks.
const RACKS: [&str; 12] = [
    "--racks",
    "2,4",
    "--hosts",
    "8",
    "--oversubscription",
    "1,2,4",
    "--rates",
    "100mbit",
    "--sizes",
    "8M",
    "--only",
    "netsum,netsum-ring,gloo,openmpi",
];

pub fn run(args: BenchArgs) -> Result<()> {
    match args.what {
        Benchmark::Dataplane { json, save, mut arguments } => {
            setup::require_bpf()?;
            if json {
                arguments.extend(["--json", "-"].map(str::to_owned));
            }
            recorded("dataplane", arguments, save)
        }
        Benchmark::Numeric => {
            let mut cargo = paths::cargo()?;
            cargo.args([
                "bench",
                "--quiet",
                "--package",
                "netsum-collective",
                "--bench",
                "numeric",
            ]);
            let status = cargo.status().context("cargo")?;
            ensure!(status.success(), "the benchmark failed: {status}");
            Ok(())
        }
        Benchmark::Wire { save, arguments } => {
            setup::require_bpf()?;
            // A peer that cannot be installed is named by the benchmark.
            setup::install_rivals();
            recorded("wire", arguments, save)
        }
        Benchmark::Control { save, mut arguments } => {
            if arguments.is_empty() {
                arguments.push("--smaller".to_owned());
            }
            recorded("control", arguments, save)
        }
        Benchmark::Host { save, arguments } => {
            setup::require_bpf()?;
            recorded("host", arguments, save)
        }
        Benchmark::Racks { save, mut arguments } => {
            setup::require_bpf()?;
            setup::install_rivals();
            arguments.splice(0..0, RACKS.map(str::to_owned));
            recorded("racks", arguments, save)
        }
    }
}

/// Runs the benchmark `bench-NAME`, and saves its output, figures and picture if asked to.
fn recorded(name: &str, mut arguments: Vec<String>, save: bool) -> Result<()> {
    let command_line = [format!("$ cargo xtask bench {name} --save")].into_iter();
    let command_line =
        command_line.chain((!arguments.is_empty()).then(|| format!("-- {}", arguments.join(" "))));
    let command_line = command_line.collect::<Vec<_>>().join(" ");
    if save {
        let draws = !["control", "host"].contains(&name);
        let kinds: &[&str] = if draws { &["json", "svg"] } else { &["json"] };
        for kind in kinds {
            let path = paths::root()?.join(RECORDS).join(format!("{name}.{kind}"));
            arguments.extend([format!("--{kind}"), path.display().to_string()]);
        }
    }
    let program = if name == "racks" { "wire" } else { name };
    let (text, status) = bench(&format!("bench-{program}"), &arguments)?;
    // If a part of the run has failed, the rest is still saved.
    if save {
        write(&format!("{RECORDS}/{name}.txt"), &command_line, &text)?;
    }
    ensure!(status.success(), "the benchmark failed: {status}");
    Ok(())
}

/// Builds a benchmark and runs it; returns its output, which was also shown, and its status.
fn bench(program: &str, arguments: &[String]) -> Result<(String, ExitStatus)> {
    // The programs that it starts are built with it.
    let mut build = paths::cargo()?;
    build.args(["build", "--quiet", "--release", "--bins"]);
    build.args(["--package", "netsum-bench", "--package", "netsum", "--package", "netsum-worker"]);
    ensure!(build.status().context("cargo")?.success(), "building the benchmark failed, see above");
    let path = paths::target_dir()?.join("release").join(program);
    let mut command = Command::new(path);
    let mut child =
        command.args(arguments).stdout(Stdio::piped()).spawn().context(program.to_owned())?;
    let mut text = String::new();
    for line in BufReader::new(child.stdout.take().context("stdout")?).lines() {
        let line = line?;
        println!("{line}");
        text += &line;
        text.push('\n');
    }
    Ok((text, child.wait()?))
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
    // The release without the distribution's suffix.
    let kernel = kernel.trim().split('-').next().unwrap_or_default();
    let count = cpus.lines().filter(|l| l.starts_with("processor")).count();
    Ok(format!("{count} x {model}, Linux {kernel}"))
}
