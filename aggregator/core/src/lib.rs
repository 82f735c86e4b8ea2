//! The controller: jobs, their life cycle, and the allocation of resources. Pure: requests and
//! times are its input, actions its output; tokio, netlink, gRPC and BPF are in the daemon.
//!
//! | module | what lives there |
//! | --- | --- |
//! | `owners` | which rank owns which address |
//! | [`in_band`] | ranks that show up by their first packets |
//! | [`job`] | a job and its checked properties |
//! | [`ended`] | flows whose job has ended |
//! | [`groups`] | child jobs of some of a job's ranks |
//! | `ring_order` | the order of ranks in a ring |
//! | [`members`] | contributors to a box, if boxes are in levels |
//! | [`membership`] | ranks that join, live and leave |
//! | [`plane`] | rings and flows, as passed to the data plane |
//! | `rank` | the number of a rank |
//! | [`port`] | faults of a port |
//! | [`bridging`] | why a bridge may not forward; [`missing_packets`]: why packets do not arrive |
//! | [`cost`] | what rings take, for plans |
//! | [`pool`] | memory, ring numbers and CPUs |
//! | [`tenant`] | tenants' limits for these |
//! | [`rate`] | bits per second as text |
//! | [`saved`] | state that outlives the daemon |
//! | [`token`] | the secret of a job |
//! | [`trace`] | which packets a client wants to see |
//! | [`bandwidth`] | the rate of a link, from a bandwidth probe |
//! | [`uplinks`] | the ports towards parent boxes |
//! | [`watch`] | stalled rings, over time |
//! | [`diagnose`] | why a job is stalled, in words |

pub mod bandwidth;
pub mod bridging;
pub mod cost;
pub mod diagnose;
pub mod ended;
pub mod groups;
pub mod in_band;
pub mod job;
pub mod members;
pub mod membership;
pub mod missing_packets;
mod owners;
pub mod plane;
pub mod pool;
pub mod port;
mod rank;
pub mod rate;
mod ring_order;
pub mod saved;
pub mod tenant;
#[cfg(test)]
mod tests;
pub mod token;
pub mod trace;
pub mod uplinks;
pub mod watch;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use netsum_common::abi::{self, FlowKey, HopKey, InBandJob, MTU_OVERHEAD, RingNumber};
use netsum_common::wire::InBandToken;
use serde::{Deserialize, Serialize};

use crate::plane::{FlowSpec, RingSpec};
pub use job::{Job, JobRing, JobSpec, State};
use members::Member;
use membership::Epoch;
pub use membership::{Connection, RankAddress};
use pool::Pool;
pub use rank::Rank;
use tenant::Limits;
pub use token::Token;
use uplinks::Uplinks;

/// Why a request is refused, in words that name the argument.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// An argument is wrong.
    #[error("{0}")]
    Invalid(String),
    /// The object does not exist.
    #[error("{0}")]
    NotFound(String),
    /// The object exists already.
    #[error("{0}")]
    Exists(String),
    /// Too little of a resource is free.
    #[error("{0}")]
    Exhausted(String),
    #[error("{0}")]
    NotNow(String),
    /// The token is wrong.
    #[error("{0}")]
    Denied(String),
    /// It took too long.
    #[error("{0}")]
    Late(String),
}

/// An action for the caller to carry out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Create a ring's maps.
    CreateRing(RingSpec),
    /// Set a ring's counters to zero: another job gets the ring.
    ResetCounters(RingNumber),
    /// Register a flow.
    AddFlow(FlowSpec),
    /// Note and drop first packets with a job's token.
    AddInBandToken(InBandToken, InBandJob),
    /// Stop that.
    RemoveInBandToken(InBandToken),
    /// Start a ring, with the interface of each rank.
    ActivateRing(RingSpec, Vec<u32>),
    /// Remove a ring and its ports, and end its flows: data that still arrives on them is dropped.
    DeleteRing {
        ring: RingNumber,
        flows: Vec<FlowKey>,
        /// Its ports' interfaces.
        ports: Vec<u32>,
    },
    /// Forget ended flows: their senders are known to have stopped.
    ForgetEnded(Vec<FlowKey>),
    /// Answer a rank that waits in `join`.
    Reply {
        /// The number of the rank's request.
        waiter: u64,
        /// The epoch that has begun, or why none has.
        result: Result<u32, Refusal>,
    },
}

