//! Admission: jobs that are refused, or wait until there is room for them; see [`plan`] for whose turn it is, and [`windows`] for
//! how much of it those at work have.

pub mod again;
pub mod plan;
#[cfg(test)]
mod tests;
mod windows;

use std::collections::BTreeMap;
use std::time::Instant;

use super::job::JobSpec;
use super::tenant::{Amount, Limits, WHOLE};
use super::{Action, Controller, Job, Refusal};
use again::Handed;
use plan::{Candidate, MOST, Market, Obstacle, Plan};

/// Jobs that may wait at once.
pub const MOST_WAITING: usize = 1024;

/// Since when somebody waits, and for how long it will. The clock goes forward only, and goes on from one daemon to the next.
#[derive(Clone, Copy, Debug, Default)]
pub struct Arrival {
    /// Nanoseconds of that clock.
    pub now: u64,
    /// When it has begun to wait; 0 where that is now.
    pub since: u64,
    /// How often it has been overtaken by now.
    pub overtaken: u32,
    /// When it gives up; never when `None`.
    pub deadline: Option<Instant>,
}

/// A job that waits.
#[derive(Debug)]
pub struct Queued {
    /// Its ticket. Who waits for longer has a lower one.
    pub ticket: u64,
    /// Since when it waits.
    pub since: u64,
    /// What it wants.
    pub spec: JobSpec,
    /// When it gives up; never when `None`.
    deadline: Option<Instant>,
    /// Younger jobs that got what it waits for.
    overtaken: u32,
}

/// How a job that waits stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Standing {
    /// Its place, from 1.
    pub position: u32,
    /// How many wait.
    pub of: u32,
    /// What it waits for.
    pub waits_for: String,
    /// How many younger ones have got what it waits for.
    pub overtaken: u32,
}

/// A job that has left the queue for the pool.
#[derive(Debug)]
pub struct Admission {
    /// Its ticket.
    pub ticket: u64,
    /// Its name.
    pub job: String,
    /// What the edge is to do for it.
    pub actions: Vec<Action>,
}

/// A tenant, and how it stands.
#[derive(Clone, Debug, PartialEq)]
pub struct TenantView {
    /// Its name.
    pub name: String,
    /// Its limits; `None` where it is not in the configuration any more, but has jobs.
    pub limits: Option<Limits>,
    /// What its jobs take.
    pub used: Amount,
    /// Its jobs that wait.
    pub waiting: u32,
    /// Since when the one waits that has waited for longest.
    pub waits_since: Option<u64>,
    /// Its jobs that have been created, since the daemon began.
    pub admitted: u64,
    /// How much of what it may have it has, of the resource of which that is the most; more than 1 where a limit was lowered.
    pub share: f64,
}

impl Controller {
    /// Changes who may have how much. No job ends by that.
    pub fn set_tenants(&mut self, mut tenants: BTreeMap<String, Limits>) {
        tenants.entry(super::tenant::DEFAULT.to_owned()).or_default();
        self.tenants = tenants;
    }

    /// Every tenant that is configured, or has jobs.
    pub fn tenants(&self) -> Vec<TenantView> {
        let market = self.market();
        let known = self.tenants.keys().map(String::as_str);
        let mut names: Vec<&str> = known.chain(market.used.keys().copied()).collect();
        names.extend(self.queue.iter().map(|q| q.spec.tenant.as_str()));
        names.sort_unstable();
        names.dedup();
        let view = |name: &str| {
            let used = market.used.get(name).copied().unwrap_or_default();
            let limits = self.tenants.get(name);
            let share = limits.cloned().unwrap_or_default().share(used, market.pool);
            let waiting = || self.queue.iter().filter(|q| q.spec.tenant == name);
            TenantView {
                name: name.to_owned(),
                limits: limits.cloned(),
                used,
                waiting: waiting().count() as u32,
                waits_since: waiting().map(|q| q.since).min(),
                admitted: self.admitted.get(name).copied().unwrap_or(0),
                share: share as f64 / WHOLE as f64,
            }
        };
        names.into_iter().map(view).collect()
    }

    /// Has a job wait for its turn; its ticket. [`admit`](Self::admit) tells when that has come.
    pub fn enqueue_job(&mut self, spec: JobSpec, arrival: Arrival) -> Result<u64, Refusal> {
        self.check_new(&spec)?;
        let market = self.market();
        if market.obstacle(&spec, spec.least_window()) == Obstacle::Never {
            let refusal = self.refusal(&market, &spec);
            return Err(Refusal::Exhausted(format!(
                "{refusal}; nor would it fit if all other jobs ended, so there is no use in waiting"
            )));
        }
        if self.queue.len() >= MOST_WAITING {
            return Err(Refusal::Exhausted(format!("{MOST_WAITING} jobs wait already")));
        }
        let Arrival { now, since, overtaken, deadline } = arrival;
        // Nobody waits since tomorrow.
        let since = if since == 0 { now } else { since.min(now) };
        self.note_return(since);
        let ticket = self.ticket(since, arrival.since == 0);
        self.queue.push(Queued { ticket, since, spec, deadline, overtaken: overtaken.min(MOST) });
        Ok(ticket)
    }

