//! Who of those that wait is admitted, and what keeps the others. A function of what is free, of who has what, and of the queue.
//!
//! **The rule.** Whoever fits is admitted, one after the other: a higher priority first, then the tenant with the smaller share
//! of what it may have, then who has waited longest. Who does not fit is passed by, so nothing lies idle that somebody could
//! use. But a job is *overtaken* when a younger one is admitted and takes something that it waits for: of the pool, or of its
//! own tenant's limit. After [`MOST`] times it is *due*: it comes before all that are not, whatever their priority, and if it
//! does not fit either, what it waits for is kept for it: nobody behind it gets anything of the pool, or nobody of its tenant.
//!
//! **Why nobody waits for ever**, as long as jobs end and limits stay. A job that is due is overtaken no more: where it fits it is
//! the first, but for older ones, and where it does not, younger ones get nothing that it waits for. So each is overtaken
//! [`MOST`] times at the most. Were a job never admitted, then from some time on nobody would overtake it. From then on no younger
//! job of its tenant is admitted, older ones come to an end, so its tenant's jobs end and its tenant's limit lets it in. From
//! then on it waits for the pool alone, so no younger job at all is admitted; the others end, the pool is empty, and in an empty
//! pool every job fits that was let into the queue.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use super::super::JobSpec;
use super::super::pool::{no_memory, no_rings};
use super::super::tenant::{Amount, Excess, Limits};

/// How often a job may be overtaken.
pub const MOST: u32 = 8;

/// A job that wants to be admitted.
#[derive(Clone, Copy, Debug)]
pub struct Candidate<'a> {
    /// Its ticket: who came first has the lower one.
    pub ticket: u64,
    /// What it wants.
    pub spec: &'a JobSpec,
    /// How often it has been overtaken.
    pub overtaken: u32,
}

/// What can be given, and who has what.
#[derive(Clone, Debug)]
pub struct Market<'a> {
    /// What the pool has in all: memory and rings.
    pub pool: Amount,
    /// What is free of that.
    pub free: Amount,
    /// All tenants with their limits.
    pub tenants: &'a BTreeMap<String, Limits>,
    /// What tenants have.
    pub used: BTreeMap<&'a str, Amount>,
}

/// What a job waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Obstacle {
    /// Nothing: it is about to be admitted.
    Nothing,
    /// Its tenant is not in the configuration any more.
    NoTenant,
    /// Its tenant's limit.
    Limit(Excess),
    /// Memory of the pool: what is needed.
    Memory(u64),
    /// Rings of the pool.
    Rings,
    /// The pool is kept for another job, which is due.
    PoolKept(String),
    /// What its tenant may have is kept for another job, which is due.
    LimitKept(String),
    /// Neither pool nor limit would do if all other jobs ended: they were made smaller.
    Never,
}

impl Obstacle {
    /// Whether it is no matter of the pool.
    pub(super) fn is_of_tenant(&self) -> bool {
        matches!(self, Self::NoTenant | Self::Limit(_) | Self::LimitKept(_) | Self::Never)
    }
}

/// What comes of it.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    /// Who is admitted, with which window, in this order.
    pub admitted: Vec<(u64, u32)>,
    /// Who waits on, in order: for what, and how often it has been overtaken by then.
    pub waiting: Vec<(u64, Obstacle, u32)>,
}

impl<'a> Market<'a> {
    fn used(&self, tenant: &str) -> Amount {
        self.used.get(tenant).copied().unwrap_or_default()
    }

    /// What a job takes with a window. `None` where no ring can have so many slots.
    pub(super) fn amount(spec: &JobSpec, window: u32) -> Option<Amount> {
        Some(Amount::of(spec, spec.slots_for(window)?))
    }

    /// What keeps a job with a window out, and may be gone some day.
    pub fn obstacle(&self, spec: &JobSpec, window: u32) -> Obstacle {
        let Some(limits) = self.tenants.get(&spec.tenant) else { return Obstacle::NoTenant };
        let Some(needed) = Self::amount(spec, window) else { return Obstacle::Never };
        let never = limits.exceeded(Amount::default(), needed).is_some();
        if never || needed.memory > self.pool.memory || needed.rings > self.pool.rings {
            return Obstacle::Never;
        }
        self.obstacle_now(spec, window)
    }

    /// What keeps a job with a window out at the moment.
    pub fn obstacle_now(&self, spec: &JobSpec, window: u32) -> Obstacle {
        let Some(limits) = self.tenants.get(&spec.tenant) else { return Obstacle::NoTenant };
        let Some(needed) = Self::amount(spec, window) else { return Obstacle::Never };
        if let Some(excess) = limits.exceeded(self.used(&spec.tenant), needed) {
            return Obstacle::Limit(excess);
        }
        if needed.memory > self.free.memory {
            return Obstacle::Memory(needed.memory);
        }
        if needed.rings > self.free.rings { Obstacle::Rings } else { Obstacle::Nothing }
    }

    pub(super) fn take(&mut self, spec: &'a JobSpec, amount: Amount) {
        self.free.memory -= amount.memory;
        self.free.rings -= amount.rings;
        let used = self.used.entry(&spec.tenant).or_default();
        *used = *used + amount;
    }

    pub(super) fn give_back(&mut self, spec: &'a JobSpec, amount: Amount) {
        self.free.memory += amount.memory;
        self.free.rings += amount.rings;
        let used = self.used.entry(&spec.tenant).or_default();
        *used = *used - amount;
    }

