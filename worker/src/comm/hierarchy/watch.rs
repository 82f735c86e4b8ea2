//! Notices the end of processes of this host, and ends the sessions of their job.

use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use super::super::session::SharedSession;
use crate::local::progress::LocalRanks;

/// How long the last message of a rank that leaves may take.
pub(super) const GOODBYE: Duration = Duration::from_millis(300);

/// Ends sessions when a process of this host ends whose rank has not left.
pub(super) struct Watch {
    /// Closed to end the thread.
    alarm: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    pub fn start(
        local_ranks: Arc<LocalRanks>,
        flat: SharedSession,
        failing: Vec<SharedSession>,
    ) -> io::Result<Self> {
        let (alarm, bell) = UnixStream::pair()?;
        let watch = move || {
            let mut living: Vec<usize> =
                (0..local_ranks.len()).filter(|place| *place != local_ranks.own_place()).collect();
            while let Some(dead) = local_ranks.next_death(&living, &bell) {
                // Its goodbye may still be on its way.
                std::thread::sleep(GOODBYE);
                living.retain(|place| *place != dead);
                let (departed, failure) = {
                    let session = flat.lock();
                    (session.has_departed(local_ranks.rank(dead)), session.failure())
                };
                if !departed {
                    let error =
                        local_ranks.fail(failure.unwrap_or_else(|| local_ranks.death(dead)));
                    failing.iter().for_each(|driver| driver.lock().fail(&error));
                }
            }
        };
        let thread = std::thread::Builder::new().name("netsum-watch".to_owned()).spawn(watch)?;
        Ok(Self { alarm: Some(alarm), thread: Some(thread) })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        // A forked process may have a copy of the socket.
        if let Some(alarm) = self.alarm.take() {
            let _ = alarm.shutdown(Shutdown::Both);
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
