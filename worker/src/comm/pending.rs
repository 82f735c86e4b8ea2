//! An operation that runs while the application does something else.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::core::sleep_at;
use super::forked;
use super::promise::{Promise, Settlement};
use super::session::SharedSession;
use netsum_collective::error::Error;
use netsum_collective::numeric::element::Owned;
use netsum_collective::report::Report;

/// How long a caller that waits drives before it checks whether another thread wants the lock.
const SLICE: Duration = Duration::from_millis(10);

/// How long a caller that waits for room leaves the driver lock to other threads that want it.
const YIELD: Duration = Duration::from_millis(1);

/// Turns the engine's data back into the caller's buffer.
pub(super) type Back<B> = fn(Owned) -> Option<B>;

/// An operation in flight, as [`all_reduce_async`](super::Communicator::all_reduce_async) and other
/// methods return it.
///
/// If it is dropped without [`wait`](Self::wait), the operation continues, because the other ranks
/// need this one's part; its result is discarded.
#[must_use = "the sum comes from `wait`"]
pub struct Pending<B> {
    settlement: Arc<Settlement>,
    /// `None` for an operation that was complete at once, or that another thread completes.
    driver: Option<SharedSession>,
    back: Back<B>,
    process: u32,
}

impl<B> Pending<B> {
    /// An operation, and the promise of its outcome.
    pub(super) fn new(driver: SharedSession, back: Back<B>) -> (Self, Promise) {
        let (settlement, promise) = Promise::new();
        (Self { settlement, driver: Some(driver), back, process: std::process::id() }, promise)
    }

    /// An operation that a thread of its own completes.
    pub(super) fn promised(back: Back<B>) -> (Self, Promise) {
        let (settlement, mut promise) = Promise::new();
        promise.retransmissions = Some(0);
        (Self { settlement, driver: None, back, process: std::process::id() }, promise)
    }

    /// An operation that is complete.
    pub(super) fn done(outcome: Result<(Owned, Report), Error>, back: Back<B>) -> Self {
        let settlement = Settlement::new();
        settlement.settle(outcome);
        Self { settlement, driver: None, back, process: std::process::id() }
    }

    /// Whether [`wait`](Self::wait) would return at once. Never blocks.
    pub fn is_done(&self) -> bool {
        forked(self.process).is_err() || self.settlement.lock().is_settled
    }

    /// Calls a function once, when [`wait`](Self::wait) would return at once. It replaces a
    /// function that was passed before. It may be called immediately, or by the thread that
    /// receives: it must be short, and must not call the communicator.
    pub fn when_done(&self, call: impl FnOnce() + Send + 'static) {
        self.settlement.call(Box::new(call));
    }

    /// Waits for the sum, and drives all operations in flight meanwhile.
    ///
    /// # Errors
    /// See [`Error`]. After [`Error::NonFinite`] the communicator can still be used.
    /// [`Error::Closed`] if the communicator was dropped before the other ranks had made the call.
    /// The buffer is dropped with an error.
    pub fn wait(self) -> Result<(B, Report), Error> {
        loop {
            if let Some(outcome) = self.take() {
                return outcome;
            }
            self.wait_for(Duration::from_secs(1));
        }
    }

    /// The result of [`wait`](Self::wait), if the operation is complete; `None` after it has been
    /// taken once.
    pub fn take(&self) -> Option<Result<(B, Report), Error>> {
        if let Err(error) = forked(self.process) {
            return Some(Err(error));
        }
        let outcome = self.settlement.lock().outcome.take()?;
        Some(outcome.and_then(|(data, report)| {
            let other = || Error::Protocol("the sum has another type than the data".to_owned());
            Ok(((self.back)(data).ok_or_else(other)?, report))
        }))
    }

    /// The same operation for a caller that has another reference to the buffer.
    pub fn untyped(self) -> Pending<Owned> {
        let Self { settlement, driver, process, .. } = self;
        Pending { settlement, driver, back: Some, process }
    }

    /// Waits for at most `most`. Returns whether the operation [is done](Self::is_done).
    pub fn wait_for(&self, most: Duration) -> bool {
        let until = Instant::now() + most;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if self.is_done() || left.is_zero() {
                return self.is_done();
            }
            let locked = self.driver.as_ref().and_then(|d| d.try_lock().map(|guard| (d, guard)));
            match locked {
                Some((driver, mut session)) => {
                    while !self.is_done() && !driver.is_contended() && Instant::now() < until {
                        let Some((fd, wait)) = session.step() else { break };
                        let left = until.saturating_duration_since(Instant::now());
                        let wait = wait.min(SLICE).min(left);
                        // Other threads can start operations meanwhile.
                        if !wait.is_zero() {
                            session = session.unlocked_while(|| sleep_at((fd, wait)));
                        }
                    }
                    session.send_now();
                }
                // Another thread drives, and settles the promise.
                None => self.settlement.wait(SLICE.min(left)),
            }
        }
    }
}

/// A handle to wait until fewer than [`MAX_IN_FLIGHT`](super::Communicator::MAX_IN_FLIGHT)
/// operations are in flight. Threads that share a communicator wait here without holding it.
#[derive(Clone)]
pub struct Room {
    /// `None` where every operation is complete at once.
    pub(super) driver: Option<SharedSession>,
    pub(super) process: u32,
}

impl Room {
    /// Waits for at most `most`. Returns whether there is room, or the communicator is being
    /// dropped.
    pub fn wait_for(&self, most: Duration) -> bool {
        let Some(driver) = self.driver.as_ref().filter(|_| forked(self.process).is_ok()) else {
            return true;
        };
        let until = Instant::now() + most;
        let mut session = driver.lock();
        while !driver.has_ended() {
            let left = until.saturating_duration_since(Instant::now());
            if !session.is_full() || left.is_zero() {
                return !session.is_full();
            }
            let Some((fd, wait)) = session.step() else { return true };
            session = session.unlocked_while(|| {
                if driver.is_contended() {
                    // A thread that unlocks and locks again at once would starve the others.
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
