//! The answer to `QueueJob`: a stream that tells where a job stands until it is created. Who lets go of it before that takes
//! the job out of the queue.

use std::pin::Pin;

use futures::Stream;
use futures::stream::unfold;
use netsum_api::v1 as api;
use netsum_api::v1::queue_job_reply::Turn as Message;
use tokio::sync::watch;
use tonic::Status;

use super::state::{Shared, Turn};
use crate::core::queue::Standing;

/// What a job in the queue is told.
pub type Turns = Pin<Box<dyn Stream<Item = Result<api::QueueJobReply, Status>> + Send>>;

/// A standing for the API.
pub fn place_message(standing: &Standing) -> api::QueuePlace {
    let Standing { position, of, waits_for, overtaken } = standing.clone();
    api::QueuePlace { position, of, waits_for, overtaken }
}

/// Somebody's hold on a job, until it has been told that the job is there.
struct Hold {
    shared: Shared,
    ticket: u64,
    job: String,
    turns: watch::Receiver<Turn>,
    told: bool,
}

impl Hold {
    /// Has the state file say that the command knows of its job, before it does: a daemon that is killed in between leaves a job
    /// that the command still asks for, and not one that the next daemon takes for nobody's.
    fn note_told(&self) {
        let mut inner = self.shared.lock();
        inner.controller.tell(&self.job);
        if let Err(e) = inner.carry_out(None, Vec::new()) {
            log::error!("job {}: {}", self.job, e.message());
        }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        if self.told {
            return;
        }
        let mut inner = self.shared.lock();
        let actions = if inner.controller.leave_queue(self.ticket, &self.job) {
            log::info!("job {}: nobody waits for its turn any more", self.job);
            Vec::new()
        } else if matches!(*self.turns.borrow(), Turn::Created) {
            log::info!("job {} deleted: nobody has waited for its turn to the end", self.job);
            inner.controller.delete_job(&self.job).unwrap_or_default()
        } else {
            return;
        };
        inner.forget_turns(self.ticket);
        // What that has made room for.
        if let Err(e) = inner.carry_out(None, actions) {
            log::error!("job {}: {}", self.job, e.message());
        }
    }
}

/// The turns of a job that has been put into the queue, in messages; `created` makes that of the job at last.
pub fn turns(
    shared: Shared,
    ticket: u64,
    job: String,
    mut turns: watch::Receiver<Turn>,
    created: impl Fn(&str) -> Result<api::Job, Status> + Send + Sync + 'static,
) -> Turns {
    turns.mark_changed();
    let hold = Hold { shared, ticket, job, turns, told: false };
    Box::pin(unfold((hold, created), |(mut hold, created)| async move {
        if hold.told {
            return None;
        }
        if hold.turns.changed().await.is_err() {
            hold.told = true;
            return Some((Err(Status::unavailable("the daemon is stopping")), (hold, created)));
        }
        let turn = hold.turns.borrow_and_update().clone();
        let message = match turn {
            Turn::Waits(standing) => Ok(Message::Waits(place_message(&standing))),
            Turn::Created => {
                hold.told = true;
                hold.note_told();
                created(&hold.job).map(Message::Created)
            }
            Turn::Ended(why) => {
                hold.told = true;
                Err(why)
            }
        };
        let reply = message.map(|turn| api::QueueJobReply { turn: Some(turn) });
        Some((reply, (hold, created)))
    }))
}
