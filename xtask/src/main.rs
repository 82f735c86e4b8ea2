//! The project's own commands: `cargo xtask COMMAND`.

mod bench;
mod build_ebpf;
mod compile;
mod debian;
mod demo;
mod dist;
mod fuzz;
mod harness;
mod lab;
mod lanes;
mod lines;
mod objects;
mod papers;
mod paths;
mod plugins;
mod programs;
#[cfg(test)]
mod purity;
mod python;
mod sanitize;
mod setup;
mod simulate;
mod soak;
#[cfg(test)]
mod tables;
mod tally;
mod test;
#[cfg(test)]
mod threats;
mod toolchain;
mod verbs_bindings;
mod vm;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", about = "The project's own commands", disable_version_flag = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Train a small classifier on four hosts, with the gradients summed inside a Linux bridge.
    #[command(disable_help_flag = true)]
    Demo(demo::DemoArgs),
    /// Run the tests, and list those that could not run, with the reason; --all adds the longest.
    Test(test::TestArgs),
    /// Rebuild the committed BPF objects; sets up the toolchain.
    BuildEbpf,
    /// Regenerate the committed bindings for libibverbs; sets up the toolchain.
    VerbsBindings,
    /// Build network namespaces with hosts and a box, for experiments.
    #[command(disable_help_flag = true)]
    Lab(lab::LabArgs),
    /// Run for long with loss on every link: a million fragments, and every sum compared.
    Soak(soak::SoakArgs),
    /// Run a benchmark.
    Bench(bench::BenchArgs),
    /// Run many jobs with faults in the simulator: `--cases N --seed S`.
    #[command(disable_help_flag = true)]
    Simulate(simulate::SimulateArgs),
    /// Compute the results of NetReduce, Blink and Ethereal: tables and pictures in target/papers.
    Papers,
    /// Run the pure crates' tests under Miri and AddressSanitizer, if the nightly toolchain has
    /// them.
    Sanitize,
    /// Build the Python package's wheel, with maturin in target/python.
    Wheel(python::WheelArgs),
    /// Build the plugins for NCCL, Open MPI and MPICH into target/plugins.
    Plugins,
    /// Build the book into target/book, and check its links.
    Book,
    /// Make the command line's man pages and shell completions; with `--deb`, a Debian package of
    /// everything; with `--schema`, the schemas of its JSON.
    #[command(disable_help_flag = true)]
    Dist(dist::DistArgs),
    /// Count lines of code, for the product and for everything else.
    Lines,
    /// Look for inputs that break a parser or a state machine, guided by coverage.
    Fuzz(fuzz::FuzzArgs),
}

fn main() -> ExitCode {
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("info"))
        .format_timestamp(None)
        .init();
    let result = match Cli::parse().command {
        Command::Demo(args) => demo::run(args),
        Command::Test(args) => test::run(&args),
        Command::BuildEbpf => build_ebpf::run(),
        Command::VerbsBindings => verbs_bindings::run(),
        Command::Lab(args) => lab::run(&args),
        Command::Soak(args) => soak::run(&args),
        Command::Bench(args) => bench::run(args),
        Command::Simulate(args) => simulate::run(&args),
        Command::Papers => papers::run(),
        Command::Sanitize => sanitize::run(),
        Command::Wheel(args) => python::run(&args),
        Command::Plugins => plugins::run(),
        Command::Book => book(),
        Command::Dist(args) => dist::run(&args),
        Command::Lines => lines::run(),
        Command::Fuzz(args) => fuzz::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // `Debug` would add a backtrace, which does not help a user.
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs a program of its own: mdBook is then built only for the book.
fn book() -> anyhow::Result<()> {
    let target = paths::target_dir()?.join("book");
    let status =
        paths::cargo()?.args(["run", "-q", "-p", "netsum-book", "--"]).arg(target).status()?;
    anyhow::ensure!(status.success(), "building the book failed, see above");
    Ok(())
}
