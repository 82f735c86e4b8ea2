//! The measuring loop, and each command's call of the library.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use netsum_worker::{Communicator, Error, Mode, Pending};

use crate::args::Options;
use crate::command::{Collective, Kind};
use crate::data::{Input, RankCall, bytes, elements};
use crate::table::{Row, Table, Volume};

/// How long a call waits for its operation without the progress thread.
const PATIENCE: Duration = Duration::from_secs(60);

/// Measures all sizes. Returns the number of wrong elements at all ranks.
pub fn run<T: Input>(collective: &'static Collective, options: &Options) -> Result<u64> {
    let counts = options.counts(collective, size_of::<T>())?;
    let mut comm = Communicator::connect(options.config()?)?;
    if options.inflight == 1 {
        comm.wait_first(PATIENCE);
    }
    let mut table = Table::new(options.json, options.rank == 0);
    table.start(&comm, collective, options);
    let mut total = 0;
    for count in counts {
        let (rank, ranks, layout) = (comm.rank(), comm.ranks(), comm.layout());
        let Options { op, root, wire, .. } = *options;
        let (kind, width) = (collective.kind, wire);
        let call = RankCall { kind, rank, ranks, op, root, layout, width, count };
        let measured = one_size::<T>(&mut comm, options, &call)
            .with_context(|| format!("{} of {count} elements of {}", collective.name, T::DTYPE))?;
        let row = measured.row(&mut comm, Volume::new::<T>(collective, &call))?;
        total += row.wrong.unwrap_or(0);
        table.row(&row);
    }
    table.end(&comm, total);
    Ok(total)
}

fn one_size<T: Input>(
    comm: &mut Communicator,
    options: &Options,
    call: &RankCall,
) -> Result<Measured, Error> {
    let RankCall { kind, rank, op, root, count, .. } = *call;
    let (ranks, block) = (call.ranks as usize, count * size_of::<T>());
    let element = size_of::<T>();
    match kind {
        Kind::AllReduce if options.tensors > 1 => {
            let input = elements::<T>(rank, 0..count);
            let parts: Vec<&[T]> = input.chunks(count.div_ceil(options.tensors as usize)).collect();
            let fill = |tensors: &mut Vec<Vec<T>>| {
                tensors.resize_with(parts.len(), Vec::new);
                tensors.iter_mut().zip(&parts).for_each(|(to, from)| (**from).clone_into(to));
            };
            let wrong = |n, tensors: &Vec<Vec<T>>| call.wrong_elements(n, &tensors.concat());
            measure(comm, options, fill, |comm, b| comm.reduce_many_async(b, op), wrong)
        }
        Kind::AllReduce | Kind::Reduce => {
            let input = elements::<T>(rank, 0..count);
            let root = kind.has_root().then_some(root);
            let fill = |b: &mut Vec<T>| input.clone_into(b);
            let start = |comm: &mut Communicator, b| comm.reduce_async(b, op, root);
            measure(comm, options, fill, start, |n, b| call.wrong_elements(n, b))
        }
        Kind::ReduceScatter => {
            let input = elements::<T>(rank, 0..ranks * count);
            let fill = |(from, to): &mut (Vec<T>, Vec<T>)| {
                input.clone_into(from);
                refill(to, count, T::default());
            };
            let start =
                |comm: &mut Communicator, (from, to)| comm.reduce_scatter_async(from, to, op);
            measure(comm, options, fill, start, |n, (_, to)| call.wrong_elements(n, to))
        }
        Kind::Broadcast => {
            let input = bytes(rank, 0..block);
            let fill = |b: &mut Vec<u8>| input.clone_into(b);
            let start = |comm: &mut Communicator, b| comm.broadcast_async(b, root);
            measure(comm, options, fill, start, |_, b| call.wrong_bytes(b, element))
        }
        Kind::AllGather | Kind::AllToAll => {
            let gathers = kind == Kind::AllGather;
            let input = bytes(rank, 0..if gathers { block } else { ranks * block });
            let fill = |(from, to): &mut (Vec<u8>, Vec<u8>)| {
                input.clone_into(from);
                refill(to, ranks * block, 0);
            };
            let start = |comm: &mut Communicator, (from, to)| match gathers {
                true => comm.all_gather_async(from, to),
                false => comm.all_to_all_async(from, to),
            };
            measure(comm, options, fill, start, |_, (_, to)| call.wrong_bytes(to, element))
        }
        Kind::Barrier => {
            let start = |comm: &mut Communicator, _| comm.barrier_async();
            measure(comm, options, |_: &mut Vec<i32>| (), start, |_, _| 0)
        }
    }
}

