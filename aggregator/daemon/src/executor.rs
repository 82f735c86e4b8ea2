//! The seam between the controller and what it controls: an agent with its data plane, in the same
//! process, or several boxes, which a fabric's manager gives orders.

use std::collections::HashSet;
use std::net::IpAddr;
use std::time::{Duration, SystemTime};

use netsum_api::v1 as api;
use netsum_core::plane::{FlowSeen, FlowSpec};
use netsum_core::saved::Saved;
use netsum_core::{Action, Controller, JobSpec, RankAddress, Refusal};
use tonic::Status;

use super::state::Shared;
use super::waiters::Waiters;

/// Carries out the controller's actions. It is behind one lock with the controller, so nothing here
/// may wait.
pub trait Executor: Send + 'static {
    /// Carries out actions for a job, or for any job if `None`: all of them, even if one fails. Ranks
    /// are answered when the actions before their answer are done.
    ///
    /// # Errors
    /// The first error.
    fn carry_out(
        &mut self,
        controller: &Controller,
        waiters: &mut Waiters,
        job: Option<&str>,
        actions: Vec<Action>,
    ) -> anyhow::Result<()>;

    /// Prepares the controller for a new job.
    ///
    /// # Errors
    /// If the job has a property that is not possible here.
    fn admit(&self, controller: &mut Controller, spec: &JobSpec) -> Result<(), Refusal>;

    /// Whether actions of this job are still being carried out. Its ranks may be waiting, and cannot
    /// send heartbeats then.
    fn is_busy(&self, _job: &str) -> bool {
        false
    }

    /// Identifies the programs that sum a job; 0 if nothing could sum it now, so its ranks need not
    /// try.
    fn programs(&self, job: &str) -> u64;

    /// What has arrived on a flow; `None` if that is known elsewhere.
    fn flow_seen(&self, flow: &FlowSpec) -> Option<FlowSeen>;

    /// Adds the executor's own part of what the next daemon has to know.
    fn save(&self, saved: &mut Saved);
}

/// A number for programs that were just attached. Never 0.
pub fn programs_of_now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_nanos() as u64
        | 1
}

/// What takes time, and happens without the lock. A service has its own copy.
#[tonic::async_trait]
pub trait Backend: Clone + Send + Sync + 'static {
    type Executor: Executor;

    fn shared(&self) -> &Shared<Self::Executor>;

    /// Updates what the controller knows of ports.
    async fn refresh_ports(&self) -> Result<(), Status>;

    /// Finds the port that a rank is behind. `patience` bounds the search.
    async fn find(
        &self,
        rank: u32,
        address: &RankAddress,
        patience: Duration,
    ) -> Result<Place, Status>;

    /// The name of the port at which packets of this address arrive, if known.
    async fn port_seen(&self, ip: IpAddr) -> Option<String>;

    /// Watches a stalled job, and says why it stands still.
    async fn diagnose(&self, request: api::DiagnoseRequest) -> Result<api::Diagnosis, Status>;

    /// Says why packets do not reach a rank.
    async fn path(&self, request: api::PathRequest) -> Result<api::PathReply, Status>;

    /// Begins to log possible causes after a rank has ended a job, which had its flows at these
    /// ports.
    fn job_aborted(&self, job: String, ports: HashSet<u32>);
}

/// Where a rank is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    pub ifindex: u32,
    /// The MAC address of its packets there: its own, or its router's.
    pub mac: [u8; 6],
    /// That router's address, if known.
    pub router: Option<IpAddr>,
}
