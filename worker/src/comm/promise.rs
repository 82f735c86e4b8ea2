//! The outcome of an operation in flight. The thread that drives has the *promise*, the caller that
//! waits has the *settlement*.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use netsum_collective::engine::Finished;
use netsum_collective::error::Error;
use netsum_collective::numeric::element::Owned;
use netsum_collective::report::Report;

/// The outcome of an operation.
type Settled = Result<(Owned, Report), Error>;

/// A function that is called when the outcome is known.
type Call = Box<dyn FnOnce() + Send>;

/// The state of an outcome.
#[derive(Default)]
pub(super) struct OutcomeState {
    /// Stays true when the outcome has been taken.
    pub is_settled: bool,
    pub outcome: Option<Settled>,
}

/// Holds the outcome.
pub(super) struct Settlement {
    settled: Mutex<OutcomeState>,
    call: Mutex<Option<Call>>,
    changed: Condvar,
    called: Instant,
}

impl Settlement {
    pub fn new() -> Arc<Self> {
        let (settled, changed, called) = (Mutex::default(), Condvar::new(), Instant::now());
        Arc::new(Self { settled, call: Mutex::new(None), changed, called })
    }

    pub fn lock(&self) -> MutexGuard<'_, OutcomeState> {
        self.settled.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn settle(&self, outcome: Settled) {
        let call = {
            let mut settled = self.lock();
            *settled = OutcomeState { is_settled: true, outcome: Some(outcome) };
            self.call.lock().unwrap_or_else(PoisonError::into_inner).take()
        };
        self.changed.notify_all();
        call.into_iter().for_each(|call| call());
    }

    /// Calls the function when the outcome is known; at once if it is.
    pub fn call(&self, call: Call) {
        let settled = self.lock();
        if !settled.is_settled {
            *self.call.lock().unwrap_or_else(PoisonError::into_inner) = Some(call);
        } else {
            drop(settled);
            call();
        }
    }

    pub fn wait(&self, most: Duration) {
        let settled = self.lock();
        if !settled.is_settled {
            drop(self.changed.wait_timeout(settled, most));
        }
    }
}

/// The other end of a [`Settlement`]. If it is dropped, the outcome is [`Error::Closed`].
pub(super) struct Promise {
    settlement: Option<Arc<Settlement>>,
    /// How many there were before the operation was started.
    pub retransmissions: Option<u64>,
}

impl Promise {
    /// A promise, and the settlement that it is for.
    pub fn new() -> (Arc<Settlement>, Self) {
        let settlement = Settlement::new();
        (Arc::clone(&settlement), Self { settlement: Some(settlement), retransmissions: None })
    }

    /// Called when the operation has ended; `retransmissions` counts on from those before.
    pub fn settle(
        mut self,
        result: Result<Finished, Error>,
        data: Owned,
        retransmissions: Option<u64>,
    ) {
        let Some(settlement) = self.settlement.take() else { return };
        let again = retransmissions.zip(self.retransmissions).map(|(after, before)| after - before);
        let report =
            result.and_then(|finished| finished.report(settlement.called.elapsed(), again));
        settlement.settle(report.map(|report| (data, report)));
    }

    /// Called when the operation could not be started.
    pub fn fail(mut self, error: Error) {
        if let Some(settlement) = self.settlement.take() {
            settlement.settle(Err(error));
        }
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        if let Some(settlement) = self.settlement.take() {
            settlement.settle(Err(Error::Closed));
        }
    }
}
