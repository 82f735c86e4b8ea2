//! All-reduces of netsum, Gloo and Open MPI on the same machine, in turns: `cargo xtask bench allreduce`.

use anyhow::{Context, Result, ensure};
use clap::Parser;
use netsum_bench::contest::report::{Row, picture};
use netsum_bench::contest::start::{Who, is_there, start};
use netsum_bench::contest::{Contestant, Order, Round};
use netsum_bench::keep::Keep;
use netsum_lab::cluster::JobSpec;

#[derive(Parser)]
struct Args {
    /// Hosts.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(2..=64))]
    ranks: u32,
    /// Smallest vector, in KiB.
    #[arg(long, default_value_t = 1)]
    from_kib: usize,
    /// Largest vector, in KiB.
    #[arg(long, default_value_t = 65536)]
    to_kib: usize,
    /// From each size to the next.
    #[arg(long, default_value_t = 4)]
    factor: usize,
    /// 32-bit integers in place of floats.
    #[arg(long)]
    ints: bool,
    /// Path MTU of netsum; the links are 104 bytes wider, and 1500 at least, for everybody.
    #[arg(long, default_value_t = 2048)]
    mtu: u32,
    /// netsum's message size in bytes.
    #[arg(long, default_value_t = 65536)]
    message_size: u32,
    /// netsum's window in messages.
    #[arg(long, default_value_t = 8)]
    window: u32,
    /// netsum's rings; each has a CPU of the box.
    #[arg(long, default_value_t = 2)]
    rings: u32,
    /// Rounds of each contestant with each size.
    #[arg(long, default_value_t = 3)]
    rounds: u32,
    /// Seconds that a round takes about.
    #[arg(long, default_value_t = 0.7)]
    seconds: f64,
    /// Only those of these names, as in the table.
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    #[command(flatten)]
    keep: Keep,
}

fn main() -> Result<()> {
    env_logger::init();
    let args = Args::parse();
    ensure!(args.factor > 1, "--factor {}: at least 2", args.factor);
    let job = JobSpec {
        mtu: args.mtu,
        message_size: args.message_size,
        window: args.window,
        rings: args.rings,
        ..JobSpec::new("bench", args.ranks)
    };
    let wanted = |who: &Who| args.only.is_empty() || args.only.iter().any(|n| who.name() == n);
    let mut contestants = Vec::new();
    for who in Who::ALL.into_iter().filter(wanted) {
        match is_there(who) {
            Ok(()) => contestants.push(
                start(who, &job, (args.mtu + 104).max(1500))
                    .with_context(|| format!("{} does not start", who.name()))?,
            ),
            Err(error) => args.keep.print(format_args!("without {}: {error:#}\n", who.name())),
        }
    }
    ensure!(!contestants.is_empty(), "nobody takes part");
    let mut rows = Vec::new();
    args.keep.print(format_args!("{}\n", Row::titles()));
    let sizes = std::iter::successors(Some(args.from_kib), |s| s.checked_mul(args.factor));
    for size in sizes.take_while(|s| *s <= args.to_kib) {
        let these = measure(&args, &mut contestants, size << 10)?;
        these.iter().for_each(|row| args.keep.print(format_args!("{}\n", row.text())));
        rows.extend(these);
    }
    let title = format!("all-reduce of {} hosts on one machine", args.ranks);
    args.keep.write(&rows, || picture(&rows, &title))
}

/// All contestants with one size, round by round.
fn measure(args: &Args, contestants: &mut [Contestant], bytes: usize) -> Result<Vec<Row>> {
    let order = |iters| Order { len: bytes / 4, float: !args.ints, iters };
    let mut iters = Vec::new();
    for contestant in &mut *contestants {
        // The first warms up, the second tells how long it takes.
        contestant.run(&order(1))?;
        let tried = contestant.run(&order(3))?.answer.micros;
        let second = tried.iter().sum::<f64>() / tried.len() as f64 / 1e6;
        iters.push((args.seconds / second).clamp(3.0, 2000.0) as u32);
    }
    let mut rounds: Vec<Vec<Round>> = contestants.iter().map(|_| Vec::new()).collect();
    for _ in 0..args.rounds {
        for ((contestant, rounds), iters) in contestants.iter_mut().zip(&mut rounds).zip(&iters) {
            rounds.push(contestant.run(&order(*iters))?);
        }
    }
    let row =
        |(c, rounds): (&Contestant, &Vec<Round>)| Row::new(c.name, !args.ints, bytes, args.ranks, rounds);
    Ok(contestants.iter().zip(&rounds).map(row).collect())
}
