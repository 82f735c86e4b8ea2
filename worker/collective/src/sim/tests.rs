//! Conditions that hold whatever the network does.

use std::ops::Range;
use std::time::Duration;

use super::aggregator::Corruption;
use super::job::{ALWAYS, Call, NEVER, Sim, Spec};
use super::network::{Class, Direction, Faults, Rates, Victim};
use super::rng::{Random, Rng};
use super::vector::Vector;
use super::{describe, simulate};
use crate::call::{self, Collective, Op};
use crate::error::Error;
use crate::frame::Descriptor;
use crate::numeric::block::Width;
use crate::numeric::element::Dtype;
use crate::numeric::layout::Layout;
use crate::queue_pairs::MIN_ACK_TIMEOUT;
use crate::report::Mode;

fn ints(rank: u32, length: usize, salt: u64) -> Vector {
    Vector::ints(rank, length, salt)
}

fn floats(rank: u32, length: usize, salt: u64) -> Vector {
    Vector::floats(rank, length, salt)
}

/// The calls of one rank: both types in all lengths, a pause before some.
fn calls(rank: u32, lengths: &[usize], seed: u64) -> Vec<Call> {
    let mut rng = Rng::with_seed(seed ^ u64::from(rank) << 32);
    let mut calls = Vec::new();
    for (n, &length) in lengths.iter().enumerate() {
        let salt = seed * 1000 + n as u64;
        for data in [ints(rank, length, salt), floats(rank, length, salt)] {
            let not_before =
                Duration::from_millis(if rng.chance(100_000) { rng.u64(..300) } else { 0 });
            calls.push(Call { data, not_before });
        }
    }
    calls
}

/// Runs a simulation, and compares every sum with that of one process. Returns the ranks' results.
fn check(spec: &Spec, lengths: &[usize]) -> Sim {
    check_with(spec, lengths, |_| ())
}

fn check_with(spec: &Spec, lengths: &[usize], prepare: impl FnOnce(&mut Sim)) -> Sim {
    let mut sim = Sim::new(spec, |rank| calls(rank, lengths, spec.seed));
    prepare(&mut sim);
    sim.run();
    let all: Vec<Vec<Call>> = (0..spec.ranks).map(|r| calls(r, lengths, spec.seed)).collect();
    for (rank, host) in sim.hosts.iter().enumerate() {
        assert_eq!(host.results.len(), lengths.len() * 2);
        for (n, (outcome, data, _)) in host.results.iter().enumerate() {
            let contributions: Vec<Vector> = all.iter().map(|c| c[n].data.clone()).collect();
            assert!(outcome.is_ok(), "seed {} rank {rank} operation {n}: {outcome:?}", spec.seed);
            assert!(
                data.bits() == Vector::sum(&spec.layout, &contributions),
                "seed {} rank {rank} operation {n}: a wrong sum",
                spec.seed
            );
        }
    }
    sim
}

/// The same faults for all packets, in thousandths.
fn even(loss: u32, duplicate: u32, reorder: u32) -> Faults {
    let [loss, duplicate, reorder] = [loss, duplicate, reorder].map(|x| x * 1000);
    Faults::even(Rates { loss, duplicate, reorder, ..Rates::default() })
}

/// A length of at most some hundred messages.
fn many(layout: &Layout) -> usize {
    4000.min(layout.elements(Dtype::F32, Width::Full).unwrap() * 100)
}

fn layouts() -> impl Iterator<Item = Layout> {
    [(1024, 1, 1), (2048, 2, 1), (600, 3, 2), (4096, 4, 3), (336, 4, 1)]
        .into_iter()
        .map(|(message_size, window, rings)| Layout { message_size, window, rings })
}

#[test]
fn ranks_that_know_of_no_box_do_not_wait_for_one() {
    for seed in 0..20 {
        let layout = Layout { message_size: 1024, window: 4, rings: 2 };
        let lossy = even(20, 5, 5);
        let spec = Spec {
            on_host_ring: true,
            present: NEVER,
            faults: lossy,
            ..Spec::new(4, layout, seed)
        };
        let sim = check(&spec, &[0, 1, 300, 5000]);
        for host in &sim.hosts {
            let statistics = host.engine.statistics();
            assert_eq!((statistics.fallbacks, statistics.box_bytes), (0, 0), "seed {seed}");
            assert!(statistics.ring_bytes > 0 && host.engine.mode() == Mode::HostRing);
        }
    }
}

