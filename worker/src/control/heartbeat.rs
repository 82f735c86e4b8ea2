//! The thread that tells the daemon that this rank lives, and hears from it when the job has
//! failed, or its ranks are to connect anew.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::Control;
use netsum_collective::error::Error;
use netsum_collective::way_back::Wish;

#[derive(Default)]
struct Shared {
    orders: Mutex<Orders>,
    wake: Condvar,
    failed: Mutex<Option<String>>,
    without_box: AtomicBool,
    has_given_up: AtomicBool,
    heard: Mutex<Heard>,
}

/// What the thread is to do.
#[derive(Default)]
struct Orders {
    /// How the job ended for this rank: `Ok` in good order.
    stop: Option<Result<(), String>>,
    /// How often somebody has asked for a beat at once.
    asked: u64,
}

/// What the daemon has said last; nothing, where it does not answer: without it nobody could join.
#[derive(Clone, Copy, Default)]
struct Heard {
    wish: Wish,
    /// Which of those who asked have their answer.
    answered: u64,
}

/// Beats until it is stopped.
pub(crate) struct Heartbeat {
    rank: u32,
    epoch: u32,
    period: Duration,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// The daemon's answer takes at most so long.
const ANSWER: Duration = Duration::from_secs(2);

impl Heartbeat {
    /// Starts beating.
    pub fn start(control: Control, rank: u32, epoch: u32, period: Duration) -> Result<Self, Error> {
        let mut heartbeat = Self { rank, epoch, period, shared: Arc::default(), thread: None };
        heartbeat.beat(control, true)?;
        Ok(heartbeat)
    }

    /// Goes on after it was stopped: this rank has left the job, and does not end with it.
    pub fn start_again(&mut self, control: Control) -> Result<(), Error> {
        self.beat(control, false)
    }

    fn beat(&mut self, mut control: Control, member: bool) -> Result<(), Error> {
        let Self { rank, epoch, period, .. } = *self;
        let shared = Arc::new(Shared::default());
        self.shared = Arc::clone(&shared);
        let theirs = shared;
        let beat = move || {
            let mut unreachable = false;
            let end = loop {
                let asked = lock(&theirs.orders).asked;
                let mut wish = Wish::default();
                let without_box = theirs.without_box.load(Ordering::Relaxed);
                match control.heartbeat(rank, epoch, without_box, ANSWER.max(period)) {
                    Ok(word) => {
                        if unreachable {
                            log::info!("rank {rank}: the controller answers again");
                        }
                        unreachable = false;
                        wish = word.wish;
                        if member && word.failed.is_some() {
                            *lock(&theirs.failed) = word.failed;
                        }
                    }
                    Err(e) => {
                        // The box sums without its daemon.
                        if !unreachable {
                            log::warn!("rank {rank}: {e}; traffic goes on");
                        }
                        unreachable = true;
                    }
                }
                *lock(&theirs.heard) = Heard { wish, answered: asked };
                let until = Instant::now() + period;
                let mut orders = lock(&theirs.orders);
                while orders.stop.is_none() && orders.asked == asked && Instant::now() < until {
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
            if unreachable {
                return;
            }
            let told = match end {
                Ok(()) => control.leave(rank, epoch, ANSWER),
                Err(reason) => control.abort(rank, epoch, &reason, ANSWER),
            };
            if let Err(e) = told {
                log::debug!("rank {rank}: leaving: {e}");
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

    /// The daemon is told, at once, that the ranks sum by themselves.
    pub fn without_box(&self) {
        if !self.shared.without_box.swap(true, Ordering::Relaxed) {
            self.ask();
        }
    }

    /// What the daemon has said last.
    pub fn wish(&self) -> Wish {
        lock(&self.shared.heard).wish
    }

    /// Has the daemon asked at once. The number of the question.
    pub fn ask(&self) -> u64 {
        let mut orders = lock(&self.shared.orders);
        orders.asked += 1;
        self.shared.wake.notify_all();
        orders.asked
    }

    /// Whether what it has said last was said after that question.
    pub fn has_answered(&self, question: u64) -> bool {
        lock(&self.shared.heard).answered >= question
    }

    /// Has the daemon told why this rank gives up, while it may still take the application long to
    /// leave: its heartbeats would keep the job alive.
    pub fn give_up(&self, reason: impl FnOnce() -> String) {
        if !self.shared.has_given_up.swap(true, Ordering::Relaxed) {
            lock(&self.shared.orders).stop = Some(Err(reason()));
            self.shared.wake.notify_all();
        }
    }

    /// Tells the daemon that this rank is done, or why it gives up.
    pub fn stop(&mut self, end: Result<(), String>) {
        lock(&self.shared.orders).stop = Some(end);
        self.shared.wake.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
