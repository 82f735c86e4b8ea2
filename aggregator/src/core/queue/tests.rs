//! Admission without anything around it.

mod random;
mod windows;

use std::net::IpAddr;
use std::time::Duration;

use super::super::membership::Join;
use super::super::{Connection, PortInfo, RankAddress, State, WindowRange};
use super::plan::MOST;
use super::*;

/// What a job of [`spec`] takes: 32 slots of 256 + 2 x 112 + 24 bytes.
const ONE: u64 = 32 * (256 + 224 + 24);

pub(super) fn spec(name: &str, tenant: &str) -> JobSpec {
    JobSpec { mtu: 256, message_size: 2048, tenant: tenant.into(), ..super::super::tests::spec(name, 2) }
}

/// So many rings in place of one.
pub(super) fn big(name: &str, tenant: &str, rings: u32) -> JobSpec {
    JobSpec { rings, ..spec(name, tenant) }
}

fn elastic(name: &str, tenant: &str, least: u32, most: u32) -> JobSpec {
    JobSpec { window: most, window_range: Some(WindowRange { least, most }), ..spec(name, tenant) }
}

/// Room for so many jobs of [`spec`], and tenants `a`, `b` and `vip`.
pub(super) fn controller(room: u64) -> Controller {
    let mut c = Controller::new(room * ONE, 2, Duration::from_secs(1));
    c.set_ports(vec![PortInfo { name: "p0".into(), ifindex: 10, mtu: 1500 }]);
    let vip = Limits { priority: 1, ..Limits::default() };
    c.set_tenants(limits(&[("a", Limits::default()), ("b", Limits::default()), ("vip", vip)]));
    c
}

fn limits(all: &[(&str, Limits)]) -> BTreeMap<String, Limits> {
    all.iter().map(|(name, limits)| ((*name).to_owned(), limits.clone())).collect()
}

/// The names of those that are admitted now, in order.
pub(super) fn admitted(c: &mut Controller) -> Vec<String> {
    c.admit().into_iter().map(|a| a.job).collect()
}

/// Puts a job into the queue; it must wait there.
fn waits(c: &mut Controller, spec: JobSpec) -> u64 {
    let ticket = c.enqueue_job(spec, Arrival::default()).unwrap();
    assert_eq!(admitted(c), [""; 0]);
    ticket
}

/// Comes now, and waits until then.
fn until(deadline: Instant) -> Arrival {
    Arrival { deadline: Some(deadline), ..Arrival::default() }
}

pub(super) fn order(c: &Controller) -> Vec<String> {
    c.standings().iter().map(|(q, _)| q.spec.name.clone()).collect()
}

#[test]
fn who_fits_is_admitted_at_once_and_who_does_not_waits() {
    let mut c = controller(1);
    let first = c.enqueue_job(spec("first", "a"), Arrival::default()).unwrap();
    let admissions = c.admit();
    let [Admission { ticket, actions, .. }] = &admissions[..] else { panic!("{admissions:?}") };
    assert_eq!(*ticket, first);
    assert!(matches!(&actions[..], [Action::ResetCounters(1), Action::CreateRing(r)] if r.slots == 32));
    waits(&mut c, spec("second", "a"));
    let standings = c.standings();
    let (queued, Standing { position: 1, of: 1, waits_for, .. }) = &standings[0] else {
        panic!("{standings:?}")
    };
    assert_eq!(queued.spec.name, "second");
    assert!(
        waits_for.contains("not enough memory for slots") && waits_for.contains("0 B of 15.8 KiB are free")
    );
    // Its name is taken, and nothing of it is there.
    assert!(matches!(c.create_job(spec("second", "a")), Err(Refusal::Exists(why)) if why.contains("waits")));
    assert!(matches!(c.job("second"), Err(Refusal::NotNow(why)) if why.contains("waits in the queue")));
    c.delete_job("first").unwrap();
    assert_eq!(admitted(&mut c), ["second"]);
    assert_eq!(c.job("second").unwrap().state, State::Waiting);
    assert!(c.standings().is_empty());
}

