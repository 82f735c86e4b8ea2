//! The communicator, which applications call.
//!
//! While the application is in a call, its thread drives. Between calls the *progress thread* does:
//! operations in flight continue, lost packets are sent again, keep-alives are sent, and other
//! ranks can fall back to the hosts' ring while this one computes.

use std::ops::DerefMut;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::config::{Bootstrap, CommConfig, Hierarchy};
use super::forked;
use super::hierarchy::{Announcement, Hierarchical};
use super::pending::{Back, Pending, Room};
use super::progress::{Driven, is_refusal};
use super::session::{Session, wait_until};
use netsum_collective::call::{Call, Collective, Op};
use netsum_collective::engine::{Finished, MAX_OPEN};
use netsum_collective::error::{Error, Position};
use netsum_collective::numeric::block::Width;
use netsum_collective::numeric::element::{Data, Element, Owned, Slice};
use netsum_collective::numeric::layout::Layout;
use netsum_collective::numeric::memory::Memory;
use netsum_collective::numeric::operators::{Elements, Reduction};
use netsum_collective::numeric::quant::Underflow;
use netsum_collective::report::{Mode, Report, Statistics};
use netsum_collective::shape::JobShape;

/// A member of a job, connected to the ring of all ranks.
///
/// All ranks call the same operations in the same order, as with MPI or NCCL. Each rank may wait
/// for an operation or leave it in flight.
///
/// The box may ask the ranks to reconnect while the job runs. They do so between two operations;
/// the later one takes that much longer, but starting it does not block. [`Statistics::reconnects`]
/// counts it. If a reconnect takes longer than twice `timeout`, the next call returns an error.
///
/// Dropping a communicator completes operations in flight, if the other ranks call them within two
/// seconds, and leaves the job in good order. That may take two more seconds where other ranks are
/// behind.
pub struct Communicator {
    pub(super) config: CommConfig,
    shape: JobShape,
    transport_name: Arc<str>,
    /// `None` for a single rank, which needs no network.
    driven: Option<Driven>,
    /// `None` where all sums are flat.
    hierarchical: Option<Hierarchical>,
    /// Statistics of a single rank.
    alone: Statistics,
    /// See [`wait_first`](Self::wait_first).
    patience: Duration,
    /// See [`set_tag`](Self::set_tag).
    tag: u32,
    /// See [`set_wire`](Self::set_wire).
    wire: Option<Width>,
    /// Number of calls of [`split`](Self::split).
    pub(super) splits: u32,
    /// The process that connected.
    process: u32,
}

impl Communicator {
    /// Operations that may be in flight; see [`all_reduce_async`](Self::all_reduce_async).
    pub const MAX_IN_FLIGHT: usize = MAX_OPEN;

    /// Finds the job, opens the connections and waits until the ring is connected.
    ///
    /// # Errors
    /// [`Error::Config`] names the wrong argument, [`Error::Controller`] the ranks that are
    /// missing; also [`Error::Socket`] and [`Error::Unreachable`].
    pub fn connect(config: CommConfig) -> Result<Self, Error> {
        let CommConfig { rank, ranks, timeout, .. } = config;
        if ranks == 0 || ranks > 64 {
            return Err(Error::Config(format!("ranks {ranks}: 1 to 64")));
        }
        if rank >= ranks {
            return Err(Error::Config(format!(
                "rank {rank}: 0 to {} with {ranks} ranks",
                ranks - 1
            )));
        }
        if timeout < Duration::from_millis(100) {
            return Err(Error::Config(format!("timeout {timeout:?}: at least 100ms")));
        }
        config.retry.check().map_err(Error::Config)?;
        if ranks == 1 {
            return Self::alone(config);
        }
        let session = Session::new(config.clone())?;
        let wire = config.wire;
        // Ranks for which they are off take part in the agreement: the ranks' settings may differ.
        let may_be_hierarchical = ranks > 2
            && config.inter_host_ring.is_none()
            && (session.has_shared_address || config.hierarchy == Hierarchy::On);
        let driven = Driven::new(session)?;
        let mut hierarchical = None;
        if may_be_hierarchical {
            hierarchical = Hierarchical::new(&driven, &config)?;
            driven.session.lock().forget_operations();
        }
        let (shape, transport_name) = {
            let session = driven.session.lock();
            (session.shape, session.transport_name.clone())
        };
        Ok(Self {
            config,
            shape,
            transport_name,
            driven: Some(driven),
            hierarchical,
            alone: Statistics::default(),
            patience: Duration::ZERO,
            tag: 0,
            wire,
            splits: 0,
            process: std::process::id(),
        })
    }

    /// Waits for hierarchical operations in flight, which are not among the session's.
    pub(super) fn complete_hierarchical(&self) {
        if let Some(hierarchical) = &self.hierarchical {
            hierarchical.complete();
        }
    }

