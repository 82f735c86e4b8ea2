//! `netsum-perf`: how fast all-reduces are, in the table that users of nccl-tests know.
//!
//! | module | what lives there |
//! | --- | --- |
//! | [`args`] | the command line |
//! | [`data`] | inputs that every rank can make for all ranks, and their sums |
//! | [`table`] | rows, as text or JSON |

mod args;
mod data;
mod table;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use netsum_worker::{Communicator, Dtype, Mode};

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

/// Measures all sizes. Gives the number of wrong elements at all ranks.
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

fn measure<T: Input>(
    comm: &mut Communicator,
    options: &Options,
    input: &[T],
    buffer: &mut [T],
) -> Result<Row> {
    let (mut elapsed, mut by_ring, mut retransmissions) = (Duration::ZERO, false, Some(0));
    for i in 0..options.warmup + options.iters {
        // A sum of sums would not stay finite.
        buffer.copy_from_slice(input);
        let started = Instant::now();
        let report = comm.all_reduce(buffer)?;
        if i >= options.warmup {
            elapsed += started.elapsed();
            by_ring |= report.mode == Mode::Ring;
            retransmissions = retransmissions.zip(report.retransmissions).map(|(all, these)| all + these);
        }
    }
    let wrong = if options.check { Some(data::wrong(buffer, comm.ranks(), &comm.layout())) } else { None };
    // All ranks' counts, so that one table tells all.
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
        mode: if counts[2] > 0 { Mode::Ring } else { Mode::Box },
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
