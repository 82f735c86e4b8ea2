//! Runs jobs with faults in the simulator, case by case. Each case is generated from its seed.

use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;
use netsum_collective::sim::{Summary, describe, simulate};

/// Run jobs with faults in the simulator. `RUST_LOG=trace` shows each packet. Exits with 1 if a
/// case fails.
#[derive(Parser)]
#[command(name = "netsum-sim", disable_version_flag = true)]
struct Args {
    /// Number of cases.
    #[arg(long, default_value_t = 20_000)]
    cases: u64,
    /// Seed of the first case; the others count up.
    #[arg(long, default_value_t = 0, env = "NETSUM_SIM_SEED")]
    seed: u64,
    /// Print each case and its result.
    #[arg(short, long)]
    verbose: bool,
    /// Stop after N failures.
    #[arg(long, default_value_t = 10)]
    failures: u64,
}

fn main() -> ExitCode {
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("off"))
        .format_timestamp(None)
        .init();
    let args = Args::parse();
    // A panic is a failure like others, printed with its case below.
    std::panic::set_hook(Box::new(|_| ()));
    let start = Instant::now();
    let (mut cases, mut failures, mut right, mut ring) = (0u64, 0u64, 0u64, 0u64);
    let mut all = Summary::default();
    for seed in args.seed..args.seed.saturating_add(args.cases) {
        if args.verbose {
            println!("seed {seed}: {}", describe(seed));
        }
        cases += 1;
        match simulate(seed) {
            Ok(s) => {
                if args.verbose {
                    println!("  {s:?}");
                }
                right += u64::from(s.right);
                ring += u64::from(s.by_ring);
                all.lost += s.lost;
                all.corrupted += s.corrupted;
                all.packets += s.packets;
                all.retransmissions += s.retransmissions;
                all.timeouts += s.timeouts;
            }
            Err(failure) => {
                failures += 1;
                println!("{failure}");
                if failures >= args.failures {
                    break;
                }
            }
        }
    }
    let elapsed = start.elapsed();
    println!(
        "{cases} cases in {elapsed:.1?}, {:.0} a second: {right} with right sums, {ring} of them \
         in part by the hosts' ring, {} with an error that names the cause, {failures} failed",
        cases as f64 / elapsed.as_secs_f64(),
        cases - failures - right
    );
    println!(
        "{} data packets, {} sent again, {} timeouts; {} packets lost, {} corrupted",
        all.packets, all.retransmissions, all.timeouts, all.lost, all.corrupted
    );
    if failures == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
