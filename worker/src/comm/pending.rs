//! An operation that runs while the application does something else.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::forked;
use super::promise::{Promise, Settlement};
use super::session::{Session, sleep_at};
use super::turns::Turns;
use netsum_collective::error::Error;
use netsum_collective::numeric::element::Owned;
use netsum_collective::report::Report;

/// How long one who waits drives without looking whether another thread wants to.
const SLICE: Duration = Duration::from_millis(10);

/// How long one who waits for room leaves the turn to another thread that wants it.
const YIELD: Duration = Duration::from_millis(1);

/// Gives the caller back what the engine had.
pub(super) type Back<B> = fn(Owned) -> Option<B>;

/// An operation in flight: what [`all_reduce_async`](super::Communicator::all_reduce_async) gives,
/// and the others.
///
/// Dropped without [`wait`](Self::wait), the operation goes on, because the other ranks need this
/// one's part; its result is thrown away.
#[must_use = "the sum comes from `wait`"]
pub struct Pending<B> {
    settlement: Arc<Settlement>,
    /// `None` for what was done at once.
    turns: Option<Arc<Turns<Session>>>,
    back: Back<B>,
    process: u32,
}

impl<B> Pending<B> {
    /// An operation and who keeps the promise.
    pub(super) fn new(turns: Arc<Turns<Session>>, back: Back<B>) -> (Self, Promise) {
        let (settlement, promise) = Promise::new();
        (Self { settlement, turns: Some(turns), back, process: std::process::id() }, promise)
    }

    /// What is done already.
    pub(super) fn done(outcome: Result<(Owned, Report), Error>, back: Back<B>) -> Self {
        let settlement = Settlement::new();
        settlement.settle(outcome);
        Self { settlement, turns: None, back, process: std::process::id() }
    }

    /// Whether [`wait`](Self::wait) would return at once. Never blocks.
    pub fn is_done(&self) -> bool {
        forked(self.process).is_err() || self.settlement.lock().is_settled
    }

    /// Has a function called once when [`wait`](Self::wait) would return at once; in the place of
    /// one that was given before. It may be called at once, or by the thread that receives: it must
    /// be short, and must not call the communicator.
    pub fn when_done(&self, call: impl FnOnce() + Send + 'static) {
        self.settlement.call(Box::new(call));
    }

    /// Waits for the sum, and drives all that is in flight meanwhile.
    ///
    /// # Errors
    /// See [`Error`]; after [`Error::NonFinite`] the communicator can still be used.
    /// [`Error::Closed`] if the communicator was dropped before the other ranks had come so far.
    /// The buffer is dropped with an error.
    pub fn wait(self) -> Result<(B, Report), Error> {
        loop {
            if let Some(outcome) = self.take() {
                return outcome;
            }
            self.wait_for(Duration::from_secs(1));
        }
    }

    /// What [`wait`](Self::wait) would give, if it is there. Once: later it is never there.
    pub fn take(&self) -> Option<Result<(B, Report), Error>> {
        if let Err(error) = forked(self.process) {
            return Some(Err(error));
        }
        let outcome = self.settlement.lock().outcome.take()?;
        Some(outcome.and_then(|(data, report)| {
            let other = || Error::Protocol("a sum of another type".to_owned());
            Ok(((self.back)(data).ok_or_else(other)?, report))
        }))
    }

    /// The same operation for somebody who has another hold of the buffer, and only drops it.
    pub fn untyped(self) -> Pending<Owned> {
        let Self { settlement, turns, process, .. } = self;
        Pending { settlement, turns, back: Some, process }
    }

    /// The same for so long at the most; whether it [is done](Self::is_done).
    pub fn wait_for(&self, most: Duration) -> bool {
        let until = Instant::now() + most;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if self.is_done() || left.is_zero() {
                return self.is_done();
            }
            match self.turns.as_ref().and_then(|turns| turns.try_take().map(|turn| (turns, turn))) {
                Some((turns, mut session)) => {
                    while !self.is_done() && !turns.is_wanted() && Instant::now() < until {
                        let Some((fd, wait)) = session.progress() else { break };
                        let left = until.saturating_duration_since(Instant::now());
                        let wait = wait.min(SLICE).min(left);
                        // Who starts an operation meanwhile is not held up.
                        if !wait.is_zero() {
                            session = session.asleep(|| sleep_at((fd, wait)));
                        }
                    }
                    session.send_now();
                }
                // Another thread drives, and tells.
                None => self.settlement.wait(SLICE.min(left)),
            }
        }
    }
}

/// Where one waits for [`MAX_IN_FLIGHT`](super::Communicator::MAX_IN_FLIGHT) operations to become
/// fewer, who shares a communicator with others and lets them have it meanwhile.
#[derive(Clone)]
pub struct Room {
    /// `None` where every operation is done at once.
    pub(super) turns: Option<Arc<Turns<Session>>>,
    pub(super) process: u32,
}

impl Room {
    /// Waits for so long at the most; whether there is room, or nothing to wait for, as in a
    /// communicator that is being dropped.
    pub fn wait_for(&self, most: Duration) -> bool {
        let Some(turns) = self.turns.as_ref().filter(|_| forked(self.process).is_ok()) else {
            return true;
        };
        let until = Instant::now() + most;
        let mut session = turns.take();
        while !turns.is_over() {
            let left = until.saturating_duration_since(Instant::now());
            if !session.is_full() || left.is_zero() {
                return !session.is_full();
            }
            let Some((fd, wait)) = session.progress() else { return true };
            session = session.asleep(|| {
                if turns.is_wanted() {
                    // Who waits for a lock does not get it from one who takes it again at once.
                    std::thread::sleep(YIELD);
                } else {
                    sleep_at((fd, wait.min(SLICE).min(left)));
                }
            });
        }
        true
    }
}

impl std::fmt::Debug for Room {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Room").finish_non_exhaustive()
    }
}

impl<B> std::fmt::Debug for Pending<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pending").field("done", &self.is_done()).finish_non_exhaustive()
    }
}
