//! Several operations in flight: the same sums in less time, and every operation ends.

use std::time::Duration;

use super::job::{ALWAYS, Call, NEVER, Sim, Spec};
use super::network::Faults;
use super::vector::Vector;
use crate::error::Error;
use crate::numeric::layout::Layout;
use crate::report::Mode;

const LAYOUT: Layout = Layout { message_size: 1024, window: 4, rings: 2 };
const CALLS: usize = 24;

/// Mixed types and lengths: some are one message of one ring, some longer than the window.
fn data(rank: u32, n: usize) -> Vector {
    let length = [1, 700, 3000, 0, 40, 9000][n % 6];
    if n % 4 < 2 {
        Vector::ints(rank, length, n as u64)
    } else {
        Vector::floats(rank, length, n as u64)
    }
}

fn run(spec: &Spec) -> Sim {
    let mut sim = Sim::new(spec, |rank| {
        (0..CALLS).map(|n| Call { data: data(rank, n), not_before: Duration::ZERO }).collect()
    });
    sim.run();
    sim
}

fn assert_right(sim: &Sim, spec: &Spec, rank: usize) {
    for (n, (outcome, sum, _)) in sim.hosts[rank].results.iter().enumerate() {
        assert!(outcome.is_ok(), "seed {} rank {rank} operation {n}: {outcome:?}", spec.seed);
        let all: Vec<Vector> = (0..spec.ranks).map(|r| data(r, n)).collect();
        let expected = Vector::sum(&spec.layout, &all);
        assert!(
            sum.bits() == expected,
            "seed {} rank {rank} operation {n}: a wrong sum",
            spec.seed
        );
    }
}

#[test]
fn sums_are_right_despite_losses_and_if_the_box_disappears() {
    let mut fell_back = 0;
    for seed in 0..60 {
        let ranks = [2, 3, 4, 8][seed as usize % 4];
        let present = [ALWAYS, NEVER, Duration::ZERO..Duration::from_micros(50 + 97 * seed)];
        let spec = Spec {
            present: present[seed as usize % 3].clone(),
            faults: Faults::loss([0, 10_000, 30_000][seed as usize / 3 % 3]),
            depth: [2, 4, 16, 64][seed as usize / 4 % 4],
            ..Spec::new(ranks, LAYOUT, seed)
        };
        let sim = run(&spec);
        for rank in 0..ranks as usize {
            assert_eq!(sim.hosts[rank].results.len(), CALLS);
            assert_right(&sim, &spec, rank);
        }
        let by_ring = sim.hosts[0].engine.mode() == Mode::HostRing;
        assert!(by_ring || seed % 3 != 1, "seed {seed}");
        fell_back += u32::from(by_ring && seed % 3 == 2);
    }
    assert!(fell_back > 10, "only {fell_back} of 20 boxes vanished in time");
}

#[test]
fn small_ones_take_a_fraction_of_the_time_without_retransmissions() {
    let time = |depth| {
        let spec = Spec { depth, blocking: usize::MAX, ..Spec::new(4, LAYOUT, 1) };
        let mut sim = Sim::new(&spec, |rank| {
            let call = |n| Call { data: Vector::ints(rank, 40, n), not_before: Duration::ZERO };
            (0..64).map(call).collect()
        });
        sim.run();
        assert!(sim.hosts.iter().all(|h| h.stack.endpoint.stats().retransmissions == 0));
        sim.elapsed()
    };
    let (one, four, many) = (time(1), time(4), time(64));
    // The window is four messages.
    assert!(four < one / 2 && many < one / 2 && many <= four, "{one:?} {four:?} {many:?}");
}

