//! Windows of jobs at work.

use super::*;

fn windows(c: &Controller) -> Vec<(String, u32, Option<u32>)> {
    c.jobs().map(|j| (j.spec.name.clone(), j.spec.window, j.wished)).collect()
}

fn expect(c: &Controller, expected: &[(&str, u32, Option<u32>)]) {
    let expected: Vec<_> = expected.iter().map(|(n, w, x)| ((*n).to_owned(), *w, *x)).collect();
    assert_eq!(windows(c), expected);
    for job in c.jobs() {
        assert_eq!(job.slots, abi_slots(job.spec.window));
        assert!(job.rings.iter().all(|r| r.slots == job.slots && r.window == job.spec.window * 8));
    }
}

/// Leaves and joins again.
fn renew(c: &mut Controller, name: &str) -> Vec<String> {
    rest(c, name);
    let mut admitted = settle(c);
    work(c, name);
    admitted.extend(settle(c));
    admitted
}

/// Room for eight windows of 2: four for each job are 16.
fn one_at_work() -> Controller {
    let mut c = controller(8);
    c.create_job(elastic("wide", "a", 2, 16)).unwrap();
    settle(&mut c);
    work(&mut c, "wide");
    expect(&c, &[("wide", 16, None)]);
    assert_eq!(c.pool.free().memory, 0);
    c
}

#[test]
fn a_job_makes_room_for_one_that_waits_and_takes_it_back_afterwards() {
    let mut c = one_at_work();
    waits(&mut c, spec("next", "b"));
    assert_eq!(settle(&mut c), [""; 0]);
    // As little as is needed, in steps of what slots there can be.
    expect(&c, &[("wide", 16, Some(8))]);
    assert_eq!(c.heartbeat("wide", "t", 0, 1, Instant::now()).unwrap().wished, Some(8));
    // It gets it when all have left, and the other one comes in before they are back.
    c.leave("wide", "t", 0, 1).unwrap();
    assert_eq!(settle(&mut c), [""; 0]);
    let actions = c.leave("wide", "t", 1, 1).unwrap();
    assert!(
        matches!(&actions[..], [Action::DeleteRing { ring: 1, .. }, Action::CreateRing(r), Action::ForgetEnded(_)] if r.slots == abi_slots(8) && r.window == 64)
    );
    assert_eq!(settle(&mut c), ["next"]);
    work(&mut c, "wide");
    settle(&mut c);
    expect(&c, &[("next", 2, None), ("wide", 8, None)]);
    c.delete_job("next").unwrap();
    settle(&mut c);
    expect(&c, &[("wide", 8, Some(16))]);
    assert_eq!(renew(&mut c, "wide"), [""; 0]);
    expect(&c, &[("wide", 16, None)]);
}

#[test]
fn what_nobody_wants_any_more_is_not_asked_for() {
    let mut c = one_at_work();
    let ticket = waits(&mut c, spec("fickle", "b"));
    settle(&mut c);
    expect(&c, &[("wide", 16, Some(8))]);
    assert!(c.leave_queue(ticket, "fickle"));
    settle(&mut c);
    expect(&c, &[("wide", 16, None)]);
    // Nor is a job asked to grow whose room somebody else takes before it has got it.
    waits(&mut c, spec("next", "b"));
    settle(&mut c);
    assert_eq!(renew(&mut c, "wide"), ["next"]);
    c.delete_job("next").unwrap();
    settle(&mut c);
    expect(&c, &[("wide", 8, Some(16))]);
    c.create_job(big("other", "b", 3)).unwrap();
    settle(&mut c);
    expect(&c, &[("other", 2, None), ("wide", 8, None)]);
}

#[test]
fn nobody_is_asked_where_that_would_not_do() {
    let mut c = one_at_work();
    c.set_memory(9 * ONE).unwrap();
    settle(&mut c);
    // Even at its least it would leave but eight of nine.
    waits(&mut c, big("huge", "b", 9));
    settle(&mut c);
    expect(&c, &[("wide", 16, None)]);
    // Who does not wait is refused, and hears what would help.
    let said = c.create_job(big("hasty", "b", 2)).unwrap_err().to_string();
    assert!(
        said.contains("not enough memory")
            && said.ends_with("; --wait has others make room, whose windows may be less"),
        "{said}"
    );
    settle(&mut c);
    expect(&c, &[("wide", 16, None)]);
}