/// A port, as the core needs it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortInfo {
    pub name: String,
    pub ifindex: u32,
    /// MTU in bytes.
    pub mtu: u32,
    /// The MAC address of packets that this machine routes; `None` if it does not route there.
    pub router: Option<[u8; 6]>,
}

/// The largest path MTU that a link with this MTU carries; the smallest one if it carries none.
pub fn largest_mtu(link: u32) -> u32 {
    let room = link.saturating_sub(MTU_OVERHEAD).clamp(abi::MIN_MTU, abi::MAX_MTU as u32);
    room / abi::MTU_STEP * abi::MTU_STEP
}

/// The largest path MTU of that link for queue pairs of adapters, which take powers of two.
pub fn largest_ibta_mtu(link: u32) -> u32 {
    1 << largest_mtu(link).ilog2()
}

#[derive(Debug)]
pub struct Controller {
    jobs: BTreeMap<String, Job>,
    pool: Pool,
    ports: Vec<PortInfo>,
    heartbeat_timeout: Duration,
    tenants: BTreeMap<String, Limits>,
    /// Addresses of the box itself.
    own: HashSet<owners::Address>,
    /// Isolated ports, with their bridges: the bridge does not forward between them.
    isolated: HashMap<u32, u32>,
    /// Number of jobs created since the daemon started, by tenant.
    admitted: BTreeMap<String, u64>,
    /// The last epoch of all groups that were deleted. A group that is opened again counts on, so
    /// that epochs of one name differ.
    last_group_epoch: u32,
}

/// A member's connection to the next one, routed by this machine.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RoutedConnection {
    /// The next member.
    pub to: HopKey,
    /// The next member's address.
    pub dst: IpAddr,
    /// This machine's MAC address at the port where the packets arrive.
    pub own: [u8; 6],
    /// The next member's port.
    pub port: Option<u32>,
    /// The MAC address that the next member's packets come from, if it is known.
    pub mac: Option<[u8; 6]>,
}

impl Controller {
    /// A controller without jobs: `memory` bytes for rings, spread over `cpus` CPUs, and one tenant
    /// without limits.
    pub fn new(memory: u64, cpus: u32, heartbeat_timeout: Duration) -> Self {
        Self {
            jobs: BTreeMap::new(),
            pool: Pool::new(memory, cpus),
            ports: Vec::new(),
            heartbeat_timeout,
            tenants: BTreeMap::from([(
                netsum_common::defaults::TENANT.to_owned(),
                Limits::default(),
            )]),
            own: HashSet::new(),
            isolated: HashMap::new(),
            admitted: BTreeMap::new(),
            last_group_epoch: 0,
        }
    }

    /// CPUs that rings are spread over.
    pub fn cpus(&self) -> usize {
        self.pool.cpus()
    }

    /// Bytes that the jobs' rings take.
    pub fn memory_used(&self) -> u64 {
        self.pool.used()
    }

    /// Bytes for the rings of all jobs.
    pub fn memory(&self) -> u64 {
        self.pool.total()
    }

    pub fn set_ports(&mut self, ports: Vec<PortInfo>) {
        self.ports = ports;
    }

    /// Sets the addresses of the box itself: no rank can have these.
    pub fn set_own_addresses(&mut self, ips: HashSet<IpAddr>, macs: HashSet<[u8; 6]>) {
        let ips = ips.into_iter().map(owners::Address::Ip);
        self.own = ips.chain(macs.into_iter().map(owners::Address::Mac)).collect();
    }

    /// Ports that the controller still knows were removed: jobs with flows there end with an error.
    pub fn ports_removed(&mut self, gone: &[u32]) -> Vec<Action> {
        let mut actions = Vec::new();
        let name = |ifindex| {
            self.ports.iter().find(|p| p.ifindex == ifindex).map_or("?", |p| p.name.as_str())
        };
        for job in self.jobs.values_mut() {
            if let Some(flow) = job.flows.iter().find(|f| gone.contains(&f.ifindex)) {
                let why = format!(
                    "rank {}: its port {} was removed",
                    job.sender(flow.member),
                    name(flow.ifindex)
                );
                actions.extend(job.fail(why));
            }
        }
        actions
    }

