//! Tenants: who may have how much, who has how much, and whose turn it is.

use std::ops::{Add, Sub};

use super::JobSpec;
use super::pool::job_memory;
use crate::size::Size;

/// The tenant of jobs that name none.
pub const DEFAULT: &str = "default";

/// A part of [`Limits::share`]: this many are the whole.
pub const WHOLE: u64 = 1_000_000;

/// What a tenant may have; what is `None` is bounded by the pool alone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Who has a higher one goes first.
    pub priority: i32,
    /// Jobs.
    pub jobs: Option<u64>,
    /// Rings of all jobs.
    pub rings: Option<u64>,
    /// Slots of all rings.
    pub slots: Option<u64>,
    /// Bytes of all rings on the box.
    pub memory: Option<u64>,
}

/// What somebody has, or wants.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Amount {
    /// Jobs.
    pub jobs: u64,
    /// Rings of all jobs.
    pub rings: u64,
    /// Slots of all rings.
    pub slots: u64,
    /// Bytes of all rings on the box.
    pub memory: u64,
}

/// A limit that somebody would exceed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Excess {
    /// What is limited.
    pub what: Resource,
    /// The limit.
    pub limit: u64,
    /// What is in use.
    pub used: u64,
    /// What is needed beyond that.
    pub needed: u64,
}

/// What is limited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resource {
    /// Jobs.
    Jobs,
    /// Rings.
    Rings,
    /// Slots.
    Slots,
    /// Bytes.
    Memory,
}

impl Amount {
    /// What a job takes whose rings have so many slots each.
    pub fn of(spec: &JobSpec, slots: u32) -> Self {
        Self {
            jobs: 1,
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

impl Sub for Amount {
    type Output = Self;
    fn sub(self, o: Self) -> Self {
        Self {
            jobs: self.jobs - o.jobs,
            rings: self.rings - o.rings,
            slots: self.slots - o.slots,
            memory: self.memory - o.memory,
        }
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

    /// The first limit that does not let somebody who has `used` have `needed` too.
    pub fn exceeded(&self, used: Amount, needed: Amount) -> Option<Excess> {
        self.each(used).into_iter().zip(self.each(needed)).find_map(
            |((what, limit, used), (_, _, needed))| {
                let limit = limit?;
                (used + needed > limit).then_some(Excess { what, limit, used, needed })
            },
        )
    }

    /// How much of what it may have a tenant has, in millionths: of the resource of which that is the most. Without a limit, or
    /// with one above what there is, that is a part of the pool, which has no number of jobs or slots.
    pub fn share(&self, used: Amount, pool: Amount) -> u64 {
        let part = |(what, limit, used): (Resource, Option<u64>, u64)| {
            let whole = match what {
                Resource::Jobs | Resource::Slots => limit?,
                Resource::Rings => limit.map_or(pool.rings, |l| l.min(pool.rings)),
                Resource::Memory => limit.map_or(pool.memory, |l| l.min(pool.memory)),
            };
            Some(match (used, whole) {
                (0, _) => 0,
                // More than nothing of nothing: a limit that was lowered.
                (_, 0) => u64::from(u32::MAX) * WHOLE,
                (used, whole) => (u128::from(used) * u128::from(WHOLE) / u128::from(whole)) as u64,
            })
        };
        self.each(used).into_iter().filter_map(part).max().unwrap_or(0)
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

    const POOL: Amount = Amount { jobs: 0, rings: 255, slots: 0, memory: 1000 };

    #[test]
    fn the_first_limit_that_is_exceeded_is_named_with_all_numbers() {
        let limits = Limits { jobs: Some(3), memory: Some(4096), ..Limits::default() };
        let used = Amount { jobs: 2, rings: 9, slots: 9, memory: 3072 };
        let one = Amount { jobs: 1, rings: 1, slots: 64, memory: 1024 };
        assert_eq!(limits.exceeded(used, one), None);
        let more = Amount { memory: 1025, ..one };
        let said = limits.exceeded(used, more).unwrap().to_string();
        assert_eq!(said, "memory limit 4.0 KiB, 3.0 KiB in use, 1.0 KiB needed");
        let said = limits.exceeded(used + one, more).unwrap().to_string();
        assert_eq!(said, "jobs limit 3, 3 in use, 1 needed");
        assert_eq!(Limits::default().exceeded(used, more), None);
    }

    #[test]
    fn a_share_is_that_of_the_limit_or_of_the_pool_whichever_is_less() {
        let used = Amount { jobs: 1, rings: 51, slots: 10, memory: 100 };
        let share = |limits: Limits| limits.share(used, POOL);
        assert_eq!(share(Limits::default()), 200_000, "51 of 255 rings");
        assert_eq!(share(Limits { memory: Some(200), ..Limits::default() }), 500_000);
        assert_eq!(share(Limits { memory: Some(1 << 40), ..Limits::default() }), 200_000);
        assert_eq!(share(Limits { slots: Some(10), ..Limits::default() }), 1_000_000);
        assert_eq!(share(Limits { jobs: Some(0), ..Limits::default() }), u64::from(u32::MAX) * WHOLE);
        assert_eq!(Limits { jobs: Some(0), ..Limits::default() }.share(Amount::default(), POOL), 0);
    }
}
