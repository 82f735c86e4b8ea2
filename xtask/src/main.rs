//! The project's own commands: `cargo xtask COMMAND`.

mod bench;
mod build_ebpf;
mod debian;
mod demo;
mod dist;
mod fuzz;
mod harness;
mod lab;
mod objects;
mod papers;
mod paths;
mod programs;
#[cfg(test)]
mod purity;
mod python;
mod sanitize;
mod setup;
mod simulate;
mod soak;
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
    /// Trains a small classifier on four hosts whose gradients are summed inside a Linux bridge.
    #[command(disable_help_flag = true)]
    Demo(demo::DemoArgs),
    /// Runs all tests; says which could not be run, and why.
    Test(test::TestArgs),
    /// Rebuilds the committed BPF objects; sets up what that takes.
    BuildEbpf,
    /// Makes the committed bindings for libibverbs anew; sets up what that takes.
    VerbsBindings,
    /// Network namespaces with hosts and a box, to play with.
    #[command(disable_help_flag = true)]
    Lab(lab::LabArgs),
    /// A long run with loss on every link: a million fragments, and every sum compared.
    Soak(soak::SoakArgs),
    /// Measures.
    Bench(bench::BenchArgs),
    /// Runs many jobs with faults in the simulator: `--cases N --seed S`.
    #[command(disable_help_flag = true)]
    Simulate(simulate::SimulateArgs),
    /// What NetReduce, Blink and Ethereal promise, computed anew: tables and pictures in
    /// target/papers.
    Papers,
    /// Runs the pure crates' tests under Miri and AddressSanitizer, where nightly has them.
    Sanitize,
    /// Builds the Python package's wheel, with maturin in target/python.
    Wheel(python::WheelArgs),
    /// Builds the book into target/book, and checks its links.
    Book,
    /// Makes man pages and shell completions of the command line; with `--deb` a Debian package of
    /// everything, with `--schema` the schemas of its JSON.
    #[command(disable_help_flag = true)]
    Dist(dist::DistArgs),
    /// Looks for inputs that break something, guided by coverage.
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
        Command::Book => book(),
        Command::Dist(args) => dist::run(&args),
        Command::Fuzz(args) => fuzz::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Not the `Debug` form, which adds a backtrace that says nothing to a user.
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// A program of its own, so that mdBook is built for the book alone.
fn book() -> anyhow::Result<()> {
    let target = paths::target_dir()?.join("book");
    let status =
        paths::cargo()?.args(["run", "-q", "-p", "netsum-book", "--"]).arg(target).status()?;
    anyhow::ensure!(status.success(), "the book could not be built");
    Ok(())
}
