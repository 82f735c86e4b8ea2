//! The progress thread drives a session between the application's calls.

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use nix::poll::{PollFd, PollFlags};
use nix::sys::time::TimeSpec;

use super::driver_lock::DriverLock;
use super::session::Session;

/// How long the thread leaves the connections alone when a call has ended: much less than any
/// timeout.
const PAUSE: Duration = Duration::from_micros(500);

/// A session, and the thread that drives it between calls.
pub(super) struct Driven {
    pub session: Arc<DriverLock<Session>>,
    thread: JoinHandle<()>,
    alarm: UnixStream,
}

impl Driven {
    pub fn start(session: Session) -> std::io::Result<Self> {
        let session = Arc::new(DriverLock::new(session));
        let (alarm, bell) = UnixStream::pair()?;
        for end in [&alarm, &bell] {
            end.set_nonblocking(true)?;
        }
        let driven = Arc::clone(&session);
        let thread = std::thread::Builder::new()
            .name("netsum-progress".to_owned())
            .spawn(move || drive(&driven, bell))?;
        Ok(Self { session, thread, alarm })
    }

    /// Wakes the thread wherever it waits: it may have to wait for something else now.
    pub fn wake(&self) {
        // A full socket means that the thread has been woken already.
        let _ = (&self.alarm).write(&[0]);
    }

    /// Completes what can be completed, leaves in good order, and ends the thread.
    pub fn close(self) {
        let mut session = self.session.end();
        self.wake();
        session.close();
        drop(session);
        // Standard error already has the message of a panic in the thread.
        let _ = self.thread.join();
    }
}

/// The thread. It has the lock only while there is something to do, never while it waits. `alarm`
/// is readable after [`Driven::wake`].
fn drive(session: &DriverLock<Session>, alarm: UnixStream) {
    // Applications call in loops, and a thread that wakes up between two calls of 200 us costs a
    // tenth of the time (1 KiB, 4 ranks on two cores).
    let pause = || {
        // A signal also ends the pause.
        let _ = nix::poll::ppoll(
            &mut [PollFd::new(alarm.as_fd(), PollFlags::POLLIN)],
            Some(TimeSpec::from_duration(PAUSE)),
            None,
        );
    };
    loop {
        let guard = session.lock_between_calls(pause);
        let Some((fd, wait)) = guard.and_then(|mut session| session.step_between_calls()) else {
            return;
        };
        if wait.is_zero() {
            continue;
        }
        let fds = fd.iter().map(|fd| fd.as_fd()).chain([alarm.as_fd()]);
        let mut fds: Vec<_> = fds.map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
        match nix::poll::ppoll(&mut fds, Some(TimeSpec::from_duration(wait)), None) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => {}
            Err(_) => return,
        }
        while (&alarm).read(&mut [0; 64]).is_ok_and(|n| n > 0) {}
    }
}
