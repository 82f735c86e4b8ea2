//! What the data plane costs: `cargo xtask bench dataplane`.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Parser;
use netsum_lab::dataplane_bench::{Settings, picture, run, table};

#[derive(Parser)]
struct Args {
    /// Few rounds of few things: to see that everything runs.
    #[arg(long)]
    quick: bool,
    /// Also writes all figures to this file; with `-` prints them in place of the tables.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Also draws them.
    #[arg(long)]
    svg: Option<PathBuf>,
}

fn main() -> Result<()> {
    env_logger::init();
    let args = Args::parse();
    let settings = if args.quick { Settings::quick() } else { Settings::full() };
    let report = run(&settings)?;
    let json = serde_json::to_string_pretty(&report)? + "\n";
    match &args.json {
        Some(path) if path.as_os_str() == "-" => {
            print!("{json}");
        }
        path => {
            print!("{}", table::text(&report));
            if let Some(path) = path {
                std::fs::write(path, json).with_context(|| path.display().to_string())?;
            }
        }
    }
    if let Some(path) = &args.svg {
        std::fs::write(path, picture::svg(&report)?).with_context(|| path.display().to_string())?;
    }
    Ok(())
}
