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

/// How often a waiting call checks for Ctrl-C.
pub const SIGNALS: Duration = Duration::from_millis(100);

/// The result of an operation.
#[pyclass(frozen, get_all, module = "netsum")]
pub struct Report {
    /// "box", or "ring" if the hosts' ring summed any part.
    mode: &'static str,
    /// Seconds from the call to the last sum.
    elapsed: f64,
    /// Sums of messages that were checked.
    verified: u64,
    /// Packets that were sent again meanwhile; None over an RDMA adapter.
    retransmissions: Option<u64>,
    /// This rank's nonzero floats that became 0, because their block has far larger ones.
    underflows: u64,
    /// Whether the ranks of each host added their data before they sent it.
    hierarchical: bool,
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
            hierarchical: r.hierarchical,
        }
    }
}

enum State {
    Flying(Arc<Pending<Owned>>),
    Done(Result<netsum_worker::Report, Error>),
}

/// An operation in flight. It keeps the array alive until it is done, also if its handle is
/// dropped.
#[pyclass(frozen, module = "netsum")]
pub struct Work {
    state: Mutex<State>,
    /// The end that is readable when it is done, after the first call of `fileno`.
    done: Mutex<Option<UnixStream>>,
    warned: Arc<Warned>,
}

/// Which warnings of a communicator have been given.
pub struct Warned {
    /// Whether the warning about a box that does not sum was given; `None` without a box.
    pub fallen_back: Option<AtomicBool>,
    /// Whether the warning about lost small values was given.
    pub underflow: AtomicBool,
}

impl Work {
    pub fn new(pending: Pending<Owned>, warned: Arc<Warned>) -> Self {
        Self { state: Mutex::new(State::Flying(Arc::new(pending))), done: Mutex::new(None), warned }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Its result, if it is done.
    fn outcome(&self) -> Option<Result<netsum_worker::Report, Error>> {
        // Dropped after the lock is released: its finalizer may use this handle.
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

    /// Warns after a fallback, and of the first operation that loses many small values.
    fn warn(&self, py: Python<'_>, report: &netsum_worker::Report) -> PyResult<()> {
        let netsum_worker::Underflow { zeroed, nonzero } = report.underflow;
        if report.underflow.is_large() && !self.warned.underflow.swap(true, Ordering::Relaxed) {
            let category = py.import("netsum.errors")?.getattr("UnderflowWarning")?;
            let text = format!(
                "{zeroed} of {nonzero} nonzero floats became 0, because their block has far \
                 larger ones. statistics()[\"underflows\"] counts all; this warning is not repeated"
            );
            PyErr::warn(py, &category, &CString::new(text)?, 1)?;
        }
        let Some(fallen_back) = &self.warned.fallen_back else { return Ok(()) };
        let by_ring = report.mode == Mode::HostRing;
        if fallen_back.swap(by_ring, Ordering::Relaxed) || !by_ring {
            return Ok(());
        }
        let category = py.import("netsum.errors")?.getattr("NoBoxWarning")?;
        let text = c"no box has summed: the ranks fall back to the hosts' ring until a box sums \
            again. `netsum diagnose JOB` on the box shows the reason";
        PyErr::warn(py, &category, text, 1)
    }

    /// Waits without Python's lock, and checks for signals; `None` after `most`.
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

    /// Waits until the operation is done, and returns its report or raises its error. After
    /// `timeout` seconds it raises TimeoutError. The operation continues then, and also after
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
                    // An error means that the other end is closed.
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
