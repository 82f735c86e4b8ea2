//! Controller and data plane behind one lock. A caller that changes the controller carries out the
//! resulting actions before it releases the lock.

use std::collections::{BTreeMap, HashMap};
use std::iter::{Peekable, from_fn};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use netsum_api::v1 as api;
use netsum_common::abi::{Address, Hop};
use netsum_core::ended::Ended;
use netsum_core::plane::RingSpec;
use netsum_core::saved::{Measured, Saved};
use netsum_core::watch::{Patience, Watch};
use netsum_core::{Action, Controller, Edge, JobSpec, Refusal, State};
use netsum_dataplane::{DataPlane, EndedRing};
use tokio::sync::oneshot;
use tonic::{Code, Status};

use super::persist::{Store, Wanted};
use super::spread::Spreader;
use super::tracers::Tracers;

/// Interval of the controller's ticks.
const TICK: Duration = Duration::from_millis(50);

/// A manager that has not called for this long counts as gone; it calls every two seconds.
pub const SILENT: Duration = Duration::from_secs(10);

/// The answer to a rank's `join`.
pub type JoinAnswer = Result<u32, Refusal>;

/// Programs other boxes for this daemon, which takes time; ranks are answered when it is done.
pub trait Boxes: Send {
    /// Reports that flows of this job have changed, or of any job if `None`; these ranks wait for
    /// that.
    fn changed(&mut self, job: Option<&str>, waiting: Vec<Waiting>);
    /// Whether ranks of this job may be waiting for it at the moment. They cannot send heartbeats
    /// before they are answered.
    fn is_busy(&self, job: &str) -> bool;
    /// The fabric as a message.
    fn show(&self) -> api::Fabric;
    /// Drains a box, which then gets no new rings, for this reason; without a reason, ends that.
    ///
    /// # Errors
    /// If the box does not exist, or is not drained.
    fn drain(&mut self, name: &str, reason: Option<String>) -> Result<(), Refusal>;
    /// Drained boxes, and why.
    fn drained(&self) -> BTreeMap<String, String>;
    /// Ends of the links that were found.
    fn found(&self) -> Vec<[String; 2]>;
    /// Accepts a found link, named by one of its ends, for an administrator, or revokes that.
    ///
    /// # Errors
    /// If the link does not exist.
    fn accept(&mut self, end: &str, revoke: bool) -> Result<(), Refusal>;
    /// Ends of the links that were accepted.
    fn accepted(&self) -> Vec<String>;
    /// Measured rates that differ from what links should carry, by their lower ends.
    fn measured(&self) -> Vec<Measured>;
    /// Whether no boxes could sum for this job now, so its ranks need not try.
    fn is_stuck(&self, job: &str) -> bool;
}

/// A waiting rank, and the epoch in its answer.
pub struct Waiting {
    pub rank: oneshot::Sender<JoinAnswer>,
    pub epoch: u32,
}

/// The daemon's state, shared by its services.
#[derive(Clone)]
pub struct Shared {
    inner: Arc<Mutex<Inner>>,
    /// Interval of the ranks' heartbeats.
    pub heartbeat: Duration,
}

/// The state behind the lock.
pub struct Inner {
    pub controller: Controller,
    pub plane: Box<dyn DataPlane>,
    pub reserved: Reserved,
    /// Next hops last known, by the packets' destination and the box's MAC address where they
    /// arrive.
    pub next_hops: HashMap<(IpAddr, [u8; 6]), Hop>,
    /// Spreads unsummed flows, if there are uplinks for that.
    pub spread: Option<Spreader>,
    /// For a manager: the other boxes.
    pub boxes: Option<Box<dyn Boxes>>,
    /// The time when the programs were attached, which tells them from earlier ones of this daemon
    /// or another.
    pub programs: u64,
    /// Watches active rings.
    pub watch: Watch,
    /// Number of clients that watch for unknown connections.
    pub watchers: u32,
    /// Tracks flows that have ended.
    pub ended: Ended,
    /// The clients that trace packets.
    pub tracers: Tracers,
    pub refused_jobs: RefusedJobs,
    /// At a manager: its election. At a box: the highest election of a manager that has called.
    pub election: u64,
    /// The aggregation rate of one CPU, in bytes per second; `None` if unknown.
    pub adds: Option<u64>,
    /// The store of the controller's state for the next daemon.
    pub store: Option<Store>,
    /// The store of the jobs that every start creates again.
    pub wanted: Option<Wanted>,
    waiters: HashMap<u64, oneshot::Sender<JoinAnswer>>,
    next_waiter: u64,
}