fn refill<T: Copy>(vector: &mut Vec<T>, length: usize, value: T) {
    vector.clear();
    vector.resize(length, value);
}

/// One rank's measurements of a size.
struct Measured {
    mean: Duration,
    /// The time of each operation; of those in flight together, their mean.
    times: Vec<Duration>,
    by_ring: bool,
    retransmissions: Option<u64>,
    /// `None` if not checked.
    wrong: Option<u64>,
}

/// Starts as many operations at a time as are to be in flight, and waits for all. Buffers are
/// filled while the clock stands.
fn measure<B: Default>(
    comm: &mut Communicator,
    options: &Options,
    fill: impl Fn(&mut B),
    start: impl Fn(&mut Communicator, B) -> Result<Pending<B>, Error>,
    wrong: impl Fn(u64, &B) -> u64,
) -> Result<Measured, Error> {
    let resent = |comm: &Communicator| comm.statistics().traffic.map(|t| t.retransmissions);
    let mut buffers: Vec<B> = (0..options.inflight).map(|_| B::default()).collect();
    let (mut total, mut times, mut by_ring) = (Duration::ZERO, Vec::new(), false);
    let mut before = None;
    for (count, is_measured) in [(options.warmup, false), (options.iters, true)] {
        before = resent(comm);
        for first in (0..count).step_by(options.inflight as usize) {
            let together = options.inflight.min(count - first);
            let mut free: Vec<B> = buffers.drain(..together as usize).collect();
            // A sum of sums would overflow, and old results would hide that nothing arrives.
            free.iter_mut().for_each(&fill);
            let started = Instant::now();
            let handles =
                free.into_iter().map(|b| start(comm, b)).collect::<Result<Vec<_>, _>>()?;
            let mut reports = Vec::with_capacity(handles.len());
            for handle in handles {
                let (buffer, report) = handle.wait()?;
                buffers.push(buffer);
                reports.push(report);
            }
            let elapsed = started.elapsed();
            if is_measured {
                total += elapsed;
                times.push(elapsed / together);
                by_ring |= reports.iter().any(|report| report.mode == Mode::HostRing);
            }
        }
    }
    let retransmissions = resent(comm).zip(before).map(|(after, before)| after - before);
    // The last operation's number.
    let number = comm.statistics().all_reduces;
    let last = buffers.last().filter(|_| options.check);
    let wrong = last.map(|buffer| wrong(number, buffer));
    Ok(Measured { mean: total / options.iters, times, by_ring, retransmissions, wrong })
}

impl Measured {
    /// Rank 0's times, and the counts of all ranks.
    fn row(mut self, comm: &mut Communicator, volume: Option<Volume>) -> Result<Row> {
        let clip = |n: u64| i32::try_from(n).unwrap_or(i32::MAX / 64).min(i32::MAX / 64);
        let mut counts = [
            clip(self.wrong.unwrap_or(0)),
            clip(self.retransmissions.unwrap_or(0)),
            i32::from(self.by_ring),
            i32::from(self.retransmissions.is_none()),
        ];
        comm.all_reduce(&mut counts)?;
        ensure!(counts.iter().all(|c| *c >= 0), "counts overflow");
        self.times.sort_unstable();
        Ok(Row {
            volume,
            mean: self.mean,
            p50: self.times[self.times.len() / 2],
            max: *self.times.last().context("nothing measured")?,
            wrong: self.wrong.map(|_| counts[0] as u64),
            mode: if counts[2] > 0 { Mode::HostRing } else { Mode::Box },
            retransmissions: (counts[3] == 0).then_some(counts[1] as u64),
        })
    }
}
