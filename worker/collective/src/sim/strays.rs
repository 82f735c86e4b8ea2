//! Complete sums that are not of the ranks' own messages: of an earlier session, whose results the
//! box still has, and of other rings.

use std::time::Duration;

use super::job::{Call, Sim, Spec};
use super::vector::Vector;
use crate::numeric::layout::Layout;
use crate::report::Mode;

const LAYOUT: Layout = Layout { message_size: 1024, window: 4, rings: 2 };

/// One call of each type; all messages fit into the slots.
fn calls(rank: u32, session: u64) -> Vec<Call> {
    [data(rank, session, 0), data(rank, session, 1)]
        .map(|data| Call { data, not_before: Duration::ZERO })
        .into()
}

fn data(rank: u32, session: u64, n: u64) -> Vector {
    match n {
        0 => Vector::ints(rank, 700, session),
        _ => Vector::floats(rank, 700, session),
    }
}

/// Checks that every rank has the right sums, or an error.
fn check(sim: &Sim, ranks: u32, session: u64) {
    for (rank, host) in sim.hosts.iter().enumerate() {
        assert_eq!(host.results.len(), 2);
        for (n, (outcome, sum, _)) in host.results.iter().enumerate() {
            let all: Vec<Vector> = (0..ranks).map(|r| data(r, session, n as u64)).collect();
            let right = sum.bits() == Vector::sum(&LAYOUT, &all);
            assert!(
                outcome.is_err() || right,
                "session {session} rank {rank} operation {n}: a wrong sum, verified"
            );
        }
    }
}

#[test]
fn a_session_accepts_no_sum_from_the_slots_of_an_earlier_one() {
    for ranks in [2, 3, 4, 8] {
        let spec = Spec::new(ranks, LAYOUT, 7);
        let mut first = Sim::new(&spec, |rank| calls(rank, 1));
        first.run();
        check(&first, ranks, 1);
        assert!(first.hosts.iter().all(|h| h.engine.mode() == Mode::Box));
        // The same queue pairs and PSNs.
        let mut second = Sim::new(&Spec { session: 2, ..spec }, |rank| calls(rank, 2));
        std::mem::swap(&mut first.aggregator, &mut second.aggregator);
        second.run();
        check(&second, ranks, 2);
        // The first session's results were received, and nothing else.
        let met: Vec<_> = second.hosts.iter().map(|h| h.engine.statistics().wrong).collect();
        assert!(met.iter().any(|wrong| *wrong > 0), "{met:?}");
        for (rank, host) in second.hosts.iter().enumerate() {
            assert!(host.results.iter().all(|r| r.0.is_ok()), "rank {rank}: {:?}", host.results);
            assert_eq!(host.engine.mode(), Mode::HostRing, "rank {rank}");
        }
    }
}

#[test]
fn a_session_accepts_no_partial_sum_of_an_earlier_one() {
    for ranks in [2, 3, 4, 8] {
        // A rank dies before it has sent anything: the slots keep the others' contributions.
        let (timeout, death) = (Duration::from_millis(500), Some((1, Duration::from_micros(150))));
        let late = |rank: u32, session| {
            let not_before = if rank == 1 { Duration::from_secs(1) } else { Duration::ZERO };
            calls(rank, session).into_iter().map(|c| Call { not_before, ..c }).collect()
        };
        let spec = Spec { timeout, death, ..Spec::new(ranks, LAYOUT, 7) };
        let mut first = Sim::new(&spec, |rank| late(rank, 1));
        first.run();
        assert!(!first.aggregator.unreleased().is_empty());
        let mut second =
            Sim::new(&Spec { session: 2, ..Spec::new(ranks, LAYOUT, 7) }, |rank| calls(rank, 2));
        std::mem::swap(&mut first.aggregator, &mut second.aggregator);
        second.run();
        check(&second, ranks, 2);
    }
}

#[test]
fn flows_that_are_registered_with_swapped_rings_are_detected() {
    for ranks in [2, 3, 4, 8] {
        let mut sim = Sim::new(&Spec::new(ranks, LAYOUT, 3), |rank| calls(rank, 1));
        sim.aggregator.exchange_rings(1);
        sim.run();
        check(&sim, ranks, 1);
    }
}