#[test]
fn steps_of_the_hosts_ring_share_acknowledgements() {
    // Each step is a packet.
    let layout = Layout { message_size: 16 * 128, window: 16, rings: 2 };
    let spec = Spec { on_host_ring: true, ..Spec::new(16, layout, 1) };
    let sim = check(&spec, &[layout.elements(Dtype::F32, Width::Full).unwrap() * 64]);
    let [steps, acks] = [Class::Data, Class::Ack].map(|class| sim.network.sent(class));
    assert!(acks * 7 < steps, "{acks} acknowledgements of {steps} steps");
    assert!(sim.hosts.iter().all(|h| h.stack.endpoint.stats().retransmissions == 0));
}

#[test]
fn the_box_sums_without_loss() {
    for ranks in [2, 3, 4, 8] {
        for layout in layouts() {
            let sim = check(&Spec::new(ranks, layout, u64::from(ranks)), &[0, 1, 3, 1000]);
            for host in &sim.hosts {
                assert!(
                    host.results.iter().all(|r| r.0.as_ref().is_ok_and(|f| f.mode == Mode::Box))
                );
                assert_eq!(host.engine.statistics().wrong, 0);
            }
        }
    }
}

#[test]
fn long_slices_are_summed() {
    let layout = Layout { message_size: 8192, window: 2, rings: 2 };
    check(&Spec::new(3, layout, 1), &[100_000]);
}

#[test]
fn nothing_is_sent_again_without_loss() {
    let layout = Layout { message_size: 2048, window: 2, rings: 1 };
    let spec = Spec::new(4, layout, 5);
    let calls = |rank| {
        (0..5).map(|n| Call { data: ints(rank, 5000, n), not_before: Duration::ZERO }).collect()
    };
    let mut sim = Sim::new(&spec, calls);
    sim.run();
    for host in &sim.hosts {
        assert_eq!(host.stack.endpoint.stats().retransmissions, 0);
    }
}

#[test]
fn loss_doubling_and_reordering_change_nothing() {
    for seed in 0..40 {
        let layout = layouts().nth(seed as usize % 5).unwrap();
        let faults = even(
            [0, 5, 10, 30][seed as usize % 4],
            [0, 10][seed as usize / 4 % 2],
            [0, 10, 50][seed as usize % 3],
        );
        let spec = Spec { faults, ..Spec::new([2, 3, 4, 8][seed as usize / 10], layout, seed) };
        let sim = check(&spec, &[1, 3, many(&layout)]);
        for host in &sim.hosts {
            assert!(
                host.results.iter().all(|r| r.0.as_ref().is_ok_and(|f| f.mode == Mode::Box)),
                "seed {seed}: fell back: {:?}",
                host.engine.statistics()
            );
        }
    }
}

#[test]
fn without_a_box_the_ranks_sum() {
    for seed in 0..20 {
        let layout = layouts().nth(seed as usize % 5).unwrap();
        let faults = even(seed as u32 % 3 * 10, 5, 10);
        let present = NEVER;
        let spec =
            Spec { faults, present, ..Spec::new([2, 3, 4, 8][seed as usize % 4], layout, seed) };
        let sim = check(&spec, &[0, 1, 3, many(&layout) / 2]);
        for host in &sim.hosts {
            assert_eq!(host.engine.mode(), Mode::HostRing);
            assert_eq!(host.engine.statistics().fallbacks, 1);
        }
    }
}

#[test]
fn a_box_that_vanishes_in_the_middle_is_replaced() {
    let mut fell_back = 0;
    for seed in 0..60 {
        let layout = layouts().nth(seed as usize % 5).unwrap();
        let faults = even(seed as u32 % 3 * 10, 5, 10);
        let present = Duration::ZERO..Duration::from_micros(50 + 137 * seed);
        let spec =
            Spec { faults, present, ..Spec::new([2, 3, 4, 8][seed as usize % 4], layout, seed) };
        let sim = check(&spec, &[3, many(&layout), 1]);
        fell_back += sim.hosts[0].engine.statistics().fallbacks;
    }
    assert!(fell_back > 40, "only {fell_back} of 60 boxes vanished in time");
}