    /// A ticket that says since when somebody waits; who comes only now is younger than all that came before.
    fn ticket(&mut self, since: u64, comes_now: bool) -> u64 {
        let mut ticket = if comes_now { since.max(self.next_ticket) } else { since };
        while self.queue.iter().any(|q| q.ticket == ticket) {
            ticket += 1;
        }
        self.next_ticket = self.next_ticket.max(ticket + 1);
        ticket
    }

    /// Admits whose turn it is. To be called after everything that may have made room, before anybody else asks.
    pub fn admit(&mut self) -> Vec<Admission> {
        if self.queue.is_empty() || self.is_waiting_for_others() {
            return Vec::new();
        }
        let plan = self.plan(None);
        self.note_overtaken(&plan);
        let mut admissions = Vec::new();
        for (ticket, window) in plan.admitted {
            let Some(i) = self.queue.iter().position(|q| q.ticket == ticket) else { continue };
            let Queued { spec, since, .. } = self.queue.remove(i);
            let job = spec.name.clone();
            match self.insert_job(JobSpec { window, ..spec }, ticket) {
                Ok(actions) => {
                    self.handed.insert(job.clone(), Handed::new(since));
                    admissions.push(Admission { ticket, job, actions });
                }
                Err(why) => {
                    let actions = vec![Action::Dequeued { ticket, why }];
                    admissions.push(Admission { ticket, job, actions });
                }
            }
        }
        admissions
    }

    /// Creates a job at once, or refuses it: who waits goes first.
    pub(super) fn admit_at_once(&mut self, spec: JobSpec) -> Result<Vec<Action>, Refusal> {
        // The youngest of all.
        let ticket = u64::MAX;
        let plan = self.plan(Some(Candidate { ticket, spec: &spec, overtaken: 0 }));
        let Some(&(_, window)) = plan.admitted.iter().find(|(t, _)| *t == ticket) else {
            let obstacle = plan.waiting.into_iter().find(|(t, ..)| *t == ticket).map(|(_, o, _)| o);
            let market = self.market();
            return Err(match obstacle {
                Some(kept @ (Obstacle::PoolKept(_) | Obstacle::LimitKept(_))) => {
                    let why = market.in_words(&spec, &kept);
                    Refusal::Exhausted(format!("not now: {why}; --wait waits for its turn"))
                }
                _ => self.refusal(&market, &spec),
            });
        };
        self.note_overtaken(&plan);
        let ticket = self.ticket(0, true);
        self.insert_job(JobSpec { window, ..spec }, ticket)
    }

    /// Decides which windows the jobs at work are to have; those without ranks get them at once. To be called when
    /// [`admit`](Self::admit) has admitted everybody that it can, and to be followed by it where there are actions, each with its job.
    pub fn fit_windows(&mut self) -> Vec<(String, Vec<Action>)> {
        if self.is_waiting_for_others() {
            return Vec::new();
        }
        let elastic: Vec<_> = self.elastic().collect();
        let queue: Vec<Candidate<'_>> = self.candidates().collect();
        let mut windows = self.market().windows(&elastic, &queue).into_iter();
        let mut changes = Vec::new();
        for job in self.jobs.values_mut() {
            let window = if job.is_elastic() { windows.next() } else { None };
            job.wished = window.filter(|window| *window != job.spec.window);
            // There is room now, or after somebody has become narrower: then this is asked again.
            if job.epoch.is_none() && job.take_wished(&mut self.pool) {
                changes.push((job.spec.name.clone(), job.restart()));
            }
        }
        changes
    }

    /// Takes a job out of the queue.
    pub fn leave_queue(&mut self, ticket: u64, name: &str) -> bool {
        let before = self.queue.len();
        self.queue.retain(|q| q.ticket != ticket || q.spec.name != name);
        self.queue.len() < before
    }

    /// Takes a job out of the queue, because somebody else says so.
    pub(super) fn remove_queued(&mut self, name: &str) -> Option<Action> {
        let i = self.queue.iter().position(|q| q.spec.name == name)?;
        let ticket = self.queue.remove(i).ticket;
        let why = Refusal::NotNow(format!("job `{name}` was taken out of the queue"));
        Some(Action::Dequeued { ticket, why })
    }

