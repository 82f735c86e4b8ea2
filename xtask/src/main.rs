//! The project's own commands: `cargo xtask COMMAND`.

mod bench;
mod demo;

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
    Demo(demo::DemoArgs),
    /// Measures.
    Bench(bench::BenchArgs),
}

fn main() -> anyhow::Result<()> {
    match Cli::parse().command {
        Command::Demo(args) => demo::run(args),
        Command::Bench(args) => bench::run(args),
    }
}