/// A rank may have verified messages that others still need when all fall back.
#[test]
fn each_collective_is_completed_without_a_box_that_vanishes() {
    let mut fell_back = 0;
    for seed in 0..80u64 {
        let layout = layouts().nth(seed as usize % 5).unwrap();
        let ranks = [2, 3, 4, 8][seed as usize % 4];
        let (n, root) = (ranks as usize, seed as u32 % ranks);
        let part = n * 40;
        let (length, bytes) = (n * part, part as u64 * 4);
        let collective = [
            Collective::ReduceScatter(Op::Sum),
            Collective::Reduce { op: Op::Sum, root },
            Collective::AllGather { block: bytes },
            Collective::AllToAll { block: bytes / u64::from(ranks) },
            Collective::Broadcast { root, block: bytes * u64::from(ranks) },
        ][seed as usize / 4 % 5];
        let gives = |rank: u32, i: usize| match collective {
            Collective::AllGather { .. } | Collective::AllToAll { .. } => i / part == rank as usize,
            Collective::Broadcast { root, .. } => rank == root,
            _ => true,
        };
        let gets = |rank: u32, i: usize| match collective {
            Collective::ReduceScatter(_) => i / part == rank as usize,
            Collective::Reduce { root, .. } => rank == root,
            Collective::AllToAll { .. } => i / (part / n) % n == rank as usize,
            _ => true,
        };
        let data = |rank, salt| match ints(rank, length, seed * 10 + salt) {
            _ if salt == 1 && gives(0, 0) && gives(1, 0) => floats(rank, length, seed),
            Vector::I(x) => Vector::I(
                x.into_iter()
                    .enumerate()
                    .map(|(i, x)| if gives(rank, i) { x } else { 0 })
                    .collect(),
            ),
            other => other,
        };
        let present = Duration::ZERO..Duration::from_micros(50 + 37 * seed);
        let faults = even(seed as u32 % 3 * 10, 5, 10);
        let called = vec![call::Call::from(collective); n];
        let spec = Spec { faults, present, called, ..Spec::new(ranks, layout, seed) };
        let calls = |rank| {
            (0..3).map(|salt| Call { data: data(rank, salt), not_before: Duration::ZERO }).collect()
        };
        let mut sim = Sim::new(&spec, calls);
        sim.run();
        for (rank, host) in (0..).zip(&sim.hosts) {
            fell_back += host.engine.statistics().fallbacks;
            for (salt, (outcome, got, _)) in (0..).zip(&host.results) {
                assert!(outcome.is_ok(), "seed {seed} rank {rank}: {outcome:?}");
                let all: Vec<_> = (0..ranks).map(|rank| data(rank, salt)).collect();
                let sums = Vector::sum(&layout, &all);
                let got = got.bits();
                let wrong = (0..length).find(|i| gets(rank, *i) && got[*i] != sums[*i]);
                assert_eq!(wrong, None, "seed {seed} rank {rank}: {collective:?}");
            }
        }
    }
    assert!(fell_back > 150, "only {fell_back} ranks fell back");
}

#[test]
fn a_box_that_appears_in_the_middle_disturbs_nobody() {
    for seed in 0..20 {
        let layout = layouts().nth(seed as usize % 5).unwrap();
        let present = Duration::from_micros(20 + 97 * seed)..Duration::MAX;
        let spec = Spec { present, ..Spec::new([2, 3, 4, 8][seed as usize % 4], layout, seed) };
        check(&spec, &[3, many(&layout), 1]);
    }
}

#[test]
fn a_box_that_drops_everything_is_given_up() {
    // The box appears when the PSNs are beyond its credit: it drops all data. Only keep-alives
    // pass.
    let layout = Layout { message_size: 1024, window: 2, rings: 1 };
    let mut spec = Spec::new(3, layout, 3);
    spec.timeout = Duration::from_secs(2);
    let mut sim = Sim::new(&spec, |rank| calls(rank, &[3000], 3));
    sim.aggregator.drop_all();
    sim.run();
    for host in &sim.hosts {
        assert!(host.results.iter().all(|r| r.0.is_ok()), "{:?}", host.results[0].0);
        assert_eq!(host.engine.mode(), Mode::HostRing);
        assert!(host.results[0].2 < Duration::from_secs(2));
    }
}

#[test]
fn a_box_that_corrupts_a_sum_is_detected_and_given_up() {
    let spec = |layout, seed: u64| Spec::new([2, 3, 4, 8][seed as usize % 4], layout, seed);
    for seed in 0..24u64 {
        let layout = Layout { message_size: 1024, window: 2, rings: 2 };
        let how = [Corruption::Flip, Corruption::Exchange, Corruption::Double][seed as usize % 3];
        let lengths = [3, 4000, 1];
        let sim = check_with(&spec(layout, seed), &lengths, |sim| {
            sim.aggregator.corrupt(5 * seed as u32, how)
        });
        let statistics = sim.hosts.iter().map(|h| h.engine.statistics());
        assert!(statistics.map(|s| s.wrong).sum::<u64>() > 0, "seed {seed} {how:?}");
        assert!(sim.hosts.iter().all(|h| h.engine.mode() == Mode::HostRing));
    }
}

