//! A session with its progress thread, which drives it between the application's calls.

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use netsum_collective::call::{Call, Collective};
use netsum_collective::error::Error;
use netsum_collective::numeric::block::Width;
use netsum_collective::numeric::element::Data;
use netsum_collective::numeric::memory::Memory;
use nix::poll::{PollFd, PollFlags};
use nix::sys::time::TimeSpec;

use super::driver_lock::DriverLock;
use super::pending::{Back, Pending};
use super::session::{Session, SharedSession, wait_until};

/// How long the thread leaves the connections alone when a call has ended: much less than any
/// timeout.
const PAUSE: Duration = Duration::from_micros(500);

/// A session, and the thread that drives it between calls.
pub(super) struct Driven {
    pub session: SharedSession,
    /// `None` once it is to end.
    thread: Option<JoinHandle<()>>,
    alarm: UnixStream,
}

impl Driven {
    pub fn new(session: Session) -> Result<Self, Error> {
        Self::start_thread(session)
            .map_err(|e| Error::Config(format!("cannot start the progress thread: {e}")))
    }

    fn start_thread(session: Session) -> std::io::Result<Self> {
        let session = Arc::new(DriverLock::new(session));
        let (alarm, bell) = UnixStream::pair()?;
        for end in [&alarm, &bell] {
            end.set_nonblocking(true)?;
        }
        let driven = Arc::clone(&session);
        let thread = std::thread::Builder::new()
            .name("netsum-progress".to_owned())
            .spawn(move || drive(&driven, bell))?;
        Ok(Self { session, thread: Some(thread), alarm })
    }

    /// Starts an operation as soon as there is room for it. `then` is called with the session still
    /// locked.
    pub fn start<B>(
        &self,
        call: Call,
        data: impl Data + Send + 'static,
        memory: Memory,
        back: Back<B>,
        then: impl FnOnce(&mut Session, &Pending<B>),
    ) -> Result<Pending<B>, Error> {
        let pending = {
            let mut session = wait_until(self.session.lock(), |session| Ok(!session.is_full()))?;
            let (pending, promise) = Pending::new(Arc::clone(&self.session), back);
            session.enqueue(call, Box::new(data), promise, memory)?;
            then(&mut session, &pending);
            pending
        };
        if !pending.is_done() {
            // The progress thread may be waiting for longer than it should now.
            self.wake();
        }
        Ok(pending)
    }

    /// Starts an operation without a tag, and announces a refusal.
    pub fn call_async<B>(
        &self,
        collective: Collective,
        wire: Option<Width>,
        data: impl Data + Send + 'static,
        back: Back<B>,
    ) -> Result<Pending<B>, Error> {
        let call = Call { collective, tag: 0, width: data.dtype().width(wire) };
        let memory = data.memory();
        let started = self.start(call, data, memory, back, |_, _| ());
        if is_refusal(&started) {
            self.refuse();
        }
        started
    }

    /// Announces a call that this rank has refused to the other ranks. Never waits.
    pub fn refuse(&self) {
        self.session.lock().refuse();
        self.wake();
    }

    /// Wakes the thread wherever it waits: it may have to wait for something else now.
    fn wake(&self) {
        // A full socket means that the thread has been woken already.
        let _ = (&self.alarm).write(&[0]);
    }
}

/// Whether a call was not started because of its arguments, which other ranks must learn.
pub(super) fn is_refusal<R>(called: &Result<R, Error>) -> bool {
    matches!(called, Err(Error::Argument(_) | Error::MessageSize { .. }))
}

impl Drop for Driven {
    /// Completes what can be completed, leaves in good order, and ends the thread.
    fn drop(&mut self) {
        let mut session = self.session.end();
        self.wake();
        session.close();
        drop(session);
        if let Some(thread) = self.thread.take() {
            // Standard error already has the message of a panic in the thread.
            let _ = thread.join();
        }
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
