//! The communicator.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use netsum_worker::half::{bf16, f16};
use netsum_worker::{
    Bool8, Bootstrap, CommConfig, Dtype, Element, Error, Op, Pending, Room, Settings, Width,
    addresses,
};
use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};

use crate::array;
use crate::errors::{argument, raised};
use crate::memory::{Elements, Memory};
use crate::work::{Report, SIGNALS, Warned, Work};

/// Moves bytes from an input to an output.
type Exchange = fn(&mut Inner, Bytes, Bytes) -> Result<Pending<(Bytes, Bytes)>, Error>;
type Bytes = Elements<u8>;

/// A member of a job. All ranks call the same operations in the same order. Threads may share it,
/// if they keep the order of calls the same at all ranks. If operations differ between ranks in
/// kind, root, operator, elements or `tag` (a number for other properties that must agree), all
/// ranks raise MismatchError. If only one rank refuses an operation, the others raise
/// MismatchError.
#[pyclass(frozen, module = "netsum", subclass, weakref)]
pub struct Communicator {
    /// `None` after `close`.
    inner: Mutex<Option<netsum_worker::Communicator>>,
    room: Room,
    #[pyo3(get)]
    /// This rank, from 0.
    rank: u32,
    #[pyo3(get)]
    /// Ranks of the job.
    ranks: u32,
    wire: Option<Width>,
    /// The process that connected. In a forked one a thread that does not exist there may hold a
    /// lock.
    process: u32,
    warned: Arc<Warned>,
}

/// The result of the environment and `settings`: rank, ranks, ip, controller, job, peers.
#[pyfunction]
pub fn resolve<'py>(
    py: Python<'py>,
    settings: BTreeMap<String, String>,
) -> PyResult<Bound<'py, PyDict>> {
    let config = configuration(py, &settings)?;
    let found = PyDict::new(py);
    found.set_item("rank", config.rank)?;
    found.set_item("ranks", config.ranks)?;
    found.set_item("ip", config.ip.to_string())?;
    match &config.bootstrap {
        Bootstrap::Controller { address, job, .. } => {
            found.set_item("controller", address)?;
            found.set_item("job", job)?;
        }
        Bootstrap::Static { peers, .. } => {
            found.set_item("peers", peers.iter().map(ToString::to_string).collect::<Vec<_>>())?;
        }
    }
    Ok(found)
}

/// The address of this machine on the route to a host.
#[pyfunction]
pub fn towards(py: Python<'_>, host: &str) -> PyResult<String> {
    Ok(py.detach(|| addresses::towards((host, 9)))?.to_string())
}

/// This machine's addresses that others may reach.
#[pyfunction]
pub fn own_addresses() -> Vec<String> {
    addresses::reachable().iter().map(ToString::to_string).collect()
}

fn configuration(py: Python<'_>, settings: &BTreeMap<String, String>) -> PyResult<CommConfig> {
    let mut all = Settings::from_environment();
    let set = settings.iter().try_for_each(|(name, value)| all.set(name, value));
    set.and_then(|()| py.detach(|| all.config())).map_err(|e| raised(py, &e))
}

/// Joins the job from the environment and `settings`, and returns when all ranks have joined.
#[pyfunction]
pub fn connect(py: Python<'_>, settings: BTreeMap<String, String>) -> PyResult<Communicator> {
    let config = configuration(py, &settings)?;
    let has_box = matches!(config.bootstrap, Bootstrap::Controller { .. });
    let made = made(py, has_box, move || Inner::connect(config).map(Some))?;
    made.ok_or_else(|| raised(py, &Error::Closed))
}

