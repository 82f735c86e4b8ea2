//! All-reduces with more ranks, rings, jobs, credit, and larger messages: `cargo xtask bench
//! scaling`.

use anyhow::Result;
use clap::Parser;
use netsum_bench::keep::Keep;
use netsum_bench::scaling::{Curve, Settings, measure, report};

#[derive(Parser)]
struct Args {
    /// Use fewer points and a smaller vector.
    #[arg(long)]
    quick: bool,
    /// Measure only these curves.
    #[arg(long, value_delimiter = ',')]
    only: Vec<Curve>,
    /// Rounds of each point.
    #[arg(long)]
    rounds: Option<u32>,
    /// The size of the vector for bandwidth, in KiB.
    #[arg(long)]
    kib: Option<usize>,
    /// The approximate time of a round, in seconds.
    #[arg(long)]
    seconds: Option<f64>,
    #[command(flatten)]
    keep: Keep,
}

fn main() -> Result<()> {
    env_logger::init();
    let args = Args::parse();
    let mut settings = Settings::new(args.quick);
    if !args.only.is_empty() {
        settings.curves = args.only;
    }
    settings.rounds = args.rounds.unwrap_or(settings.rounds);
    settings.bytes = args.kib.map_or(settings.bytes, |kib| kib << 10);
    settings.seconds = args.seconds.unwrap_or(settings.seconds);
    args.keep.print(format_args!(
        "All-reduces of f32 on one machine: bandwidth with {} KiB, latency with {} B; path MTU \
         2048, best of {} rounds.\n",
        settings.bytes >> 10,
        settings.small_bytes,
        settings.rounds
    ));
    let mut rows = Vec::new();
    for curve in settings.curves.clone() {
        let these = measure(curve, &settings)?;
        args.keep.print(format_args!("\n{}\n", report::table(&these).trim_end()));
        rows.extend(these);
    }
    args.keep.write(&rows, || report::picture(&rows))
}