#[test]
fn few_floats_take_one_way_if_their_exponent_was_predicted() {
    // Three kinds of length: one packet, longer, and too long for limbs.
    let layout = Layout { message_size: 2048, ..LAYOUT };
    let exponents = [0, 1, 0, -40, -39, -38, 90, 90, -126, -149, 127, 3, 2, 1, 0];
    let few = |rank: u32, n: usize, seed: u64| {
        // Every length has each exponent up to three times in a row.
        let (length, step) =
            if seed.is_multiple_of(3) { (1 + n % 57, n) } else { (1 + n % 4 * 50, n / 12) };
        let scale = 2f64.powi(exponents[(step + seed as usize) % exponents.len()]);
        let x = (0..length).map(|i| {
            let x = ((i * 7919 + n * 31 + rank as usize * 104_729) % 10_007) as f64 / 5003.5 - 1.0;
            (x * scale) as f32
        });
        Vector::F(x.collect())
    };
    for seed in 0..40 {
        let ranks = [2, 3, 4, 8][seed as usize % 4];
        let present = [ALWAYS, NEVER, Duration::ZERO..Duration::from_micros(50 + 37 * seed)];
        let spec = Spec {
            present: present[seed as usize / 4 % 3].clone(),
            faults: Faults::loss([0, 20_000][seed as usize % 2]),
            depth: [1, 6][seed as usize / 8 % 2],
            ..Spec::new(ranks, layout, seed)
        };
        // Other operations in between, also in the same ring.
        let data = |rank, n: usize| if n % 5 == 4 { data(rank, n) } else { few(rank, n, seed) };
        let mut sim = Sim::new(&spec, |rank| {
            (0..60).map(|n| Call { data: data(rank, n), not_before: Duration::ZERO }).collect()
        });
        sim.run();
        for (rank, host) in sim.hosts.iter().enumerate() {
            assert_eq!(host.results.len(), 60);
            for (n, (outcome, sum, _)) in host.results.iter().enumerate() {
                assert!(outcome.is_ok(), "seed {seed} rank {rank} operation {n}: {outcome:?}");
                let all: Vec<Vector> = (0..ranks).map(|r| data(r, n)).collect();
                assert!(
                    sum.bits() == Vector::sum(&layout, &all),
                    "seed {seed} rank {rank} operation {n}"
                );
            }
        }
    }
    // One way there and back, unless the exponent has moved to another window: of 16 exponents for a
    // packet, else of 8.
    for (length, step, ways) in [(57, 0, 1), (57, 16, 2), (80, 0, 1), (80, 8, 2)] {
        let mut sim = Sim::new(&Spec::new(3, layout, 1), |rank| {
            let call = |n: i32| Call {
                data: Vector::F(vec![2f32.powi(n % 10 * step - 30) * (rank + 1) as f32; length]),
                not_before: Duration::ZERO,
            };
            (0..20).map(call).collect()
        });
        sim.run();
        let (time, way) = (sim.elapsed(), Duration::from_micros(20 * 20 * ways));
        // The first two of more than few floats take two ways each.
        assert!(time > way && time < way * 4 / 3, "{length} {step}: {time:?}");
    }
}

#[test]
fn infinities_among_few_floats_are_as_in_ieee_754() {
    let mut sim = Sim::new(&Spec { depth: 4, ..Spec::new(3, LAYOUT, 1) }, |rank| {
        let call = |n| {
            let bad = match (n % 4, rank) {
                (1, 2) => f32::NAN,
                (2, 1) | (3, 2) => f32::INFINITY,
                (3, 0) => f32::NEG_INFINITY,
                _ => 1.5,
            };
            Call {
                data: Vector::F(vec![1e3, bad, n as f32, 0.5f32.powi(30)]),
                not_before: Duration::ZERO,
            }
        };
        (0..12).map(call).collect()
    });
    sim.run();
    for host in &sim.hosts {
        for (n, (outcome, sum, _)) in host.results.iter().enumerate() {
            assert_eq!(outcome.as_ref().unwrap().non_finite, None);
            let bad = [4.5, f32::NAN, f32::INFINITY, f32::NAN][n % 4];
            let sums = Vector::F(vec![3e3, bad, 3.0 * n as f32, 3.0 * 0.5f32.powi(30)]);
            assert_eq!(sum.bits(), sums.bits(), "{n}");
        }
    }
}