    /// Takes out those whose time is over.
    pub(super) fn late_in_queue(&mut self, now: Instant) -> Vec<Action> {
        let is_late = |q: &Queued| q.deadline.is_some_and(|d| d <= now);
        if !self.queue.iter().any(is_late) {
            return Vec::new();
        }
        let standings = self.standings();
        let late = self.queue.iter().filter(|q| is_late(q)).map(|q| {
            let standing = standings.iter().find(|(queued, _)| queued.ticket == q.ticket);
            let why = standing.map_or(String::new(), |(_, s)| {
                format!(
                    "job `{}` waited in vain, at last in place {} of {}: {}",
                    q.spec.name, s.position, s.of, s.waits_for
                )
            });
            Action::Dequeued { ticket: q.ticket, why: Refusal::Late(why) }
        });
        let late: Vec<Action> = late.collect();
        self.queue.retain(|q| !is_late(q));
        late
    }

    /// Those that wait, in the order of their turns.
    pub fn standings(&self) -> Vec<(&Queued, Standing)> {
        if self.queue.is_empty() {
            return Vec::new();
        }
        let (plan, market, of) = (self.plan(None), self.market(), self.queue.len() as u32);
        let admitted = plan.admitted.iter().map(|&(ticket, _)| (ticket, Obstacle::Nothing));
        let order = admitted.chain(plan.waiting.into_iter().map(|(ticket, obstacle, _)| (ticket, obstacle)));
        let standing = |(i, (ticket, obstacle)): (usize, (u64, Obstacle))| {
            let queued = self.queue.iter().find(|q| q.ticket == ticket)?;
            let waits_for = match obstacle {
                Obstacle::Nothing if self.is_waiting_for_others() => {
                    "others to come back that waited with the daemon that was killed".into()
                }
                obstacle => market.in_words(&queued.spec, &obstacle),
            };
            let overtaken = queued.overtaken;
            Some((queued, Standing { position: i as u32 + 1, of, waits_for, overtaken }))
        };
        order.enumerate().filter_map(standing).collect()
    }

    /// Whether a job of this name waits.
    pub fn is_queued(&self, name: &str) -> bool {
        self.queue.iter().any(|q| q.spec.name == name)
    }

    pub(super) fn queued(&self) -> impl Iterator<Item = &JobSpec> {
        self.queue.iter().map(|q| &q.spec)
    }

    fn candidates(&self) -> impl Iterator<Item = Candidate<'_>> {
        self.queue.iter().map(|q| Candidate { ticket: q.ticket, spec: &q.spec, overtaken: q.overtaken })
    }

    fn plan(&self, one_more: Option<Candidate<'_>>) -> Plan {
        self.market().plan(self.candidates().chain(one_more))
    }

    fn note_overtaken(&mut self, plan: &Plan) {
        for (ticket, _, overtaken) in &plan.waiting {
            if let Some(q) = self.queue.iter_mut().find(|q| q.ticket == *ticket) {
                q.overtaken = *overtaken;
            }
        }
    }

    fn elastic(&self) -> impl Iterator<Item = (u64, &JobSpec)> {
        self.jobs.values().filter(|j| j.is_elastic()).map(|j| (j.ticket, &j.spec))
    }

    /// Whether jobs at work would be asked to do with less, were it to wait.
    fn would_make_room(&self, market: &Market<'_>, spec: &JobSpec) -> bool {
        let elastic: Vec<_> = self.elastic().collect();
        let queue: Vec<_> =
            self.candidates().chain([Candidate { ticket: u64::MAX, spec, overtaken: 0 }]).collect();
        let windows = market.windows(&elastic, &queue);
        elastic.iter().zip(windows).any(|((_, spec), window)| window < spec.window)
    }

    fn market(&self) -> Market<'_> {
        let mut used: BTreeMap<&str, Amount> = BTreeMap::new();
        for Job { spec, slots, .. } in self.jobs.values() {
            let of_tenant = used.entry(&spec.tenant).or_default();
            *of_tenant = *of_tenant + Amount::of(spec, *slots);
        }
        Market { pool: self.pool.whole(), free: self.pool.free(), tenants: &self.tenants, used }
    }

    /// Why a job is refused: the limit, what is in use, and what would fit.
    fn refusal(&self, market: &Market<'_>, spec: &JobSpec) -> Refusal {
        let least = spec.least_window();
        let obstacle = market.obstacle_now(spec, least);
        let would_fit = match market.largest_window(spec, least.saturating_sub(1)) {
            _ if self.would_make_room(market, spec) => {
                "; --wait has others make room, whose windows may be less".into()
            }
            Some(window) => format!("; --window {window} would fit"),
            None if matches!(obstacle, Obstacle::Memory(_)) => "; no --window would fit".into(),
            None => String::new(),
        };
        Refusal::Exhausted(market.in_words(spec, &obstacle) + &would_fit)
    }
}
