//! The process of rank 0: it reads orders from standard input, a JSON object a line, and writes an
//! answer to each.

use std::io::{BufRead, Write};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use netsum_lab::cluster::RankSpec;
use netsum_lab::cpu::Pinned;
use netsum_worker::{Communicator, Mode};
use nix::sys::resource::{Usage, UsageWho, getrusage};
use nix::sys::time::TimeValLike as _;
use serde::{Deserialize, Serialize};

use super::RANK_CPU;

/// An order: all-reduces of `len` floats, one after the other, for at least `seconds`.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Order {
    pub len: usize,
    pub seconds: f64,
}

/// The sum of all all-reduces of an order, without the times to make and check vectors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Answer {
    /// Bytes of vectors.
    pub bytes: u64,
    pub seconds: f64,
    /// CPU seconds of the process (getrusage(2)).
    pub user: f64,
    pub system: f64,
    /// Packets received.
    pub packets: u64,
    /// How often a thread slept.
    pub sleeps: u64,
    /// All-reduces that the box did not sum.
    pub fallbacks: u64,
    pub retransmissions: u64,
}

impl Answer {
    pub fn gigabytes(&self) -> f64 {
        self.bytes as f64 / 1e9
    }
}

/// Carries out orders until the input ends.
///
/// # Errors
/// If the rank fails, or a sum is wrong.
pub fn run(spec: &str) -> Result<()> {
    let spec: RankSpec = serde_json::from_str(spec).context("a RankSpec")?;
    // The communicator's threads inherit it.
    let _cpu = Pinned::to(RANK_CPU)?;
    let mut comm = Communicator::connect(spec.config())?;
    println!("{}", comm.transport());
    for line in std::io::stdin().lock().lines() {
        let answer = obey(&mut comm, &serde_json::from_str(&line?)?)?;
        let mut out = std::io::stdout().lock();
        writeln!(out, "{}", serde_json::to_string(&answer)?)?;
        out.flush()?;
    }
    Ok(())
}

fn obey(comm: &mut Communicator, order: &Order) -> Result<Answer> {
    // Rank 1 contributes zeros, so the sum is the vector itself. All values are exact in a message's
    // scale. Neighbours differ: a sum of the wrong elements is found.
    let vector: Vec<f32> = (0..order.len).map(|i| (i % 1021 + 1) as f32).collect();
    let mut buffer = vec![0.0; order.len];
    let mut all = Answer::default();
    let until = Instant::now() + Duration::from_secs_f64(order.seconds);
    while all.bytes == 0 || Instant::now() < until {
        buffer.copy_from_slice(&vector);
        let before = (getrusage(UsageWho::RUSAGE_SELF)?, comm.statistics());
        let report = comm.all_reduce(&mut buffer)?;
        let after = (getrusage(UsageWho::RUSAGE_SELF)?, comm.statistics());
        ensure!(buffer == vector, "a sum was wrong");
        let part = |of: fn(&Usage) -> f64| of(&after.0) - of(&before.0);
        let packets = |s: netsum_worker::Statistics| s.traffic.map_or(0, |t| t.packets_received);
        all.bytes += 4 * order.len as u64;
        all.seconds += report.elapsed.as_secs_f64();
        all.user += part(|usage| usage.user_time().num_microseconds() as f64 / 1e6);
        all.system += part(|usage| usage.system_time().num_microseconds() as f64 / 1e6);
        all.sleeps += part(|usage| usage.voluntary_context_switches() as f64) as u64;
        all.packets += packets(after.1) - packets(before.1);
        all.fallbacks += u64::from(report.mode != Mode::Box);
        all.retransmissions += report.retransmissions.unwrap_or(0);
    }
    Ok(all)
}