/// Waits for a communicator that `make` connects.
fn made(
    py: Python<'_>,
    has_box: bool,
    make: impl FnOnce() -> Result<Option<Inner>, Error> + Send + 'static,
) -> PyResult<Option<Communicator>> {
    let (sender, mut answer) = mpsc::channel();
    // In its own thread, because Ctrl-C must end the wait.
    std::thread::Builder::new().name("netsum-connect".to_owned()).spawn(move || {
        let _ = sender.send(make());
    })?;
    loop {
        let answer = &mut answer;
        match py.detach(move || answer.recv_timeout(SIGNALS)) {
            Ok(Ok(None)) => return Ok(None),
            Ok(Ok(Some(comm))) => {
                let (rank, ranks, wire) = (comm.rank(), comm.ranks(), comm.wire());
                let fallen_back = (has_box && ranks > 1).then(AtomicBool::default);
                let warned = Arc::new(Warned { fallen_back, underflow: AtomicBool::default() });
                return Ok(Some(Communicator {
                    room: comm.room(),
                    inner: Mutex::new(Some(comm)),
                    rank,
                    ranks,
                    wire,
                    process: std::process::id(),
                    warned,
                }));
            }
            Ok(Err(error)) => return Err(raised(py, &error)),
            Err(RecvTimeoutError::Disconnected) => return Err(raised(py, &Error::Closed)),
            Err(RecvTimeoutError::Timeout) => py.check_signals()?,
        }
    }
}

fn op(py: Python<'_>, name: &str) -> PyResult<Op> {
    Op::ALL.into_iter().find(|op| op.name() == name).ok_or_else(|| {
        let names = Op::ALL.map(|op| format!("{:?}", op.name())).join(", ");
        argument(py, &format!("op {name:?}: must be one of {names}"))
    })
}

/// Calls a method for the type of a memory's elements.
macro_rules! with_type {
    ($py:expr, $memory:expr, $self:ident.$method:ident($($argument:expr),*)) => {
        match $memory.kind {
            Some(Dtype::I8) => $self.$method::<i8>($($argument),*),
            Some(Dtype::U8) => $self.$method::<u8>($($argument),*),
            Some(Dtype::I16) => $self.$method::<i16>($($argument),*),
            Some(Dtype::U16) => $self.$method::<u16>($($argument),*),
            Some(Dtype::I32) => $self.$method::<i32>($($argument),*),
            Some(Dtype::U32) => $self.$method::<u32>($($argument),*),
            Some(Dtype::I64) => $self.$method::<i64>($($argument),*),
            Some(Dtype::U64) => $self.$method::<u64>($($argument),*),
            Some(Dtype::F16) => $self.$method::<f16>($($argument),*),
            Some(Dtype::Bf16) => $self.$method::<bf16>($($argument),*),
            Some(Dtype::F32) => $self.$method::<f32>($($argument),*),
            Some(Dtype::F64) => $self.$method::<f64>($($argument),*),
            Some(Dtype::Bool) => $self.$method::<Bool8>($($argument),*),
            None => Err($memory.no_sum($py)),
        }
    };
}

/// How to start an operation.
#[derive(Clone, Copy)]
struct Begin {
    /// How long to wait for it before it continues in flight.
    first: Duration,
    /// A number that must be the same at all ranks.
    tag: u32,
    /// Instead of the setting `wire`.
    wire: Option<Width>,
}

impl Begin {
    fn with_wire(self, py: Python<'_>, wire: Option<&str>) -> PyResult<Self> {
        let parsed = wire.map(str::parse).transpose();
        let wrong = |e: String| argument(py, &format!("wire {:?}: {e}", wire.unwrap_or_default()));
        Ok(Self { wire: parsed.map_err(wrong)?, ..self })
    }
}

/// A call that waits: an operation that completes soon wakes no other thread.
const BLOCKING: Begin = Begin { first: Duration::from_millis(1), tag: 0, wire: None };

/// A call that does not wait.
const fn in_flight(tag: u32) -> Begin {
    Begin { first: Duration::ZERO, tag, wire: None }
}

/// Marks an error that has been announced to the other ranks, or need not be.
fn mark_announced(py: Python<'_>, error: &PyErr) {
    // Unusual exceptions have no room for the attribute; they are announced twice.
    let _ = error.value(py).setattr("announced", true);
}

