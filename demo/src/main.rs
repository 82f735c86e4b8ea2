//! Trains a small classifier over netsum, or in one process.

mod lab;
mod rank;

use std::io::Write;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result};
use clap::{Args, Parser, Subcommand};
use netsum_demo::data::Data;
use netsum_demo::model::Model;
use netsum_demo::report::{Line, Trained};
use netsum_demo::train::{Config, fingerprint, to_bytes, train};
use netsum_demo::{DEFAULT_EPOCHS, sum_here};

#[derive(Parser)]
#[command(
    name = "netsum-demo",
    about = "Trains a small classifier of handwritten digits, data-parallel"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Train on hosts of a lab, with the gradients summed by the box between them.
    Hosts(lab::DemoArgs),
    /// Train with PyTorch on hosts of a lab, with the gradients summed by the box, and by Gloo.
    Torch(lab::torch::TorchArgs),
    /// Run one rank of several; the box, or a ring, sums the gradients.
    Rank(rank::RankArgs),
    /// Train with all ranks' batches in this process: the weights are the same, bit by bit.
    Reference(Training),
}

/// Parameters of the training, equal for all ranks and the reference.
#[derive(Args)]
struct Training {
    /// Number of ranks.
    #[arg(long)]
    ranks: usize,
    /// Number of times that each image is used.
    #[arg(long, default_value_t = DEFAULT_EPOCHS)]
    epochs: usize,
    /// Seed of the first weights and the order of the images.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Write the weights to this file, as little-endian floats.
    #[arg(long)]
    weights: Option<PathBuf>,
}

impl Training {
    fn config(&self) -> Config {
        Config::new(self.ranks, self.epochs, self.seed)
    }
}

fn main() -> Result<()> {
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("warn")).init();
    match Cli::parse().command {
        Command::Hosts(args) => lab::run(args),
        Command::Torch(args) => lab::torch::run(&args),
        Command::Rank(args) => rank::run(&args),
        Command::Reference(args) => reference(&args),
    }
}

fn reference(args: &Training) -> Result<()> {
    let (config, data) = (args.config(), Data::load()?);
    let start = Instant::now();
    let sum = |parts: &[Vec<f32>], total: &mut [f32]| {
        sum_here(parts, total);
        Ok(())
    };
    let model = train(&config, &data, 0..config.ranks, sum, |_| ())?;
    let seconds = start.elapsed().as_secs_f64();
    finish(
        args,
        &data,
        &model,
        Trained { steps: config.steps(&data), seconds, ..Trained::default() },
    )
}

/// Writes the weights, and prints the result of the training.
fn finish(args: &Training, data: &Data, model: &Model, so_far: Trained) -> Result<()> {
    if let Some(path) = &args.weights {
        std::fs::write(path, to_bytes(model.parameters()))
            .with_context(|| path.display().to_string())?;
    }
    print_line(&Line::Trained(Trained {
        accuracy: model.accuracy(&data.test),
        fingerprint: format!("{:016x}", fingerprint(model.parameters())),
        ..so_far
    }))
}

/// Prints a line of JSON and flushes standard output.
fn print_line(line: &Line) -> Result<()> {
    let mut out = std::io::stdout().lock();
    serde_json::to_writer(&mut out, line)?;
    out.write_all(b"\n")?;
    Ok(out.flush()?)
}