#[test]
fn priority_comes_before_shares_and_shares_before_age() {
    let mut c = controller(4);
    for (name, tenant) in [("a1", "a"), ("a2", "a"), ("a3", "a"), ("b1", "b")] {
        c.create_job(spec(name, tenant)).unwrap();
    }
    for (name, tenant) in [("a4", "a"), ("a5", "a"), ("b2", "b"), ("vip1", "vip"), ("b3", "b")] {
        waits(&mut c, spec(name, tenant));
    }
    assert_eq!(order(&c), ["vip1", "b2", "b3", "a4", "a5"]);
    c.delete_job("a1").unwrap();
    assert_eq!(admitted(&mut c), ["vip1"]);
    c.delete_job("vip1").unwrap();
    assert_eq!(admitted(&mut c), ["b2"], "b has one, a two");
    // Now both have two, and the older one of those that wait is of a.
    assert_eq!(order(&c), ["a4", "a5", "b3"]);
}

#[test]
fn a_share_is_that_of_the_tenants_own_limit() {
    let mut c = controller(4);
    let half = Limits { memory: Some(2 * ONE), ..Limits::default() };
    c.set_tenants(limits(&[("a", half), ("b", Limits::default())]));
    for (name, tenant) in [("a1", "a"), ("b1", "b"), ("b2", "b"), ("b3", "b")] {
        c.create_job(spec(name, tenant)).unwrap();
    }
    waits(&mut c, spec("b4", "b"));
    waits(&mut c, spec("a2", "a"));
    c.delete_job("b1").unwrap();
    // Half of two against two of four: as much, so the older one.
    assert_eq!(admitted(&mut c), ["b4"]);
    c.delete_job("b2").unwrap();
    assert_eq!(admitted(&mut c), ["a2"]);
}

#[test]
fn a_refusal_names_limit_use_and_what_would_fit() {
    let mut c = controller(10);
    let some = Limits { jobs: Some(3), memory: Some(3 * ONE), rings: Some(4), slots: None, priority: 0 };
    c.set_tenants(limits(&[("a", some)]));
    c.create_job(big("a1", "a", 2)).unwrap();
    let refused = |c: &mut Controller, spec: JobSpec| c.create_job(spec).unwrap_err().to_string();
    let said = refused(&mut c, big("a2", "a", 3));
    assert!(said.contains("tenant `a`: rings limit 4, 2 in use, 3 needed"), "{said}");
    assert!(!said.contains("would fit"), "no window makes a ring less: {said}");
    let wide = |window| JobSpec { window, ..spec("a2", "a") };
    let said = refused(&mut c, wide(8));
    let expected =
        "tenant `a`: memory limit 47.2 KiB, 31.5 KiB in use, 63.0 KiB needed; --window 2 would fit";
    assert_eq!(said, expected);
    c.create_job(wide(2)).unwrap();
    assert!(refused(&mut c, wide(1)).contains("there is such a job already"));
    let said = refused(&mut c, JobSpec { window: 1, ..spec("a3", "a") });
    assert!(said.contains("memory limit 47.2 KiB, 47.2 KiB in use"), "{said}");
    c.create_job(big("d1", "default", 6)).unwrap();
    let said = refused(&mut c, JobSpec { window: 16, ..spec("d2", "default") });
    assert!(said.contains("; 15.8 KiB of 157.5 KiB are free; "), "{said}");
    assert!(said.ends_with("; --window 2 would fit"), "{said}");
    let said = refused(&mut c, spec("x", "nobody"));
    assert_eq!(said, "--tenant `nobody`: the configuration has a, default");
}

#[test]
fn there_is_no_waiting_for_what_can_never_be() {
    let mut c = controller(4);
    c.set_tenants(limits(&[("a", Limits { memory: Some(2 * ONE), ..Limits::default() })]));
    for (spec, expected) in [
        (big("x", "a", 3), "tenant `a`: memory limit"),
        (big("x", "default", 5), "not enough memory for slots"),
        (JobSpec { window: 0, ..spec("x", "a") }, "--window 0: at least 1"),
        (elastic("x", "a", 4, 2), "--window 4..2: the least comes first"),
        (elastic("x", "a", 1, 1 << 20), "slots in a ring, at most"),
    ] {
        let said = c.enqueue_job(spec, Arrival::default()).unwrap_err().to_string();
        assert!(said.contains(expected), "{said}");
    }
    assert!(c.standings().is_empty());
    // Limits may be lowered while it waits. It stays, keeps nobody out, and is admitted when they are raised again.
    c.create_job(big("d", "default", 3)).unwrap();
    waits(&mut c, big("x", "a", 2));
    c.set_tenants(limits(&[("a", Limits { memory: Some(ONE), ..Limits::default() })]));
    c.delete_job("d").unwrap();
    assert_eq!(admitted(&mut c), [""; 0]);
    assert!(c.standings()[0].1.waits_for.contains("they were lowered"), "{:?}", c.standings());
    c.set_tenants(limits(&[]));
    assert!(c.standings()[0].1.waits_for.contains("not in the configuration any more"));
    c.set_tenants(limits(&[("a", Limits::default())]));
    assert_eq!(admitted(&mut c), ["x"]);
}