type Inner = netsum_worker::Communicator;

impl Communicator {
    /// Calls the communicator without Python's lock.
    fn with<R: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut Inner) -> Result<R, Error> + Send,
    ) -> PyResult<R> {
        if !self.is_here() {
            return Err(raised(py, &Error::Forked));
        }
        let called = py.detach(|| match &mut *self.lock() {
            Some(comm) => call(comm),
            None => Err(Error::Closed),
        });
        called.map_err(|error| raised(py, &error))
    }

    fn is_here(&self) -> bool {
        self.process == std::process::id()
    }

    fn lock(&self) -> MutexGuard<'_, Option<Inner>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a call, and announces it to the other ranks if it is refused. A call that Ctrl-C ends
    /// may be repeated.
    fn call(&self, py: Python<'_>, start: impl FnOnce() -> PyResult<Work>) -> PyResult<Work> {
        start().inspect_err(|error| {
            if error.is_instance_of::<PyException>(py)
                && !error.value(py).hasattr("announced").unwrap_or(false)
            {
                self._refuse(py);
                mark_announced(py, error);
            }
        })
    }

    fn root(&self, py: Python<'_>, root: i64) -> PyResult<u32> {
        let text = || format!("root {root}: 0 to {} with {} ranks", self.ranks - 1, self.ranks);
        u32::try_from(root).map_err(|_| argument(py, &text()))
    }

    fn work<B: Send>(
        &self,
        py: Python<'_>,
        Begin { first, tag, wire }: Begin,
        start: impl FnOnce(&mut Inner) -> Result<Pending<B>, Error> + Send,
    ) -> PyResult<Work> {
        let mut start = Some(start);
        loop {
            let begun = self.with(py, |comm| {
                // Only the thread that holds the communicator starts operations.
                let Some(start) = start.take_if(|_| self.room.wait_for(Duration::ZERO)) else {
                    return Ok(None);
                };
                comm.wait_first(first);
                comm.set_tag(tag);
                comm.set_wire(wire.or(self.wire));
                start(comm)
                    .map(|pending| Some(Work::new(pending.untyped(), Arc::clone(&self.warned))))
            });
            // The library has announced its own refusals.
            if let Some(work) = begun.inspect_err(|error| mark_announced(py, error))? {
                return Ok(work);
            }
            // Other threads may use the communicator meanwhile, and Ctrl-C ends the wait.
            py.detach(|| self.room.wait_for(SIGNALS));
            py.check_signals().inspect_err(|error| mark_announced(py, error))?;
        }
    }

    fn reduce_in_place<T: Element>(
        &self,
        py: Python<'_>,
        memory: Memory,
        op: Op,
        root: Option<u32>,
        begin: Begin,
    ) -> PyResult<Work> {
        let elements = memory.elements::<T>(py)?;
        self.work(py, begin, move |comm| comm.reduce_async(elements, op, root))
    }

    fn reduce_many<T: Element>(
        &self,
        py: Python<'_>,
        memories: Vec<Memory>,
        op: Op,
        begin: Begin,
    ) -> PyResult<Work> {
        if let Some(other) = memories.iter().find(|other| other.kind != memories[0].kind) {
            let text = format!(
                "arrays of dtype {} and {}: one operation must have one dtype",
                memories[0].dtype, other.dtype
            );
            return Err(argument(py, &text));
        }
        let elements = memories
            .into_iter()
            .map(|memory| memory.elements::<T>(py))
            .collect::<Result<Vec<_>, _>>()?;
        self.work(py, begin, move |comm| comm.reduce_many_async(elements, op))
    }

    fn scatter<T: Element>(
        &self,
        py: Python<'_>,
        input: Memory,
        output: Memory,
        op: Op,
        begin: Begin,
    ) -> PyResult<Work> {
        let (input, output) = (input.elements::<T>(py)?, output.elements::<T>(py)?);
        self.work(py, begin, move |comm| comm.reduce_scatter_async(input, output, op))
    }
}

