//! The cost of the data plane: `cargo xtask bench dataplane`.

use anyhow::Result;
use clap::Parser;
use netsum_bench::dataplane::{Settings, picture, run, table};
use netsum_bench::keep::Keep;

#[derive(Parser)]
struct Args {
    /// Run few rounds of everything, as a smoke test.
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