#[test]
fn a_limit_that_is_lowered_ends_no_job() {
    let mut c = controller(4);
    (0..3).for_each(|i| drop(c.create_job(spec(&format!("a{i}"), "a")).unwrap()));
    c.set_tenants(limits(&[("a", Limits { jobs: Some(1), ..Limits::default() })]));
    assert_eq!(c.jobs().count(), 3);
    let said = c.create_job(spec("a3", "a")).unwrap_err().to_string();
    assert_eq!(said, "tenant `a`: jobs limit 1, 3 in use, 1 needed");
    waits(&mut c, spec("a3", "a"));
    c.delete_job("a0").unwrap();
    c.delete_job("a1").unwrap();
    assert_eq!(admitted(&mut c), [""; 0]);
    let view = &c.tenants()[0];
    assert_eq!((view.name.as_str(), view.used.jobs, view.waiting, view.share), ("a", 1, 1, 1.0));
    c.delete_job("a2").unwrap();
    assert_eq!(admitted(&mut c), ["a3"]);
}

#[test]
fn a_large_job_is_overtaken_only_so_often() {
    let mut c = controller(4);
    (0..4).for_each(|i| drop(c.create_job(spec(&format!("small{i}"), "vip")).unwrap()));
    waits(&mut c, big("large", "a", 4));
    // One ends after the other, and there is always another one of a tenant with a higher priority.
    let mut next = 4;
    while !c.is_queued("large") || next < 100 {
        c.enqueue_job(spec(&format!("small{next}"), "vip"), Arrival::default()).unwrap();
        let oldest = c.jobs().map(|j| j.spec.name.clone()).min_by_key(|n| n[5..].parse::<u32>().unwrap());
        c.delete_job(&oldest.unwrap()).unwrap();
        next += 1;
        if admitted(&mut c).contains(&"large".to_owned()) {
            break;
        }
        if next == 4 + MOST + 1 {
            assert_eq!(order(&c)[0], "large", "it is due");
            let why = &c.standings()[1].1.waits_for;
            assert!(why.contains("job `large` goes first, it has been overtaken 8 times"), "{why}");
            // Nor can anybody get past it who does not wait.
            let said = c.create_job(spec("quick", "vip")).unwrap_err().to_string();
            assert!(said.contains("goes first") && said.contains("--wait"), "{said}");
        }
    }
    assert_eq!(next, 4 + MOST + 4, "then the four that were at work had to end");
    assert!(c.job("large").is_ok());
}

#[test]
fn who_waits_for_its_own_limit_keeps_nobody_else_out() {
    let mut c = controller(4);
    c.set_tenants(limits(&[("a", Limits { jobs: Some(1), ..Limits::default() }), ("b", Limits::default())]));
    c.create_job(spec("a1", "a")).unwrap();
    waits(&mut c, spec("a2", "a"));
    for i in 0..3 * MOST {
        c.create_job(spec(&format!("b{i}"), "b")).unwrap();
        c.delete_job(&format!("b{i}")).unwrap();
        assert_eq!(admitted(&mut c), [""; 0]);
    }
    c.delete_job("a1").unwrap();
    assert_eq!(admitted(&mut c), ["a2"]);
}

#[test]
fn time_runs_out_for_those_that_wait() {
    let (mut c, now) = (controller(1), Instant::now());
    c.create_job(spec("first", "a")).unwrap();
    let late = c.enqueue_job(spec("late", "a"), until(now + Duration::from_secs(5))).unwrap();
    waits(&mut c, spec("patient", "a"));
    assert_eq!(c.tick(now + Duration::from_secs(4)), []);
    let actions = c.tick(now + Duration::from_secs(5));
    let [Action::Dequeued { ticket, why: Refusal::Late(why) }] = &actions[..] else { panic!("{actions:?}") };
    assert_eq!(*ticket, late);
    assert!(why.contains("job `late` waited in vain, at last in place 1 of 2: not enough memory"), "{why}");
    assert_eq!(order(&c), ["patient"]);
    // Taken out by hand, by an administrator and by whoever waited.
    let actions = c.delete_job("patient").unwrap();
    assert!(matches!(&actions[..], [Action::Dequeued { why: Refusal::NotNow(_), .. }]), "{actions:?}");
    let ticket = waits(&mut c, spec("fickle", "a"));
    assert!(c.leave_queue(ticket, "fickle") && !c.leave_queue(ticket, "fickle"));
    c.delete_job("first").unwrap();
    assert_eq!(admitted(&mut c), [""; 0]);
}