    /// Changes the memory for the rings of all jobs.
    ///
    /// # Errors
    /// If the jobs take more already.
    pub fn set_memory(&mut self, memory: u64) -> Result<(), Refusal> {
        self.pool.set_total(memory)
    }

    /// Records how many bytes the machine has left for rings.
    pub fn set_available(&mut self, bytes: u64) {
        self.pool.set_available(bytes);
    }

    /// Changes the heartbeat timeout of ranks.
    pub fn set_heartbeat_timeout(&mut self, timeout: Duration) {
        self.heartbeat_timeout = timeout;
    }

    /// Records the present MTUs of interfaces.
    pub fn set_mtus(&mut self, mtus: impl Iterator<Item = (u32, u32)>) {
        for (ifindex, mtu) in mtus {
            self.ports.iter_mut().filter(|p| p.ifindex == ifindex).for_each(|p| p.mtu = mtu);
        }
    }

    /// Records where this machine routes now, see [`PortInfo::router`].
    pub fn set_routers(&mut self, routers: impl Iterator<Item = (u32, Option<[u8; 6]>)>) {
        for (ifindex, router) in routers {
            self.ports.iter_mut().filter(|p| p.ifindex == ifindex).for_each(|p| p.router = router);
        }
    }

    /// Checks that packets of a path MTU fit a port; `who` is named in the refusal.
    fn check_mtu(&self, who: &str, mtu: u32, ifindex: u32) -> Result<(), Refusal> {
        let needed = mtu + MTU_OVERHEAD;
        match self.ports.iter().find(|p| p.ifindex == ifindex && p.mtu < needed) {
            Some(port) => Err(Refusal::Invalid(format!(
                "{who}: port {} has an MTU of {}; for a path MTU of {mtu} and {MTU_OVERHEAD} bytes of \
                 headers at least {needed} is needed",
                port.name, port.mtu
            ))),
            None => Ok(()),
        }
    }

    pub fn ports(&self) -> &[PortInfo] {
        &self.ports
    }

    /// Sets the isolated ports, with their bridges.
    pub fn set_isolated(&mut self, ports: impl Iterator<Item = (u32, u32)>) {
        self.isolated = ports.collect();
    }

    /// See [`PortInfo::router`].
    pub fn router(&self, ifindex: u32) -> Option<[u8; 6]> {
        self.ports.iter().find(|p| p.ifindex == ifindex)?.router
    }

    /// The connections between members of active rings that this machine routes.
    pub fn routed_connections(&self) -> impl Iterator<Item = RoutedConnection> {
        let active = self.jobs.values().filter(|job| job.state == State::Active);
        active.flat_map(move |job| {
            job.flows.iter().filter_map(move |flow| self.routed_connection(job, flow))
        })
    }

    fn routed_connection(&self, job: &Job, flow: &FlowSpec) -> Option<RoutedConnection> {
        let own = self.router(flow.ifindex)?;
        let next = flow.member.next(job.spec.member_count());
        let of_next = job.flows.iter().find(|f| f.ring == flow.ring && f.member == next);
        let to = HopKey { ring: flow.ring, member: next.0 };
        let (port, mac) = (of_next.map(|f| f.ifindex), of_next.and_then(|f| f.src_mac));
        Some(RoutedConnection { to, dst: flow.dst, own, port, mac })
    }

    /// A port's name; its number if the port no longer exists.
    pub fn port_name(&self, ifindex: u32) -> String {
        let port = self.ports.iter().find(|p| p.ifindex == ifindex);
        port.map_or_else(|| ifindex.to_string(), |p| p.name.clone())
    }

    /// All jobs, by name.
    pub fn jobs(&self) -> impl Iterator<Item = &Job> {
        self.jobs.values()
    }

    pub fn job(&self, name: &str) -> Result<&Job, Refusal> {
        self.jobs.get(name).ok_or_else(|| no_job(name))
    }

    fn job_mut(&mut self, name: &str) -> Result<&mut Job, Refusal> {
        self.jobs.get_mut(name).ok_or_else(|| no_job(name))
    }

