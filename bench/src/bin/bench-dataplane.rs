//! What the data plane costs: `cargo xtask bench dataplane`.

use anyhow::Result;
use clap::Parser;
use netsum_bench::dataplane::{Settings, picture, run, table};
use netsum_bench::keep::Keep;

#[derive(Parser)]
struct Args {
    /// Few rounds of few things: to see that everything runs.
    #[arg(long)]
    quick: bool,
    #[command(flatten)]
    keep: Keep,
}

fn main() -> Result<()> {
    env_logger::init();
    let args = Args::parse();
    let settings = if args.quick { Settings::quick() } else { Settings::full() };
    let report = run(&settings)?;
    args.keep.print(table::text(&report));
    args.keep.write(&report, || picture::svg(&report))
}
