//! All ranks leave after the same operation, to reconnect, and return to the box this way.

use std::time::Duration;

use super::aggregator::Corruption;
use super::job::{ALWAYS, Call, NEVER, Sim, Spec};
use super::network::Faults;
use super::vector::Vector;
use crate::error::Error;
use crate::numeric::layout::Layout;
use crate::report::Mode;

const LAYOUT: Layout = Layout { message_size: 1024, window: 2, rings: 2 };
const CALLS: usize = 4;
const LAST: usize = 1;

fn data(rank: u32, n: usize) -> Vector {
    if n.is_multiple_of(2) {
        Vector::small_ints(rank, 3000, n as u64)
    } else {
        Vector::floats(rank, 3000, n as u64)
    }
}

/// Runs a job; `late` returns when a rank may start an operation.
fn run(spec: &Spec, late: impl Fn(u32, usize) -> Duration) -> Sim {
    let spec = Spec { reconnect: Some(LAST), ..spec.clone() };
    let mut sim = Sim::new(&spec, |rank| {
        (0..CALLS).map(|n| Call { data: data(rank, n), not_before: late(rank, n) }).collect()
    });
    sim.run();
    sim
}

/// Checks that a rank has the right sums of all operations, and has left.
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
        let sim =
            run(&Spec { present, faults, ..Spec::new(ranks, LAYOUT, seed) }, |_, _| Duration::ZERO);
        (0..ranks as usize).for_each(|rank| assert_parted(&sim, ranks, rank));
        let by_ring = sim.hosts.iter().any(|h| h.engine.mode() == Mode::HostRing);
        assert!(
            by_ring || sim.aggregator.unreleased().is_empty(),
            "seed {seed}: slots are not released"
        );
    }
}

#[test]
fn without_loss_ranks_wait_only_for_the_slowest() {
    let pause = Duration::from_millis(3);
    for ranks in [2, 3, 8] {
        let whole = run(&Spec::new(ranks, LAYOUT, 1), |_, _| Duration::ZERO).elapsed();
        // One rank or another has no CPU for a while.
        for (rank, part) in
            (0..ranks as usize).flat_map(|rank| (0..20).map(move |part| (rank, part)))
        {
            let from = whole * part / 20;
            let pauses = vec![(rank, from..from + pause)];
            let sim = run(&Spec { pauses, ..Spec::new(ranks, LAYOUT, 1) }, |_, _| Duration::ZERO);
            let done = sim.hosts.iter().map(|h| h.results[LAST].2).max().unwrap();
            for host in &sim.hosts {
                let parted = host.parted.unwrap().saturating_sub(done);
                assert!(
                    parted < pause * 2,
                    "rank {rank} of {ranks} pauses at {from:?}: {parted:?}"
                );
                assert_eq!(host.engine.mode(), Mode::Box);
            }
        }
    }
}