    /// The place of a candidate in the order: the lowest is first.
    pub(super) fn place(&self, c: &Candidate<'_>) -> (bool, Reverse<i32>, u64, u64) {
        let limits = self.tenants.get(&c.spec.tenant);
        let share = limits.map_or(u64::MAX, |l| l.share(self.used(&c.spec.tenant), self.pool));
        let due = c.overtaken >= MOST;
        let priority = limits.map_or(i32::MIN, |l| l.priority);
        if due { (false, Reverse(0), 0, c.ticket) } else { (true, Reverse(priority), share, c.ticket) }
    }

    /// The largest window that a job could have, of those up to `most`.
    pub fn largest_window(&self, spec: &JobSpec, most: u32) -> Option<u32> {
        (1..=most).rev().find(|&window| self.obstacle(spec, window) == Obstacle::Nothing)
    }

    /// Applies the rule.
    pub fn plan(mut self, queue: impl IntoIterator<Item = Candidate<'a>>) -> Plan {
        let mut left: Vec<Candidate<'a>> = queue.into_iter().collect();
        let mut admitted: Vec<(Candidate<'a>, u32)> = Vec::new();
        loop {
            left.sort_by_key(|c| self.place(c));
            let obstacles = self.obstacles(&left);
            let Some(first) = obstacles.iter().position(|o| *o == Obstacle::Nothing) else {
                self.grow(&mut admitted, &left, &obstacles);
                let waiting = left.iter().zip(obstacles).map(|(c, o)| (c.ticket, o, c.overtaken)).collect();
                return Plan { admitted: admitted.iter().map(|(c, w)| (c.ticket, *w)).collect(), waiting };
            };
            let chosen = left.remove(first);
            let window = chosen.spec.least_window();
            if let Some(amount) = Self::amount(chosen.spec, window) {
                self.take(chosen.spec, amount);
            }
            for c in left.iter_mut().filter(|c| c.ticket < chosen.ticket) {
                let obstacle = self.obstacle(c.spec, c.spec.least_window());
                let same = c.spec.tenant == chosen.spec.tenant;
                if obstacle != Obstacle::Never && (same || !obstacle.is_of_tenant()) {
                    c.overtaken += 1;
                }
            }
            admitted.push((chosen, window));
        }
    }

    /// What keeps each, in order; what is kept for one that is due is closed to those behind it.
    fn obstacles(&self, order: &[Candidate<'_>]) -> Vec<Obstacle> {
        let mut pool_for: Option<&str> = None;
        let mut limit_for: BTreeMap<&str, &str> = BTreeMap::new();
        let of = |c: &Candidate<'_>| self.obstacle(c.spec, c.spec.least_window());
        let mut all = Vec::new();
        for c in order {
            let own = of(c);
            let obstacle = match (pool_for, limit_for.get(c.spec.tenant.as_str())) {
                _ if matches!(own, Obstacle::Never | Obstacle::NoTenant | Obstacle::Limit(_)) => own,
                (_, Some(&due)) => Obstacle::LimitKept(due.to_owned()),
                (Some(due), None) => Obstacle::PoolKept(due.to_owned()),
                (None, None) => own,
            };
            if c.overtaken >= MOST {
                match &obstacle {
                    Obstacle::Limit(_) => drop(limit_for.entry(&c.spec.tenant).or_insert(&c.spec.name)),
                    Obstacle::Memory(_) | Obstacle::Rings => drop(pool_for.get_or_insert(&c.spec.name)),
                    _ => {}
                }
            }
            all.push(obstacle);
        }
        all
    }

    /// Widens the windows of those that left the choice, in order, by what nobody waits for.
    fn grow(
        &mut self,
        admitted: &mut [(Candidate<'a>, u32)],
        left: &[Candidate<'_>],
        obstacles: &[Obstacle],
    ) {
        if obstacles.iter().any(|o| !o.is_of_tenant()) {
            return;
        }
        for (c, window) in admitted {
            if left.iter().any(|l| l.spec.tenant == c.spec.tenant) {
                continue;
            }
            let Some(before) = Self::amount(c.spec, *window) else { continue };
            self.give_back(c.spec, before);
            *window = self.largest_window(c.spec, c.spec.window).map_or(*window, |w| w.max(*window));
            if let Some(now) = Self::amount(c.spec, *window) {
                self.take(c.spec, now);
            }
        }
    }

    /// What a job waits for, in words.
    pub fn in_words(&self, spec: &JobSpec, obstacle: &Obstacle) -> String {
        let tenant = &spec.tenant;
        match obstacle {
            Obstacle::Nothing => "nothing any more".into(),
            Obstacle::NoTenant => format!("tenant `{tenant}` is not in the configuration any more"),
            Obstacle::Never => {
                "more than its tenant's limits or the pool would have, were it alone; they were lowered"
                    .into()
            }
            Obstacle::Limit(excess) => format!("tenant `{tenant}`: {excess}"),
            Obstacle::LimitKept(due) => {
                format!("tenant `{tenant}`: job `{due}` goes first, it has been overtaken {MOST} times")
            }
            Obstacle::PoolKept(due) => {
                format!("the pool: job `{due}` goes first, it has been overtaken {MOST} times")
            }
            Obstacle::Memory(_) | Obstacle::Rings => self.refusal_of_pool(spec, spec.least_window()),
        }
    }

    /// Why the pool does not have what a job needs.
    fn refusal_of_pool(&self, spec: &JobSpec, window: u32) -> String {
        let slots = spec.slots_for(window).unwrap_or(0);
        let needed = Amount::of(spec, slots);
        if needed.memory > self.free.memory {
            no_memory(spec, slots, self.free.memory, self.pool.memory).to_string()
        } else {
            no_rings(spec, self.free.rings).to_string()
        }
    }
}
