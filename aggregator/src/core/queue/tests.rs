//! Admission without anything around it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use proptest::prelude::*;

use super::super::pool::job_memory;
use super::super::{PortInfo, State, WindowRange};
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

#[derive(Clone, Debug)]
enum Event {
    /// Create or enqueue: number of the tenant, rings, least and most window, time to wait if it waits.
    Come(u8, u32, u32, u32, Option<u64>),
    /// One of those that are at work ends.
    End(usize),
    /// One of those that wait goes away.
    Abort(usize),
    Tick(u64),
    /// A tenant's limits: jobs, rings, slots in 32s, memory in jobs; priority.
    Limit(u8, [Option<u64>; 4], i32),
    Pool(u64),
}

fn events() -> impl Strategy<Value = Event> {
    let come = (0u8..3, 1u32..5, 1u32..4, 0u32..4, prop::option::of(0u64..3000));
    let limit = [
        prop::option::of(0u64..8),
        prop::option::of(0u64..8),
        prop::option::of(0u64..8),
        prop::option::of(0u64..8),
    ];
    prop_oneof![
        8 => come.prop_map(|(t, rings, least, more, wait)| Event::Come(t, rings, least, least + more, wait)),
        6 => any::<usize>().prop_map(Event::End),
        1 => any::<usize>().prop_map(Event::Abort),
        1 => (0u64..2000).prop_map(Event::Tick),
        1 => (0u8..3, limit, -1i32..2).prop_map(|(t, l, p)| Event::Limit(t, l, p)),
        1 => (4u64..14).prop_map(Event::Pool),
    ]
}

/// What the test knows of a job that waits.
#[derive(Clone, Debug)]
struct Waiting {
    spec: JobSpec,
    overtaken: u32,
}

/// The same admission by other means: naive, and with no order at all.
struct Model {
    limits: BTreeMap<String, Limits>,
    waiting: BTreeMap<u64, Waiting>,
    rings: BTreeSet<u32>,
}

impl Model {
    fn used(c: &Controller, tenant: &str) -> Amount {
        let of_tenant = c.jobs().filter(|j| j.spec.tenant == tenant);
        of_tenant.fold(Amount::default(), |sum, j| sum + Amount::of(&j.spec, j.slots))
    }

    /// Whether its tenant's limits let a job in.
    fn limits_allow(&self, used: Amount, spec: &JobSpec) -> bool {
        let l = &self.limits[&spec.tenant];
        let all = used + Amount::of(spec, abi_slots(spec.least_window()));
        let within = |limit: Option<u64>, n: u64| limit.is_none_or(|limit| n <= limit);
        within(l.jobs, all.jobs)
            && within(l.rings, all.rings)
            && within(l.slots, all.slots)
            && within(l.memory, all.memory)
    }

    fn pool_allows(&self, c: &Controller, spec: &JobSpec) -> bool {
        job_memory(spec, abi_slots(spec.least_window())) <= c.memory() - c.memory_used()
    }

    /// It would not fit if it were alone.
    fn is_hopeless(&self, c: &Controller, spec: &JobSpec) -> bool {
        let needed = job_memory(spec, abi_slots(spec.least_window()));
        !self.limits_allow(Amount::default(), spec) || needed > c.memory()
    }

    /// Another job came in: within its limits, and past those that were there before.
    fn came_in(&mut self, c: &Controller, ticket: u64, name: &str) -> Result<(), TestCaseError> {
        let job = c.job(name).unwrap();
        let (tenant, range) = (&job.spec.tenant, job.spec.window_range.unwrap());
        prop_assert!((range.least..=range.most).contains(&job.spec.window));
        let limits = &self.limits[tenant];
        prop_assert_eq!(
            limits.exceeded(Amount::default(), Self::used(c, tenant)),
            None,
            "{} of {}",
            name,
            tenant
        );
        let overtaken: Vec<u64> = self
            .waiting
            .iter()
            .filter(|(t, w)| {
                let same = w.spec.tenant == *tenant;
                let allowed = self.limits_allow(Self::used(c, &w.spec.tenant), &w.spec);
                **t < ticket && !self.is_hopeless(c, &w.spec) && (same || allowed)
            })
            .map(|(t, _)| *t)
            .collect();
        for ticket in overtaken {
            self.waiting.entry(ticket).and_modify(|w| w.overtaken += 1);
        }
        Ok(())
    }

