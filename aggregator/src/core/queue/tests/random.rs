//! Random sequences of all that can happen, against a naive model.

use std::collections::BTreeMap;
use std::time::Duration;

use netsum_common::abi::ring_memory;
use proptest::prelude::*;

use super::super::super::pool::job_memory;
use super::super::plan::MOST;
use super::*;

#[derive(Clone, Debug)]
enum Event {
    /// Create or enqueue: number of the tenant, rings, least and most window, time to wait if it waits.
    Come(u8, u32, u32, u32, Option<u64>),
    /// One of those that are at work ends.
    End(usize),
    /// One of those that wait goes away.
    Abort(usize),
    Tick(u64),
    /// Ranks join one of those without, or all those at work leave.
    Work(usize),
    Rest(usize),
    /// Those of all jobs that are asked to connect anew do so.
    Renew,
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
        6 => any::<usize>().prop_map(Event::Work),
        2 => any::<usize>().prop_map(Event::Rest),
        3 => Just(Event::Renew),
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
    /// Memory of each in the data plane.
    rings: BTreeMap<u32, u64>,
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
                Action::CreateRing(r) => {
                    assert!(self.rings.insert(r.id, ring_memory(r.slots, r.mtu, r.ranks)).is_none());
                }
                Action::DeleteRing { ring, .. } => assert!(self.rings.remove(ring).is_some()),
                Action::ResetCounters(_)
                | Action::AddFlow(_)
                | Action::ActivateRing(..)
                | Action::ForgetEnded(_)
                | Action::Reply { .. } => {}
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
        prop_assert_eq!(memory, self.rings.values().sum::<u64>());
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
            let narrower = c.jobs().any(|j| j.wished.is_some_and(|w| w < j.spec.window));
            let would_fit = self.would_fit(c, &w.spec);
            prop_assert!(!would_fit || kept() || narrower, "nobody makes room for {}", w.spec.name);
        }
        self.check_windows(c)
    }

    /// Whether it would fit, had all whose windows may change the least.
    fn would_fit(&self, c: &Controller, spec: &JobSpec) -> bool {
        let least = |j: &Job| if j.is_elastic() { abi_slots(j.spec.least_window()) } else { j.slots };
        let used = |job: &Job| Amount::of(&job.spec, least(job));
        let of_tenant = c.jobs().filter(|j| j.spec.tenant == spec.tenant);
        let theirs = of_tenant.fold(Amount::default(), |sum, j| sum + used(j));
        let memory: u64 = c.jobs().map(|j| used(j).memory).sum();
        let needed = job_memory(spec, abi_slots(spec.least_window()));
        self.limits_allow(theirs, spec) && memory + needed <= c.memory()
    }

    fn check_windows(&self, c: &Controller) -> Result<(), TestCaseError> {
        let wider = |j: &Job| j.wished.is_some_and(|w| w > j.spec.window);
        // What a job will take, if that is more than it takes now.
        let slots = |j: &Job| abi_slots(j.wished.unwrap_or(0).max(j.spec.window));
        for job in c.jobs() {
            let Some(wished) = job.wished else { continue };
            let range = job.spec.window_range.unwrap();
            prop_assert!(wished != job.spec.window && (range.least..=range.most).contains(&wished));
            prop_assert!(job.is_elastic() && job.epoch.is_some(), "nobody keeps it from having it now");
        }
        let memory: u64 = c.jobs().map(|j| job_memory(&j.spec, slots(j))).sum();
        prop_assert!(memory <= c.memory(), "more is promised than there is");
        if c.jobs().any(wider) {
            prop_assert!(c.jobs().all(|j| j.wished.is_none() || wider(j)), "from one to the other");
        }
        for (tenant, limits) in &self.limits {
            let of_tenant: Vec<&Job> = c.jobs().filter(|j| j.spec.tenant == *tenant).collect();
            let all = of_tenant.iter().fold(Amount::default(), |sum, j| sum + Amount::of(&j.spec, slots(j)));
            let over = limits.exceeded(Amount::default(), all).is_some();
            prop_assert!(!over || !of_tenant.iter().any(|j| wider(j)), "{tenant} is promised too much");
            // Nothing that nobody wants lies idle.
            for job in of_tenant.iter().filter(|j| j.is_elastic() && self.waiting.is_empty()) {
                let next = (slots(job) / 8..=job.spec.window_range.unwrap().most)
                    .find(|&w| abi_slots(w) > slots(job));
                let Some(next) = next else { continue };
                let more = Amount::of(&job.spec, abi_slots(next)) - Amount::of(&job.spec, slots(job));
                let fits = memory + more.memory <= c.memory()
                    && limits.exceeded(Amount::default(), all + more).is_none();
                prop_assert!(!fits, "{} could have {next}", job.spec.name);
            }
        }
        Ok(())
    }

    /// Does what is to be done after each change, as the edge does.
    fn settle(&mut self, c: &mut Controller) -> Result<(), TestCaseError> {
        for round in 0.. {
            prop_assert!(round < 100, "no end");
            let admissions = c.admit();
            let admitted = !admissions.is_empty();
            for admission in admissions {
                self.waiting.remove(&admission.ticket).expect("it waited, and is told once");
                self.carry_out(&admission.actions);
                self.came_in(c, admission.ticket, &admission.job)?;
            }
            prop_assert!(c.admit().is_empty(), "once is enough");
            let changes = if admitted { continue } else { c.fit_windows() };
            if changes.is_empty() {
                break;
            }
            changes.iter().for_each(|(_, actions)| self.carry_out(actions));
        }
        self.check(c)
    }

    /// Ranks of all that are asked to connect anew do so; whether there were any.
    fn renew(&mut self, c: &mut Controller) -> Result<bool, TestCaseError> {
        let asked = |j: &&Job| j.wished.is_some();
        let names: Vec<String> = c.jobs().filter(asked).map(|j| j.spec.name.clone()).collect();
        for name in &names {
            // One of those before may have changed what this one is to have.
            self.carry_out(&rest(c, name));
            self.settle(c)?;
            self.carry_out(&work(c, name));
            self.settle(c)?;
        }
        Ok(!names.is_empty())
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
        let mut m = Model { limits: all.into(), waiting: BTreeMap::new(), rings: BTreeMap::new() };
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
                Event::Work(i) | Event::Rest(i) => {
                    let works = matches!(event, Event::Rest(_));
                    let jobs = c.jobs().filter(|j| j.epoch.is_some() == works);
                    let names: Vec<String> = jobs.map(|j| j.spec.name.clone()).collect();
                    if let Some(name) = names.get(i % names.len().max(1)) {
                        let actions = if works { rest(&mut c, name) } else { work(&mut c, name) };
                        m.carry_out(&actions);
                    }
                }
                Event::Renew => drop(m.renew(&mut c)?),
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
            m.settle(&mut c)?;
        }
        // Windows come to rest.
        for round in 0.. {
            prop_assert!(round < 100, "no end of changes");
            if !m.renew(&mut c)? {
                break;
            }
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
            for (_, actions) in c.fit_windows() {
                m.carry_out(&actions);
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