/// Addresses that belong to a port without any flow, by source.
#[derive(Debug, Default)]
pub struct Reserved {
    pub the_box: HashMap<Address, u32>,
    /// Next hops of ranks, at the ports of these ranks.
    pub routers: HashMap<Address, u32>,
    /// Gateways of this machine's routes, at the ports that they are behind.
    pub gateways: HashMap<Address, u32>,
    /// As a fabric's manager reports: ranks behind other boxes, at the ports towards these, and the
    /// manager if it is behind a port of this box.
    pub fabric: HashMap<Address, u32>,
    /// A manager elsewhere, at the port towards it. Removed after it has not called for [`SILENT`],
    /// because it may be behind another port by then, and could not report that.
    pub manager: HashMap<Address, u32>,
    /// The time of its last call.
    pub called: Option<Instant>,
}

/// Counts jobs that were not created, by reason.
#[derive(Clone, Debug, Default)]
pub struct RefusedJobs([u64; 4]);

impl RefusedJobs {
    /// Reasons: an invalid argument; the name exists; not enough memory in the pool or machine, or
    /// beyond the tenant's limits; anything else.
    const REASONS: [(&str, Option<Code>); 4] = [
        ("invalid", Some(Code::InvalidArgument)),
        ("exists", Some(Code::AlreadyExists)),
        ("exhausted", Some(Code::ResourceExhausted)),
        ("failed", None),
    ];

    /// Counts one more, refused with this code.
    pub fn count(&mut self, code: Code) {
        let known = Self::REASONS.iter().position(|(_, c)| *c == Some(code));
        self.0[known.unwrap_or(Self::REASONS.len() - 1)] += 1;
    }

    pub fn by_reason(&self) -> impl Iterator<Item = (&'static str, u64)> {
        Self::REASONS.iter().zip(self.0).map(|((reason, _), n)| (*reason, n))
    }
}

/// A number for programs that were just attached. Never 0.
pub fn programs_of_now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_nanos() as u64
        | 1
}

impl Shared {
    pub fn new(
        controller: Controller,
        plane: Box<dyn DataPlane>,
        heartbeat: Duration,
        patience: Patience,
    ) -> Self {
        let watch = Watch::new(patience);
        let inner = Inner {
            controller,
            plane,
            reserved: Reserved::default(),
            next_hops: HashMap::new(),
            spread: None,
            boxes: None,
            programs: programs_of_now(),
            watch,
            watchers: 0,
            ended: Ended::default(),
            tracers: Tracers::default(),
            refused_jobs: RefusedJobs::default(),
            election: 0,
            adds: None,
            store: None,
            wanted: None,
            waiters: HashMap::new(),
            next_waiter: 0,
        };
        Self { inner: Arc::new(Mutex::new(inner)), heartbeat }
    }

    /// Locks the state for one request. No code may block while it holds the lock.
    pub fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls the controller's tick periodically.
    pub async fn keep_time(self) {
        let mut tick = tokio::time::interval(TICK);
        loop {
            tick.tick().await;
            let mut inner = self.lock();
            let Inner { controller, boxes, .. } = &mut *inner;
            if let Some(boxes) = boxes {
                controller.was_deaf(TICK, |job| boxes.is_busy(job));
            }
            let actions = inner.controller.tick(Instant::now());
            if actions.is_empty() {
                continue;
            }
            if let Err(e) = inner.carry_out(None, actions) {
                log::error!("{}", e.message());
            }
        }
    }
}

impl Inner {
    /// A number for a request that will be answered later, and the receiver of its answer.
    pub fn waiter(&mut self) -> (u64, oneshot::Receiver<JoinAnswer>) {
        let (sender, receiver) = oneshot::channel();
        self.next_waiter += 1;
        self.waiters.insert(self.next_waiter, sender);
        (self.next_waiter, receiver)
    }

    /// Forgets a request that does not wait after all.
    pub fn forget(&mut self, waiter: u64) {
        self.waiters.remove(&waiter);
    }

    /// Updates the data plane's reserved addresses.
    pub fn reserve(&mut self) -> anyhow::Result<()> {
        let Reserved { the_box, routers, gateways, fabric, manager, .. } = &self.reserved;
        let all = manager.iter().chain(fabric).chain(gateways).chain(routers).chain(the_box);
        self.plane.reserve(all.map(|(address, place)| (*address, *place)).collect())
    }

