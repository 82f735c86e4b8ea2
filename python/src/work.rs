//! An operation in flight.

use std::ffi::CString;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use netsum_worker::{Error, Mode, Owned, Pending};
use pyo3::prelude::*;

use crate::errors::raised;

/// How often one who waits looks whether Ctrl-C was pressed.
pub const SIGNALS: Duration = Duration::from_millis(100);

/// What an operation came to.
#[pyclass(frozen, get_all, module = "netsum")]
pub struct Report {
    /// Who did the sum: "box", or "ring" if the ranks did any part of it.
    mode: &'static str,
    /// Seconds from the call to the last sum.
    elapsed: f64,
    /// Sums of messages that were checked.
    verified: u64,
    /// Packets that were sent again meanwhile; None over an RDMA adapter.
    retransmissions: Option<u64>,
    /// Floats of this rank that were not zero and counted as 0, beside far larger ones.
    underflows: u64,
}

#[pymethods]
impl Report {
    fn __repr__(&self) -> String {
        format!("<netsum.Report: by the {} in {:.6} s>", self.mode, self.elapsed)
    }
}

impl From<netsum_worker::Report> for Report {
    fn from(r: netsum_worker::Report) -> Self {
        let (mode, elapsed) = (r.mode.name(), r.elapsed.as_secs_f64());
        Self {
            mode,
            elapsed,
            verified: r.verified,
            retransmissions: r.retransmissions,
            underflows: r.underflow.zeroed,
        }
    }
}

enum State {
    Flying(Arc<Pending<Owned>>),
    Done(Result<netsum_worker::Report, Error>),
}

/// An operation in flight. It holds the array until it is done, whether somebody waits for it or
/// not; a handle that is dropped leaves the operation to go on.
#[pyclass(frozen, module = "netsum")]
pub struct Work {
    state: Mutex<State>,
    /// The end that is readable when it is done, once somebody has asked for it.
    done: Mutex<Option<UnixStream>>,
    warned: Arc<Warned>,
}

/// What warnings of a communicator have said.
pub struct Warned {
    /// Whether a box should sum, and none has; `None` where there is none to.
    pub fallen_back: Option<AtomicBool>,
    /// That an operation loses small values.
    pub underflow: AtomicBool,
}

impl Work {
    pub fn new(pending: Pending<Owned>, warned: Arc<Warned>) -> Self {
        Self { state: Mutex::new(State::Flying(Arc::new(pending))), done: Mutex::new(None), warned }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What it came to, if it is done.
    fn outcome(&self) -> Option<Result<netsum_worker::Report, Error>> {
        // Its finalizer may look at this handle: it is dropped when the lock is free again.
        let mut array: Option<Owned> = None;
        let mut state = self.lock();
        if let State::Flying(pending) = &*state {
            let outcome = pending.take()?.map(|(owned, report)| {
                array = Some(owned);
                report
            });
            *state = State::Done(outcome);
        }
        match &*state {
            State::Done(outcome) => Some(outcome.clone()),
            State::Flying(_) => None,
        }
    }

    /// Warns where the ranks have begun to sum by themselves, and of the first operation that loses
    /// much.
    fn warn(&self, py: Python<'_>, report: &netsum_worker::Report) -> PyResult<()> {
        let netsum_worker::Underflow { zeroed, nonzero } = report.underflow;
        if report.underflow.is_large() && !self.warned.underflow.swap(true, Ordering::Relaxed) {
            let category = py.import("netsum.errors")?.getattr("UnderflowWarning")?;
            let text = format!(
                "{zeroed} of {nonzero} floats that are not zero counted as 0: they are too small beside the \
                 largest one of their message. statistics()[\"underflows\"] counts all; there is no \
                 second warning"
            );
            PyErr::warn(py, &category, &CString::new(text)?, 1)?;
        }
        let Some(fallen_back) = &self.warned.fallen_back else { return Ok(()) };
        let by_ring = report.mode == Mode::Ring;
        if fallen_back.swap(by_ring, Ordering::Relaxed) || !by_ring {
            return Ok(());
        }
        let category = py.import("netsum.errors")?.getattr("NoBoxWarning")?;
        let text = c"no box has summed: the ranks sum by themselves, by an ordinary ring, and go back to the box when it sums again. \
            `netsum diagnose JOB` on the box says why";
        PyErr::warn(py, &category, text, 1)
    }

    /// Waits without Python's lock, and looks for signals; `None` after `most`.
    pub fn wait_for(
        &self,
        py: Python<'_>,
        most: Option<Duration>,
    ) -> PyResult<Option<Result<netsum_worker::Report, Error>>> {
        let until = most.map(|most| Instant::now() + most);
        loop {
            if let Some(outcome) = self.outcome() {
                return Ok(Some(outcome));
            }
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return Ok(None);
            }
            let pending = match &*self.lock() {
                State::Flying(pending) => Arc::clone(pending),
                State::Done(_) => continue,
            };
            py.detach(|| pending.wait_for(left.map_or(SIGNALS, |left| left.min(SIGNALS))));
            py.check_signals()?;
        }
    }
}

#[pymethods]
impl Work {
    /// Whether `wait` would return at once. Never blocks.
    fn is_done(&self) -> bool {
        match &*self.lock() {
            State::Flying(pending) => pending.is_done(),
            State::Done(_) => true,
        }
    }

    /// Waits until the operation is done, and gives its report, or raises what went wrong. After
    /// `timeout` seconds it raises TimeoutError, and the operation goes on. So it does after
    /// Ctrl-C.
    #[pyo3(signature = (timeout=None))]
    pub fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Report> {
        let most =
            timeout.map(|s| Duration::try_from_secs_f64(s.max(0.0)).unwrap_or(Duration::MAX / 4));
        match self.wait_for(py, most.map(|most| most.min(Duration::from_secs(1 << 30))))? {
            Some(Ok(report)) => {
                self.warn(py, &report)?;
                Ok(report.into())
            }
            Some(Err(error)) => Err(raised(py, &error)),
            None => {
                Err(pyo3::exceptions::PyTimeoutError::new_err("the operation is still in flight"))
            }
        }
    }

    /// A file descriptor that is readable when the operation is done; it is closed with this
    /// handle.
    fn fileno(&self) -> PyResult<i32> {
        let mut done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        if done.is_none() {
            let (reader, mut writer) = UnixStream::pair()?;
            match &*self.lock() {
                State::Flying(pending) => pending.when_done(move || {
                    // Nobody listens any more: fine.
                    let _ = writer.write(&[1]);
                }),
                State::Done(_) => drop(writer),
            }
            *done = Some(reader);
        }
        Ok(done.as_ref().map_or(-1, |reader| reader.as_raw_fd()))
    }

    fn __await__(this: Bound<'_, Self>) -> PyResult<Bound<'_, PyAny>> {
        this.py().import("netsum.aio")?.getattr("wait")?.call1((this,))?.call_method0("__await__")
    }

    fn __repr__(&self) -> String {
        format!("<netsum.Work: {}>", if self.is_done() { "done" } else { "in flight" })
    }
}
