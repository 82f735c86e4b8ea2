//! All ranks leave after the same operation, to connect anew.

use std::time::Duration;

use super::job::{ALWAYS, Call, NEVER, Sim, Spec};
use super::network::Faults;
use super::vector::Vector;
use crate::error::Error;
use crate::numeric::layout::Layout;
use crate::report::Mode;

const LAYOUT: Layout = Layout { message_size: 1024, window: 2, rings: 2 };
const CALLS: usize = 4;
/// The last one.
const LAST: usize = 1;

fn data(rank: u32, n: usize) -> Vector {
    if n.is_multiple_of(2) {
        Vector::ints(rank, 3000, n as u64)
    } else {
        Vector::floats(rank, 3000, n as u64)
    }
}

/// Runs it; `late` tells when a rank may begin an operation.
fn run(spec: &Spec, late: impl Fn(u32, usize) -> Duration) -> Sim {
    let spec = Spec { renew: Some(LAST), ..spec.clone() };
    let mut sim = Sim::new(&spec, |rank| {
        (0..CALLS).map(|n| Call { data: data(rank, n), not_before: late(rank, n) }).collect()
    });
    sim.run();
    sim
}

/// That a rank has the right sums of all operations that there were, and has left.
fn assert_parted(sim: &Sim, ranks: u32, rank: usize) {
    let host = &sim.hosts[rank];
    assert_eq!(host.results.len(), LAST + 1, "rank {rank}");
    assert!(host.parted.is_some(), "rank {rank}");
    for (n, (outcome, sum, _)) in host.results.iter().enumerate() {
        assert!(outcome.is_ok(), "rank {rank}: {outcome:?}");
        let all: Vec<Vector> = (0..ranks).map(|r| data(r, n)).collect();
        assert_eq!(sum.bits(), Vector::sum(&LAYOUT, &all), "rank {rank}, operation {n}");
    }
}

#[test]
fn all_leave_after_the_same_operation_whatever_is_lost() {
    for seed in 0..60 {
        let ranks = [2, 3, 4, 8][seed as usize % 4];
        let present = [ALWAYS, NEVER, Duration::ZERO..Duration::from_micros(50 + 137 * seed)];
        let present = present[seed as usize % 3].clone();
        let faults = Faults::loss([0, 10_000, 50_000][seed as usize / 3 % 3]);
        let sim = run(&Spec { present, faults, ..Spec::new(ranks, LAYOUT, seed) }, |_, _| Duration::ZERO);
        (0..ranks as usize).for_each(|rank| assert_parted(&sim, ranks, rank));
        let by_ring = sim.hosts.iter().any(|h| h.engine.mode() == Mode::Ring);
        assert!(by_ring || sim.aggregator.held().is_empty(), "seed {seed}: slots are held");
    }
}

#[test]
fn without_loss_nobody_is_waited_for_longer_than_it_takes() {
    let pause = Duration::from_millis(3);
    for ranks in [2, 3, 8] {
        let whole = run(&Spec::new(ranks, LAYOUT, 1), |_, _| Duration::ZERO).elapsed();
        // One or the other has no CPU for a while, at some time.
        for (rank, part) in (0..ranks as usize).flat_map(|rank| (0..20).map(move |part| (rank, part))) {
            let from = whole * part / 20;
            let pauses = vec![(rank, from..from + pause)];
            let sim = run(&Spec { pauses, ..Spec::new(ranks, LAYOUT, 1) }, |_, _| Duration::ZERO);
            let done = sim.hosts.iter().map(|h| h.results[LAST].2).max().unwrap();
            for host in &sim.hosts {
                let parted = host.parted.unwrap().saturating_sub(done);
                assert!(parted < pause * 2, "rank {rank} of {ranks} pauses at {from:?}: {parted:?}");
                assert_eq!(host.engine.mode(), Mode::Box);
            }
        }
    }
}

#[test]
fn a_rank_may_be_far_ahead_or_behind() {
    for late in 0..4 {
        for (n, time) in [(LAST, 300), (LAST, 5000), (LAST + 1, 300), (0, 5000)] {
            let not_before =
                |rank, call| Duration::from_millis(if rank == late && call == n { time } else { 0 });
            let spec = Spec { timeout: Duration::from_secs(1), ..Spec::new(4, LAYOUT, 7) };
            let sim = run(&spec, not_before);
            (0..4).for_each(|rank| assert_parted(&sim, 4, rank));
        }
    }
}

#[test]
fn a_death_in_the_middle_is_named_by_all_who_have_not_left() {
    let (mut named, mut parted) = (0, 0);
    for seed in 0..200u64 {
        let ranks = [2, 3, 4][seed as usize % 3];
        let dead = seed as usize / 3 % ranks as usize;
        let at = Duration::from_micros(40 + 9 * seed);
        let timeout = Duration::from_secs(1);
        let faults = Faults::loss(10_000 * (seed as u32 % 2));
        let spec = Spec { faults, timeout, death: Some((dead, at)), ..Spec::new(ranks, LAYOUT, seed) };
        let sim = run(&spec, |_, _| Duration::ZERO);
        for (rank, host) in sim.hosts.iter().enumerate().filter(|(rank, _)| *rank != dead) {
            if host.parted.is_some() {
                assert_parted(&sim, ranks, rank);
                parted += 1;
                continue;
            }
            let (outcome, _, when) = host.results.last().unwrap();
            let Err(Error::RankDied { rank: name, .. }) = outcome else {
                panic!("seed {seed} rank {rank}: {outcome:?}")
            };
            assert_eq!(*name as usize, dead, "seed {seed} rank {rank}");
            assert!(*when < at + timeout * 2, "seed {seed} rank {rank}: after {when:?}");
            named += 1;
        }
    }
    assert!(named > 100 && parted > 20, "{named} {parted}");
}