/// Methods that start operations.
impl Communicator {
    fn start_all_reduce(
        &self,
        array: &Bound<'_, PyAny>,
        op: &str,
        begin: Begin,
        wire: Option<&str>,
    ) -> PyResult<Work> {
        let py = array.py();
        let begin = match begin.with_wire(py, wire) {
            Ok(begin) => begin,
            Err(error) => return self.call(py, || Err(error)),
        };
        if !array.is_instance_of::<PyList>() && !array.is_instance_of::<PyTuple>() {
            return self.start_reduce(array, None, op, begin);
        }
        self.call(py, || {
            let arrays: Vec<Bound<'_, PyAny>> = array.extract()?;
            let op = self::op(py, op)?;
            let memories: Vec<_> =
                arrays.iter().map(|array| array::memory(array, true)).collect::<Result<_, _>>()?;
            match memories.first() {
                None => self.reduce_many::<f32>(py, memories, op, begin),
                Some(first) => {
                    with_type!(py, first, self.reduce_many(py, memories, op, begin))
                }
            }
        })
    }

    fn start_reduce(
        &self,
        array: &Bound<'_, PyAny>,
        root: Option<i64>,
        op: &str,
        begin: Begin,
    ) -> PyResult<Work> {
        let py = array.py();
        self.call(py, || {
            let root = root.map(|root| self.root(py, root)).transpose()?;
            let (op, memory) = (self::op(py, op)?, array::memory(array, true)?);
            with_type!(py, memory, self.reduce_in_place(py, memory, op, root, begin))
        })
    }

    fn start_reduce_scatter(
        &self,
        output: &Bound<'_, PyAny>,
        input: &Bound<'_, PyAny>,
        op: &str,
        begin: Begin,
    ) -> PyResult<Work> {
        let py = output.py();
        self.call(py, || {
            let op = self::op(py, op)?;
            let (input, output) = (array::memory(input, false)?, array::memory(output, true)?);
            if input.dtype != output.dtype {
                let text = format!(
                    "input of dtype {} and output of {}: must have the same dtype",
                    input.dtype, output.dtype
                );
                return Err(argument(py, &text));
            }
            with_type!(py, input, self.scatter(py, input, output, op, begin))
        })
    }

    fn start_broadcast(&self, array: &Bound<'_, PyAny>, root: i64, begin: Begin) -> PyResult<Work> {
        let py = array.py();
        self.call(py, || {
            let (root, memory) = (self.root(py, root)?, array::memory(array, true)?.into_bytes());
            self.work(py, begin, move |comm| comm.broadcast_async(memory, root))
        })
    }

    /// Starts `exchange` of the bytes of `input` to `output`.
    fn start_exchange(
        &self,
        output: &Bound<'_, PyAny>,
        input: &Bound<'_, PyAny>,
        begin: Begin,
        exchange: Exchange,
    ) -> PyResult<Work> {
        let py = output.py();
        self.call(py, || {
            let (from, to) = (
                array::memory(input, false)?.into_bytes(),
                array::memory(output, true)?.into_bytes(),
            );
            self.work(py, begin, move |comm| exchange(comm, from, to))
        })
    }

    fn start_barrier(&self, py: Python<'_>, begin: Begin) -> PyResult<Work> {
        self.call(py, || self.work(py, begin, Inner::barrier_async))
    }
}

#[pymethods]
impl Communicator {
    /// Replaces each element by the sum of all ranks' elements at its place, in place; or by their
    /// average ("avg", of floats), "min", "max", product ("prod"), or bitwise "band", "bor" or
    /// "bxor" (of integers and bool). The same bits at every rank. A list of arrays of one dtype is
    /// reduced as if they were concatenated, in one operation: use it for many small arrays.
    /// `wire`, "32bit" or "16bit", is the number of bits of a float on the links in a sum of over
    /// 4,096 of them, instead of the setting of that name.
    #[pyo3(signature = (array, op="sum", *, wire=None))]
    fn all_reduce(
        &self,
        array: &Bound<'_, PyAny>,
        op: &str,
        wire: Option<&str>,
    ) -> PyResult<Report> {
        self.start_all_reduce(array, op, BLOCKING, wire)?.wait(array.py(), None)
    }