    /// A job, for a caller that must know its token.
    pub fn job_for(&self, name: &str, token: &str) -> Result<&Job, Refusal> {
        // A wrong name and a wrong token get the same answer, which reveals nothing.
        let denied = || {
            Refusal::Denied(format!(
                "job `{name}`: no such job, or the token is wrong; `netsum job show {name} \
                 --show-token` on the box prints it"
            ))
        };
        let job = match (self.jobs.get(name), groups::job_of(name)) {
            (Some(job), _) => job,
            (None, Some(parent)) => {
                self.job_for(parent, token).map_err(|_| denied())?;
                let message = format!("job `{name}`: no such group: its ranks have to open it");
                return Err(Refusal::NotFound(message));
            }
            (None, None) => return Err(denied()),
        };
        if job.spec.token.is(token) { Ok(job) } else { Err(denied()) }
    }

    /// The least MTU of all ports; without a port, the usual one of Ethernet.
    fn link_mtu(&self) -> u32 {
        self.ports.iter().map(|port| port.mtu).min().unwrap_or(1500)
    }

    /// Creates a job and reserves its memory, if there is room. A path MTU of 0 becomes the largest
    /// of adapters that all ports carry, until ranks join that take a larger one.
    pub fn create_job(&mut self, mut spec: JobSpec) -> Result<Vec<Action>, Refusal> {
        if spec.mtu == 0 {
            let link = self.link_mtu();
            spec.mtu = largest_ibta_mtu(link);
            let joins = !spec.in_band && !spec.members.is_part() && spec.float_lsb.is_none();
            spec.largest_mtu = joins.then(|| largest_mtu(link));
        }
        spec.check()?;
        let is_there = |name: &&str| self.ports.iter().any(|p| p.name == *name);
        if let Some(uplink) =
            spec.members.uplink.iter().flat_map(Uplinks::ports).find(|name| !is_there(name))
        {
            let names: Vec<_> = self.ports.iter().map(|p| p.name.as_str()).collect();
            return Err(Refusal::Invalid(format!(
                "--uplink {uplink}: netsum has ports {}",
                names.join(", ")
            )));
        }
        let who = format!("--mtu {}", spec.mtu);
        self.ports.iter().try_for_each(|port| self.check_mtu(&who, spec.mtu, port.ifindex))?;
        self.add_job(spec)
    }

    /// Creates a job whose path MTU is known, without checking the ports.
    fn add_job(&mut self, mut spec: JobSpec) -> Result<Vec<Action>, Refusal> {
        let slots = spec.check()?;
        self.check_new(&spec)?;
        if self.check_room(&spec, slots).is_err() {
            spec.largest_mtu = None;
        }
        self.check_room(&spec, slots)?;
        let rings = self.pool.reserve(&spec, slots)?;
        let reset = rings.iter().map(|r| Action::ResetCounters(r.id));
        let mut actions: Vec<_> =
            reset.chain(rings.iter().cloned().map(Action::CreateRing)).collect();
        let job = Job::new(spec, slots, rings);
        actions.extend(job.in_band_token_action());
        *self.admitted.entry(job.spec.tenant.clone()).or_default() += 1;
        self.jobs.insert(job.spec.name.clone(), job);
        Ok(actions)
    }

    /// Checks everything but room.
    fn check_new(&self, spec: &JobSpec) -> Result<(), Refusal> {
        if self.jobs.contains_key(&spec.name) {
            return Err(Refusal::Exists(format!(
                "job `{}` already exists: pick another name or delete it",
                spec.name
            )));
        }
        if !self.tenants.contains_key(&spec.tenant) {
            let names: Vec<&str> = self.tenants.keys().map(String::as_str).collect();
            return Err(Refusal::Invalid(format!(
                "--tenant `{}`: the configuration has {}",
                spec.tenant,
                names.join(", ")
            )));
        }
        let twin = self
            .jobs
            .values()
            .map(|j| &j.spec)
            .find(|other| other.in_band && other.token == spec.token);
        if let Some(other) = twin.filter(|_| spec.in_band) {
            return Err(Refusal::Exists(format!(
                "--token: job `{}` has the same; first packets with it could be of either",
                other.name
            )));
        }
        Ok(())
    }