/// Single packets, so that the box can forge a message.
fn forged(seed: u64, is_sealed: bool, how: Corruption) -> (Vec<Vec<Call>>, Sim) {
    let layout = Layout { message_size: 900, window: 2, rings: 2 };
    let ranks = [2, 3, 4, 8][seed as usize % 4];
    let spec = Spec { mtu: 1024, is_sealed, ..Spec::new(ranks, layout, seed) };
    let calls = |rank: u32| -> Vec<Call> {
        let call = |n: u64| {
            let salt = seed * 100 + n;
            let data = match n % 3 {
                0 => floats(rank, 5, salt),
                1 => floats(rank, 2000, salt).halves(),
                _ => Vector::small_ints(rank, 2000, salt),
            };
            Call { data, not_before: Duration::ZERO }
        };
        (0..6).map(call).collect()
    };
    let mut sim = Sim::new(&spec, calls);
    sim.aggregator.corrupt(seed as u32 % 30, how);
    sim.run();
    ((0..ranks).map(calls).collect(), sim)
}

fn wrong_sums((calls, sim): &(Vec<Vec<Call>>, Sim), layout: &Layout) -> usize {
    let wrong = |host: &super::job::Host| {
        let results = host.results.iter().enumerate();
        let is_wrong = |n: usize, data: &Vector| {
            let contributions: Vec<Vector> = calls.iter().map(|c| c[n].data.clone()).collect();
            data.bits() != Vector::sum_in(n + 1, layout, &contributions)
        };
        results.filter(|(n, (result, data, _))| result.is_ok() && is_wrong(*n, data)).count()
    };
    sim.hosts.iter().map(wrong).sum()
}

/// Check lanes find accidents. Tags find intentions, too.
#[test]
fn a_box_that_forges_a_sum_is_detected_if_sums_are_sealed() {
    let layout = Layout { message_size: 900, window: 2, rings: 2 };
    let mut undetected = 0;
    for seed in 0..40 {
        let open = forged(seed, false, Corruption::Forge);
        undetected += usize::from(wrong_sums(&open, &layout) > 0);
        for how in [
            Corruption::Forge,
            Corruption::Flip,
            Corruption::Exchange,
            Corruption::Double,
            Corruption::Replay,
        ] {
            let sealed = forged(seed, true, how);
            assert_eq!(wrong_sums(&sealed, &layout), 0, "seed {seed} {how:?}");
            for host in &sealed.1.hosts {
                assert!(host.results.len() == 6 && host.results.iter().all(|r| r.0.is_ok()));
            }
            let statistics = sealed.1.hosts.iter().map(|h| h.engine.statistics());
            let wrong = statistics.map(|s| s.wrong).sum::<u64>();
            assert!(wrong > 0 || matches!(how, Corruption::Replay), "seed {seed} {how:?}");
        }
    }
    assert!(undetected > 20, "only {undetected} of 40 forged sums passed the check lanes");
}

#[test]
fn a_rank_with_another_secret_is_an_error_at_all() {
    let layout = Layout { message_size: 1024, window: 2, rings: 1 };
    for seed in 0..16 {
        let ranks = [2, 3, 4, 8][seed as usize % 4];
        let other_secret = Some(seed as u32 % ranks);
        let spec = Spec { is_sealed: true, other_secret, ..Spec::new(ranks, layout, seed) };
        let mut sim = Sim::new(&spec, |rank| calls(rank, &[100], seed));
        sim.run();
        for host in &sim.hosts {
            for (result, ..) in &host.results {
                let text = result.as_ref().unwrap_err().to_string();
                assert!(text.contains("NETSUM_SECRET must be the same at all ranks"), "{text}");
            }
            assert!(!host.results.is_empty());
        }
    }
}

