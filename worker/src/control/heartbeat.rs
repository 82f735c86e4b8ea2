//! The thread that sends heartbeats to the controller, and receives whether the job has failed or
//! its ranks are to reconnect.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::{Cause, Control, MissingPackets};
use netsum_collective::error::Error;
use netsum_collective::failback::ReconnectRequest;

#[derive(Default)]
struct Shared {
    orders: Mutex<Orders>,
    wake: Condvar,
    failed: Mutex<Option<String>>,
    /// Ranks whose processes have ended.
    ended_ranks: Mutex<Vec<u32>>,
    on_host_ring: AtomicBool,
    /// This rank's nonzero floats that became 0.
    underflows: AtomicU64,
    /// The path test that the controller has asked for, and the one whose packet was acknowledged.
    path_test: AtomicU32,
    acknowledged: AtomicU32,
    has_given_up: AtomicBool,
    last: Mutex<Last>,
    /// What a rank lacked when the controller was last asked, and why.
    cause: Mutex<Option<(MissingPackets, Cause)>>,
}

/// Requests to the thread.
#[derive(Default)]
struct Orders {
    /// How the job ended for this rank: `Ok` in good order.
    stop: Option<Result<(), String>>,
    /// How many heartbeats have been requested at once.
    requested: u64,
    /// What this rank lacks and the controller is to say why.
    missing: Option<MissingPackets>,
}

/// The controller's last answer; the default if it does not answer, because no rank could join
/// then.
#[derive(Clone, Copy, Default)]
struct Last {
    reconnect_request: ReconnectRequest,
    /// The number of the last request that has been answered.
    answered: u64,
}

/// Sends heartbeats until it is stopped.
pub(crate) struct Heartbeat {
    rank: u32,
    epoch: u32,
    period: Duration,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// The longest time to wait for the controller's answer.
const ANSWER: Duration = Duration::from_secs(2);
/// The same for reporting the end to a controller that did not answer before.
const LAST_TRY: Duration = Duration::from_millis(200);

impl Heartbeat {
    /// Starts the thread.
    pub fn start(control: Control, rank: u32, epoch: u32, period: Duration) -> Result<Self, Error> {
        let mut heartbeat = Self { rank, epoch, period, shared: Arc::default(), thread: None };
        heartbeat.beat(control, true)?;
        Ok(heartbeat)
    }

    /// Starts the thread again after it was stopped. This rank has left the job, so a failure of
    /// the job does not concern it.
    pub fn start_again(&mut self, control: Control) -> Result<(), Error> {
        self.beat(control, false)
    }

    fn beat(&mut self, mut control: Control, member: bool) -> Result<(), Error> {
        let Self { rank, epoch, period, .. } = *self;
        let underflows = self.shared.underflows.load(Ordering::Relaxed).into();
        let shared = Arc::new(Shared { underflows, ..Shared::default() });
        self.shared = Arc::clone(&shared);
        let theirs = shared;
        let beat = move || {
            let mut unreachable = false;
            let mut reported;
            let end = loop {
                let (requested, missing) = {
                    let mut orders = lock(&theirs.orders);
                    (orders.requested, orders.missing.take())
                };
                let mut reconnect_request = ReconnectRequest::default();
                let on_host_ring = theirs.on_host_ring.load(Ordering::Relaxed);
                let acknowledged = theirs.acknowledged.load(Ordering::Relaxed);
                let underflows = theirs.underflows.load(Ordering::Relaxed);
                reported = underflows;
                let mut beat = || {
                    let wait = ANSWER.max(period);
                    control.heartbeat(rank, epoch, on_host_ring, acknowledged, underflows, wait)
                };
                let sent = Instant::now();
                let mut answer = beat();
                // A connection that was lost shows only when it is used.
                if answer.is_err() && !unreachable && sent.elapsed() < ANSWER {
                    answer = beat();
                }
                match answer {
                    Ok(answer) => {
                        if unreachable {
                            log::info!("rank {rank}: the controller answers again");
                        }
                        unreachable = false;
                        *lock(&theirs.ended_ranks) = answer.ended_ranks;
                        reconnect_request = answer.reconnect_request;
                        // A controller that was restarted counts from the start.
                        if theirs.path_test.swap(answer.path_test, Ordering::Relaxed)
                            > answer.path_test
                        {
                            theirs.acknowledged.store(0, Ordering::Relaxed);
                        }
                        if member && answer.failed.is_some() {
                            *lock(&theirs.failed) = answer.failed;
                        }
                    }
                    Err(e) => {
                        // The box sums without its controller.
                        if !unreachable {
                            log::warn!("rank {rank}: {e}; traffic continues");
                        }
                        unreachable = true;
                        lock(&theirs.ended_ranks).clear();
                    }
                }
                *lock(&theirs.last) = Last { reconnect_request, answered: requested };
                if let Some(missing) = missing {
                    let cause = control.explain_missing_packets(rank, epoch, missing, ANSWER);
                    let cause = cause.inspect_err(|e| log::debug!("rank {rank}: {e}"));
                    if let (MissingPackets::Sum, Ok(Cause { text, .. })) = (missing, &cause)
                        && !text.is_empty()
                    {
                        log::warn!(
                            "rank {rank}: cause of the fallback, reported by the box: {text}"
                        );
                    }
                    *lock(&theirs.cause) = cause.ok().map(|cause| (missing, cause));
                }
                let until = Instant::now() + period;
                let mut orders = lock(&theirs.orders);
                while orders.stop.is_none()
                    && orders.requested == requested
                    && Instant::now() < until
                {
                    let wait = until.saturating_duration_since(Instant::now());
                    orders = theirs
                        .wake
                        .wait_timeout(orders, wait)
                        .map_or_else(|e| e.into_inner().0, |w| w.0);
                }
                if let Some(end) = orders.stop.take() {
                    break end;
                }
            };
            // It may answer again by now.
            let wait = if unreachable { LAST_TRY } else { ANSWER };
            let underflows = theirs.underflows.load(Ordering::Relaxed);
            if end.is_ok() && underflows != reported {
                let on_host_ring = theirs.on_host_ring.load(Ordering::Relaxed);
                let acknowledged = theirs.acknowledged.load(Ordering::Relaxed);
                // If it fails, leaving fails too, and says so.
                let _ =
                    control.heartbeat(rank, epoch, on_host_ring, acknowledged, underflows, wait);
            }
            let sent = match end {
                Ok(()) => control.leave(rank, epoch, wait),
                Err(reason) => control.abort(rank, epoch, &reason, wait),
            };
            if let Err(e) = sent {
                log::debug!("rank {rank}: cannot report its end to the controller: {e}");
            }
        };
        let thread = std::thread::Builder::new()
            .name("netsum-heartbeat".to_owned())
            .spawn(beat)
            .map_err(|e| Error::Config(format!("cannot start a thread: {e}")))?;
        self.thread = Some(thread);
        Ok(())
    }

