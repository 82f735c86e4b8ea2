//! Controller and data plane behind one lock. Whoever changes the controller carries out its actions before anybody else
//! sees it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{oneshot, watch};
use tonic::Status;

use super::persist::Store;
use super::trace::Tracers;
use crate::clock;
use crate::core::ended::Ended;
use crate::core::queue::{Admission, Standing};
use crate::core::watch::{Patience, Watch};
use crate::core::{Action, Controller, Refusal, State};
use crate::dataplane::DataPlane;

/// What a rank in `join` waits for.
pub type JoinAnswer = Result<u32, Refusal>;

/// What the daemon knows, shared by its services.
#[derive(Clone)]
pub struct Shared {
    inner: Arc<Mutex<Inner>>,
    /// How often ranks are to say that they are alive.
    pub heartbeat: Duration,
}

/// What is behind the lock.
pub struct Inner {
    /// The controller.
    pub controller: Controller,
    /// The data plane.
    pub plane: Box<dyn DataPlane>,
    /// Active rings over time.
    pub watch: Watch,
    /// How many look for unknown connections at the moment.
    pub watchers: u32,
    /// Flows that have ended, over time.
    pub ended: Ended,
    /// Who traces packets.
    pub tracers: Tracers,
    /// Where the controller's state is kept for the next daemon.
    pub store: Option<Store>,
    waiters: HashMap<u64, oneshot::Sender<JoinAnswer>>,
    next_waiter: u64,
    /// Who is told about jobs in the queue, by their tickets.
    queue: HashMap<u64, watch::Sender<Turn>>,
}

/// How a job that was put into the queue stands.
#[derive(Clone, Debug)]
pub enum Turn {
    /// It waits.
    Waits(Standing),
    /// It has been created.
    Created,
    /// It will not be.
    Ended(Status),
}

impl Shared {
    /// A daemon's state.
    pub fn new(
        mut controller: Controller,
        plane: Box<dyn DataPlane>,
        heartbeat: Duration,
        patience: Patience,
    ) -> Self {
        let watch = Watch::new(patience);
        controller.set_began(clock::monotonic());
        let inner = Inner {
            controller,
            plane,
            watch,
            watchers: 0,
            ended: Ended::default(),
            tracers: Tracers::default(),
            store: None,
            waiters: HashMap::new(),
            next_waiter: 0,
            queue: HashMap::new(),
        };
        Self { inner: Arc::new(Mutex::new(inner)), heartbeat }
    }

    /// Everything, for one request. Nothing that is done under the lock waits for anybody.
    pub fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks at the clock, again and again.
    pub async fn keep_time(self) {
        let mut tick = tokio::time::interval(Duration::from_millis(50));
        loop {
            tick.tick().await;
            let mut inner = self.lock();
            let now = Instant::now();
            let all_are_back = inner.controller.end_return(now);
            let actions = inner.controller.tick(now);
            if actions.is_empty() && !all_are_back {
                continue;
            }
            if let Err(e) = inner.carry_out(None, actions) {
                log::error!("{}", e.message());
            }
        }
    }
}

impl Inner {
    /// A number for a request that will be answered later, and where its answer comes out.
    pub fn waiter(&mut self) -> (u64, oneshot::Receiver<JoinAnswer>) {
        let (sender, receiver) = oneshot::channel();
        self.next_waiter += 1;
        self.waiters.insert(self.next_waiter, sender);
        (self.next_waiter, receiver)
    }

    /// Nobody waits for this number after all.
    pub fn forget(&mut self, waiter: u64) {
        self.waiters.remove(&waiter);
    }

    /// How many requests wait for an answer.
    pub fn waiting(&self) -> usize {
        self.waiters.len()
    }

    /// Carries out actions for a job. What the data plane cannot do fails the job.
    pub fn carry_out(&mut self, job: Option<&str>, actions: Vec<Action>) -> Result<(), Status> {
        let began = Instant::now();
        let result = self.all(job, actions);
        self.admit();
        // The rings of a large job take seconds, and heartbeats wait for the lock.
        self.controller.was_deaf(began.elapsed());
        // After the deed: a daemon that comes next finds what has not been told and ends the job.
        if let Some(store) = &mut self.store
            && let Err(e) = store.write(&self.controller.save())
        {
            log::error!("{}: {e:#}; if the daemon is killed now, its jobs end", store.path().display());
        }
        result
    }

    /// Ends all jobs.
    pub fn end_all(&mut self) -> Result<(), Status> {
        let actions = self.controller.end_all();
        self.carry_out(None, actions)
    }

    /// Forgets flows that ended long ago, and lets go of ports that are none any more and from which nothing must be kept.
    pub fn tidy(&mut self, now: Instant) -> anyhow::Result<()> {
        let flows = self.plane.ended_flows()?;
        self.plane.forget_ended(&self.ended.observe(&flows, now))?;
        self.detach_if_done()
    }