    /// The paths between members of active rings that this box routes.
    pub fn edges(&self) -> impl Iterator<Item = Edge> {
        let active = self.controller.jobs().filter(|job| job.state == State::Active);
        active.flat_map(|job| self.controller.edges(job))
    }

    /// Number of requests that wait for an answer.
    pub fn waiting(&self) -> usize {
        self.waiters.len()
    }

    /// Carries out actions for a job. If the data plane refuses one, the job fails.
    pub fn carry_out(&mut self, job: Option<&str>, actions: Vec<Action>) -> Result<(), Status> {
        let began = Instant::now();
        let result = self.all(job, actions);
        // After the actions: the next daemon finds rings that were not saved, and ends their jobs.
        self.keep();
        // A large job's rings, or a disk, can take seconds, and heartbeats wait for the lock.
        self.controller.was_deaf(began.elapsed(), |_| true);
        result
    }

    /// The aggregation rate of all CPUs for rings, in bytes per second; `None` if unknown.
    pub fn adds(&self) -> Option<u64> {
        Some(self.adds? * self.controller.cpus() as u64)
    }

    /// Records that a manager has called, by its election. Returns whether no manager elected later
    /// has called.
    pub fn hear(&mut self, election: u64) -> bool {
        if election > self.election {
            log::info!(
                "election {election} of a manager: earlier ones can give no orders any more"
            );
            self.election = election;
            self.keep();
        }
        election == self.election
    }

    /// Writes the state that outlives the daemon.
    fn keep(&mut self) {
        if let Some(store) = &mut self.store {
            let boxes = self
                .boxes
                .as_ref()
                .map(|boxes| (boxes.drained(), boxes.found(), boxes.accepted(), boxes.measured()));
            let (drained, found, accepted, measured) = boxes.unwrap_or_default();
            store.keep(
                &Saved {
                    drained,
                    found,
                    accepted,
                    measured,
                    election: self.election,
                    adds: self.adds,
                    ..self.controller.save()
                },
                "if the daemon is killed now, its jobs end",
            );
        }
        if let Some(wanted) = &mut self.wanted {
            wanted.keep(&self.controller);
        }
    }

    /// Creates jobs again that should exist and do not, for example after a boot. From now on
    /// changes are written.
    pub fn create_again(&mut self, mut wanted: Wanted, jobs: Vec<JobSpec>) {
        for spec in jobs {
            let name = spec.name.clone();
            if self.controller.job(&name).is_ok() {
                continue;
            }
            match self.controller.create_again(spec.clone()) {
                Ok(actions) => match self.carry_out(Some(&name), actions) {
                    Ok(()) => {
                        log::info!(NETSUM_JOB = name; "job {name} is created again, with empty \
                            rings")
                    }
                    Err(e) => {
                        log::error!(NETSUM_JOB = name; "job {name} is created again, and cannot \
                            begin: {}", e.message())
                    }
                },
                Err(refusal) => wanted.is_missing(spec, &refusal.to_string()),
            }
        }
        self.wanted = Some(wanted);
        self.keep();
    }

    /// Ends all jobs. The file for later starts keeps them.
    pub fn end_all(&mut self) -> Result<(), Status> {
        self.wanted = None;
        let actions = self.controller.end_all();
        self.carry_out(None, actions)
    }

    /// Retries failed writes, forgets flows that ended long ago, and detaches from former ports.
    pub fn tidy(&mut self, now: Instant) -> anyhow::Result<()> {
        if self.store.as_ref().is_some_and(Store::is_behind)
            || self.wanted.as_ref().is_some_and(Wanted::is_behind)
        {
            self.keep();
        }
        let is_silent = self.reserved.called.is_some_and(|called| now > called + SILENT);
        if is_silent && !self.reserved.manager.is_empty() {
            self.reserved.manager.clear();
            self.reserve()?;
        }
        let flows = self.plane.ended_flows()?;
        self.plane.forget_ended(&self.ended.observe(&flows, now))?;
        self.detach_if_done()
    }

    /// Detaches from interfaces that are no longer ports, unless data of ended flows may come from
    /// them.
    fn detach_if_done(&mut self) -> anyhow::Result<()> {
        let flows = self.plane.ended_flows()?;
        let ports = self.controller.ports();
        let is_needed = |i: &u32| {
            ports.iter().any(|p| p.ifindex == *i) || flows.iter().any(|f| f.ifindex == *i)
        };
        let done: Vec<u32> = self.plane.attached().into_iter().filter(|i| !is_needed(i)).collect();
        done.into_iter().try_for_each(|ifindex| self.plane.detach(ifindex))
    }