#[test]
fn a_death_is_told_for_every_operation_that_is_open() {
    for seed in 0..24 {
        let ranks = [2, 3, 4, 8][seed as usize % 4];
        let (dead, at) =
            (seed as usize / 4 % ranks as usize, Duration::from_micros(60 + 20 * seed));
        let timeout = Duration::from_secs(2);
        let present = if seed % 2 == 0 { ALWAYS } else { NEVER };
        let spec = Spec {
            present,
            timeout,
            depth: 8,
            death: Some((dead, at)),
            ..Spec::new(ranks, LAYOUT, seed)
        };
        let sim = run(&spec);
        for (rank, host) in sim.hosts.iter().enumerate().filter(|(rank, _)| *rank != dead) {
            assert_eq!(host.results.len(), CALLS);
            let failed = host.results.iter().position(|r| r.0.is_err());
            let failed = failed.unwrap_or_else(|| panic!("seed {seed} rank {rank}: no error"));
            for (outcome, _, when) in &host.results[failed..] {
                let Err(Error::RankDied { rank: named, .. }) = outcome else {
                    panic!("seed {seed} rank {rank}: {outcome:?}")
                };
                assert_eq!(*named as usize, dead, "seed {seed} rank {rank}");
                assert!(*when < at + timeout * 3 / 2, "seed {seed} rank {rank}: after {when:?}");
            }
        }
    }
}

#[test]
fn all_reconnect_after_the_same_operation_however_far_ahead_some_are() {
    let mut later = 0;
    for seed in 0..60u64 {
        let ranks = [2, 3, 4][seed as usize % 3];
        let spec = Spec {
            faults: Faults::loss([0, 20_000][seed as usize / 3 % 2]),
            depth: 8,
            reconnect: Some(5),
            ..Spec::new(ranks, LAYOUT, seed)
        };
        // Rank 0 lags behind, in half of the cases.
        let late = Duration::from_millis(if seed % 4 < 2 { 3 } else { 0 });
        let mut sim = Sim::new(&spec, |rank| {
            let not_before = |n| if rank == 0 && n == 5 { late } else { Duration::ZERO };
            (0..CALLS).map(|n| Call { data: data(rank, n), not_before: not_before(n) }).collect()
        });
        sim.run();
        let last = sim.hosts[0].results.len();
        assert!((6..=13).contains(&last), "seed {seed}: {last}");
        later += u32::from(last > 6);
        for (rank, host) in sim.hosts.iter().enumerate() {
            assert!(host.parted.is_some() && host.results.len() == last, "seed {seed} rank {rank}");
            assert_right(&sim, &spec, rank);
        }
    }
    assert!(later > 10, "only in {later} cases was a rank ahead");
}

#[test]
fn different_operations_are_an_error_wherever_in_the_queue_they_are() {
    for seed in 0..12u64 {
        let ranks = [2, 3, 4, 8][seed as usize % 4];
        let present = if seed % 3 == 0 { NEVER } else { ALWAYS };
        let spec = Spec { present, depth: 6, ..Spec::new(ranks, LAYOUT, seed) };
        let (odd, at) = (seed as u32 % ranks, seed % 6);
        let mut sim = Sim::new(&spec, |rank| {
            let length = |n| 300 + usize::from(rank == odd && n == at);
            let call =
                |n| Call { data: Vector::ints(rank, length(n), n), not_before: Duration::ZERO };
            (0..12).map(call).collect()
        });
        sim.run();
        for host in &sim.hosts {
            let error = host.results.iter().find_map(|r| r.0.as_ref().err()).unwrap();
            assert!(matches!(error, Error::Mismatch(_)), "seed {seed}: {error}");
        }
    }
}