    fn alone(config: CommConfig) -> Result<Self, Error> {
        let layout = match &config.bootstrap {
            Bootstrap::Static { message_size, window, rings, .. } => {
                Layout { message_size: *message_size, window: *window, rings: *rings }
            }
            _ => Layout { message_size: 1 << 16, window: 1, rings: 1 },
        };
        let shape = JobShape {
            ranks: 1,
            mtu: 1024,
            layout,
            relaxed: false,
            on_host_ring: false,
            is_sealed: false,
        };
        shape.check().map_err(Error::Config)?;
        let (transport_name, alone) = ("nothing".into(), Statistics::default());
        Ok(Self {
            config,
            shape,
            transport_name,
            driven: None,
            hierarchical: None,
            alone,
            patience: Duration::ZERO,
            tag: 0,
            wire: None,
            splits: 0,
            process: std::process::id(),
        })
    }

    /// Replaces each element by the sum over all ranks' elements at its place, with the same bits at
    /// every rank and every time: integers modulo two to the power of their width, `f32` as
    /// [`reference_sum`](crate::reference_sum) adds, `f64` rounded after each rank, `bool` the or.
    /// All ranks must call with the same length and type. Operations in flight complete first.
    /// [`reduce`](Self::reduce) has other operators.
    ///
    /// # Errors
    /// See [`Error`]. After an error some elements of the slice may be sums already.
    pub fn all_reduce<T: Element>(&mut self, data: &mut [T]) -> Result<Report, Error> {
        let data = self.reduced(data, Op::Sum, None);
        self.call_reduction(Collective::AllReduce(Op::Sum), data).1
    }

    /// One [`all_reduce`](Self::all_reduce) of several tensors, as if they were concatenated in one
    /// slice: it gives the same bits, and if all tensors fit in a message, it sends one message
    /// instead of many. The tensors are not copied into one slice. The total length must be the
    /// same at all ranks; the tensors' own lengths may differ.
    ///
    /// ```no_run
    /// # fn example(mut comm: netsum_worker::Communicator) -> Result<(), netsum_worker::Error> {
    /// let (mut weights, mut biases) = (vec![0.25f32; 4096], vec![0.5f32; 64]);
    /// comm.all_reduce_many(&mut [&mut weights, &mut biases])?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce), but [`Error::NonFiniteTensors`] for infinities and
    /// NaNs.
    pub fn all_reduce_many<T: Element>(
        &mut self,
        tensors: &mut [&mut [T]],
    ) -> Result<Report, Error> {
        let data = self.reduced_many(tensors, Op::Sum);
        let (data, report) = self.call_reduction(Collective::AllReduce(Op::Sum), data);
        report.map_err(|error| match (error, data) {
            (Error::NonFinite { first, end }, Some(Reduction { elements: data, .. })) => {
                let position = |element| {
                    let (tensor, element) = data.locate(element);
                    Position { tensor, element }
                };
                Error::NonFiniteTensors { first: position(first), last: position(end - 1) }
            }
            (error, _) => error,
        })
    }

    /// Starts an [`all_reduce`](Self::all_reduce) that continues while the application does
    /// something else, and returns a handle to wait for the sum. The handle owns the buffer, a
    /// vector or any other owner of a slice, and returns it with the sum. Operations are done in
    /// the order of the calls, blocking ones included. The next one's messages are sent as soon as
    /// the window has room and the one before has no more to send. So a gradient's buckets can be
    /// summed while the next ones are computed.
    ///
    /// If [`MAX_IN_FLIGHT`](Self::MAX_IN_FLIGHT) operations are in flight, the call waits for the
    /// oldest.
    ///
    /// ```no_run
    /// # fn example(mut comm: netsum_worker::Communicator) -> Result<(), netsum_worker::Error> {
    /// let mut buckets = Vec::new();
    /// for layer in 0..8 {
    ///     let gradient = vec![layer as f32; 65536];
    ///     buckets.push(comm.all_reduce_async(gradient)?);
    /// }
    /// for bucket in buckets {
    ///     let (sum, report) = bucket.wait()?;
    ///     println!("{} elements in {:?}", sum.len(), report.elapsed);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// See [`Error`]: a failure of the communicator, or an element type that messages are too small
    /// for. [`Pending::wait`] returns other errors.
    pub fn all_reduce_async<T: Element, B>(&mut self, data: B) -> Result<Pending<B>, Error>
    where
        B: DerefMut<Target = [T]> + Send + 'static,
    {
        self.reduce_async(data, Op::Sum, None)
    }

    /// Makes calls that start an operation wait for it for at most `patience`, as
    /// [`Pending::wait_for`] does: for applications that wait for each operation at once. An
    /// operation that completes within this time does not wake another thread. Zero by default.
    pub fn wait_first(&mut self, patience: Duration) {
        self.patience = patience;
    }