    /// Why the job has failed, if it has.
    pub fn failed(&self) -> Option<String> {
        lock(&self.shared.failed).clone()
    }

    /// Ranks whose processes have ended, as the controller last reported; empty if it does not
    /// answer.
    pub fn ended_ranks(&self) -> Vec<u32> {
        lock(&self.shared.ended_ranks).clone()
    }

    /// Reports to the controller at once that the ranks have fallen back.
    pub fn on_host_ring(&self) {
        if !self.shared.on_host_ring.swap(true, Ordering::Relaxed) {
            self.request_cause(MissingPackets::Sum);
        }
    }

    /// The next heartbeat reports these floats, too.
    pub fn count_underflows(&self, zeroed: u64) {
        self.shared.underflows.fetch_add(zeroed, Ordering::Relaxed);
    }

    /// Number of the path test that the controller requested last.
    pub fn path_test(&self) -> u32 {
        self.shared.path_test.load(Ordering::Relaxed)
    }

    /// Reports at once that this test's packet was acknowledged.
    pub fn path_test_acknowledged(&self, test: u32) {
        if self.shared.acknowledged.swap(test, Ordering::Relaxed) != test {
            self.request();
        }
    }

    /// Asks the controller why this rank lacks something.
    pub fn request_cause(&self, missing: MissingPackets) {
        let mut orders = lock(&self.shared.orders);
        (orders.requested, orders.missing) = (orders.requested + 1, Some(missing));
        self.shared.wake.notify_all();
    }

    /// The controller's answer to [`Self::request_cause`], if that was about the same lack.
    pub fn cause(&self, missing: MissingPackets) -> Option<Cause> {
        lock(&self.shared.cause)
            .clone()
            .filter(|(reported, _)| *reported == missing)
            .map(|(_, cause)| cause)
    }

    /// The controller's last request.
    pub fn reconnect_request(&self) -> ReconnectRequest {
        lock(&self.shared.last).reconnect_request
    }

    /// Requests a heartbeat at once. Returns the number of the request.
    pub fn request(&self) -> u64 {
        let mut orders = lock(&self.shared.orders);
        orders.requested += 1;
        self.shared.wake.notify_all();
        orders.requested
    }

    /// Whether the controller has answered this request, or the attempt has failed.
    pub fn has_answered(&self, request: u64) -> bool {
        lock(&self.shared.last).answered >= request
    }

    /// Reports to the controller that this rank has failed, and stops heartbeats, which would keep
    /// the job alive until the application leaves.
    pub fn give_up(&self, reason: impl FnOnce() -> String) {
        if !self.shared.has_given_up.swap(true, Ordering::Relaxed) {
            lock(&self.shared.orders).stop = Some(Err(reason()));
            self.shared.wake.notify_all();
        }
    }

    /// Reports how this rank ends, and waits for the thread.
    pub fn stop(&mut self, end: Result<(), String>) {
        lock(&self.shared.orders).stop = Some(end);
        self.shared.wake.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A rank that ends without a word, as when it cannot connect to the others, must not seem to live.
impl Drop for Heartbeat {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            self.give_up(|| "its communicator ended before it could work".to_owned());
            let _ = thread.join();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_heartbeat_that_nobody_has_any_more_has_ended() {
        // Nobody listens there: a reserved port.
        let control = Control::new("127.0.0.1:1", "train", "sesame", None).unwrap();
        let heartbeat = Heartbeat::start(control, 0, 1, Duration::from_millis(100)).unwrap();
        let shared = Arc::downgrade(&heartbeat.shared);
        drop(heartbeat);
        assert_eq!(shared.strong_count(), 0, "its thread beats on");
    }
}
