//! Trees over spines whose links differ in rate: `cargo xtask bench racks --plan`.

use anyhow::{Context, Result, ensure};
use clap::Parser;
use netsum_bench::trees::{HEAD, measure};
use netsum_lab::Rate;

#[derive(Parser)]
struct Args {
    /// The rate of each spine's links, fastest first, separated by commas; multiples of the last.
    #[arg(long, value_delimiter = ',', default_value = "200mbit,100mbit,50mbit")]
    rates: Vec<Rate>,
    /// Bytes of the vector.
    #[arg(long, default_value_t = 32 << 20)]
    bytes: usize,
    #[arg(long, default_value_t = 3)]
    repeat: u64,
    /// Also write the figures to this file.
    #[arg(long)]
    json: Option<std::path::PathBuf>,
}

fn main() -> Result<()> {
    env_logger::init();
    let args = Args::parse();
    ensure!(args.rates.is_sorted_by(|a, b| a.0 >= b.0), "--rates: the fastest comes first");
    let (all, shown) = measure(&args.rates, args.bytes, args.repeat)?;
    println!("{HEAD}");
    all.iter().for_each(|figures| println!("{figures}"));
    println!("\n{shown}");
    if let Some(path) = args.json {
        let json = serde_json::to_string_pretty(&all)? + "\n";
        std::fs::write(&path, json).with_context(|| path.display().to_string())?;
    }
    Ok(())
}
