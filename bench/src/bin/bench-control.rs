//! A fabric manager with many boxes and ranks, and the call that starts an operation: `cargo xtask
//! bench control`.

use anyhow::{Context, Result};
use clap::Parser;
use netsum_bench::control::{HEAD, Size, measure, start};

#[derive(Parser)]
struct Args {
    #[command(flatten)]
    size: Size,
    /// Also measure a half and a quarter of the jobs and leaves.
    #[arg(long)]
    smaller: bool,
    /// Rounds of starts of operations, for each case.
    #[arg(long, default_value_t = 50)]
    rounds: usize,
    /// Also write the figures to this file.
    #[arg(long)]
    json: Option<std::path::PathBuf>,
}

fn main() -> Result<()> {
    env_logger::init();
    let args = Args::parse();
    let netsum = std::env::current_exe()?.with_file_name("netsum");
    let parts: &[usize] = if args.smaller { &[4, 2, 1] } else { &[1] };
    println!("{HEAD}");
    let mut all = Vec::new();
    for part in parts {
        let Size { leaves, jobs, .. } = args.size;
        let size = Size {
            leaves: leaves.div_ceil(*part),
            jobs: jobs.div_ceil(*part),
            ..args.size.clone()
        };
        let figures = measure(&netsum, &size)?;
        println!("{figures}");
        all.push(figures);
    }
    println!();
    let all = serde_json::json!({ "manager": all, "start": start::table(args.rounds)? });
    if let Some(path) = args.json {
        let json = serde_json::to_string_pretty(&all)? + "\n";
        std::fs::write(&path, json).with_context(|| path.display().to_string())?;
    }
    Ok(())
}