#[test]
fn a_dead_rank_is_named_by_all_others_in_time() {
    for seed in 0..16 {
        let ranks = [2, 3, 4, 8][seed as usize % 4];
        let layout = layouts().nth(seed as usize % 5).unwrap();
        let (dead, at) = (seed as usize % ranks as usize, Duration::from_micros(100 + 25 * seed));
        let present = if seed % 2 == 0 { ALWAYS } else { NEVER };
        let faults = even(10 * (seed as u32 % 2), 0, 0);
        let timeout = Duration::from_secs(2);
        let spec = Spec {
            faults,
            present,
            timeout,
            death: Some((dead, at)),
            ..Spec::new(ranks, layout, seed)
        };
        let mut sim = Sim::new(&spec, |rank| calls(rank, &[2000, 2000, 2000, 2000], seed));
        sim.run();
        for (rank, host) in sim.hosts.iter().enumerate().filter(|(rank, _)| *rank != dead) {
            let (outcome, _, when) = host.results.last().unwrap();
            let Err(Error::RankDied { rank: named, .. }) = outcome else {
                panic!("seed {seed} rank {rank}: {outcome:?}")
            };
            assert_eq!(*named as usize, dead, "seed {seed} rank {rank}");
            assert!(*when < at + timeout * 3 / 2, "seed {seed} rank {rank}: after {when:?}");
        }
    }
}

#[test]
fn only_an_operation_reveals_a_dead_rank() {
    let layout = Layout { message_size: 600, window: 2, rings: 1 };
    let (second, ms) = (Duration::from_secs(1), Duration::from_millis(1));
    for (seed, present) in [(1, ALWAYS), (2, NEVER)] {
        let spec = |pause: Range<Duration>, death| {
            let pauses = vec![(1, pause)];
            Spec {
                present: present.clone(),
                timeout: 2 * second,
                pauses,
                death,
                ..Spec::new(3, layout, seed)
            }
        };
        let calls = |rank, next| {
            let at = |not_before| Call { data: floats(rank, 500, seed), not_before };
            vec![at(Duration::ZERO), at(next), at(next)]
        };
        // Stopped for longer than the timeout, until shortly before or after the next call.
        for next in [8 * second, 5 * second - 300 * ms] {
            let mut sim = Sim::new(&spec(second..5 * second, None), |rank| calls(rank, next));
            sim.run();
            for (rank, host) in sim.hosts.iter().enumerate() {
                assert!(
                    host.results.iter().all(|r| r.0.is_ok()),
                    "seed {seed}, rank {rank}: {:?}",
                    host.results
                );
            }
        }
        // Dead: the next call reports it soon.
        let next = 6 * second;
        let mut sim =
            Sim::new(&spec(Duration::ZERO..Duration::ZERO, Some((1, second))), |r| calls(r, next));
        sim.run();
        for host in [0, 2].map(|rank| &sim.hosts[rank]) {
            assert!(host.results[0].0.is_ok());
            let (Err(Error::RankDied { rank: 1, .. }), _, when) = &host.results[1] else {
                panic!("seed {seed}: {:?}", host.results[1].0)
            };
            assert!(*when < next + second, "seed {seed}: {when:?}");
        }
    }
}

#[test]
fn different_operations_are_an_error() {
    for seed in 0..24u64 {
        let layout = layouts().nth(seed as usize % 5).unwrap();
        let ranks = [2, 3, 4, 8][seed as usize % 4];
        let present = if seed % 3 == 0 { NEVER } else { ALWAYS };
        let is_sealed = seed >= 12;
        let spec = Spec { present, is_sealed, ..Spec::new(ranks, layout, seed) };
        let odd = seed as u32 % ranks;
        let mut sim = Sim::new(&spec, |rank| {
            // In the last case all lanes fit: only the lengths in the messages' sequence lanes
            // differ.
            let data = match (rank == odd, seed % 4) {
                (false, _) => ints(rank, 700, 1),
                (true, 0) => ints(rank, 701, 1),
                (true, 1) => ints(rank, 5, 1),
                (true, 2) => ints(rank, 0, 1),
                (true, _) => floats(rank, 700, 1),
            };
            let again = || Call { data: ints(rank, 1, 9), not_before: Duration::ZERO };
            vec![Call { data, not_before: Duration::ZERO }, again(), again(), again()]
        });
        sim.run();
        for host in &sim.hosts {
            assert!(host.results[0].0.is_err(), "seed {seed}");
            let error = host.results.iter().find_map(|r| r.0.as_ref().err()).unwrap();
            assert!(matches!(error, Error::Mismatch(_)), "seed {seed}: {error}");
            assert!(host.results.last().unwrap().2 < Duration::from_secs(5));
        }
    }
}