    /// As all_reduce, in flight.
    #[pyo3(signature = (array, op="sum", *, tag=0, wire=None))]
    fn all_reduce_async(
        &self,
        array: &Bound<'_, PyAny>,
        op: &str,
        tag: u32,
        wire: Option<&str>,
    ) -> PyResult<Work> {
        self.start_all_reduce(array, op, in_flight(tag), wire)
    }

    /// As all_reduce, but only rank `root` gets the result. None is all ranks.
    #[pyo3(signature = (array, root, op="sum"))]
    fn reduce(&self, array: &Bound<'_, PyAny>, root: Option<i64>, op: &str) -> PyResult<Report> {
        self.start_reduce(array, root, op, BLOCKING)?.wait(array.py(), None)
    }

    /// As reduce, in flight.
    #[pyo3(signature = (array, root, op="sum", *, tag=0))]
    fn reduce_async(
        &self,
        array: &Bound<'_, PyAny>,
        root: Option<i64>,
        op: &str,
        tag: u32,
    ) -> PyResult<Work> {
        self.start_reduce(array, root, op, in_flight(tag))
    }

    /// Reduces `input`, and writes this rank's part of the result to `output`.
    #[pyo3(signature = (output, input, op="sum"))]
    fn reduce_scatter(
        &self,
        output: &Bound<'_, PyAny>,
        input: &Bound<'_, PyAny>,
        op: &str,
    ) -> PyResult<Report> {
        self.start_reduce_scatter(output, input, op, BLOCKING)?.wait(output.py(), None)
    }

    /// As reduce_scatter, in flight.
    #[pyo3(signature = (output, input, op="sum", *, tag=0))]
    fn reduce_scatter_async(
        &self,
        output: &Bound<'_, PyAny>,
        input: &Bound<'_, PyAny>,
        op: &str,
        tag: u32,
    ) -> PyResult<Work> {
        self.start_reduce_scatter(output, input, op, in_flight(tag))
    }

    /// Copies the array of rank `root`, of any dtype, to all ranks, in place.
    fn broadcast(&self, array: &Bound<'_, PyAny>, root: i64) -> PyResult<Report> {
        self.start_broadcast(array, root, BLOCKING)?.wait(array.py(), None)
    }

    /// As broadcast, in flight.
    #[pyo3(signature = (array, root, *, tag=0))]
    fn broadcast_async(&self, array: &Bound<'_, PyAny>, root: i64, tag: u32) -> PyResult<Work> {
        self.start_broadcast(array, root, in_flight(tag))
    }

    /// Concatenates the inputs of all ranks, of any dtype, in `output`.
    fn all_gather(&self, output: &Bound<'_, PyAny>, input: &Bound<'_, PyAny>) -> PyResult<Report> {
        self.start_exchange(output, input, BLOCKING, Inner::all_gather_async)?
            .wait(output.py(), None)
    }

    /// As all_gather, in flight.
    #[pyo3(signature = (output, input, *, tag=0))]
    fn all_gather_async(
        &self,
        output: &Bound<'_, PyAny>,
        input: &Bound<'_, PyAny>,
        tag: u32,
    ) -> PyResult<Work> {
        self.start_exchange(output, input, in_flight(tag), Inner::all_gather_async)
    }

    /// Concatenates this rank's part of each rank's input, of any dtype, in `output`.
    fn all_to_all(&self, output: &Bound<'_, PyAny>, input: &Bound<'_, PyAny>) -> PyResult<Report> {
        self.start_exchange(output, input, BLOCKING, Inner::all_to_all_async)?
            .wait(output.py(), None)
    }

