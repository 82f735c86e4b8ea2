//! Those that come back, and a daemon that does not know them.

use proptest::prelude::*;

use super::super::plan::MOST;
use super::super::tests::{admitted, big, controller, order, spec};
use super::super::{Arrival, Queued};
use super::*;
use crate::core::saved::Saved;

/// Waits since then, by a clock that stands at 1000.
fn since(since: u64, overtaken: u32) -> Arrival {
    Arrival { now: 1000, since, overtaken, deadline: None }
}

#[test]
fn who_has_waited_for_longer_goes_first_whenever_it_comes() {
    let mut c = controller(1);
    c.create_job(spec("old", "a")).unwrap();
    for (name, at) in
        [("later", 20), ("first", 10), ("twin", 20), ("now", 0), ("tomorrow", u64::MAX), ("last", 0)]
    {
        c.enqueue_job(spec(name, "a"), since(at, 0)).unwrap();
    }
    assert_eq!(order(&c), ["first", "later", "twin", "now", "tomorrow", "last"]);
    // Nor is somebody due for ever, whatever it says.
    c.enqueue_job(spec("due", "a"), since(900, u32::MAX)).unwrap();
    assert_eq!(order(&c)[0], "due");
    assert_eq!(c.standings()[0].1.overtaken, MOST);
    assert_eq!(c.tenants()[0].waits_since, Some(10));
}

#[test]
fn nobody_is_admitted_before_those_had_time_to_come_back_that_waited_with_an_earlier_daemon() {
    let (mut c, now) = (controller(1), Instant::now());
    c.set_began(500);
    // As long as nobody comes back, nobody is waited for.
    c.enqueue_job(spec("new", "a"), since(600, 0)).unwrap();
    assert_eq!(admitted(&mut c), ["new"]);
    c.delete_job("new").unwrap();
    c.enqueue_job(spec("young", "a"), since(300, 0)).unwrap();
    assert_eq!(admitted(&mut c), [""; 0]);
    assert!(c.standings()[0].1.waits_for.contains("others to come back"), "{:?}", c.standings());
    assert!(!c.end_return(now) && !c.end_return(now + RETURN / 2));
    c.enqueue_job(spec("old", "a"), since(200, 0)).unwrap();
    assert_eq!(admitted(&mut c), [""; 0]);
    // Nor does anybody get past them who does not wait.
    assert!(c.create_job(spec("quick", "a")).is_err());
    assert!(c.end_return(now + RETURN));
    assert_eq!(admitted(&mut c), ["old"]);
    // Once is enough: who comes even later has its age, and nobody waits for it.
    c.delete_job("old").unwrap();
    c.enqueue_job(spec("oldest", "a"), since(100, 0)).unwrap();
    assert!(!c.end_return(now + 2 * RETURN));
    assert_eq!(admitted(&mut c), ["oldest"]);
}

/// Another daemon's controller, with the jobs of one that was killed.
fn next_daemon(c: &Controller, room: u64, now: Instant) -> Controller {
    let text = serde_json::to_string(&c.save()).unwrap();
    let mut next = controller(room);
    next.set_began(1000);
    assert_eq!(next.restore(serde_json::from_str(&text).unwrap(), now, |_| None), Ok(Vec::new()));
    next
}

#[test]
fn a_job_that_nobody_could_be_told_of_is_kept_for_its_command_and_not_for_ever() {
    let (mut c, now) = (controller(3), Instant::now());
    for (n, name) in ["claimed", "told", "left"].into_iter().enumerate() {
        c.enqueue_job(spec(name, "a"), since(10 + n as u64, 0)).unwrap();
    }
    assert_eq!(admitted(&mut c), ["claimed", "told", "left"]);
    c.tell("told");
    let mut next = next_daemon(&c, 3, now);
    assert!(!next.claim("claimed", 9) && !next.claim("claimed", 0) && !next.claim("other", 10));
    assert!(next.claim("claimed", 10));
    // The earlier daemon was killed after it noted that it would tell, and before it did.
    assert!(next.claim("told", 11));
    assert_eq!(next.tick(now + UNCLAIMED / 2), []);
    let actions = next.tick(now + UNCLAIMED);
    assert!(matches!(&actions[..], [Action::DeleteRing { .. }]), "{actions:?}");
    assert_eq!(next.jobs().map(|j| j.spec.name.as_str()).collect::<Vec<_>>(), ["claimed", "told"]);
    // One that goes by the same name later is another one.
    next.delete_job("told").unwrap();
    next.create_job(spec("told", "a")).unwrap();
    assert!(!next.claim("told", 11));
    assert_eq!(next.tick(now + 2 * UNCLAIMED), []);
    // A state file of a daemon that knew nothing of that.
    let mut old = serde_json::to_value(next.save()).unwrap();
    old.as_object_mut().unwrap().remove("handed").unwrap();
    assert!(serde_json::from_value::<Saved>(old).is_ok());
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// Whoever waits is in the same order with the next daemon, in whatever order it comes back.
    #[test]
    fn the_order_outlives_the_daemon(
        jobs in prop::collection::vec((0u8..3, 1u32..5, 0u32..10, 1u64..50), 1..20),
        seed in any::<u64>(),
    ) {
        let mut c = controller(4);
        (0..4).for_each(|i| drop(c.create_job(spec(&format!("start{i}"), ["a", "b"][i % 2])).unwrap()));
        for (n, (tenant, rings, overtaken, at)) in jobs.into_iter().enumerate() {
            let s = big(&format!("n{n}"), ["a", "b", "vip"][usize::from(tenant)], rings);
            // No two began at the same moment.
            let arrival = since(20 * at + n as u64, overtaken);
            drop(c.enqueue_job(s, arrival));
        }
        let before = c.standings();
        let mut back: Vec<&Queued> = before.iter().map(|(q, _)| *q).collect();
        back.sort_by_key(|q| q.ticket.wrapping_mul(seed | 1));
        let (now, mut next) = (Instant::now(), next_daemon(&c, 4, Instant::now()));
        for q in back {
            next.enqueue_job(q.spec.clone(), since(q.since, q.overtaken)).unwrap();
            prop_assert!(next.admit().is_empty());
        }
        while next.is_waiting_for_others() {
            next.end_return(now + RETURN);
            next.end_return(now + 2 * RETURN);
        }
        let after = next.standings();
        prop_assert_eq!(before.len(), after.len());
        for ((_, b), (_, a)) in before.iter().zip(&after) {
            prop_assert_eq!(b, a);
        }
        prop_assert_eq!(order(&c), order(&next));
    }
}
