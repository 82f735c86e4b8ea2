//! `netsum-perf` measures how fast all-reduces are, and prints the table of nccl-tests.
//!
//! | module | what lives there |
//! | --- | --- |
//! | [`args`] | the command line |
//! | [`data`] | inputs that every rank can compute for all ranks, and their sums |
//! | [`table`] | rows, as text or JSON |

mod args;
mod data;
mod table;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use netsum_worker::{Communicator, Dtype, Mode, Report};

use args::{Cli, Command, Options};
use data::Input;
use table::{Row, Table};

fn main() -> ExitCode {
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("warn")).init();
    let Command::AllReduce(options) = Cli::parse().command;
    let rank = options.rank;
    let outcome = match options.dtype {
        args::Type::I32 => all_reduce::<i32>(&options),
        args::Type::F32 => all_reduce::<f32>(&options),
    };
    match outcome {
        Ok(0) => ExitCode::SUCCESS,
        Ok(wrong) => {
            eprintln!("netsum-perf: rank {rank}: {wrong} wrong elements");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("netsum-perf: rank {rank}: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Measures all sizes. Returns the number of wrong elements at all ranks.
fn all_reduce<T: Input>(options: &Options) -> Result<u64> {
    let sizes = options.sizes()?;
    let largest = *sizes.last().context("no size to measure")? / 4;
    let mut comm = Communicator::connect(options.config()?)?;
    let mut table = Table::new(options.json, options.rank == 0);
    table.start(&comm, T::DTYPE, options);
    let input: Vec<T> = (0..largest as u64).map(|i| T::input(options.rank, i)).collect();
    let mut buffer = input.clone();
    let mut total = 0;
    for size in sizes {
        let count = size / 4;
        let row = measure(&mut comm, options, &input[..count], &mut buffer[..count])
            .with_context(|| format!("all-reduce of {count} elements of {}", T::DTYPE))?;
        total += row.wrong.unwrap_or(0);
        table.row(&row);
    }
    table.end(&comm, total);
    Ok(total)
}

/// The totals of all measured all-reduces of a size.
struct Times {
    elapsed: Duration,
    by_ring: bool,
    retransmissions: Option<u64>,
}

impl Times {
    fn add(&mut self, elapsed: Duration, report: &Report, again: Option<u64>) {
        self.elapsed += elapsed;
        self.by_ring |= report.mode == Mode::HostRing;
        self.retransmissions = self.retransmissions.zip(again).map(|(all, these)| all + these);
    }
}

/// Calls one all-reduce after the other.
fn one_by_one<T: Input>(
    comm: &mut Communicator,
    options: &Options,
    input: &[T],
    buffer: &mut [T],
    times: &mut Times,
) -> Result<()> {
    let part = input.len().div_ceil(options.tensors as usize).max(1);
    for i in 0..options.warmup + options.iters {
        // A sum of sums would overflow.
        buffer.copy_from_slice(input);
        let mut tensors: Vec<&mut [T]> = buffer.chunks_mut(part).collect();
        let started = Instant::now();
        let report = match &mut tensors[..] {
            [one] => comm.all_reduce(one)?,
            many => comm.all_reduce_many(many)?,
        };
        if i >= options.warmup {
            times.add(started.elapsed(), &report, report.retransmissions);
        }
    }
    Ok(())
}

/// Starts as many at a time as are to be in flight. Vectors are allocated before the clock starts.
fn in_flight<T: Input>(
    comm: &mut Communicator,
    options: &Options,
    input: &[T],
    buffer: &mut [T],
    times: &mut Times,
) -> Result<()> {
    for (count, measured) in [(options.warmup, false), (options.iters, true)] {
        for first in (0..count).step_by(options.inflight as usize) {
            let inputs: Vec<Vec<T>> =
                (first..count.min(first + options.inflight)).map(|_| input.to_vec()).collect();
            let again = |comm: &Communicator| comm.statistics().traffic.map(|t| t.retransmissions);
            let (started, before) = (Instant::now(), again(comm));
            let handles = inputs
                .into_iter()
                .map(|x| comm.all_reduce_async(x))
                .collect::<Result<Vec<_>, _>>()?;
            let sums = handles.into_iter().map(|h| h.wait()).collect::<Result<Vec<_>, _>>()?;
            let mut elapsed = started.elapsed();
            let mut again = again(comm).zip(before).map(|(after, before)| after - before);
            for (sum, report) in sums {
                if measured {
                    times.add(elapsed, &report, again);
                }
                // These are totals.
                (elapsed, again) = (Duration::ZERO, again.map(|_| 0));
                buffer.copy_from_slice(&sum);
            }
        }
    }
    Ok(())
}

fn measure<T: Input>(
    comm: &mut Communicator,
    options: &Options,
    input: &[T],
    buffer: &mut [T],
) -> Result<Row> {
    let mut times = Times { elapsed: Duration::ZERO, by_ring: false, retransmissions: Some(0) };
    let way = if options.inflight > 1 { in_flight } else { one_by_one };
    way(comm, options, input, buffer, &mut times)?;
    let Times { elapsed, by_ring, retransmissions } = times;
    let wrong =
        if options.check { Some(data::wrong(buffer, comm.ranks(), &comm.layout())) } else { None };
    // Sums all ranks' counts for one table.
    let clip = |n: u64| i32::try_from(n).unwrap_or(i32::MAX / 64).min(i32::MAX / 64);
    let mut counts = [
        clip(wrong.unwrap_or(0)),
        clip(retransmissions.unwrap_or(0)),
        i32::from(by_ring),
        i32::from(retransmissions.is_none()),
    ];
    comm.all_reduce(&mut counts)?;
    ensure!(counts.iter().all(|c| *c >= 0), "counts overflow");
    Ok(Row {
        size: input.len() * 4,
        count: input.len(),
        dtype: T::DTYPE,
        time: elapsed / options.iters,
        ranks: comm.ranks(),
        wrong: wrong.map(|_| counts[0] as u64),
        mode: if counts[2] > 0 { Mode::HostRing } else { Mode::Box },
        retransmissions: (counts[3] == 0).then_some(counts[1] as u64),
    })
}

/// The type's name in options and tables.
fn name(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::I32 => "int32",
        Dtype::F32 => "float",
    }
}