/// Calls with the same elements of the same type: every message fits every other.
#[test]
fn each_pair_of_different_calls_is_an_error_that_names_both() {
    let of = |collective, tag| call::Call { tag, ..call::Call::from(collective) };
    let calls = [
        call::Call::SUM,
        of(Collective::AllReduce(Op::Sum), 1),
        call::Call { width: Width::Half, ..call::Call::SUM },
        of(Collective::AllReduce(Op::Average), 0),
        of(Collective::Reduce { op: Op::Sum, root: 0 }, 0),
        of(Collective::Reduce { op: Op::Sum, root: 1 }, 0),
        of(Collective::Reduce { op: Op::Average, root: 0 }, 0),
        of(Collective::ReduceScatter(Op::Sum), 0),
        of(Collective::ReduceScatter(Op::Average), 0),
        of(Collective::Broadcast { root: 0, block: 2800 }, 0),
        of(Collective::Broadcast { root: 1, block: 2800 }, 0),
        of(Collective::Broadcast { root: 0, block: 2799 }, 0),
        of(Collective::AllGather { block: 700 }, 0),
        of(Collective::AllGather { block: 699 }, 0),
        of(Collective::AllToAll { block: 175 }, 0),
        of(Collective::Barrier, 0),
    ];
    for (i, usual) in calls.iter().enumerate() {
        for (j, odd) in calls.iter().enumerate().filter(|(j, _)| *j != i) {
            let (seed, ranks) = ((i * calls.len() + j) as u64, 2 + (i + j) as u32 % 3);
            let mut called = vec![*usual; ranks as usize];
            called[(i + 2 * j) % ranks as usize] = *odd;
            let present = if seed.is_multiple_of(3) { NEVER } else { ALWAYS };
            let layout = layouts().nth(seed as usize % 5).unwrap();
            let spec = Spec { present, called, ..Spec::new(ranks, layout, seed) };
            let mut sim = Sim::new(&spec, |rank| {
                vec![Call { data: ints(rank, 700, 1), not_before: Duration::ZERO }]
            });
            sim.run();
            for host in &sim.hosts {
                let Err(Error::Mismatch(text)) = &host.results[0].0 else {
                    panic!("{usual:?} {odd:?}: {:?}", host.results[0].0)
                };
                for call in [usual, odd] {
                    let d = Descriptor { number: 1, length: 700, dtype: Dtype::I32, call: *call };
                    assert!(text.contains(&d.to_string()), "{call:?}: {text}");
                }
            }
        }
    }
}

/// The rank's next call is like the one that the others make now: nothing else would distinguish
/// them.
#[test]
fn a_call_that_only_one_rank_refuses_is_an_error_that_names_it() {
    for seed in 0..24u64 {
        let (ranks, odd) = (2 + seed as u32 % 3, seed as u32 / 3 % 2);
        let present = if seed.is_multiple_of(2) { ALWAYS } else { NEVER };
        let depth = [1, 4][seed as usize / 2 % 2];
        let spec = Spec {
            present,
            depth,
            ..Spec::new(ranks, layouts().nth(seed as usize % 5).unwrap(), seed)
        };
        let mut sim = Sim::new(&spec, |rank| {
            let call = |_| Call { data: ints(rank, 700, 1), not_before: Duration::ZERO };
            (u32::from(rank == odd)..4).map(call).collect()
        });
        sim.hosts[odd as usize].engine.refuse(1);
        sim.run();
        for (rank, host) in sim.hosts.iter().enumerate() {
            for (outcome, ..) in &host.results {
                let Err(Error::Mismatch(text)) = outcome else {
                    panic!("seed {seed} rank {rank}: {outcome:?}")
                };
                let refused = format!("rank {odd} calls for nothing (its own call returned");
                let refused_there = format!("rank {odd} for nothing (its own call returned");
                assert!(text.contains(&refused) || text.contains(&refused_there), "{text}");
            }
            assert_eq!(host.results.len(), if rank as u32 == odd { 3 } else { 4 });
        }
    }
}

/// More than may be open.
#[test]
fn calls_that_all_ranks_refuse_do_no_harm() {
    for seed in 0..8u64 {
        let layout = layouts().nth(seed as usize % 5).unwrap();
        let present = if seed.is_multiple_of(2) { ALWAYS } else { NEVER };
        let spec = Spec { present, faults: even(5, 5, 5), depth: 3, ..Spec::new(3, layout, seed) };
        let sim = check_with(&spec, &[0, 3, 700], |sim| {
            sim.hosts.iter_mut().for_each(|h| h.engine.refuse(100))
        });
        for host in &sim.hosts {
            assert_eq!((host.engine.statistics().all_reduces, host.engine.refused()), (6, 0));
        }
    }
}

