//! What of the controller outlives the daemon: jobs, with their tokens, rings, flows and ranks. Who
//! comes after a daemon that was killed goes on with it. What outlives the machine, too, is less:
//! what the jobs were created with.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Instant;

use netsum_common::abi::{FlowKey, RingConfig, RingNumber, ring_flags};
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
    /// Boxes of a fabric that get no new rings, and why.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub drained: BTreeMap<String, String>,
    /// Links between boxes that a manager has found: their ends.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub found: Vec<[String; 2]>,
    /// Ends of links that were found and that administrators have accepted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub accepted: Vec<String>,
    /// What links between boxes carry where that is not what they should.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub measured: Vec<Measured>,
    /// Of a manager: its election. Of a box: the highest of a manager that has called.
    #[serde(default)]
    pub election: u64,
    /// Bytes that one of a box's CPUs adds in a second, as it was measured before there were jobs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub adds: Option<u64>,
}

/// A link between boxes as it was measured, in bits per second.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Measured {
    /// Lower end and upper end.
    pub ends: [String; 2],
    pub rate: u64,
    /// What it should have carried; 0 where nobody knew. Where that is another number by now, it is
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
    /// Where flows that it had go.
    #[serde(default)]
    ended: Vec<(IpAddr, u32)>,
}

/// A ring. All but its number, its CPU and its order follows from the job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct SavedRing {
    id: RingNumber,
    ranks: u32,
    slots: u32,
    /// In fragments; the file has its older name.
    #[serde(rename = "window")]
    credit: u32,
    mtu: u32,
    cpu: u32,
    verify_icrc: bool,
    in_order: bool,
    in_band: bool,
}

/// Ranks that are at work.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct SavedEpoch {
    number: u32,
    ranks: Vec<RankAddress>,
    left: Vec<bool>,
    #[serde(default)]
    ring: Vec<Rank>,
    #[serde(default)]
    renew: bool,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    without_box: bool,
}

impl SavedRing {
    fn new(spec: &JobSpec, ring: &RingSpec) -> Self {
        let RingSpec { id, cpu, config: RingConfig { flags, ranks, slots, credit, mtu, .. } } =
            *ring;
        let JobSpec { verify_icrc, in_band, .. } = *spec;
        let in_order = flags & ring_flags::RELAXED == 0;
        Self { id, ranks, slots, credit, mtu, cpu, verify_icrc, in_order, in_band }
    }
}

impl SavedJob {
    /// Its rings in the data plane.
    pub fn rings(&self) -> impl Iterator<Item = RingSpec> {
        self.rings.iter().map(|ring| {
            let config = self.spec.ring_config(self.slots, ring.in_order);
            RingSpec { id: ring.id, cpu: ring.cpu, config }
        })
    }

    /// Whether its rings sum.
    pub fn is_active(&self) -> bool {
        self.state == State::Active
    }
}

impl Controller {
    /// What should outlive the daemon. Ranks that wait for others to join do not: they ask again.
    pub fn save(&self) -> Saved {
        let job = |job: &Job| SavedJob {
            spec: job.spec.clone(),
            slots: job.slots,
            rings: job.rings.iter().map(|ring| SavedRing::new(&job.spec, ring)).collect(),
            flows: job.flows.clone(),
            state: job.state.clone(),
            last_epoch: job.last_epoch,
            epoch: job.epoch.as_ref().map(|e| SavedEpoch {
                number: e.number,
                ranks: e.ranks.clone(),
                left: Rank::all(e.ranks.len() as u32).map(|r| e.heard(r).is_none()).collect(),
                ring: e.ring.clone(),
                renew: e.renew,
                // Others say so themselves.
                without_box: e.without_box && job.spec.or_ring,
            }),
            ended: job.ended.iter().map(|key| (unmapped(key.dst_ip), key.qpn)).collect(),
        };
        let jobs = self.jobs.values().map(job).collect();
        Saved { ports: self.ports.clone(), jobs, ..Saved::default() }
    }

    /// What the jobs were created with: enough to create them again.
    pub fn specs(&self) -> impl Iterator<Item = &JobSpec> {
        self.jobs.values().map(|job| &job.spec)
    }

    /// Creates a job again that an earlier controller had: its rings are empty, and may have other
    /// numbers. Ports are not looked at. At boot some come late, and each rank's is looked at when
    /// it joins.
    ///
    /// # Errors
    /// If it does not fit any more, as [`Controller::create_job`] says it.
    pub fn create_again(&mut self, spec: JobSpec) -> Result<Vec<Action>, Refusal> {
        self.add_job(spec)
    }

    /// Takes over what another has saved, into a controller without jobs. The present ports are set
    /// already. Jobs for which `broken` knows a reason, and those with flows on ports that are
    /// gone, end with an error.
    ///
    /// # Errors
    /// If a job does not fit: not the pool's ring numbers, more memory than there is.
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
                .take_again(&saved.spec, slots, &mut rings)
                .map_err(|e| format!("job `{name}`: {e}"))?;
            let gone =
                saved.flows.iter().find(|f| self.ports.iter().all(|p| p.ifindex != f.ifindex));
            let why = why.or_else(|| {
                gone.map(|f| format!("rank {}: its port (interface {}) is gone", f.rank, f.ifindex))
            });
            let mut job = Job::new(saved.spec, slots, rings);
            (job.flows, job.state, job.last_epoch) = (saved.flows, saved.state, saved.last_epoch);
            job.epoch = saved.epoch.map(|e| {
                let mut epoch = Epoch::resumed(e.number, e.ranks, e.ring, &e.left, now);
                (epoch.renew, epoch.without_box) = (e.renew, e.without_box);
                epoch
            });
            job.ended = saved
                .ended
                .into_iter()
                .map(|(dst, qpn)| FlowKey { dst_ip: mapped(dst), qpn })
                .collect();
            actions.extend(job.listen_in_band());
            if let Some(why) = why {
                actions.extend(job.fail(format!("the daemon was started again, and {why}")));
            }
            self.jobs.insert(name, job);
        }
        Ok(actions)
    }
}