    fn all(&mut self, job: Option<&str>, actions: Vec<Action>) -> Result<(), Status> {
        let is_change =
            |a: &Action| matches!(a, Action::ActivateRing(..) | Action::DeleteRing { .. });
        let changed = actions.iter().any(is_change);
        let mut waiting = Vec::new();
        let result = self.each(actions, &mut waiting);
        if let Some(boxes) = self.boxes.as_mut().filter(|_| changed || !waiting.is_empty()) {
            boxes.changed(job, waiting);
        }
        let Err(error) = result else { return Ok(()) };
        let mut errors = error.chain().filter_map(|e| e.downcast_ref::<std::io::Error>());
        let no_memory = errors.any(|e| e.kind() == std::io::ErrorKind::OutOfMemory);
        let error = format!("{error:#}");
        if let Some(job) = job {
            let actions = self.controller.data_plane_failed(job, &error);
            if let Err(e) = self.each(actions, &mut Vec::new()) {
                log::error!(NETSUM_JOB = job; "after a failure: {e:#}");
            }
        }
        let message = format!("the data plane refused: {error}");
        Err(if no_memory { Status::resource_exhausted(message) } else { Status::internal(message) })
    }

    /// Carries out all actions, even if one fails; returns the first error. Replies to ranks that
    /// wait for boxes are moved to `waiting`.
    fn each(&mut self, actions: Vec<Action>, waiting: &mut Vec<Waiting>) -> anyhow::Result<()> {
        let (mut actions, mut result) = (actions.into_iter().peekable(), Ok(()));
        while let Some(action) = actions.next() {
            if self.boxes.is_some()
                && let Action::Reply { waiter, result: Ok(epoch) } = action
            {
                waiting.extend(self.waiters.remove(&waiter).map(|rank| Waiting { rank, epoch }));
                continue;
            }
            result = result.and(self.one(action, &mut actions));
        }
        result
    }

    /// Carries out one action, together with following ones that fit into the same change.
    fn one(
        &mut self,
        action: Action,
        rest: &mut Peekable<impl Iterator<Item = Action>>,
    ) -> anyhow::Result<()> {
        log::debug!("{action:?}");
        match action {
            Action::CreateRing(ring) => {
                let next = || match rest.next_if(|a| matches!(a, Action::CreateRing(_)))? {
                    Action::CreateRing(ring) => Some(ring),
                    _ => None,
                };
                let rings: Vec<RingSpec> = std::iter::once(ring).chain(from_fn(next)).collect();
                self.plane.create_rings(&rings)
            }
            Action::ResetCounters(ring) => self.plane.reset_counters(ring),
            Action::AddFlow(flow) => self.plane.add_flow(&flow),
            Action::ListenInBand(token, job) => self.plane.listen_in_band(token, job),
            Action::IgnoreInBand(token) => self.plane.ignore_in_band(token),
            Action::ActivateRing(ring, ports) => {
                let edges: Vec<Edge> =
                    self.edges().filter(|edge| edge.to.ring == ring.id).collect();
                for edge in edges {
                    let known = self.next_hops.get(&(edge.dst, edge.own));
                    let unknown = Hop { own: edge.own, dst: [0; 6], src: [0; 6] };
                    self.plane.set_hop(edge.to, known.unwrap_or(&unknown))?;
                }
                self.plane.activate_ring(&ring, &ports)
            }
            Action::ForgetEnded(flows) => self.plane.forget_ended(&flows),
            Action::DeleteRing { ring: id, flows, ports } => {
                let next = || match rest.next_if(|a| matches!(a, Action::DeleteRing { .. }))? {
                    Action::DeleteRing { ring: id, flows, ports } => {
                        Some(EndedRing { id, flows, ports })
                    }
                    _ => None,
                };
                let ring = EndedRing { id, flows, ports };
                let rings: Vec<EndedRing> = std::iter::once(ring).chain(from_fn(next)).collect();
                self.plane.delete_rings(&rings)
            }
            Action::Reply { waiter, result } => {
                if let Some(sender) = self.waiters.remove(&waiter) {
                    // A rank that has disconnected needs no answer.
                    let _ = sender.send(result);
                }
                Ok(())
            }
        }
    }
}