    /// Detaches from interfaces that are no ports any more, and from which no ended flow's data can come.
    fn detach_if_done(&mut self) -> anyhow::Result<()> {
        let flows = self.plane.ended_flows()?;
        let ports = self.controller.ports();
        let is_needed =
            |i: &u32| ports.iter().any(|p| p.ifindex == *i) || flows.iter().any(|f| f.ifindex == *i);
        let done: Vec<u32> = self.plane.attached().into_iter().filter(|i| !is_needed(i)).collect();
        done.into_iter().try_for_each(|ifindex| self.plane.detach(ifindex))
    }

    /// Whether an earlier daemon has created a job for a command that has waited since then and comes for it. One that has come to
    /// an end meanwhile is deleted, to be waited for again.
    pub fn claim(&mut self, name: &str, since: u64) -> Result<bool, Status> {
        if !self.controller.claim(name, since) {
            return Ok(false);
        }
        if !matches!(self.controller.job(name)?.state, State::Failed(_)) {
            return Ok(true);
        }
        let actions = self.controller.delete_job(name)?;
        self.carry_out(None, actions)?;
        Ok(false)
    }

    /// What becomes of a job that was put into the queue a moment ago comes out here.
    pub fn follow(&mut self, ticket: u64) -> watch::Receiver<Turn> {
        let standing = Standing { position: 0, of: 0, waits_for: String::new(), overtaken: 0 };
        let (sender, receiver) = watch::channel(Turn::Waits(standing));
        self.queue.insert(ticket, sender);
        receiver
    }

    /// Nobody follows this job any more.
    pub fn forget_turns(&mut self, ticket: u64) {
        self.queue.remove(&ticket);
    }

    /// Lets jobs out of the queue for which there is room by now, decides what becomes of the windows of those at work, and tells
    /// all who wait where they stand.
    fn admit(&mut self) {
        loop {
            let admissions = self.controller.admit();
            if !admissions.is_empty() {
                admissions.into_iter().for_each(|admission| self.admit_one(admission));
                continue;
            }
            // Jobs without ranks become narrower at once, which may make room.
            let changes = self.controller.fit_windows();
            if changes.is_empty() {
                break;
            }
            for (job, actions) in changes {
                if let Err(e) = self.all(Some(&job), actions) {
                    log::error!("job {job}, with another window: {}", e.message());
                }
            }
        }
        if self.queue.is_empty() {
            return;
        }
        for (queued, standing) in self.controller.standings() {
            let Some(sender) = self.queue.get(&queued.ticket) else { continue };
            sender.send_if_modified(|turn| {
                let new = !matches!(turn, Turn::Waits(old) if *old == standing);
                if new {
                    *turn = Turn::Waits(standing);
                }
                new
            });
        }
    }

    fn admit_one(&mut self, Admission { ticket, job, actions }: Admission) {
        let turn = match self.all(None, actions) {
            Ok(()) => {
                log::info!("job {job} created: it has waited for its turn");
                Turn::Created
            }
            Err(error) => {
                log::error!("job {job}: {}", error.message());
                let undo = self.controller.delete_job(&job).unwrap_or_default();
                if let Err(e) = self.all(None, undo) {
                    log::error!("job {job}, after a failure: {}", e.message());
                }
                Turn::Ended(error)
            }
        };
        self.tell(ticket, turn);
    }

    /// Tells who follows a job what has become of it. Nobody may.
    fn tell(&mut self, ticket: u64, turn: Turn) {
        if let Some(sender) = self.queue.remove(&ticket) {
            sender.send_replace(turn);
        }
    }

    fn all(&mut self, job: Option<&str>, actions: Vec<Action>) -> Result<(), Status> {
        let mut first_error = None;
        for action in actions {
            if let Err(error) = self.one(action) {
                first_error.get_or_insert(format!("{error:#}"));
            }
        }
        let Some(error) = first_error else { return Ok(()) };
        if let Some(job) = job {
            for action in self.controller.data_plane_failed(job, &error) {
                if let Err(e) = self.one(action) {
                    log::error!("after a failure: {e:#}");
                }
            }
        }
        Err(Status::internal(format!("the data plane refused: {error}")))
    }

    fn one(&mut self, action: Action) -> anyhow::Result<()> {
        log::debug!("{action:?}");
        match action {
            Action::CreateRing(ring) => self.plane.create_ring(&ring),
            Action::ResetCounters(ring) => self.plane.reset_counters(ring),
            Action::AddFlow(flow) => self.plane.add_flow(&flow),
            Action::ListenInBand(job) => self.plane.listen_in_band(&job),
            Action::IgnoreInBand(token) => self.plane.ignore_in_band(token),
            Action::ActivateRing(ring, ports) => self.plane.activate_ring(&ring, &ports),
            Action::ForgetEnded(flows) => self.plane.forget_ended(&flows),
            Action::DeleteRing { ring, flows, ports } => self.plane.delete_ring(ring, &flows, &ports),
            Action::Dequeued { ticket, why } => {
                log::info!("{why}");
                self.tell(ticket, Turn::Ended(why.into()));
                Ok(())
            }
            Action::Reply { waiter, result } => {
                if let Some(sender) = self.waiters.remove(&waiter) {
                    // A rank that has gone away needs no answer.
                    let _ = sender.send(result);
                }
                Ok(())
            }
        }
    }
}
