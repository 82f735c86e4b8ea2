//! The seam between the controller and what it controls: an agent with its data plane, in the same
//! process, or several boxes, which a fabric's manager gives orders.

use std::time::SystemTime;

use netsum_core::plane::{FlowSpec, FlowStats};
use netsum_core::saved::Saved;
use netsum_core::{Action, Controller, JobSpec, Refusal};

use super::waiters::Waiters;

/// Carries out the controller's actions. It is behind one lock with the controller, so nothing here
/// may wait.
pub trait Executor: Send + 'static {
    /// Carries out actions for a job, or for any job if `None`: all of them, even if one fails. A
    /// rank is answered when the actions before its answer are done.
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

    /// Whether actions of this job are still being carried out. Its ranks may be waiting, and
    /// cannot send heartbeats then.
    fn is_busy(&self, _job: &str) -> bool {
        false
    }

    /// Identifies the programs that sum a job; 0 if nothing could sum it now, so its ranks need not
    /// try.
    fn program_generation(&self, job: &str) -> u64;

    /// What has arrived on a flow; `None` if that is known elsewhere.
    fn flow_stats(&self, flow: &FlowSpec) -> Option<FlowStats>;

    /// Adds the executor's own part of what the next daemon has to know.
    fn save(&self, saved: &mut Saved);
}

/// A number for programs that were just attached. Never 0.
pub fn new_program_generation() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_nanos() as u64
        | 1
}