    /// As all_to_all, in flight.
    #[pyo3(signature = (output, input, *, tag=0))]
    fn all_to_all_async(
        &self,
        output: &Bound<'_, PyAny>,
        input: &Bound<'_, PyAny>,
        tag: u32,
    ) -> PyResult<Work> {
        self.start_exchange(output, input, in_flight(tag), Inner::all_to_all_async)
    }

    /// Returns once all ranks have called it, and earlier operations have completed.
    fn barrier(&self, py: Python<'_>) -> PyResult<Report> {
        self.start_barrier(py, BLOCKING)?.wait(py, None)
    }

    /// As barrier, in flight.
    #[pyo3(signature = (*, tag=0))]
    fn barrier_async(&self, py: Python<'_>, tag: u32) -> PyResult<Work> {
        self.start_barrier(py, in_flight(tag))
    }

    /// Announces a call that the caller itself has refused. Ranks that make it raise MismatchError,
    /// unless all refuse it. Methods of this class have announced their own refusals: the exception
    /// has an attribute `announced`.
    fn _refuse(&self, py: Python<'_>) {
        if self.is_here() {
            py.detach(|| {
                if let Some(comm) = &mut *self.lock() {
                    comm.refuse();
                }
            });
        }
    }

    fn __enter__(this: Py<Self>) -> Py<Self> {
        this
    }

    #[pyo3(signature = (*_what))]
    fn __exit__(&self, py: Python<'_>, _what: &Bound<'_, PyTuple>) {
        self.close(py);
    }

    fn __repr__(&self) -> String {
        format!("<netsum.Communicator: rank {} of {}>", self.rank, self.ranks)
    }

    /// "box" if the box sums, "ring" if the hosts' ring does.
    #[getter]
    fn mode(&self, py: Python<'_>) -> PyResult<&'static str> {
        self.with(py, |comm| Ok(comm.mode().name()))
    }

    /// The transport of this rank's packets.
    #[getter]
    fn transport(&self, py: Python<'_>) -> PyResult<String> {
        self.with(py, |comm| Ok(comm.transport().to_owned()))
    }

    /// Counters of this rank since it connected, by name.
    fn statistics<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let s = self.with(py, |comm| Ok(comm.statistics()))?;
        let all = PyDict::new(py);
        for (name, value) in [
            ("all_reduces", s.all_reduces),
            ("verified", s.verified),
            ("unsummed", s.unsummed),
            ("wrong", s.wrong),
            ("fallbacks", s.fallbacks),
            ("box_bytes", s.box_bytes),
            ("ring_bytes", s.ring_bytes),
            ("reconnects", s.reconnects),
            ("underflows", s.underflows),
        ] {
            all.set_item(name, value)?;
        }
        Ok(all)
    }

    /// Makes a communicator of all ranks that pass the same `color`, in the order of their `key`,
    /// and of their ranks here where keys are equal. All ranks must call it; those that pass None
    /// get None.
    #[pyo3(signature = (color, key=0))]
    fn split(
        slf: Py<Self>,
        py: Python<'_>,
        color: Option<u32>,
        key: i32,
    ) -> PyResult<Option<Self>> {
        // Without a box only a rank alone can.
        made(py, true, move || {
            let split = |comm: &mut Inner| comm.split_config(color, key);
            let config = slf.get().lock().as_mut().ok_or(Error::Closed).and_then(split)?;
            config.map(Inner::connect).transpose()
        })
    }

    /// Leaves the job. Operations in flight complete if the other ranks call them within two
    /// seconds; others raise ClosedError.
    fn close(&self, py: Python<'_>) {
        if self.is_here() {
            py.detach(|| {
                let comm = self.lock().take();
                drop(comm);
            });
        }
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        let comm = self.inner.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if comm.is_some() {
            // Without Python's lock, because it waits for other ranks.
            Python::attach(|py| py.detach(|| drop(comm)));
        }
    }
}