    /// Sets a number that must be the same at all ranks for the next operations, as MPI's tags: for
    /// properties that netsum cannot compare, such as how tensors are laid out. 0 by default.
    pub fn set_tag(&mut self, tag: u32) {
        self.tag = tag;
    }

    /// Sets how the floats of the next operations travel, if they are more than 4,096: in 32 bits, in
    /// 16, which takes half the bytes, or if `None` in their own. In 16 bits a float keeps, sign
    /// included, 16 bits less those that the ranks' number needs: 14 with 4 ranks, 10 with 64, below
    /// the largest float of its block of 1,024. They are rounded at random, so that sums are right on
    /// the average. It must be the same at all ranks. [`CommConfig::wire`] is what it is at first.
    pub fn set_wire(&mut self, wire: Option<Width>) {
        self.wire = wire;
    }

    /// How floats travel, as [`set_wire`](Self::set_wire) has set it.
    pub fn wire(&self) -> Option<Width> {
        self.wire
    }

    /// How other ranks see a call.
    fn described(&self, collective: Collective, data: &dyn Data) -> Call {
        Call { collective, tag: self.tag, width: data.dtype().width(self.wire) }
    }

    /// Starts an operation whose data the engine owns until it completes. `data` is an error where
    /// the arguments are wrong.
    pub(super) fn call_async<B, D: Data + Send + 'static>(
        &mut self,
        collective: Collective,
        data: Result<D, Error>,
        back: Back<B>,
    ) -> Result<Pending<B>, Error> {
        forked(self.process)?;
        let started = data.and_then(|data| self.start(collective, data, back));
        self.announce_refusal(started)
    }

    fn start<B>(
        &mut self,
        collective: Collective,
        mut data: impl Data + Send + 'static,
        back: Back<B>,
    ) -> Result<Pending<B>, Error> {
        let memory = data.memory();
        if memory.overlaps_itself() {
            let text = "arrays of the operation share memory, and one of them is written: pass a \
                        copy of one. Input and output may share memory only where the shorter one \
                        is exactly this rank's part of the longer one";
            return Err(Error::Argument(text.to_owned()));
        }
        if let Some(hierarchical) = &self.hierarchical {
            hierarchical.check(&memory)?;
        }
        let Some(driven) = &self.driven else {
            let outcome = self.run_alone(&mut data, Instant::now());
            return Ok(Pending::done(
                outcome.map(|report| (Box::new(data) as Owned, report)),
                back,
            ));
        };
        let call = self.described(collective, &data);
        driven.start(call, data, memory, back, |session, pending| {
            if !self.patience.is_zero() {
                let until = Instant::now() + self.patience;
                session.drive_until(until, self.patience, || pending.is_done());
            }
            (self.shape, self.transport_name) = (session.shape, session.transport_name.clone());
        })
    }

    /// As [`call_async`](Self::call_async), of a reduction, which may be hierarchical.
    pub(super) fn call_reduction_async<B, E: Elements + Send + 'static>(
        &mut self,
        collective: Collective,
        data: Result<Reduction<E>, Error>,
        back: Back<B>,
    ) -> Result<Pending<B>, Error> {
        let is_hierarchical = |data: &Reduction<E>| {
            self.hierarchical.as_ref().is_some_and(|h| h.takes(collective, data))
        };
        match data {
            Ok(data) if is_hierarchical(&data) => {
                let (dtype, elements) = data.elements();
                let announcement = Announcement { dtype, elements, memory: data.memory() };
                let call = self.described(collective, &announcement);
                let announced = self.call_async(collective, Ok(announcement), |_| Some(()))?;
                let (pending, promise) = Pending::promised(back);
                if let Some(hierarchical) = &self.hierarchical {
                    hierarchical.enqueue(call, data, announced, promise);
                }
                pending.wait_for(self.patience);
                Ok(pending)
            }
            data => self.call_async(collective, data, back),
        }
    }

    /// As [`call`](Self::call), of a reduction, which may be hierarchical.
    pub(super) fn call_reduction<E: Elements>(
        &mut self,
        collective: Collective,
        data: Result<Reduction<E>, Error>,
    ) -> (Option<Reduction<E>>, Result<Report, Error>) {
        let is_hierarchical = |data: &Reduction<E>| {
            self.hierarchical.as_ref().is_some_and(|h| h.takes(collective, data))
        };
        match data {
            Ok(mut data) if is_hierarchical(&data) => {
                let called = Instant::now();
                let (dtype, elements) = data.elements();
                let announcement = Announcement { dtype, elements, memory: Memory::default() };
                let call = self.described(collective, &announcement);
                // Other threads can end the session meanwhile.
                let announced = self.call_async(collective, Ok(announcement), |_| Some(()));
                let report = announced.and_then(|announced| {
                    let hierarchical = self.hierarchical.as_ref().ok_or(Error::Closed)?;
                    let (finished, again) =
                        hierarchical.run(call, &mut data.elements, announced)?;
                    finished.report(called.elapsed(), again)
                });
                (Some(data), report)
            }
            data => self.call(collective, data),
        }
    }

    /// Announces the call to the other ranks if it was refused. Every call returns through this.
    fn announce_refusal<R>(&mut self, called: Result<R, Error>) -> Result<R, Error> {
        if is_refusal(&called) {
            self.refuse();
        }
        called
    }

    /// Announces a call that the application itself has refused. Ranks that make the call get
    /// [`Error::Mismatch`]; if all ranks refuse it, it has no effect. Methods that return
    /// [`Error::Argument`] or [`Error::MessageSize`] have announced that already. Never waits.
    pub fn refuse(&mut self) {
        if let Some(driven) = self.here() {
            driven.refuse();
        }
    }

    /// A handle to wait until an operation can be started without waiting.
    pub fn room(&self) -> Room {
        Room {
            driver: self.driven.as_ref().map(|driven| Arc::clone(&driven.session)),
            process: self.process,
        }
    }

    /// An operation from its start to its end, with data that is lent. `data` is an error where the
    /// arguments are wrong.
    pub(super) fn call<D: Data>(
        &mut self,
        collective: Collective,
        data: Result<D, Error>,
    ) -> (Option<D>, Result<Report, Error>) {
        if let Err(error) = forked(self.process) {
            return (None, Err(error));
        }
        self.complete_hierarchical();
        match data {
            Ok(mut data) => {
                let report = self.run(collective, &mut data);
                (Some(data), self.announce_refusal(report))
            }
            Err(error) => (None, self.announce_refusal(Err(error))),
        }
    }

    fn run(&mut self, collective: Collective, data: &mut dyn Data) -> Result<Report, Error> {
        let called = Instant::now();
        let Some(driven) = &self.driven else { return self.run_alone(data, called) };
        let mut session = wait_until(driven.session.lock(), Session::may_run)?;
        let report = session.run(self.described(collective, data), data, called);
        (self.shape, self.transport_name) = (session.shape, session.transport_name.clone());
        report
    }

    /// A single rank's data is its own sum: floats keep their bits.
    fn run_alone(&mut self, data: &mut dyn Data, called: Instant) -> Result<Report, Error> {
        data.keep_own();
        self.alone.all_reduces += 1;
        let (non_finite, underflow) = (None, Underflow::default());
        let (mode, hierarchical) = (Mode::HostRing, false);
        let finished = Finished { mode, verified: 0, non_finite, underflow, hierarchical };
        finished.report(called.elapsed(), Some(0))
    }

    /// Returns once all ranks have called it and earlier operations have completed.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    pub fn barrier(&mut self) -> Result<(), Error> {
        self.call(Collective::Barrier, Ok(Slice(&mut [0i32][..]))).1.map(|_| ())
    }

    /// This rank.
    pub fn rank(&self) -> u32 {
        self.config.rank
    }

    /// Ranks of the job.
    pub fn ranks(&self) -> u32 {
        self.shape.ranks
    }

    /// How data is cut into messages, for [`reference_sum`](crate::reference_sum).
    pub fn layout(&self) -> Layout {
        self.shape.layout
    }

    /// The transport of this rank's packets: `UDP`, or an adapter with its port and GID index.
    pub fn transport(&self) -> &str {
        &self.transport_name
    }

    /// Whether all messages are sealed: see [`CommConfig::secret`].
    pub fn is_sealed(&self) -> bool {
        self.shape.is_sealed
    }

    /// Whether the box sums, or the hosts' ring after a fallback.
    pub fn mode(&self) -> Mode {
        self.here().map_or(Mode::HostRing, |driven| driven.session.lock().mode())
    }

    /// What this rank has done since it connected.
    pub fn statistics(&self) -> Statistics {
        let flat = self.here().map_or(self.alone, |driven| driven.session.lock().statistics());
        match self.hierarchical.as_ref().filter(|_| forked(self.process).is_ok()) {
            Some(hierarchical) => hierarchical.statistics(flat),
            None => flat,
        }
    }

    /// `None` in a forked process, where another thread's lock would stay locked.
    fn here(&self) -> Option<&Driven> {
        self.driven.as_ref().filter(|_| forked(self.process).is_ok())
    }
}

impl std::fmt::Debug for Communicator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Communicator")
            .field("rank", &self.config.rank)
            .field("shape", &self.shape)
            .finish_non_exhaustive()
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        let (driven, hierarchical) = (self.driven.take(), self.hierarchical.take());
        if forked(self.process).is_err() {
            // Only the process that connected may leave the job.
            std::mem::forget((driven, hierarchical));
        } else {
            drop(hierarchical);
            drop(driven);
        }
    }
}
