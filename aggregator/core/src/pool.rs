//! The box's resources: memory, ring numbers, CPUs.

use netsum_common::abi::{MAX_RINGS, RingMemory, RingNumber};

use super::{JobSpec, Refusal};
use crate::plane::RingSpec;
use netsum_common::size::Size;

/// The free resources.
#[derive(Debug)]
pub struct Pool {
    total: u64,
    used: u64,
    /// Bytes that the machine has left, as far as known.
    available: u64,
    /// Ring numbers in use, by number.
    rings: [bool; MAX_RINGS as usize],
    /// Rings on each CPU.
    load: Vec<u32>,
}

/// Bytes that a job's rings take on the box.
pub fn job_memory(spec: &JobSpec, slots: u32) -> u64 {
    ring_memory(spec, slots).bytes() * u64::from(spec.rings)
}

/// The same as text.
fn memory_in_words(spec: &JobSpec, slots: u32) -> String {
    let (rings, memory) = (spec.rings, Size(job_memory(spec, slots)));
    format!("{rings} rings x {} = {memory}", ring_memory(spec, slots))
}

fn ring_memory(spec: &JobSpec, slots: u32) -> RingMemory {
    RingMemory { slots, sum_bytes: spec.sum_bytes(), members: spec.max_members() }
}

impl Pool {
    /// A pool with everything free.
    pub fn new(total: u64, cpus: u32) -> Self {
        let load = vec![0; cpus.max(1) as usize];
        Self { total, used: 0, available: u64::MAX, rings: [false; MAX_RINGS as usize], load }
    }

    /// CPUs that rings are spread over.
    pub fn cpus(&self) -> usize {
        self.load.len()
    }

    /// Total bytes.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Changes the total bytes.
    pub fn set_total(&mut self, total: u64) -> Result<(), Refusal> {
        if total < self.used {
            let (total, used) = (Size(total), Size(self.used));
            return Err(Refusal::Exhausted(format!(
                "pool.memory = {total}: the jobs take {used} already"
            )));
        }
        self.total = total;
        Ok(())
    }

    /// Records the bytes that the machine has left.
    pub fn set_available(&mut self, available: u64) {
        self.available = available;
    }

    /// Bytes in use.
    pub fn used(&self) -> u64 {
        self.used
    }

    /// Bytes that a job may take.
    pub(super) fn free(&self) -> u64 {
        (self.total - self.used).min(self.available)
    }

    /// Checks that the resources for a job are free.
    pub(super) fn check_room(&self, spec: &JobSpec, slots: u32) -> Result<(), Refusal> {
        if job_memory(spec, slots) > self.free() {
            let (free, total) = (Size(self.total - self.used), Size(self.total));
            let machine = if self.available < free.0 {
                format!(", but the machine has {} left for rings", Size(self.available))
            } else {
                String::new()
            };
            return Err(Refusal::Exhausted(format!(
                "not enough memory for slots: {}; {free} of {total} are free{machine}; a smaller \
                 --window, --message-size or --rings needs less",
                memory_in_words(spec, slots)
            )));
        }
        let free = self.rings[1..].iter().filter(|taken| !**taken).count();
        if free < spec.rings as usize {
            let message =
                format!("--rings {}: {free} of {} rings are free", spec.rings, MAX_RINGS - 1);
            return Err(Refusal::Exhausted(message));
        }
        Ok(())
    }

    /// Takes the resources for a job.
    pub fn reserve(&mut self, spec: &JobSpec, slots: u32) -> Result<Vec<RingSpec>, Refusal> {
        self.check_room(spec, slots)?;
        let free: Vec<u32> =
            (1..MAX_RINGS).filter(|&i| !self.rings[i as usize]).take(spec.rings as usize).collect();
        self.used += job_memory(spec, slots);
        self.available = self.available.saturating_sub(job_memory(spec, slots));
        let rings = free.into_iter().map(|id| {
            self.rings[id as usize] = true;
            let cpu = (0..self.load.len()).min_by_key(|&c| self.load[c]).unwrap_or(0);
            self.load[cpu] += 1;
            let config = spec.ring_config(spec.mtu, slots, spec.in_order.unwrap_or(true));
            RingSpec { id: RingNumber(id), cpu: cpu as u32, config }
        });
        Ok(rings.collect())
    }

    /// Takes the resources that a job had under an earlier daemon. Its rings may get other CPUs if
    /// there are fewer now.
    pub fn reserve_again(
        &mut self,
        spec: &JobSpec,
        slots: u32,
        rings: &mut [RingSpec],
    ) -> Result<(), Refusal> {
        let needed = job_memory(spec, slots);
        if needed > self.total - self.used {
            return Err(Refusal::Exhausted(format!(
                "{} no longer fit into pool.memory = {}",
                memory_in_words(spec, slots),
                Size(self.total)
            )));
        }
        for ring in rings.iter() {
            if self.rings.get(ring.id.0 as usize).is_none_or(|taken| *taken)
                || ring.id == RingNumber::NONE
            {
                return Err(Refusal::Exhausted(format!("ring number {} is not free", ring.id)));
            }
        }
        self.used += needed;
        for ring in rings {
            self.rings[ring.id.0 as usize] = true;
            ring.cpu %= self.load.len() as u32;
            self.load[ring.cpu as usize] += 1;
        }
        Ok(())
    }

    /// Returns the resources of a job.
    pub fn release(&mut self, spec: &JobSpec, slots: u32, rings: &[RingSpec]) {
        self.used -= job_memory(spec, slots);
        for ring in rings {
            self.rings[ring.id.0 as usize] = false;
            self.load[ring.cpu as usize] -= 1;
        }
    }
}