#[test]
fn non_finite_elements_are_named_and_do_no_harm() {
    let layout = Layout { message_size: 600, window: 2, rings: 2 };
    let per_message = layout.elements(Dtype::F32, Width::Full).unwrap();
    let bad = |rank: u32| {
        let Vector::F(mut x) = floats(rank, 3000, 1) else { panic!() };
        if rank == 1 {
            x[1000] = f32::INFINITY;
            x[2000] = f32::NAN;
        }
        vec![
            Call { data: Vector::F(x), not_before: Duration::ZERO },
            Call { data: floats(rank, 10, 2), not_before: Duration::ZERO },
        ]
    };
    let mut sim = Sim::new(&Spec::new(3, layout, 1), bad);
    sim.run();
    let first = 1000 / per_message * per_message;
    for host in &sim.hosts {
        let finished = host.results[0].0.as_ref().unwrap();
        assert_eq!(finished.non_finite, Some(first..first + per_message));
        // All other results are sums, and those are NaN at all ranks.
        let given = (0..3).map(|rank| bad(rank).swap_remove(0).data);
        assert_eq!(host.results[0].1.bits(), Vector::sum(&layout, &given.collect::<Vec<_>>()));
        let Vector::F(sums) = &host.results[0].1 else { panic!() };
        let nan = sums.iter().filter(|x| x.is_nan()).count();
        assert_eq!(nan, 2 * per_message);
        assert_eq!(host.results[1].0.as_ref().unwrap().non_finite, None);
        let sums: Vec<Vector> = (0..3).map(|r| floats(r, 10, 2)).collect();
        assert_eq!(host.results[1].1.bits(), Vector::sum(&layout, &sums));
    }
}

#[test]
fn a_rank_that_comes_late_is_waited_for() {
    let layout = Layout { message_size: 1024, window: 2, rings: 1 };
    let spec = Spec { timeout: Duration::from_secs(1), ..Spec::new(3, layout, 2) };
    let mut sim = Sim::new(&spec, |rank| {
        let not_before = Duration::from_secs(if rank == 1 { 10 } else { 0 });
        vec![Call { data: ints(rank, 3000, 1), not_before }]
    });
    sim.run();
    for host in &sim.hosts {
        assert!(
            host.results[0].0.as_ref().is_ok_and(|f| f.mode == Mode::Box),
            "{:?}",
            host.results[0].0
        );
    }
}

/// The seeds of the short test, or the one in the environment.
fn seeds() -> std::ops::Range<u64> {
    match std::env::var("NETSUM_SIM_SEED") {
        Ok(seed) => {
            let seed = seed.parse().expect("NETSUM_SIM_SEED is a number");
            seed..seed + 1
        }
        Err(_) => 0..4000,
    }
}

#[test]
fn every_case_ends_with_the_right_sum_or_an_error_that_names_the_cause() {
    let (mut right, mut by_ring) = (0, 0);
    for seed in seeds() {
        match simulate(seed) {
            Ok(s) => {
                right += u64::from(s.right);
                by_ring += u64::from(s.by_ring);
            }
            Err(failure) => panic!("replay with NETSUM_SIM_SEED={seed}\n{failure}"),
        }
    }
    if seeds().end - seeds().start > 1 {
        assert!(
            right > 3000 && by_ring > 100 && right < 3950,
            "{right} right, {by_ring} by the ring"
        );
    }
}

#[test]
fn a_seed_replays() {
    for seed in 0..50 {
        let run = || simulate(seed).map(|s| format!("{s:?}")).map_err(|f| f.to_string());
        assert_eq!(run(), run(), "{}", describe(seed));
    }
}

/// Two operations of prologue and data messages, with the given packets lost. Returns how long they
/// took.
fn with_losses(ranks: u32, victims: &[Victim]) -> (Sim, Duration) {
    let layout = Layout { message_size: 2048, window: 2, rings: 1 };
    let mut spec = Spec::new(ranks, layout, 1);
    spec.faults.victims = victims.to_vec();
    let mut sim = Sim::new(&spec, |rank| {
        (0..2).map(|n| Call { data: floats(rank, 1500, n), not_before: Duration::ZERO }).collect()
    });
    sim.run();
    let time = sim.elapsed();
    sim.settle(Duration::from_millis(300));
    assert_eq!(sim.aggregator.unreleased(), Vec::<String>::new(), "{victims:?}");
    for (n, salt) in [(0, 0), (1, 1)] {
        let all: Vec<_> = (0..ranks).map(|r| floats(r, 1500, salt)).collect();
        let sum = Vector::sum(&layout, &all);
        assert!(sim.hosts.iter().all(|h| h.results[n].1.bits() == sum), "{victims:?}");
    }
    (sim, time)
}