#[test]
fn a_job_that_leaves_the_choice_gets_the_widest_window_that_nobody_waits_for() {
    let window = |c: &Controller, name: &str| {
        let job = c.job(name).unwrap();
        assert_eq!(job.slots, abi_slots(job.spec.window));
        assert!(job.rings.iter().all(|r| r.slots == job.slots && r.window == job.spec.window * 8));
        job.spec.window
    };
    let mut c = controller(8);
    c.create_job(elastic("alone", "a", 1, 4)).unwrap();
    assert_eq!(window(&c, "alone"), 4);
    // Six of eight are left; a window of 11 has the slots of 16, and that of 9, too.
    c.create_job(elastic("next", "a", 1, 16)).unwrap();
    assert_eq!(window(&c, "next"), 8);
    c.create_job(elastic("last", "a", 1, 16)).unwrap();
    assert_eq!(window(&c, "last"), 4);
    assert_eq!(c.pool.free().memory, 0);
    let said = c.create_job(elastic("none", "a", 1, 16)).unwrap_err().to_string();
    assert!(said.ends_with("no --window would fit"), "{said}");

    // Of a tenant's limit likewise.
    let mut c = controller(8);
    c.set_tenants(limits(&[("a", Limits { slots: Some(100), ..Limits::default() })]));
    c.create_job(elastic("alone", "a", 1, 16)).unwrap();
    assert_eq!(window(&c, "alone"), 4, "64 slots");

    // While somebody waits for the pool, the least will do.
    let mut c = controller(8);
    c.create_job(big("old", "a", 7)).unwrap();
    waits(&mut c, big("waits", "a", 8));
    c.create_job(elastic("narrow", "b", 1, 16)).unwrap();
    assert_eq!(window(&c, "narrow"), 1);
    // Two that come in at once share what is left, the first as much as it likes.
    let mut c = controller(8);
    c.create_job(big("old", "a", 8)).unwrap();
    waits(&mut c, elastic("one", "a", 2, 8));
    waits(&mut c, elastic("two", "b", 2, 16));
    c.delete_job("old").unwrap();
    assert_eq!(admitted(&mut c), ["one", "two"]);
    assert_eq!((window(&c, "one"), window(&c, "two")), (8, 8));
}

fn abi_slots(window: u32) -> u32 {
    netsum_common::abi::ring_slots(window, 8).unwrap()
}

/// Both ranks of a job of one ring or more join, and are at work.
fn work(c: &mut Controller, name: &str) -> Vec<Action> {
    let job = c.job(name).unwrap();
    let (ticket, rings, epoch) = (job.ticket as u16, job.rings.len() as u32, job.last_epoch + 1);
    let [high, low] = ticket.to_be_bytes();
    let join = |rank: u32| {
        let connection = |n: u32| Connection { receive_qpn: 2 * n + 2, send_qpn: 2 * n + 3, first_psn: 0 };
        Join {
            job: name.into(),
            token: "t".into(),
            address: RankAddress {
                rank,
                ip: IpAddr::from([10, high, low, rank as u8]),
                mac: [2, 0, 0, high, low, rank as u8],
                rings: (0..rings).map(connection).collect(),
                plain: connection(rings),
                any_ip_id: false,
            },
            ifindex: 10,
            mac: [2, 0, 0, high, low, rank as u8],
            epoch,
            deadline: Instant::now() + Duration::from_secs(60),
            waiter: 0,
        }
    };
    assert!(c.join(join(0), Instant::now()).unwrap().is_empty());
    c.join(join(1), Instant::now()).unwrap()
}

/// Both leave.
fn rest(c: &mut Controller, name: &str) -> Vec<Action> {
    let epoch = c.job(name).unwrap().last_epoch;
    assert!(c.leave(name, "t", 0, epoch).unwrap().is_empty());
    c.leave(name, "t", 1, epoch).unwrap()
}

/// Admits and fits windows until there is nothing more to do; the names of those admitted.
fn settle(c: &mut Controller) -> Vec<String> {
    let mut all = Vec::new();
    loop {
        let names = admitted(c);
        if names.is_empty() && c.fit_windows().is_empty() {
            return all;
        }
        all.extend(names);
    }
}