    /// Deletes a job with its groups; waiting ranks get an error.
    pub fn delete_job(&mut self, name: &str) -> Result<Vec<Action>, Refusal> {
        let mut job = self.jobs.remove(name).ok_or_else(|| no_job(name))?;
        if job.spec.is_group {
            self.last_group_epoch = self.last_group_epoch.max(job.last_epoch);
        }
        let groups: Vec<String> = self.groups_of(name).cloned().collect();
        let mut actions: Vec<_> =
            groups.iter().filter_map(|group| self.delete_job(group).ok()).flatten().collect();
        actions
            .extend(job.dismiss_waiters(&Refusal::NotFound(format!("job `{name}` was deleted"))));
        actions
            .extend(job.spec.in_band.then(|| Action::RemoveInBandToken(job.spec.token.in_band())));
        actions.extend(job.teardown());
        self.pool.release(&job.spec, job.slots, &job.rings);
        Ok(actions)
    }

    /// Deletes all jobs: the daemon ends.
    pub fn end_all(&mut self) -> Vec<Action> {
        let names: Vec<String> = self.jobs.keys().cloned().collect();
        names.iter().filter_map(|name| self.delete_job(name).ok()).flatten().collect()
    }

    /// Empties a job's rings and forgets its flows: for an application that reconnects and whose
    /// flows were added by hand or in band.
    pub fn restart_job(&mut self, name: &str) -> Result<Vec<Action>, Refusal> {
        let job = self.job_mut(name)?;
        if job.epoch.is_some() || job.has_waiters() {
            return Err(Refusal::NotNow(format!(
                "job `{name}`: its ranks join by themselves: use `netsum job reconnect {name}`, or \
                 start them again"
            )));
        }
        // This includes the in-band state: connections may use the numbers of the last epoch again.
        job.in_band = in_band::InBand::default();
        job.state = State::Waiting;
        job.last_epoch += 1;
        Ok(job.restart())
    }

    /// Asks all ranks of a job to reconnect after the same operation.
    pub fn reconnect_job(&mut self, name: &str) -> Result<(), Refusal> {
        let epoch = self.job_mut(name)?.epoch.as_mut();
        let why =
            || Refusal::NotNow(format!("job `{name}`: no ranks that have joined it are at work"));
        epoch.ok_or_else(why)?.reconnect = true;
        Ok(())
    }

    /// Registers a flow by hand. Its `member` is a rank of the job; the member that this rank's
    /// connection belongs to replaces it.
    pub fn add_flow(
        &mut self,
        name: &str,
        ring: JobRing,
        mut flow: FlowSpec,
    ) -> Result<Vec<Action>, Refusal> {
        let job = self.job(name)?;
        if job.spec.in_band {
            let message = format!(
                "job `{name}`: its connections are set up in band, so flows cannot be added"
            );
            return Err(Refusal::NotNow(message));
        }
        if job.epoch.is_some() || job.has_waiters() {
            return Err(Refusal::NotNow(format!(
                "job `{name}`: its ranks join by themselves, so flows cannot be added"
            )));
        }
        flow.ring = job.ring(ring)?.id;
        let rank = flow.member;
        self.place(job, &mut flow)?;
        if let Some(ip) = plane::no_host([flow.src, flow.dst]) {
            return Err(Refusal::Invalid(format!("{ip}: not the address of a host")));
        }
        if flow.src.is_ipv4() != flow.dst.is_ipv4() {
            let message =
                format!("--dst {}: not of the same family as --src {}", flow.dst, flow.src);
            return Err(Refusal::Invalid(message));
        }
        if job.flows.iter().any(|f| f.ring == flow.ring && f.member == flow.member) {
            return Err(Refusal::Exists(format!(
                "--rank {rank}: already has a flow in ring {ring}"
            )));
        }
        self.check_mtu(&format!("--rank {rank}"), job.spec.mtu, flow.ifindex)?;
        self.check_key(&flow)?;
        let mut all = self.job(name)?.flows.clone();
        all.push(flow.clone());
        let spec = &self.job(name)?.spec;
        self.check_owners(name, &all, |member| spec.sender(member))?;
        self.take_over(std::slice::from_ref(&flow));
        let job = self.job_mut(name)?;
        job.flows.push(flow.clone());
        let mut actions = vec![Action::AddFlow(flow)];
        actions.extend(job.activate_if_complete());
        Ok(actions)
    }

