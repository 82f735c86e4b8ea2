//! The thread that tells the daemon that this rank lives, and hears from it when the job has failed, or is to have another window.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::{Control, Word};
use crate::comm::error::Error;

#[derive(Default)]
struct Shared {
    /// How the job ended for this rank: `Ok` in good order.
    stop: Mutex<Option<Result<(), String>>>,
    wake: Condvar,
    failed: Mutex<Option<String>>,
    wished: Mutex<Option<u32>>,
}

/// Beats until it is stopped.
pub(crate) struct Heartbeat {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// The daemon's answer takes at most so long.
const ANSWER: Duration = Duration::from_secs(2);

impl Heartbeat {
    /// Starts beating.
    pub fn start(mut control: Control, rank: u32, epoch: u32, period: Duration) -> Result<Self, Error> {
        let shared = Arc::new(Shared::default());
        let theirs = Arc::clone(&shared);
        let beat = move || {
            let mut unreachable = false;
            let end = loop {
                match control.heartbeat(rank, epoch, ANSWER.max(period)) {
                    Ok(word) => {
                        if unreachable {
                            log::info!("rank {rank}: the controller answers again");
                        }
                        unreachable = false;
                        match word {
                            Word::Failed(reason) => *lock(&theirs.failed) = Some(reason),
                            Word::Alive { wished_window } => *lock(&theirs.wished) = wished_window,
                        }
                    }
                    Err(e) => {
                        // The box sums without its daemon.
                        if !unreachable {
                            log::warn!("rank {rank}: {e}; traffic goes on");
                        }
                        unreachable = true;
                        // Nobody could join.
                        *lock(&theirs.wished) = None;
                    }
                }
                let until = Instant::now() + period;
                let mut stop = lock(&theirs.stop);
                while stop.is_none() && Instant::now() < until {
                    let wait = until.saturating_duration_since(Instant::now());
                    stop = theirs.wake.wait_timeout(stop, wait).map_or_else(|e| e.into_inner().0, |w| w.0);
                }
                if let Some(end) = stop.take() {
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
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Why the job has failed, if it has.
    pub fn failed(&self) -> Option<String> {
        lock(&self.shared.failed).clone()
    }

    /// The window that the daemon would like the job to have, if that is another one.
    pub fn wished_window(&self) -> Option<u32> {
        *lock(&self.shared.wished)
    }

    /// Tells the daemon that this rank is done, or why it gives up.
    pub fn stop(&mut self, end: Result<(), String>) {
        *lock(&self.shared.stop) = Some(end);
        self.shared.wake.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
