//! The manager as the controller's executor: actions become orders to boxes, which
//! [`dispatch`](crate::dispatch) gives.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use netsum_common::abi::FlowKey;
use netsum_controller::executor::{Executor, new_program_generation};
use netsum_controller::state;
use netsum_controller::waiters::{JoinResult, Waiters};
use netsum_core::plane::{FlowSpec, FlowStats};
use netsum_core::saved::Saved;
use netsum_core::{Action, Controller, JobSpec, Refusal};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;

use crate::boxes::Boxes;

/// The state of a manager: the controller, and its orders as executor.
pub type Shared = state::Shared<Orders>;

/// The flows of a job have changed, or those of any.
pub struct Change {
    pub job: Option<String>,
    pub joined: Vec<Joined>,
    /// Flows of deleted jobs whose ranks are known to have stopped.
    pub stopped: HashSet<FlowKey>,
}

/// A rank that is answered when the change has been carried out, and the epoch in its answer.
pub struct Joined {
    pub rank: oneshot::Sender<JoinResult>,
    pub epoch: u32,
}

/// The jobs of changes that are not carried out yet; `None` stands for all.
#[derive(Clone, Default)]
pub struct Pending(Arc<Mutex<Vec<Option<String>>>>);

impl Pending {
    fn jobs(&self) -> MutexGuard<'_, Vec<Option<String>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The first one has been carried out.
    pub fn done(&self) {
        self.jobs().remove(0);
    }
}

/// Turns actions into changes for [`Dispatcher`](crate::dispatch::Dispatcher).
pub struct Orders {
    changes: UnboundedSender<Change>,
    pending: Pending,
    boxes: Arc<Boxes>,
    /// Stands for the programs of all boxes.
    program_generation: u64,
}

impl Orders {
    /// Orders for these boxes, and the receiver of the changes.
    pub fn new(boxes: Arc<Boxes>) -> (Self, UnboundedReceiver<Change>) {
        let (changes, receiver) = unbounded_channel();
        let (pending, program_generation) = (Pending::default(), new_program_generation());
        (Self { changes, pending, boxes, program_generation }, receiver)
    }

    pub fn pending(&self) -> Pending {
        self.pending.clone()
    }
}

impl Executor for Orders {
    fn carry_out(
        &mut self,
        _: &Controller,
        waiters: &mut Waiters,
        job: Option<&str>,
        actions: Vec<Action>,
    ) -> anyhow::Result<()> {
        let (mut is_change, mut joined, mut stopped) = (false, Vec::new(), HashSet::new());
        for action in actions {
            log::debug!("{action:?}");
            match action {
                Action::Reply { waiter, result: Ok(epoch) } => {
                    joined.extend(waiters.take(waiter).map(|rank| Joined { rank, epoch }));
                }
                Action::Reply { waiter, result } => waiters.answer(waiter, result),
                Action::ActivateRing(..) | Action::DeleteRing { .. } => is_change = true,
                Action::ForgetEnded(flows) => stopped.extend(flows),
                // Boxes do this with their own part of the job.
                _ => {}
            }
        }
        if is_change || !joined.is_empty() {
            let job = job.map(str::to_owned);
            self.pending.jobs().push(job.clone());
            // The receiver is gone when the manager ends.
            let _ = self.changes.send(Change { job, joined, stopped });
        }
        Ok(())
    }

    fn admit(&self, _: &mut Controller, spec: &JobSpec) -> Result<(), Refusal> {
        if spec.in_band {
            let why = "--in-band: set-up in band does not work over several boxes";
            return Err(Refusal::Invalid(why.into()));
        }
        if spec.float_lsb.is_some() {
            let why = "--dtype f32: sums of several boxes would be rounded more than once; create \
                       the job at one box";
            return Err(Refusal::Invalid(why.into()));
        }
        if spec.elastic.is_some() {
            let why = "--min-ranks: over several boxes, a job has a fixed number of ranks";
            return Err(Refusal::Invalid(why.into()));
        }
        Ok(())
    }

    fn is_busy(&self, job: &str) -> bool {
        self.pending.jobs().iter().any(|of| of.as_ref().is_none_or(|of| of == job))
    }

    fn program_generation(&self, job: &str) -> u64 {
        if self.boxes.is_unplaced(job) { 0 } else { self.program_generation }
    }

    fn flow_stats(&self, _: &FlowSpec) -> Option<FlowStats> {
        None
    }

    fn save(&self, saved: &mut Saved) {
        saved.drained = self.boxes.drained();
        saved.found = self.boxes.found();
        saved.accepted = self.boxes.accepted();
        saved.measured = self.boxes.measured();
    }
}