    /// Finds the member that a rank's flow belongs to.
    fn place(&self, job: &Job, flow: &mut FlowSpec) -> Result<(), Refusal> {
        let (spec, rank) = (&job.spec, flow.member);
        let invalid = |message: String| Err(Refusal::Invalid(message));
        if rank.0 >= spec.ranks {
            return invalid(format!("--rank {rank}: the job has ranks 0 to {}", spec.ranks - 1));
        }
        let Some((number, member)) = spec.members.of(rank.0, spec.ranks) else {
            let known: Vec<_> =
                Rank::all(spec.member_count()).map(|n| job.sender(n).to_string()).collect();
            return invalid(format!(
                "--rank {rank}: its connection does not cross this box; only those of ranks {} do",
                known.join(", ")
            ));
        };
        let port = self.port_name(flow.ifindex);
        if let (Some(uplinks), Some(ring)) = (&spec.members.uplink, job.job_ring(flow.ring)) {
            let (uplink, is_up) = (uplinks.of(ring), member == Member::Up);
            if is_up && uplink != port {
                return invalid(format!(
                    "--rank {rank} --port {port}: its connection arrives from the parent, at \
                     --uplink {uplink}"
                ));
            }
            if !is_up && uplinks.ports().any(|uplink| uplink == port) {
                return invalid(format!(
                    "--rank {rank} --port {port}: that is the --uplink, and rank {rank} is a \
                     member below"
                ));
            }
            let first = uplinks.of(JobRing(0));
            if is_up && uplink != first && job.uplink_flow(&job.flows).is_none() {
                return invalid(format!(
                    "--ring {ring} --rank {rank}: add its flow in ring 0 first: its --uplink \
                     {first} also carries unsummed traffic"
                ));
            }
        }
        flow.member = Rank(number);
        flow.group_mark = member.group_mark();
        Ok(())
    }

    /// Flows are registered. Jobs that had the same flows earlier drop them from their records:
    /// they know nothing of the new senders, and must not let their data through.
    fn take_over(&mut self, flows: &[FlowSpec]) {
        let keys: HashSet<FlowKey> = flows.iter().map(FlowSpec::key).collect();
        for job in self.jobs.values_mut() {
            job.ended.retain(|key| !keys.contains(key));
        }
    }

    /// Checks that no other flow has this destination and queue pair.
    fn check_key(&self, flow: &FlowSpec) -> Result<(), Refusal> {
        let taken = self.jobs.values().find(|j| j.flows.iter().any(|f| f.key() == flow.key()));
        match taken {
            Some(job) => Err(Refusal::Exists(format!(
                "--dst {} --qpn {:#x}: a flow of job `{}` goes there already",
                flow.dst,
                flow.qpn.get(),
                job.spec.name
            ))),
            None => Ok(()),
        }
    }

    /// The data plane failed to carry out an action for a job.
    pub fn execution_failed(&mut self, name: &str, error: &str) -> Vec<Action> {
        match self.jobs.get_mut(name) {
            Some(job) => job.fail(format!("cannot set up the job: {error}")),
            None => Vec::new(),
        }
    }

    /// Checks timeouts: ranks that are late to join, or silent.
    pub fn tick(&mut self, now: Instant) -> Vec<Action> {
        let timeout = self.heartbeat_timeout;
        let (mut actions, mut ended) = (Vec::new(), Vec::new());
        for job in self.jobs.values_mut() {
            let had_epoch = job.epoch.is_some();
            actions.extend(job.tick(now, timeout));
            if let State::Failed(why) = &job.state
                && had_epoch
                && job.epoch.is_none()
            {
                ended.push((job.spec.name.clone(), why.clone()));
            }
        }
        actions.extend(ended.iter().flat_map(|(job, why)| self.end_groups(job, why)));
        actions.extend(self.delete_idle_groups(now));
        actions
    }
}

fn no_job(name: &str) -> Refusal {
    Refusal::NotFound(format!("job `{name}`: no such job"))
}

/// Number of an epoch that has ended or is active, for answers to heartbeats.
pub fn epoch_number(job: &Job) -> u32 {
    job.epoch.as_ref().map_or(job.last_epoch, |e: &Epoch| e.number)
}
