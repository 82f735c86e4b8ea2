//! Ranks that wait in `Join`.

use std::collections::HashMap;

use netsum_core::Refusal;
use tokio::sync::oneshot;

/// The answer to a rank's `Join`: the epoch that has begun.
pub type JoinResult = Result<u32, Refusal>;

/// The requests that wait for an answer, by number.
#[derive(Default)]
pub struct Waiters {
    senders: HashMap<u64, oneshot::Sender<JoinResult>>,
    last: u64,
}

impl Waiters {
    /// A number for a request that will be answered later, and the receiver of its answer.
    pub fn add(&mut self) -> (u64, oneshot::Receiver<JoinResult>) {
        let (sender, receiver) = oneshot::channel();
        self.last += 1;
        self.senders.insert(self.last, sender);
        (self.last, receiver)
    }

    /// Takes a request, to answer it later; `None` if it no longer waits.
    pub fn take(&mut self, waiter: u64) -> Option<oneshot::Sender<JoinResult>> {
        self.senders.remove(&waiter)
    }

    pub fn answer(&mut self, waiter: u64, answer: JoinResult) {
        if let Some(sender) = self.take(waiter) {
            // A rank that has disconnected needs no answer.
            let _ = sender.send(answer);
        }
    }

    /// Number of requests that wait.
    pub fn count(&self) -> usize {
        self.senders.len()
    }
}
