//! netsum's rank in a contest. It reads orders from standard input, a JSON object a line, and
//! writes an answer to each.

use std::io::{BufRead, Write};

use anyhow::{Context, Result};
use netsum_bench::contest::cost::{busy_now, own_cpu};
use netsum_bench::contest::{Answer, Order};
use netsum_lab::cluster::RankSpec;
use netsum_worker::{Communicator, Mode, Width};

fn main() -> Result<()> {
    env_logger::init();
    let spec: RankSpec =
        serde_json::from_str(&std::env::args().nth(1).context("a RankSpec is missing")?)?;
    // Several boxes have no common controller to join.
    let way = std::env::args().nth(2).context("box, box-16bit or ring is missing")?;
    let wanted = if way == "ring" { Mode::HostRing } else { Mode::Box };
    let mut comm = Communicator::connect(spec.config())?;
    if way == "box-16bit" {
        comm.set_width(Width::Half);
    }
    println!("ready");
    for line in std::io::stdin().lock().lines() {
        let order: Order = serde_json::from_str(&line?)?;
        let answer = reduce(&mut comm, &order, wanted)?;
        let mut out = std::io::stdout().lock();
        writeln!(out, "{}", serde_json::to_string(&answer)?)?;
        out.flush()?;
    }
    Ok(())
}

fn reduce(comm: &mut Communicator, order: &Order, wanted: Mode) -> Result<Answer> {
    let (rank, ranks) = (comm.rank(), comm.ranks());
    let number = |x: u32| x as f32;
    // Neighbouring elements differ, so a sum of the wrong elements is found.
    // Sums of so many different numbers are exact in 16 bits, too, for 8 ranks.
    let element = |i: usize| (i % 53) as u32;
    let mut buffer = vec![number(0); order.len];
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
        buffer.iter_mut().enumerate().for_each(|(i, x)| *x = number(element(i) * (rank + 1)));
        comm.all_reduce(&mut [number(1)])?;
        let (before, cpu) = (busy_now()?, own_cpu()?);
        let report = comm.all_reduce(&mut buffer)?;
        answer.cpu += own_cpu()? - cpu;
        let busy =
            busy_now()?.iter().zip(before).map(|(now, before)| now - before).collect::<Vec<_>>();
        answer.busy += busy.iter().sum::<f64>();
        answer.busiest += busy.into_iter().fold(0.0, f64::max);
        answer.micros.push(report.elapsed.as_secs_f64() * 1e6);
        answer.retransmissions += report.retransmissions.unwrap_or(0);
        answer.astray += u64::from(report.mode != wanted);
        let sum = |i| number(element(i) * (ranks * (ranks + 1) / 2));
        answer.wrong += buffer.iter().enumerate().filter(|(i, x)| **x != sum(*i)).count() as u64;
    }
    Ok(answer)
}
