//! Tenants: their limits and their use.

use std::collections::BTreeMap;
use std::ops::Add;

use netsum_common::abi::Messages;
use netsum_common::defaults;
use netsum_common::size::Size;

use super::pool::job_memory;
use super::{Controller, JobSpec, Refusal};

/// Limits of a tenant; `None`: only the pool limits it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    pub jobs: Option<u64>,
    /// Rings of all jobs.
    pub rings: Option<u64>,
    /// Slots of all rings.
    pub slots: Option<u64>,
    /// Bytes of all rings on the box.
    pub memory: Option<u64>,
}

/// Resources in use, or needed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Amount {
    pub jobs: u64,
    /// Rings of all jobs.
    pub rings: u64,
    /// Slots of all rings.
    pub slots: u64,
    /// Bytes of all rings on the box.
    pub memory: u64,
}

/// A limit that would be exceeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Excess {
    /// The limited resource.
    pub what: Resource,
    pub limit: u64,
    /// The amount in use.
    pub used: u64,
    /// The amount needed beyond that.
    pub needed: u64,
}

/// A limited resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resource {
    Jobs,
    Rings,
    Slots,
    /// Bytes.
    Memory,
}

impl Amount {
    /// Resources of a job with this many slots in each ring. A group without rings needs none.
    pub fn of(spec: &JobSpec, slots: u32) -> Self {
        Self {
            jobs: u64::from(spec.rings > 0),
            rings: spec.rings.into(),
            slots: u64::from(slots) * u64::from(spec.rings),
            memory: job_memory(spec, slots),
        }
    }
}

impl Add for Amount {
    type Output = Self;
    fn add(self, o: Self) -> Self {
        Self {
            jobs: self.jobs + o.jobs,
            rings: self.rings + o.rings,
            slots: self.slots + o.slots,
            memory: self.memory + o.memory,
        }
    }
}

/// A tenant's limits and use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TenantView {
    pub name: String,
    /// Its limits; `None` if it has jobs but is no longer in the configuration.
    pub limits: Option<Limits>,
    /// Resources of its jobs.
    pub used: Amount,
    /// Number of its jobs created since the daemon started.
    pub admitted: u64,
}

impl Controller {
    /// Changes tenants' limits. Existing jobs continue.
    pub fn set_tenants(&mut self, mut tenants: BTreeMap<String, Limits>) {
        tenants.entry(defaults::TENANT.to_owned()).or_default();
        self.tenants = tenants;
    }

    /// Every tenant that is configured or has jobs.
    pub fn tenants(&self) -> Vec<TenantView> {
        let of_jobs = self.jobs.values().map(|j| &j.spec.tenant);
        let mut names: Vec<&String> = self.tenants.keys().chain(of_jobs).collect();
        names.sort_unstable();
        names.dedup();
        let view = |name: &String| TenantView {
            name: name.clone(),
            limits: self.tenants.get(name).cloned(),
            used: self.used_by(name),
            admitted: self.admitted.get(name).copied().unwrap_or(0),
        };
        names.into_iter().map(view).collect()
    }

    fn used_by(&self, tenant: &str) -> Amount {
        let jobs = self.jobs.values().filter(|j| j.spec.tenant == tenant);
        jobs.fold(Amount::default(), |sum, j| sum + Amount::of(&j.spec, j.slots))
    }

    /// Checks that the tenant's limits and the pool have room for a job. The refusal names the
    /// limit, the use, and what would fit.
    pub(super) fn check_room(&self, spec: &JobSpec, slots: u32) -> Result<(), Refusal> {
        let (limits, used) = (self.tenants.get(&spec.tenant), self.used_by(&spec.tenant));
        let check = |slots| {
            let excess = limits.and_then(|limits| limits.exceeded(used, Amount::of(spec, slots)));
            match excess {
                Some(excess) => {
                    Err(Refusal::Exhausted(format!("tenant `{}`: {excess}", spec.tenant)))
                }
                None => self.pool.check_room(spec, slots),
            }
        };
        let Err(why) = check(slots) else { return Ok(()) };
        let fits = |window: &u32| {
            spec.slots_for(Messages(*window)).is_some_and(|slots| check(slots).is_ok())
        };
        Err(Refusal::Exhausted(match (1..spec.window.0).rev().find(fits) {
            Some(window) => format!("{why}; --window {window} would fit"),
            None if job_memory(spec, slots) > self.pool.free() => {
                format!("{why}; no --window would fit")
            }
            None => why.to_string(),
        }))
    }
}

impl Limits {
    fn each(&self, of: Amount) -> [(Resource, Option<u64>, u64); 4] {
        [
            (Resource::Jobs, self.jobs, of.jobs),
            (Resource::Rings, self.rings, of.rings),
            (Resource::Slots, self.slots, of.slots),
            (Resource::Memory, self.memory, of.memory),
        ]
    }

    /// The first limit that `needed` exceeds, given `used`.
    pub fn exceeded(&self, used: Amount, needed: Amount) -> Option<Excess> {
        self.each(used).into_iter().zip(self.each(needed)).find_map(
            |((what, limit, used), (_, _, needed))| {
                let limit = limit?;
                (used + needed > limit).then_some(Excess { what, limit, used, needed })
            },
        )
    }
}

impl std::fmt::Display for Excess {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let number = |n: u64| match self.what {
            Resource::Memory => Size(n).to_string(),
            _ => n.to_string(),
        };
        let what = match self.what {
            Resource::Jobs => "jobs",
            Resource::Rings => "rings",
            Resource::Slots => "slots",
            Resource::Memory => "memory",
        };
        let (limit, used, needed) = (number(self.limit), number(self.used), number(self.needed));
        write!(f, "{what} limit {limit}, {used} in use, {needed} needed")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_limit_that_is_exceeded_is_named_with_all_numbers() {
        let limits = Limits { jobs: Some(3), memory: Some(4096), ..Limits::default() };
        let used = Amount { jobs: 2, rings: 9, slots: 9, memory: 3072 };
        let one = Amount { jobs: 1, rings: 1, slots: 64, memory: 1024 };
        assert_eq!(limits.exceeded(used, one), None);
        let more = Amount { memory: 1025, ..one };
        let refusal = limits.exceeded(used, more).unwrap().to_string();
        assert_eq!(refusal, "memory limit 4.0 KiB, 3.0 KiB in use, 1.0 KiB needed");
        let refusal = limits.exceeded(used + one, more).unwrap().to_string();
        assert_eq!(refusal, "jobs limit 3, 3 in use, 1 needed");
        assert_eq!(Limits::default().exceeded(used, more), None);
    }
}