#[test]
fn a_packet_lost_before_the_box_makes_only_its_sender_go_back() {
    for ranks in [2, 3, 4] {
        let (mut cases, mut tails) = (0, 0);
        for nth in 0.. {
            let victim = Victim { rank: 1, class: Class::Data, direction: Direction::Up, nth };
            let (sim, time) = with_losses(ranks, &[victim]);
            if sim.network.damage.lost == 0 {
                break;
            }
            cases += 1;
            let stats: Vec<_> = sim.hosts.iter().map(|h| h.stack.endpoint.stats()).collect();
            let others = stats.iter().enumerate().filter(|(rank, _)| *rank != 1);
            let others = others.map(|(_, s)| s.retransmissions).max();
            assert!(stats[1].retransmissions > 0, "packet {nth} of {ranks} ranks");
            if stats.iter().all(|s| s.local_ack_timeout == 0) {
                assert_eq!(others, Some(0), "packet {nth} of {ranks} ranks");
                assert!(
                    time < Duration::from_micros(400),
                    "packet {nth} of {ranks} ranks: {time:?}"
                );
            } else {
                // No later packet shows the gap: all ranks wait, and none can know whose loss it
                // is. Each probes with its oldest packet, and with the last of a message and the
                // one before.
                tails += 1;
                assert!(others <= Some(2), "packet {nth} of {ranks} ranks: {others:?}");
            }
        }
        assert!(cases > 50 && tails <= 6, "{tails} of {cases}");
    }
}

/// What an all-reduce may take with one timeout, which is longer than all the rest, but not with
/// two.
const ONE_TIMEOUT: Duration = MIN_ACK_TIMEOUT.saturating_add(Duration::from_millis(7));

#[test]
fn no_single_lost_packet_causes_a_long_wait() {
    let up = [Class::Data, Class::Ack].map(|c| (c, Direction::Up));
    let down = [Class::Data, Class::Ack, Class::Result].map(|c| (c, Direction::Down));
    for (class, direction) in up.into_iter().chain(down) {
        for rank in 0..3 {
            for nth in 0.. {
                let victim = Victim { rank, class, direction, nth };
                let (sim, time) = with_losses(3, &[victim]);
                if sim.network.damage.lost == 0 {
                    assert!(nth > 2, "there are such packets");
                    break;
                }
                assert!(time < ONE_TIMEOUT, "{victim:?}: {time:?}");
            }
        }
    }
}

#[test]
fn a_lost_nak_costs_little() {
    for (class, direction) in [(Class::Data, Direction::Up), (Class::Result, Direction::Down)] {
        for nth in 5..20 {
            // If rank 1 loses data, rank 2 NAKs. If rank 1 loses a sum, it NAKs itself.
            let naks = if class == Class::Data { 2 } else { 1 };
            let nak = Victim { rank: naks, class: Class::Nak, direction: Direction::Up, nth: 0 };
            let (sim, time) = with_losses(3, &[Victim { rank: 1, class, direction, nth }, nak]);
            assert_eq!(sim.network.damage.lost, 2);
            assert!(time < ONE_TIMEOUT, "{class:?} {nth}: {time:?}");
        }
    }
}

#[test]
fn waits_for_a_slow_rank_send_a_probe_from_67_ms_on() {
    for (late, most) in [(5, 0), (60, 0), (100, 1), (250, 2)] {
        let layout = Layout { message_size: 2048, window: 2, rings: 1 };
        let mut sim = Sim::new(&Spec::new(3, layout, 1), |rank| {
            let late = Duration::from_millis(if rank == 1 { late } else { 0 });
            vec![Call { data: ints(rank, 5000, 0), not_before: late }]
        });
        sim.run();
        sim.settle(Duration::from_millis(300));
        let again = sim.hosts.iter().map(|h| h.stack.endpoint.stats().retransmissions).max();
        assert_eq!(again, Some(most), "{late} ms late");
    }
}
