//! The cost of a host alone: `cargo xtask bench host`.

use anyhow::{Context, Result};
use clap::Parser;
use netsum_bench::host::{HEAD, Settings, measure, rank};

#[derive(Parser)]
struct Args {
    #[command(flatten)]
    settings: Settings,
    /// Measure briefly, as a smoke test.
    #[arg(long)]
    quick: bool,
    /// Also write the figures to this file.
    #[arg(long)]
    json: Option<std::path::PathBuf>,
    /// Be rank 0, with this configuration.
    #[arg(long, hide = true)]
    rank: Option<String>,
}

fn main() -> Result<()> {
    env_logger::init();
    let args = Args::parse();
    if let Some(spec) = args.rank {
        return rank::run(&spec);
    }
    let settings = if args.quick {
        Settings { mtus: vec![1408], size: 1, rounds: 1, seconds: 0.2, ..args.settings }
    } else {
        args.settings
    };
    println!("{}", HEAD.join("\n"));
    let figures = measure(&settings, |row| println!("{row}"))?;
    if let Some(path) = args.json {
        let json = serde_json::to_string_pretty(&figures)? + "\n";
        std::fs::write(&path, json).with_context(|| path.display().to_string())?;
    }
    Ok(())
}