#[test]
fn the_one_with_the_larger_share_and_the_younger_one_make_room_first() {
    let mut c = controller(8);
    for (name, tenant) in [("a1", "a"), ("a2", "a"), ("b1", "b")] {
        c.create_job(elastic(name, tenant, 2, 4)).unwrap();
        settle(&mut c);
        work(&mut c, name);
    }
    c.create_job(big("rest", "vip", 2)).unwrap();
    expect(&c, &[("a1", 4, None), ("a2", 4, None), ("b1", 4, None), ("rest", 2, None)]);
    waits(&mut c, spec("next", "vip"));
    settle(&mut c);
    expect(&c, &[("a1", 4, None), ("a2", 4, Some(2)), ("b1", 4, None), ("rest", 2, None)]);
    waits(&mut c, spec("next2", "vip"));
    settle(&mut c);
    expect(&c, &[("a1", 4, Some(2)), ("a2", 4, Some(2)), ("b1", 4, None), ("rest", 2, None)]);
    // It comes in as soon as there is room, whoever has made it.
    assert_eq!(renew(&mut c, "a1"), ["next"]);
    assert_eq!(renew(&mut c, "a2"), ["next2"]);
}

#[test]
fn for_a_tenants_limit_its_own_jobs_alone_make_room() {
    let mut c = controller(16);
    c.set_tenants(limits(&[
        ("a", Limits { memory: Some(4 * ONE), ..Limits::default() }),
        ("b", Limits::default()),
    ]));
    for (name, tenant) in [("a1", "a"), ("b1", "b")] {
        c.create_job(elastic(name, tenant, 2, 8)).unwrap();
        settle(&mut c);
        work(&mut c, name);
    }
    waits(&mut c, spec("a2", "a"));
    settle(&mut c);
    expect(&c, &[("a1", 8, Some(4)), ("b1", 8, None)]);
    assert_eq!(renew(&mut c, "a1"), ["a2"]);
    // A limit that is lowered takes nothing away.
    c.set_tenants(limits(&[
        ("a", Limits { memory: Some(ONE), ..Limits::default() }),
        ("b", Limits::default()),
    ]));
    settle(&mut c);
    expect(&c, &[("a1", 4, None), ("a2", 2, None), ("b1", 8, None)]);
}

#[test]
fn jobs_without_ranks_change_at_once_and_those_that_are_set_up_by_hand_never() {
    let mut c = one_at_work();
    rest(&mut c, "wide");
    assert_eq!(settle(&mut c), [""; 0]);
    let ticket = c.enqueue_job(big("next", "b", 4), Arrival::default()).unwrap();
    assert_eq!(settle(&mut c), ["next"]);
    assert!(!c.leave_queue(ticket, "next"));
    expect(&c, &[("next", 2, None), ("wide", 8, None)]);
    c.delete_job("next").unwrap();
    settle(&mut c);
    expect(&c, &[("wide", 16, None)]);

    // Nobody knows yet how this one's ranks will come.
    let mut c = controller(8);
    c.create_job(elastic("new", "a", 2, 16)).unwrap();
    let in_band = JobSpec { in_band: true, ..elastic("in-band", "a", 2, 16) };
    waits(&mut c, in_band);
    assert_eq!(settle(&mut c), [""; 0]);
    expect(&c, &[("new", 16, None)]);
    work(&mut c, "new");
    settle(&mut c);
    assert_eq!(renew(&mut c, "new"), ["in-band"]);
    expect(&c, &[("in-band", 8, None), ("new", 8, None)]);
    c.delete_job("new").unwrap();
    settle(&mut c);
    expect(&c, &[("in-band", 8, None)]);
}

#[test]
fn a_wish_outlives_the_daemon() {
    let mut c = one_at_work();
    waits(&mut c, spec("next", "b"));
    settle(&mut c);
    renew(&mut c, "wide");
    c.delete_job("next").unwrap();
    settle(&mut c);
    expect(&c, &[("wide", 8, Some(16))]);
    let text = serde_json::to_string(&c.save()).unwrap();
    let mut next = controller(8);
    assert_eq!(next.restore(serde_json::from_str(&text).unwrap(), Instant::now(), |_| None).unwrap(), []);
    expect(&next, &[("wide", 8, Some(16))]);
    assert_eq!(next.memory_used(), c.memory_used());
    settle(&mut next);
    assert_eq!(renew(&mut next, "wide"), [""; 0]);
    expect(&next, &[("wide", 16, None)]);
}