    fn carry_out(&mut self, actions: &[Action]) {
        for action in actions {
            match action {
                Action::CreateRing(r) => assert!(self.rings.insert(r.id)),
                Action::DeleteRing { ring, .. } => assert!(self.rings.remove(ring)),
                Action::ResetCounters(_) => {}
                Action::Dequeued { ticket, .. } => {
                    assert!(self.waiting.remove(ticket).is_some(), "told twice")
                }
                other => panic!("{other:?}"),
            }
        }
    }

    /// What must be so whenever nothing more is to be done.
    fn check(&self, c: &Controller) -> Result<(), TestCaseError> {
        prop_assert!(c.memory_used() <= c.memory());
        prop_assert_eq!(self.rings.len(), c.jobs().map(|j| j.rings.len()).sum::<usize>());
        prop_assert_eq!(self.waiting.len(), c.standings().len());
        let memory: u64 = c.jobs().map(|j| job_memory(&j.spec, j.slots)).sum();
        prop_assert_eq!(memory, c.memory_used());
        let waiting: BTreeMap<&str, u32> =
            c.queue.iter().map(|q| (q.spec.name.as_str(), q.overtaken)).collect();
        for (ticket, w) in &self.waiting {
            let counted = waiting[w.spec.name.as_str()];
            prop_assert!(w.overtaken <= counted, "{}: {} times, not {counted}", w.spec.name, w.overtaken);
            prop_assert!(counted <= MOST, "{} was overtaken too often", w.spec.name);
            let fits =
                self.limits_allow(Self::used(c, &w.spec.tenant), &w.spec) && self.pool_allows(c, &w.spec);
            // What it could have is kept for another one, which is due and does not fit.
            let kept = || {
                self.waiting.iter().any(|(other, o)| {
                    other != ticket && waiting[o.spec.name.as_str()] >= MOST && !self.is_hopeless(c, &o.spec)
                })
            };
            prop_assert!(!fits || kept(), "{} fits and waits", w.spec.name);
        }
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(1500) })]

    #[test]
    fn nobody_gets_too_much_nothing_lies_idle_and_nobody_waits_for_ever(events in prop::collection::vec(events(), 1..120)) {
        let tenant = |t: u8| ["a", "b", "default"][usize::from(t)].to_owned();
        let mut c = controller(8);
        let mut now = Instant::now();
        let all = ["a", "b", "default", "vip"].map(|t| (t.to_owned(), Limits::default()));
        let mut m = Model { limits: all.into(), waiting: BTreeMap::new(), rings: BTreeSet::new() };
        c.set_tenants(m.limits.clone());
        for (n, event) in events.into_iter().enumerate() {
            match event {
                Event::Come(t, rings, least, most, wait) => {
                    let spec = JobSpec { rings, ..elastic(&format!("j{n}"), &tenant(t), least, most) };
                    match wait {
                        Some(wait) => {
                            let hopeless = m.is_hopeless(&c, &spec);
                            let answer = c.enqueue_job(spec.clone(), until(now + Duration::from_millis(wait)));
                            prop_assert_eq!(answer.is_err(), hopeless);
                            if let Ok(ticket) = answer {
                                m.waiting.insert(ticket, Waiting { spec, overtaken: 0 });
                            }
                        }
                        None => {
                            let fits = m.limits_allow(Model::used(&c, &spec.tenant), &spec) && m.pool_allows(&c, &spec);
                            match c.create_job(spec.clone()) {
                                Ok(actions) => {
                                    m.carry_out(&actions);
                                    m.came_in(&c, u64::MAX, &spec.name)?;
                                }
                                Err(why) => prop_assert!(!fits || why.to_string().contains("goes first"), "{}", why),
                            }
                        }
                    }
                }
                Event::End(i) => {
                    let names: Vec<String> = c.jobs().map(|j| j.spec.name.clone()).collect();
                    if let Some(name) = names.get(i % names.len().max(1)) {
                        let actions = c.delete_job(name).unwrap();
                        m.carry_out(&actions);
                    }
                }
                Event::Abort(i) => {
                    let tickets: Vec<u64> = m.waiting.keys().copied().collect();
                    if let Some(ticket) = tickets.get(i % tickets.len().max(1)) {
                        prop_assert!(c.leave_queue(*ticket, &m.waiting[ticket].spec.name));
                        m.waiting.remove(ticket);
                    }
                }
                Event::Tick(ms) => {
                    now += Duration::from_millis(ms);
                    let actions = c.tick(now);
                    m.carry_out(&actions);
                }
                Event::Limit(t, [jobs, rings, slots, memory], priority) => {
                    let (slots, memory) = (slots.map(|n| 32 * n), memory.map(|n| ONE * n));
                    m.limits.insert(tenant(t), Limits { priority, jobs, rings, slots, memory });
                    c.set_tenants(m.limits.clone());
                }
                Event::Pool(room) => {
                    let used = c.memory_used();
                    prop_assert_eq!(c.set_memory(room * ONE).is_err(), room * ONE < used);
                }
            }
            for admission in c.admit() {
                m.waiting.remove(&admission.ticket).expect("it waited, and is told once");
                m.carry_out(&admission.actions);
                m.came_in(&c, admission.ticket, &admission.job)?;
            }
            prop_assert!(c.admit().is_empty(), "once is enough");
            m.check(&c)?;
        }
        // All that are at work end, one after the other: then all that can ever be admitted have been.
        m.limits.values_mut().for_each(|l| *l = Limits::default());
        c.set_tenants(m.limits.clone());
        c.set_memory(20 * ONE.max(c.memory_used())).unwrap();
        loop {
            for admission in c.admit() {
                m.waiting.remove(&admission.ticket).unwrap();
                m.carry_out(&admission.actions);
            }
            let Some(name) = c.jobs().map(|j| j.spec.name.clone()).next() else { break };
            let actions = c.delete_job(&name).unwrap();
            m.carry_out(&actions);
        }
        prop_assert!(m.waiting.is_empty() && c.standings().is_empty() && m.rings.is_empty());
        prop_assert_eq!(c.memory_used(), 0);
    }

    /// Jobs keep coming, of all sizes, priorities and tenants, and the first one that waits has the least luck possible.
    #[test]
    fn younger_jobs_get_what_somebody_waits_for_only_so_often(
        size in 2u32..9,
        others in prop::collection::vec((0u8..3, 1u32..5, any::<bool>()), 200..201),
    ) {
        let mut c = controller(8);
        (0..8).for_each(|i| drop(c.create_job(spec(&format!("start{i}"), "b")).unwrap()));
        let unlucky = waits(&mut c, big("unlucky", "a", size));
        let (mut younger, mut done) = (0, false);
        for (n, (t, rings, wait)) in others.into_iter().enumerate() {
            let s = big(&format!("n{n}"), ["vip", "b", "vip"][usize::from(t)], rings);
            if wait {
                c.enqueue_job(s, Arrival::default()).unwrap();
            } else if c.create_job(s).is_ok() {
                younger += 1;
            }
            let first = c.jobs().map(|j| j.spec.name.clone()).next().unwrap();
            c.delete_job(&first).unwrap();
            for a in c.admit() {
                if a.ticket == unlucky {
                    done = true;
                } else if !done {
                    younger += 1;
                }
            }
            if done {
                break;
            }
        }
        prop_assert!(done && younger <= MOST, "{} younger jobs were admitted before it", younger);
    }
}
