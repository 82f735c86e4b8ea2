//! The cost of loss: sums by the box, with both models of a host, compared with the ring of bypass
//! connections over the same RC endpoint.

use std::fmt::Write;
use std::time::Duration;

use super::aggregator::BoxPacket;
use super::job::{Call, NEVER, Sim, Spec};
use super::network::{Class, Direction, Faults, Victim, percent};
use super::vector::Vector;
use crate::numeric::layout::{CHECK_BYTES, Layout};
use crate::report::Mode;

/// All-reduces of a job. Each cell sends about as many packets: four all-reduces with 32 ranks, 64
/// with 2 ranks.
const RANKS_TIMES_OPERATIONS: u32 = 128;
/// Elements of each: two messages, which the window allows at once, and two that wait for their
/// sums.
const LENGTH: usize = 4 * ELEMENTS;
const ELEMENTS: usize = (MESSAGE as usize - CHECK_BYTES) / 4;
const MESSAGE: u32 = 32 << 10;

struct Cell {
    lost: u64,
    again: u64,
    worst: u64,
    timeouts: u64,
    /// Of one all-reduce, on average.
    time: Duration,
}

fn spec(ranks: u32, selective: bool, faults: Faults, seed: u64) -> Spec {
    let layout = Layout { message_size: MESSAGE, window: 2, rings: 1 };
    let mut spec = Spec { mtu: 1024, selective, faults, ..Spec::new(ranks, layout, seed) };
    // No rank gives up.
    (spec.timeout, spec.limit) = (Duration::from_secs(10_000), Duration::from_secs(10_000));
    spec
}

fn cell(ranks: u32, loss: u32, selective: bool, by_ring: bool) -> Cell {
    let mut spec = spec(ranks, selective, Faults::loss(loss), 1);
    if by_ring {
        spec.present = NEVER;
    }
    run(&spec, if by_ring { Mode::HostRing } else { Mode::Box }, |_| ())
}