#[test]
fn a_rank_may_be_far_ahead_or_behind() {
    for late in 0..4 {
        for (n, time) in [(LAST, 300), (LAST, 5000), (LAST + 1, 300), (0, 5000)] {
            let not_before = |rank, call| {
                Duration::from_millis(if rank == late && call == n { time } else { 0 })
            };
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
        let spec =
            Spec { faults, timeout, death: Some((dead, at)), ..Spec::new(ranks, LAYOUT, seed) };
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

/// Checks that all ranks have the right sums of all calls.
fn assert_right(sim: &Sim, ranks: u32, calls: usize, what: &str) {
    for n in 0..calls {
        let all: Vec<Vector> = (0..ranks).map(|r| data(r, n)).collect();
        let expected = Vector::sum(&LAYOUT, &all);
        for (rank, host) in sim.hosts.iter().enumerate() {
            let (outcome, sum, _) = &host.results[n];
            assert!(outcome.is_ok(), "{what} rank {rank} operation {n}: {outcome:?}");
            assert!(sum.bits() == expected, "{what} rank {rank} operation {n}: a wrong sum");
        }
    }
}

#[test]
fn ranks_that_cannot_join_stay_and_may_try_again() {
    for seed in 0..120u64 {
        let ranks = [2, 3, 4, 8][seed as usize % 4];
        let present = [ALWAYS, NEVER, Duration::ZERO..Duration::from_micros(50 + 137 * seed)];
        let present = present[seed as usize % 3].clone();
        let faults = Faults::loss([0, 10_000, 50_000][seed as usize / 3 % 3]);
        let depth = [1, 3][seed as usize % 2];
        let (refused, reconnect) = (Some(0), [None, Some(1), Some(2)][seed as usize / 5 % 3]);
        let spec =
            Spec { present, faults, depth, refused, reconnect, ..Spec::new(ranks, LAYOUT, seed) };
        let mut sim = Sim::new(&spec, |rank| {
            (0..CALLS).map(|n| Call { data: data(rank, n), not_before: Duration::ZERO }).collect()
        });
        sim.run();
        let what = format!("seed {seed}");
        let done = sim.hosts[0].results.len();
        assert!(reconnect.is_some_and(|last| done > last) || done == CALLS, "{what}: {done}");
        assert!(sim.refused.is_some(), "{what}");
        assert_right(&sim, ranks, done, &what);
        for host in &sim.hosts {
            assert_eq!(host.results.len(), done, "{what}");
            assert!(host.parted.is_some() || done == CALLS, "{what}");
        }
    }
}

/// Calls of all ranks, one in every `period`.
fn every(period: Duration, calls: usize, spec: &Spec, prepare: impl FnOnce(&mut Sim)) -> Sim {
    let spec = Spec { returns: true, limit: Duration::from_secs(4000), ..spec.clone() };
    let mut sim = Sim::new(&spec, |rank| {
        (0..calls).map(|n| Call { data: data(rank, n), not_before: period * n as u32 }).collect()
    });
    prepare(&mut sim);
    sim.run();
    assert_right(&sim, spec.ranks, calls, &format!("seed {}", spec.seed));
    sim
}

/// For each call, whether the box or the ring summed it, and when it was done.
fn modes(sim: &Sim) -> Vec<(Mode, Duration)> {
    sim.hosts[0]
        .results
        .iter()
        .map(|(outcome, _, at)| (outcome.as_ref().unwrap().mode, *at))
        .collect()
}

#[test]
fn ranks_return_to_the_box_as_soon_as_it_sums_again() {
    let period = Duration::from_millis(20);
    for seed in 0..48u64 {
        let ranks = [2, 3, 4, 8][seed as usize % 4];
        // The box disappears in the middle of an operation, for less or for more than the first
        // wait.
        let gone = Duration::from_millis(200) + Duration::from_micros(13 * seed);
        let back = gone + Duration::from_millis([300, 3000][seed as usize / 4 % 2]);
        let faults = Faults::loss([0, 10_000][seed as usize / 8 % 2]);
        let depth = [1, 3][seed as usize / 16 % 2];
        let is_sealed = seed >= 32;
        let spec =
            Spec { absent: gone..back, faults, depth, is_sealed, ..Spec::new(ranks, LAYOUT, seed) };
        let sim = every(period, 250, &spec, |_| ());
        let [connected] = sim.connected[..] else {
            panic!("seed {seed}: connected at {:?}", sim.connected)
        };
        let due = back.max(gone + Duration::from_secs(1));
        assert!(
            connected > back && connected < due + Duration::from_millis(500),
            "seed {seed}: {connected:?}, {due:?}"
        );
        let after: Vec<Mode> = modes(&sim)
            .into_iter()
            .filter(|(_, at)| *at > connected)
            .map(|(mode, _)| mode)
            .collect();
        assert!(
            after.len() > 20 && after.iter().all(|mode| *mode == Mode::Box),
            "seed {seed}: {after:?}"
        );
    }
}

#[test]
fn a_box_that_does_not_sum_is_tried_less_and_less_often() {
    let timeout = Duration::from_secs(1);
    let spec = Spec { timeout, ..Spec::new(3, LAYOUT, 1) };
    let sim = every(Duration::from_millis(500), 2400, &spec, |sim| {
        sim.aggregator.drop_all();
        sim.drops_all = true;
    });
    let seconds: Vec<u64> = sim.connected.iter().map(Duration::as_secs).collect();
    println!("tried after {seconds:?} s");
    // In twenty minutes.
    assert_eq!(seconds.len(), 6, "{seconds:?}");
    assert!(sim.connected.windows(3).all(|w| w[2] - w[1] > (w[1] - w[0]) * 2), "{seconds:?}");
    // The last call is late by at most the cost of the tries.
    let late = modes(&sim)[2399].1 - Duration::from_millis(500) * 2399;
    assert!(late < timeout, "{late:?}");
}

#[test]
fn ranks_stay_away_from_a_box_that_has_summed_wrong() {
    for seed in 0..12 {
        let spec = Spec::new([2, 3, 4][seed as usize % 3], LAYOUT, seed);
        let sim = every(Duration::from_millis(500), 100, &spec, |sim| {
            sim.aggregator.corrupt(40, Corruption::Flip)
        });
        assert_eq!(sim.connected, [], "seed {seed}");
        assert_eq!(modes(&sim)[99].0, Mode::HostRing, "seed {seed}");
    }
}
