//! Reads the data for the metrics. The lock is taken again for each ring, to keep a joining rank
//! from waiting for a scrape of hundreds of rings. A job that ends meanwhile is left out.

use std::time::{Duration, Instant};

use anyhow::Result;
use netsum_common::abi::{RingConfig, RingNumber};
use netsum_controller::message::senders;
use netsum_controller::state::RefusedJobs;
use netsum_core::tenant::TenantView;
use netsum_core::{Job, Rank, State, pool};

use crate::agent::Shared;
use crate::link::Interface;
use crate::load::{RingLoad, Timings, counters, fragment_bytes, ring_load};
use crate::network::Network;

/// The box at about one moment.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// Bytes of the pool for all rings, and how many of them are in use.
    pub memory: (u64, u64),
    /// Counters of packets without a ring.
    pub no_job: Vec<u64>,
    pub tenants: Vec<TenantView>,
    pub refused_jobs: RefusedJobs,
    pub jobs: Vec<JobSnapshot>,
    pub ports: Vec<Interface>,
}

#[derive(Clone, Debug)]
pub struct JobSnapshot {
    pub name: String,
    /// Its owner.
    pub tenant: String,
    pub ranks: u32,
    /// The rank whose connection belongs to each member; all ranks in order if this box sums the
    /// job alone.
    pub senders: Vec<u32>,
    /// Path MTU in bytes.
    pub mtu: u32,
    /// Its state.
    pub state: State,
    /// Whether its ranks sum over the hosts' ring, and how often they have fallen back.
    pub on_host_ring: (bool, u64),
    /// Whether its ranks report that they seal their sums.
    pub is_sealed: bool,
    /// Nonzero floats of its ranks that became 0.
    pub underflows: u64,
    /// Bytes of its rings.
    pub memory: u64,
    /// Counters of all its rings, by number.
    pub counters: Vec<u64>,
    /// Average payload bytes per fragment of a full message.
    pub fragment_bytes: f64,
    /// Configuration and load of each ring.
    pub rings: Vec<(RingConfig, RingLoad)>,
    /// Its timed sums.
    pub timings: Timings,
    /// Ranks that send heartbeats, and the time since each one's last.
    pub heartbeat_ages: Vec<(u32, Duration)>,
}

/// Reads everything.
///
/// # Errors
/// If netlink or the data plane does not answer.
pub async fn gather(shared: &Shared, network: &Network) -> Result<Snapshot> {
    let interfaces = network.interfaces().await?;
    let (mut snapshot, names) = {
        let inner = shared.lock();
        let ports: Vec<u32> = inner.controller.ports().iter().map(|p| p.ifindex).collect();
        let snapshot = Snapshot {
            memory: (inner.controller.memory(), inner.controller.memory_used()),
            no_job: counters(&inner, [RingNumber::NONE])?,
            tenants: inner.controller.tenants(),
            refused_jobs: inner.refused_jobs.clone(),
            jobs: Vec::new(),
            ports: interfaces.into_iter().filter(|l| ports.contains(&l.ifindex)).collect(),
        };
        let names: Vec<String> = inner.controller.jobs().map(|j| j.spec.name.clone()).collect();
        (snapshot, names)
    };
    for name in names {
        snapshot.jobs.extend(job(shared, &name).await?);
    }
    Ok(snapshot)
}

/// Reads a job; `None` if it has been deleted.
async fn job(shared: &Shared, name: &str) -> Result<Option<JobSnapshot>> {
    let (mut found, rings) = {
        let inner = shared.lock();
        let Ok(job) = inner.controller.job(name) else { return Ok(None) };
        (without_rings(job), job.rings.clone())
    };
    for ring in rings {
        {
            let inner = shared.lock();
            let Ok(job) = inner.controller.job(name) else { return Ok(None) };
            if !job.rings.contains(&ring) {
                return Ok(None);
            }
            let of_ring = counters(&inner, [ring.id])?;
            found.counters.iter_mut().zip(of_ring).for_each(|(sum, value)| *sum += value);
            found.timings.add(&inner, ring.id)?;
            let mut load = ring_load(&inner, job, &ring)?;
            load.credit_used.truncate(ring.config.members as usize);
            let cpu = inner.executor.plane.cpu_number(ring.cpu);
            found.rings.push((RingConfig { cpu, ..ring.config }, load));
        }
        tokio::task::yield_now().await;
    }
    Ok(Some(found))
}

fn without_rings(job: &Job) -> JobSnapshot {
    let on_host_ring = job.epoch.as_ref().is_some_and(|epoch| epoch.on_host_ring);
    // Where no box can sum, there is nothing to alert to.
    let has_fallen_back = on_host_ring && !job.is_summed_by_hosts();
    let now = Instant::now();
    let heartbeat_age = |rank: u32| {
        let last_seen = job.epoch.as_ref()?.last_seen(Rank(rank))?;
        Some((rank, now.saturating_duration_since(last_seen)))
    };
    JobSnapshot {
        name: job.spec.name.clone(),
        tenant: job.spec.tenant.clone(),
        ranks: job.spec.member_count(),
        senders: senders(job),
        mtu: job.mtu(),
        state: job.state.clone(),
        on_host_ring: (has_fallen_back, job.fallbacks),
        is_sealed: job.epoch.as_ref().is_some_and(|epoch| epoch.is_sealed()),
        underflows: job.underflows,
        memory: pool::job_memory(&job.spec, job.slots),
        counters: vec![0; netsum_common::counters::Counter::ALL.len()],
        fragment_bytes: fragment_bytes(job),
        rings: Vec::new(),
        timings: Timings::of_ranks(job.spec.member_count()),
        heartbeat_ages: (0..job.spec.member_count()).filter_map(heartbeat_age).collect(),
    }
}