fn run(spec: &Spec, mode: Mode, prepare: impl FnOnce(&mut Sim)) -> Cell {
    let operations = (RANKS_TIMES_OPERATIONS / spec.ranks) as usize;
    let mut sim = Sim::new(spec, |rank| {
        let calls = (0..operations).map(|n| Call {
            data: Vector::ints(rank, LENGTH, n as u64),
            not_before: Duration::ZERO,
        });
        calls.collect()
    });
    prepare(&mut sim);
    sim.run();
    for host in &sim.hosts {
        assert!(host.results.iter().all(|r| r.0.as_ref().is_ok_and(|f| f.mode == mode)));
    }
    let stats: Vec<_> = sim.hosts.iter().map(|h| h.stack.endpoint.stats()).collect();
    Cell {
        lost: sim.network.damage.lost_data,
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
        "{RANKS_TIMES_OPERATIONS} / ranks all-reduces of {} KiB; path MTU 1024, messages of {} \
         KiB, \
         window 2; links of 8 Gb/s and 10 us,\n\
         loss on each link in each direction. The box's jobs send {packets} data packets in all; \
         the ring's 2 (N-1)/N times as\n\
         many. again: packets sent again, by all ranks and by the worst; t/o: timeouts; ms: for \
         one \
         all-reduce.\n",
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
fn cost_of_loss() {
    insta::assert_snapshot!(table());
}

/// What selective hosts behind a box send again, and how long an all-reduce takes.
#[test]
fn little_more_is_sent_again_than_is_lost() {
    for (loss, ranks, most, longest) in
        [(1_000, 4, 1.1, 0.3), (10_000, 4, 1.2, 1.0), (50_000, 4, 1.5, 4.0), (10_000, 8, 1.4, 1.5)]
    {
        let cells = (1..=8)
            .map(|seed| run(&spec(ranks, true, Faults::loss(loss), seed), Mode::Box, |_| ()));
        let (again, lost, ms) = cells.fold((0, 0, 0.0), |(again, lost, ms), c| {
            (again + c.again, lost + c.lost, ms + c.time.as_secs_f64() * 1e3 / 8.0)
        });
        let ratio = again as f64 / lost as f64;
        println!("{} {ranks} ranks: {again} for {lost}, {ratio:.2}; {ms:.3} ms", percent(loss));
        assert!(
            ratio < most && ms < longest,
            "{} {ranks} ranks: {ratio:.2}, {ms:.3} ms",
            percent(loss)
        );
    }
}

/// Boxes below each box, level by level, each with about as many members.
fn levels(ranks: u32) -> [&'static [usize]; 3] {
    match ranks {
        4 => [&[], &[2], &[2, 2]],
        16 => [&[], &[4], &[2, 2]],
        _ => [&[], &[8], &[4, 4]],
    }
}

fn table_of_levels() -> String {
    const SEEDS: u64 = 2;
    let mut out = String::from(
        "The same jobs below one box, below leaves and a spine, and below leaves, boxes between, \
         and \
         a spine. Each link loses as much, also\n\
         those between boxes, which take no time. Means of 2 seeds. again: packets sent again, in \
         percent of those needed; ms: for one\n\
         all-reduce.\n\n",
    );
    let _ =
        writeln!(out, "{:>13} | {:^37} | {:^37}", "", "go-back-N, in order", "selective, relaxed");
    let columns =
        [1, 2, 3].map(|n| format!("{:>12}", format!("{n} level{}", if n > 1 { "s" } else { "" })));
    let _ = writeln!(
        out,
        "{:>7} {:>5}{}",
        "loss",
        "ranks",
        format!(" | {}", columns.join(" ")).repeat(2)
    );
    let _ = writeln!(
        out,
        "{:>13}{}",
        "",
        format!(" |{}", format!(" {:>5} {:>6}", "again", "ms").repeat(3)).repeat(2)
    );
    for loss in [0, 100, 1_000, 10_000] {
        for ranks in [4, 16, 64] {
            let _ = write!(out, "{:>7} {ranks:>5}", percent(loss));
            for selective in [false, true] {
                let _ = write!(out, " |");
                for branches in levels(ranks) {
                    let seeds = if loss == 0 { 1 } else { SEEDS };
                    let cells = (1..=seeds).map(|seed| {
                        let mut spec = spec(ranks, selective, Faults::loss(loss), seed);
                        (spec.branches, spec.uplink_loss) = (branches.to_vec(), loss);
                        run(&spec, Mode::Box, |_| ())
                    });
                    let (again, time) = cells.fold((0, 0.0), |(again, time), c| {
                        (again + c.again, time + c.time.as_secs_f64())
                    });
                    let needed = seeds * u64::from(RANKS_TIMES_OPERATIONS * 4 * MESSAGE / 1024);
                    let (again, ms) =
                        (100.0 * again as f64 / needed as f64, time * 1e3 / seeds as f64);
                    let _ = write!(out, " {again:>5.1} {ms:>6.3}");
                }
            }
            out.push('\n');
        }
    }
    out
}

#[test]
fn cost_of_loss_in_levels() {
    insta::assert_snapshot!(table_of_levels());
}

/// One packet is lost, from the middle of the first message, and perhaps each rank's first NAK.
fn table_of_single_losses() -> String {
    const RANKS: u32 = 16;
    const NTH: u32 = 40;
    let mut out = String::from(
        "16 ranks as above, and one lost packet. again: packets that all ranks together send \
         again; \
         us: time that it adds to all\n\
         all-reduces. A lost NAK is the first one of each rank.\n\n",
    );
    let _ =
        writeln!(out, "{:>30} | {:^32} | {:^32}", "", "go-back-N, in order", "selective, relaxed");
    let columns =
        [1, 2, 3].map(|n| format!("{:>10}", format!("{n} level{}", if n > 1 { "s" } else { "" })));
    let _ = writeln!(out, "{:>30}{}", "lost", format!(" | {}", columns.join(" ")).repeat(2));
    let _ = writeln!(
        out,
        "{:>30}{}",
        "",
        format!(" |{}", format!(" {:>5} {:>4}", "again", "us").repeat(3)).repeat(2)
    );
    let host = |class, direction| Victim { rank: 5, class, direction, nth: NTH };
    for (name, victim, between) in [
        ("a contribution", Some(host(Class::Data, Direction::Up)), None),
        ("a partial sum", None, Some(BoxPacket::Partial)),
        ("a total", None, Some(BoxPacket::Total)),
        ("a sum on its way to a rank", Some(host(Class::Result, Direction::Down)), None),
    ] {
        for nak in [false, true] {
            let _ = write!(out, "{:>30}", if nak { "the same, and the NAK" } else { name });
            for selective in [false, true] {
                let _ = write!(out, " |");
                for branches in levels(RANKS) {
                    if between.is_some() && branches.is_empty() {
                        let _ = write!(out, "{:>11}", "");
                        continue;
                    }
                    let cell = |faults: Faults, between: Option<BoxPacket>| {
                        let mut spec = spec(RANKS, selective, faults, 1);
                        spec.branches = branches.to_vec();
                        run(&spec, Mode::Box, |sim| {
                            if let Some(what) = between {
                                sim.aggregator.lose(what, NTH);
                            }
                        })
                    };
                    let naks = (0..RANKS as usize).filter(|_| nak).map(|rank| Victim {
                        rank,
                        class: Class::Nak,
                        direction: Direction::Up,
                        nth: 0,
                    });
                    let victims = victim.into_iter().chain(naks).collect();
                    let (c, none) = (
                        cell(Faults { victims, ..Faults::default() }, between),
                        cell(Faults::default(), None),
                    );
                    assert_eq!(none.again, 0);
                    let more = (c.time - none.time) * (RANKS_TIMES_OPERATIONS / RANKS);
                    let _ = write!(out, " {:>5} {:>4.0}", c.again, more.as_secs_f64() * 1e6);
                }
            }
            out.push('\n');
        }
    }
    out
}

#[test]
fn cost_of_one_lost_packet_in_levels() {
    insta::assert_snapshot!(table_of_single_losses());
}
