//! The controller and its executor behind one lock. A caller that changes the controller carries
//! out the resulting actions before it releases the lock.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use netsum_core::saved::Saved;
use netsum_core::{Action, Controller, JobSpec};
use tonic::{Code, Status};

use super::executor::Executor;
use super::store::{JobFile, Store};
use super::waiters::Waiters;

/// Interval of the ranks' heartbeats, unless configured otherwise.
pub const HEARTBEAT: Duration = Duration::from_secs(1);
/// Interval of the controller's ticks.
const TICK: Duration = Duration::from_millis(50);

/// The daemon's state, shared by its services.
pub struct Shared<E> {
    inner: Arc<Mutex<Inner<E>>>,
    /// Interval of the ranks' heartbeats.
    pub heartbeat: Duration,
}

impl<E> Clone for Shared<E> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), heartbeat: self.heartbeat }
    }
}

/// The state behind the lock.
pub struct Inner<E> {
    pub controller: Controller,
    pub executor: E,
    /// Ranks that wait for others.
    pub waiters: Waiters,
    pub refused_jobs: RefusedJobs,
    /// At a manager: its election. At a box: the highest election of a manager that has called.
    pub election: u64,
    /// The store of the controller's state for the next daemon.
    pub store: Option<Store>,
    /// The store of the jobs that every start creates again.
    pub job_file: Option<JobFile>,
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

impl<E: Executor> Shared<E> {
    pub fn new(controller: Controller, executor: E, heartbeat: Duration) -> Self {
        let inner = Inner {
            controller,
            executor,
            waiters: Waiters::default(),
            refused_jobs: RefusedJobs::default(),
            election: 0,
            store: None,
            job_file: None,
        };
        Self { inner: Arc::new(Mutex::new(inner)), heartbeat }
    }

    /// Locks the state for one request. No code may block while it holds the lock.
    pub fn lock(&self) -> MutexGuard<'_, Inner<E>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The same for a request that changes something; `election` is that of the manager that sent
    /// it, if any.
    ///
    /// # Errors
    /// If a manager elected later has called.
    pub fn order(&self, election: Option<u64>) -> Result<MutexGuard<'_, Inner<E>>, Status> {
        let mut inner = self.lock();
        match election {
            Some(theirs) if !inner.accept_election(theirs) => {
                let now = inner.election;
                let why = format!(
                    "refused orders of the manager with election number {theirs}: one with number \
                     {now} has taken over"
                );
                Err(Status::aborted(why))
            }
            _ => Ok(inner),
        }
    }

    /// Calls the controller's tick periodically.
    pub async fn run_ticks(self) {
        let mut tick = tokio::time::interval(TICK);
        loop {
            tick.tick().await;
            let mut inner = self.lock();
            let Inner { controller, executor, .. } = &mut *inner;
            controller.extend_heartbeats(TICK, |job| executor.is_busy(job));
            let actions = inner.controller.tick(Instant::now());
            if actions.is_empty() {
                continue;
            }
            inner.carry_out_or_log(None, actions);
        }
    }
}

impl<E: Executor> Inner<E> {
    /// Carries out actions for a job, and writes the state. If an action fails, the job does.
    pub fn carry_out(&mut self, job: Option<&str>, actions: Vec<Action>) -> Result<(), Status> {
        let began = Instant::now();
        let result = self.execute(job, actions);
        // After the actions: the next daemon finds rings that were not saved, and ends their jobs.
        self.save();
        // A large job's rings, or a disk, can take seconds, and heartbeats wait for the lock.
        self.controller.extend_heartbeats(began.elapsed(), |_| true);
        result
    }

    /// [`Self::carry_out`] for a change that no client waits for.
    pub fn carry_out_or_log(&mut self, job: Option<&str>, actions: Vec<Action>) {
        match (self.carry_out(job, actions), job) {
            (Ok(()), _) => {}
            (Err(e), Some(job)) => log::error!(NETSUM_JOB = job; "job {job}: {}", e.message()),
            (Err(e), None) => log::error!("{}", e.message()),
        }
    }

    /// Records that a manager has called, by its election. Returns whether no manager elected later
    /// has called.
    pub fn accept_election(&mut self, election: u64) -> bool {
        if election > self.election {
            log::info!(
                "a manager with election number {election} took over; orders of earlier ones are \
                 refused"
            );
            self.election = election;
            self.save();
        }
        election == self.election
    }

    /// Writes the state that outlives the daemon.
    fn save(&mut self) {
        if let Some(store) = &mut self.store {
            let mut saved = Saved { election: self.election, ..self.controller.save() };
            self.executor.save(&mut saved);
            store.save(&saved, "its jobs would not survive a kill of the daemon");
        }
        if let Some(job_file) = &mut self.job_file {
            job_file.save(&self.controller);
        }
    }

    /// Repeats writes that have failed.
    pub fn retry_save(&mut self) {
        if self.store.as_ref().is_some_and(Store::has_unsaved)
            || self.job_file.as_ref().is_some_and(JobFile::has_unsaved)
        {
            self.save();
        }
    }

    /// Creates jobs again that should exist and do not, for example after a boot. From now on
    /// changes are written.
    pub fn recreate_jobs(&mut self, mut job_file: JobFile, jobs: Vec<JobSpec>) {
        for spec in jobs {
            let name = spec.name.clone();
            if self.controller.job(&name).is_ok() {
                continue;
            }
            match self.controller.recreate_job(spec.clone()) {
                Ok(actions) => match self.carry_out(Some(&name), actions) {
                    Ok(()) => {
                        log::info!(NETSUM_JOB = name; "job {name} created again, with empty \
                            rings")
                    }
                    Err(e) => {
                        log::error!(NETSUM_JOB = name; "job {name} created again, but cannot \
                            begin: {}", e.message())
                    }
                },
                Err(refusal) => job_file.add_missing(spec, &refusal.to_string()),
            }
        }
        self.job_file = Some(job_file);
        self.save();
    }

    /// Ends all jobs. The file for later starts keeps them.
    pub fn end_all(&mut self) -> Result<(), Status> {
        self.job_file = None;
        let actions = self.controller.end_all();
        self.carry_out(None, actions)
    }

    fn execute(&mut self, job: Option<&str>, actions: Vec<Action>) -> Result<(), Status> {
        let Err(error) = self.try_execute(job, actions) else { return Ok(()) };
        let mut errors = error.chain().filter_map(|e| e.downcast_ref::<std::io::Error>());
        let no_memory = errors.any(|e| e.kind() == std::io::ErrorKind::OutOfMemory);
        let error = format!("{error:#}");
        if let Some(job) = job {
            let actions = self.controller.execution_failed(job, &error);
            if let Err(e) = self.try_execute(Some(job), actions) {
                log::error!(NETSUM_JOB = job; "job {job}: cannot clean up after a failure: {e:#}");
            }
        }
        let message = format!("cannot change the data plane: {error}");
        Err(if no_memory { Status::resource_exhausted(message) } else { Status::internal(message) })
    }

    fn try_execute(&mut self, job: Option<&str>, actions: Vec<Action>) -> anyhow::Result<()> {
        let Self { controller, executor, waiters, .. } = self;
        executor.carry_out(controller, waiters, job, actions)
    }
}
