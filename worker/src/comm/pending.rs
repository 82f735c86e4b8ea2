//! An all-reduce that runs while the application does something else.

use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use super::promise::{Promise, Settlement};
use super::session::Session;
use super::turns::Turns;
use netsum_collective::error::Error;
use netsum_collective::numeric::element::Element;
use netsum_collective::report::Report;

/// How long one who waits drives without looking whether another thread wants to.
const SLICE: Duration = Duration::from_millis(10);

/// An all-reduce in flight: what [`all_reduce_async`](super::Communicator::all_reduce_async) gives.
///
/// Dropped without [`wait`](Self::wait), the all-reduce goes on, because the other ranks need this one's part; its sum is thrown away.
#[must_use = "the sum comes from `wait`"]
pub struct Pending<T> {
    settlement: Arc<Settlement>,
    /// `None` for what was done at once.
    turns: Option<Arc<Turns<Session>>>,
    element: PhantomData<fn() -> T>,
}

impl<T: Element> Pending<T> {
    /// An all-reduce and who keeps the promise.
    pub(super) fn new(turns: Arc<Turns<Session>>, retransmissions: Option<u64>) -> (Self, Promise) {
        let (settlement, promise) = Promise::new(retransmissions);
        (Self { settlement, turns: Some(turns), element: PhantomData }, promise)
    }

    /// What is done already.
    pub(super) fn done(outcome: Result<(Vec<T>, Report), Error>) -> Self {
        let settlement = Settlement::new(None);
        settlement.settle(outcome.map(|(data, report)| (T::own(data), report)));
        Self { settlement, turns: None, element: PhantomData }
    }

    /// Whether [`wait`](Self::wait) would return at once. Never blocks.
    pub fn is_done(&self) -> bool {
        self.settlement.lock().is_some()
    }

    /// Waits for the sum, and drives all that is in flight meanwhile.
    ///
    /// # Errors
    /// See [`Error`]; after [`Error::NonFinite`] the communicator can still be used. [`Error::Closed`] if the communicator was dropped
    /// before the other ranks had come so far. The vector is gone with an error.
    pub fn wait(self) -> Result<(Vec<T>, Report), Error> {
        loop {
            if let Some(outcome) = self.settlement.lock().take() {
                let (data, report) = outcome?;
                let other = || Error::Protocol("a sum of another type".to_owned());
                return Ok((T::disown(data).ok_or_else(other)?, report));
            }
            match self.turns.as_ref().and_then(|turns| turns.try_take().map(|turn| (turns, turn))) {
                Some((turns, mut session)) => {
                    while !self.is_done() && !turns.is_wanted() && session.rest(SLICE) {}
                }
                // Another thread drives, and tells.
                None => self.settlement.wait(SLICE),
            }
        }
    }
}

impl<T> std::fmt::Debug for Pending<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pending").field("done", &self.settlement.lock().is_some()).finish_non_exhaustive()
    }
}
