//! The CPUs that serve rings, when they go offline and come back.
//!
//! The kernel's thread behind an entry of the CPU map is bound to its CPU once, when the entry is
//! made (kernel/bpf/cpumap.c, `__cpu_map_entry_alloc`). When the CPU goes offline, the scheduler
//! lets the thread run anywhere, and it stays so when the CPU is back (kernel/sched/core.c,
//! `select_fallback_rq`). `aggregate` drops packets on another CPU than the ring's (`wrong_cpu`),
//! so slots have one writer at any time. This module restores service: a CPU that is back gets a
//! new thread, and another CPU serves the rings of one that is offline.

use anyhow::{Context as _, Result};
use aya::maps::{CpuMap, PerCpuArray};
use netsum_common::abi::{RingConfig, RingNumber, maps, ring_flags};
use netsum_common::counters::{COUNTERS, Counter};

use super::bpf::BpfDataPlane;

/// Packets that may wait for a CPU: the kernel's maximum (`cpu_map_update_elem`,
/// kernel/bpf/cpumap.c). Packets that do not fit are lost, and go-back-N sends whole windows again
/// for them: with 8 hosts and 2,048 packets in flight from each, 4,096 overflowed when the CPU was
/// busy for 44 ms.
const QUEUE: u32 = 16384;

pub fn online_cpus() -> Result<Vec<u32>> {
    aya::util::online_cpus().map_err(|(what, e)| anyhow::anyhow!("{what}: {e}"))
}

impl BpfDataPlane {
    /// Checks that the rings' CPUs are online and their threads run on them, and fixes what is not.
    /// Returns what was done, as text.
    pub(super) fn repair_cpus(&mut self) -> Result<Vec<String>> {
        let online = online_cpus()?;
        let mut done = Vec::new();
        for place in 0..self.cpus.len() {
            let (configured, present) = (self.threads.configured[place], self.cpus[place]);
            let serving = stand_in(configured, present, &self.threads.configured, &online);
            if serving != present {
                self.start_thread(serving)?;
                self.cpus[place] = serving;
                done.push(format!(
                    "CPU {serving} serves the rings of CPU {configured} from now on"
                ));
            }
        }
        let mut wrong_cpu = 0;
        for id in self.rings.keys().copied().collect::<Vec<_>>() {
            let now = self.wrong_cpu(id)?;
            let (cpu, before) = {
                let ring = self.rings.get_mut(&id).context("a ring that was just there")?;
                (ring.cpu, std::mem::replace(&mut ring.wrong_cpu, now))
            };
            wrong_cpu += now.saturating_sub(before);
            if let Some(&to) = self.cpus.get(cpu as usize) {
                self.serve_by(id, to)?;
            }
        }
        if wrong_cpu > 0 {
            for cpu in self.cpus.clone() {
                self.start_thread(cpu)?;
            }
            done.push(format!(
                "{wrong_cpu} packets came to another CPU than their ring's: its thread was started \
                 again"
            ));
        }
        Ok(done)
    }

    pub(super) fn wrong_cpu(&self, ring: RingNumber) -> Result<u64> {
        let counters: PerCpuArray<_, u64> = self.map(maps::COUNTERS)?;
        Ok(counters.get(&(ring.0 * COUNTERS + Counter::WrongCpu as u32), 0)?.iter().sum())
    }

    /// Moves a ring to a CPU. The ring is inactive meanwhile, so two CPUs never serve it.
    fn serve_by(&mut self, ring: RingNumber, cpu: u32) -> Result<()> {
        let config = self.ring_config(ring)?;
        if config.members == 0 || config.cpu == cpu {
            return Ok(());
        }
        self.set_active(ring, false)?;
        let moved = self.move_to(ring, &config, cpu);
        // Also after a failure: the ring is then served as before.
        let back = self.set_active(ring, config.flags & ring_flags::ACTIVE != 0);
        moved.and(back)
    }

    fn move_to(&mut self, ring: RingNumber, config: &RingConfig, cpu: u32) -> Result<()> {
        self.wait_for_programs()?;
        let flags = config.flags & !ring_flags::ACTIVE;
        Ok(self.array(maps::RINGS)?.set(ring.0, RingConfig { flags, cpu, ..*config }, 0)?)
    }

    /// Replaces a CPU's entry in the CPU map, with a thread that is bound to the CPU. The old
    /// thread first handles the packets in its queue.
    pub(super) fn start_thread(&mut self, cpu: u32) -> Result<()> {
        let mut map = CpuMap::try_from(self.ebpf.map_mut(maps::CPUS).context(maps::CPUS)?)?;
        map.set(cpu, QUEUE, Some(&self.threads.aggregate), 0)
            .with_context(|| format!("CPU {cpu} cannot serve rings (queue of {QUEUE})"))
    }
}

/// The CPU to serve in the place of `configured`, where `present` serves now.
fn stand_in(configured: u32, present: u32, all: &[u32], online: &[u32]) -> u32 {
    [configured, present]
        .iter()
        .chain(all)
        .chain(online)
        .copied()
        .find(|c| online.contains(c))
        .unwrap_or(present)
}

#[cfg(test)]
mod tests {
    use super::stand_in;

    #[test]
    fn another_cpu_replaces_an_offline_one_until_it_returns() {
        assert_eq!(stand_in(1, 1, &[1, 2], &[0, 1, 2]), 1);
        assert_eq!(stand_in(1, 1, &[1, 2], &[0, 2]), 2, "one that serves rings already");
        assert_eq!(stand_in(1, 2, &[1, 2, 3], &[0, 2, 3]), 2, "who stands in stays");
        assert_eq!(stand_in(1, 1, &[1], &[0, 2]), 0, "any other, where none is configured");
        assert_eq!(stand_in(1, 0, &[1], &[0, 1]), 1, "back");
    }
}
