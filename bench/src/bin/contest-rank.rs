//! netsum's rank in a contest. It reads orders from standard input, a JSON object a line, and
//! writes an answer to each.

use std::io::{BufRead, Write};
use std::time::Duration;

use anyhow::{Context, Result};
use netsum_bench::contest::collective::Collective;
use netsum_bench::contest::cost::{busy_now, own_cpu};
use netsum_bench::contest::{Answer, Order};
use netsum_lab::cluster::RankSpec;
use netsum_worker::{Communicator, Error, Mode, Op, Report, Width};

fn main() -> Result<()> {
    env_logger::init();
    let spec: RankSpec =
        serde_json::from_str(&std::env::args().nth(1).context("a RankSpec is missing")?)?;
    // Several boxes have no common controller to join.
    let way = std::env::args().nth(2).context("box, box-16bit or ring is missing")?;
    let wanted = if way == "ring" { Mode::HostRing } else { Mode::Box };
    let mut comm = Communicator::connect(spec.config())?;
    if way == "box-16bit" {
        comm.set_wire(Some(Width::Half));
    }
    // Operations are waited for at once.
    comm.wait_first(Duration::from_secs(60));
    println!("ready");
    for line in std::io::stdin().lock().lines() {
        let order: Order = serde_json::from_str(&line?)?;
        let answer = run(&mut comm, &order, wanted)?;
        let mut out = std::io::stdout().lock();
        writeln!(out, "{}", serde_json::to_string(&answer)?)?;
        out.flush()?;
    }
    Ok(())
}

/// The data of an operation: floats to reduce, or bytes to move.
enum Data {
    Floats(Vec<f32>),
    Bytes(Vec<u8>),
}

impl Data {
    fn new(collective: Collective, floats: impl Iterator<Item = f32>) -> Self {
        match collective {
            Collective::Broadcast | Collective::AllGather | Collective::AllToAll => {
                Self::Bytes(floats.flat_map(f32::to_le_bytes).collect())
            }
            _ => Self::Floats(floats.collect()),
        }
    }

    fn floats(self) -> Vec<f32> {
        match self {
            Self::Floats(floats) => floats,
            Self::Bytes(bytes) => {
                bytes.as_chunks().0.iter().map(|lane| f32::from_le_bytes(*lane)).collect()
            }
        }
    }
}

/// Runs one operation, and returns its result.
fn operate(
    comm: &mut Communicator,
    collective: Collective,
    input: Data,
    output: Data,
) -> Result<(Data, Report), Error> {
    use Data::{Bytes, Floats};
    let (sum, root) = (Op::Sum, 0);
    Ok(match (collective, input, output) {
        (Collective::AllReduce, Floats(mut x), _) => {
            let report = comm.all_reduce(&mut x)?;
            (Floats(x), report)
        }
        (Collective::Reduce, Floats(x), _) => {
            let (x, report) = comm.reduce_async(x, sum, Some(root))?.wait()?;
            (Floats(x), report)
        }
        (Collective::ReduceScatter, Floats(x), Floats(y)) => {
            let ((_, y), report) = comm.reduce_scatter_async(x, y, sum)?.wait()?;
            (Floats(y), report)
        }
        (Collective::Broadcast, Bytes(x), _) => {
            let (x, report) = comm.broadcast_async(x, root)?.wait()?;
            (Bytes(x), report)
        }
        (Collective::AllGather, Bytes(x), Bytes(y)) => {
            let ((_, y), report) = comm.all_gather_async(x, y)?.wait()?;
            (Bytes(y), report)
        }
        (Collective::AllToAll, Bytes(x), Bytes(y)) => {
            let ((_, y), report) = comm.all_to_all_async(x, y)?.wait()?;
            (Bytes(y), report)
        }
        _ => (Floats(Vec::new()), comm.barrier_async()?.wait()?.1),
    })
}

fn run(comm: &mut Communicator, order: &Order, wanted: Mode) -> Result<Answer> {
    let (rank, ranks, collective) = (comm.rank(), comm.ranks(), order.collective);
    // Neighbouring elements differ, so a sum of the wrong elements is found.
    // Elements are small, so sums of 8 ranks are exact in 16 bits, too.
    let element = |i: usize| (i % 53) as u32;
    let own = |i: usize| (element(i) * (rank + 1)) as f32;
    let part = order.len / ranks as usize;
    let first = rank as usize * part;
    let (given, taken) = match collective {
        Collective::AllGather => (part, order.len),
        Collective::ReduceScatter => (order.len, part),
        _ => (order.len, order.len),
    };
    let right = |i: usize| {
        let (sum, from) = (ranks * (ranks + 1) / 2, (i / part.max(1)) as u32 + 1);
        (match collective {
            Collective::Reduce if rank > 0 => element(i) * (rank + 1),
            Collective::ReduceScatter => element(first + i) * sum,
            Collective::Broadcast => element(i),
            Collective::AllGather => element(i % part) * from,
            Collective::AllToAll => element(first + i % part) * from,
            _ => element(i) * sum,
        }) as f32
    };
    let mut answer = Answer {
        micros: Vec::new(),
        busy: 0.0,
        busiest: 0.0,
        cpu: 0.0,
        wrong: 0,
        retransmissions: 0,
        astray: 0,
    };
    for _ in 0..order.iters {
        let input = Data::new(collective, (0..given).map(own));
        let output = Data::new(collective, (0..taken).map(|_| -1.0));
        comm.all_reduce(&mut [1.0f32])?;
        let (before, cpu) = (busy_now()?, own_cpu()?);
        let (result, report) = operate(comm, collective, input, output)?;
        answer.cpu += own_cpu()? - cpu;
        let busy =
            busy_now()?.iter().zip(before).map(|(now, before)| now - before).collect::<Vec<_>>();
        answer.busy += busy.iter().sum::<f64>();
        answer.busiest += busy.into_iter().fold(0.0, f64::max);
        answer.micros.push(report.elapsed.as_secs_f64() * 1e6);
        answer.retransmissions += report.retransmissions.unwrap_or(0);
        answer.astray += u64::from(report.mode != wanted);
        let result = result.floats();
        answer.wrong += result.iter().enumerate().filter(|(i, x)| **x != right(*i)).count() as u64;
    }
    Ok(answer)
}
