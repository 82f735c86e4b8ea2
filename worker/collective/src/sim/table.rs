//! What loss costs: sums by the box, with both models of a host, beside the plain ring over the same RC endpoint.

use std::fmt::Write;
use std::time::Duration;

use super::job::{Call, NEVER, Sim, Spec};
use super::network::{Faults, percent};
use super::vector::Vector;
use crate::numeric::layout::{CHECK_BYTES, Layout};
use crate::report::Mode;

/// All-reduces of a job, so that each cell sends as many packets: with 32 ranks four, with 2 ranks 64.
const RANKS_TIMES_OPERATIONS: u32 = 128;
/// Elements of each: two messages, which the window allows at once, and two that wait for their sums.
const LENGTH: usize = 4 * ELEMENTS;
const ELEMENTS: usize = (MESSAGE as usize - CHECK_BYTES) / 4;
const MESSAGE: u32 = 32 << 10;

struct Cell {
    again: u64,
    worst: u64,
    timeouts: u64,
    /// Of an all-reduce, on average.
    time: Duration,
}

fn cell(ranks: u32, loss: u32, selective: bool, by_ring: bool) -> Cell {
    let layout = Layout { message_size: MESSAGE, window: 2, rings: 1 };
    let mut spec = Spec { mtu: 1024, selective, faults: Faults::loss(loss), ..Spec::new(ranks, layout, 1) };
    // Nobody gives up.
    (spec.timeout, spec.limit) = (Duration::from_secs(10_000), Duration::from_secs(10_000));
    if by_ring {
        spec.present = NEVER;
    }
    let operations = (RANKS_TIMES_OPERATIONS / ranks) as usize;
    let mut sim = Sim::new(&spec, |rank| {
        let calls = (0..operations)
            .map(|n| Call { data: Vector::ints(rank, LENGTH, n as u64), not_before: Duration::ZERO });
        calls.collect()
    });
    sim.run();
    let mode = if by_ring { Mode::Ring } else { Mode::Box };
    for host in &sim.hosts {
        assert!(host.results.iter().all(|r| r.0.as_ref().is_ok_and(|f| f.mode == mode)));
    }
    let stats: Vec<_> = sim.hosts.iter().map(|h| h.stack.endpoint.stats()).collect();
    Cell {
        again: stats.iter().map(|s| s.retransmissions).sum(),
        worst: stats.iter().map(|s| s.retransmissions).max().unwrap_or(0),
        timeouts: stats.iter().map(|s| s.local_ack_timeout).sum(),
        time: sim.elapsed() / operations as u32,
    }
}

fn table() -> String {
    let mut out = String::new();
    let packets = RANKS_TIMES_OPERATIONS * 4 * MESSAGE / 1024;
    let _ = writeln!(
        out,
        "{RANKS_TIMES_OPERATIONS} / ranks all-reduces of {} KiB; path MTU 1024, messages of {} KiB, window 2; links of 8 Gb/s and 10 us,\n\
         loss on each link in each direction. The box's jobs send {packets} data packets in all; the ring's 2 (N-1)/N times as\n\
         many. again: packets sent again, by all ranks and by the worst; t/o: time-outs; ms: for one all-reduce.\n",
        LENGTH * 4 / 1024,
        MESSAGE / 1024,
    );
    let _ = writeln!(
        out,
        "{:>7} {:>5} | {:^29} | {:^29} | {:^29}\n{:>7} {:>5}{}",
        "",
        "",
        "box, go-back-N, in order",
        "ring, selective",
        "box, selective, relaxed",
        "loss",
        "ranks",
        format!(" | {:>7} {:>6} {:>5} {:>8}", "again", "worst", "t/o", "ms").repeat(3)
    );
    for loss in [0, 100, 1_000, 10_000, 50_000, 100_000] {
        for ranks in [2, 4, 8, 32] {
            let _ = write!(out, "{:>7} {ranks:>5}", percent(loss));
            for (selective, by_ring) in [(false, false), (false, true), (true, false)] {
                let c = cell(ranks, loss, selective, by_ring);
                let ms = c.time.as_secs_f64() * 1e3;
                let _ = write!(out, " | {:>7} {:>6} {:>5} {ms:>8.3}", c.again, c.worst, c.timeouts);
            }
            out.push('\n');
        }
    }
    out
}

#[test]
fn what_loss_costs() {
    insta::assert_snapshot!(table());
}
