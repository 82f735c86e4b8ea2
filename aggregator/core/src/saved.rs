//! State that outlives the daemon: jobs, with their tokens, rings, flows and ranks. After a daemon
//! was killed, the next one continues with this state. Less outlives a reboot: only the properties
//! that jobs were created with.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Instant;

use netsum_common::abi::{FlowKey, RingNumber, ring_flags};
use serde::{Deserialize, Serialize};

use super::job::{Job, JobSpec, State};
use super::membership::{Epoch, RankAddress};
use super::rank::Rank;
use super::{Action, Controller, PortInfo, Refusal};
use crate::plane::{FlowSpec, RingSpec, mapped, unmapped};

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Saved {
    /// Ports that the programs are attached to.
    pub ports: Vec<PortInfo>,
    /// Jobs, by name.
    pub jobs: Vec<SavedJob>,
    /// Boxes of a fabric that get no new rings, with reasons.
    pub drained: BTreeMap<String, String>,
    /// Links between boxes that a manager has discovered, by their ends.
    pub found: Vec<[String; 2]>,
    /// Ends of discovered links that administrators have accepted.
    pub accepted: Vec<String>,
    /// Links between boxes whose measured rate differs from the nominal one.
    pub measured: Vec<Measured>,
    /// A manager's election; on a box, the highest election of a manager that has called.
    pub election: u64,
    /// Aggregation rate of one of a box's CPUs in bytes per second, measured before there were
    /// jobs.
    pub aggregation_rate: Option<u64>,
}

/// A link between boxes with its measured rate, in bits per second.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Measured {
    /// Lower end and upper end.
    pub ends: [String; 2],
    pub rate: u64,
    /// Its nominal rate when it was measured; 0 if unknown. If the nominal rate has changed, it is
    /// another link.
    pub nominal: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedJob {
    spec: JobSpec,
    slots: u32,
    rings: Vec<SavedRing>,
    /// Its flows in the data plane.
    pub flows: Vec<FlowSpec>,
    state: State,
    last_epoch: u32,
    epoch: Option<SavedEpoch>,
    /// Destinations of flows that it had.
    ended: Vec<(IpAddr, u32)>,
}

/// A ring. Everything else follows from the job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct SavedRing {
    id: RingNumber,
    mtu: u32,
    cpu: u32,
    in_order: bool,
}

/// Ranks of an active epoch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct SavedEpoch {
    number: u32,
    ranks: Vec<RankAddress>,
    left: Vec<bool>,
    ring: Vec<Rank>,
    reconnect: bool,
    on_host_ring: bool,
}

impl From<&RingSpec> for SavedRing {
    fn from(&RingSpec { id, cpu, config }: &RingSpec) -> Self {
        let in_order = config.flags & ring_flags::RELAXED == 0;
        Self { id, mtu: config.mtu, cpu, in_order }
    }
}

impl SavedJob {
    /// Its rings in the data plane.
    pub fn rings(&self) -> impl Iterator<Item = RingSpec> {
        self.rings.iter().map(|ring| {
            let config = self.spec.ring_config(ring.mtu, self.slots, ring.in_order);
            RingSpec { id: ring.id, cpu: ring.cpu, config }
        })
    }

    /// Whether its rings sum.
    pub fn is_active(&self) -> bool {
        self.state == State::Active && !self.flows.is_empty()
    }
}

impl Controller {
    /// The state that should outlive the daemon. Ranks that wait for others are not saved: they ask
    /// again.
    pub fn save(&self) -> Saved {
        let job = |job: &Job| SavedJob {
            spec: job.spec.clone(),
            slots: job.slots,
            rings: job.rings.iter().map(SavedRing::from).collect(),
            flows: job.flows.clone(),
            state: job.state.clone(),
            last_epoch: job.last_epoch,
            epoch: job.epoch.as_ref().map(|e| SavedEpoch {
                number: e.number,
                ranks: e.ranks.clone(),
                left: Rank::all(e.ranks.len() as u32).map(|r| e.last_seen(r).is_none()).collect(),
                ring: e.ring.clone(),
                reconnect: e.reconnect,
                // Ranks of other jobs report this themselves.
                on_host_ring: e.on_host_ring
                    && (job.spec.host_ring_fallback || job.is_summed_by_hosts()),
            }),
            ended: job.ended.iter().map(|key| (unmapped(key.dst_ip), key.qpn)).collect(),
        };
        let jobs = self.jobs.values().map(job).collect();
        Saved { ports: self.ports.clone(), jobs, ..Saved::default() }
    }

    /// The properties that the jobs were created with: enough to create them again. Ranks open
    /// groups again by themselves.
    pub fn specs(&self) -> impl Iterator<Item = &JobSpec> {
        self.jobs.values().map(|job| &job.spec).filter(|spec| !spec.is_group)
    }

    /// Creates a job of an earlier controller again: its rings are empty, and may have other
    /// numbers. Ports are not checked here: at boot some appear late, and each rank's port is
    /// checked when it joins.
    ///
    /// # Errors
    /// If the job no longer fits, as for [`Controller::create_job`].
    pub fn recreate_job(&mut self, spec: JobSpec) -> Result<Vec<Action>, Refusal> {
        self.add_job(spec)
    }

    /// Restores saved state into a controller without jobs. The present ports must be set already.
    /// Jobs for which `broken` returns a reason end with an error, as do jobs with flows on removed
    /// ports.
    ///
    /// # Errors
    /// If a job does not fit: its ring numbers are not in the pool, or it needs too much memory.
    pub fn restore(
        &mut self,
        saved: Saved,
        now: Instant,
        broken: impl Fn(&SavedJob) -> Option<String>,
    ) -> Result<Vec<Action>, String> {
        let mut actions = Vec::new();
        for saved in saved.jobs {
            let name = saved.spec.name.clone();
            let (why, mut rings) = (broken(&saved), saved.rings().collect::<Vec<_>>());
            let slots = saved.spec.check().map_err(|e| format!("job `{name}`: {e}"))?;
            self.pool
                .reserve_again(&saved.spec, slots, &mut rings)
                .map_err(|e| format!("job `{name}`: {e}"))?;
            let gone =
                saved.flows.iter().find(|f| self.ports.iter().all(|p| p.ifindex != f.ifindex));
            let gone = gone.map(|f| (f.member, f.ifindex));
            let mut job = Job::new(saved.spec, slots, rings);
            (job.flows, job.state, job.last_epoch) = (saved.flows, saved.state, saved.last_epoch);
            job.epoch = saved.epoch.map(|e| {
                let mut epoch = Epoch::resumed(e.number, e.ranks, e.ring, &e.left, now);
                (epoch.reconnect, epoch.on_host_ring) = (e.reconnect, e.on_host_ring);
                epoch
            });
            job.ended = saved
                .ended
                .into_iter()
                .map(|(dst, qpn)| FlowKey { dst_ip: mapped(dst), qpn })
                .collect();
            actions.extend(job.in_band_token_action());
            let why = why.or_else(|| {
                let (member, ifindex) = gone?;
                let rank = job.sender(member);
                Some(format!("rank {rank}: its port (interface {ifindex}) was removed"))
            });
            if let Some(why) = why {
                actions.extend(job.fail(format!("the controller was restarted, and {why}")));
            }
            self.jobs.insert(name, job);
        }
        Ok(actions)
    }
}
