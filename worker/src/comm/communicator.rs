//! The communicator: what the application calls.
//!
//! While the application is in a call, its thread drives. Between calls the *keeper* thread does:
//! operations in flight go on, packets that others miss are sent again, keep-alives go out, and
//! other ranks can fall back to the ring while this one computes.

use std::io::Write;
use std::ops::DerefMut;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::config::{Bootstrap, CommConfig};
use super::forked;
use super::pending::{Back, Pending, Room};
use super::session::{Session, keep, wait_until};
use super::turns::Turns;
use netsum_collective::call::{Call, Collective, Op};
use netsum_collective::engine::{Finished, MAX_OPEN};
use netsum_collective::error::{Error, Position};
use netsum_collective::numeric::element::{Data, Element, Owned, Slice, Slices, take_back};
use netsum_collective::numeric::layout::Layout;
use netsum_collective::numeric::quant::Underflow;
use netsum_collective::report::{Mode, Report, Statistics};
use netsum_collective::shape::JobShape;

/// A member of a job, connected to the ring of all ranks.
///
/// All ranks call for the same operations in the same order, as with MPI or NCCL; which of them
/// wait and which are in flight may differ from rank to rank.
///
/// The box may ask the ranks to connect anew while the job is at work: then all do at the end of an
/// all-reduce, before any later one, which takes that much longer. Who starts one is not held up.
/// Nothing else is noticed of it, but in [`statistics`](Self::statistics). What it takes longer
/// than `timeout` twice to do is an error of the next call.
///
/// Dropping it completes what is in flight, where the other ranks get there within two seconds, and
/// leaves the job in good order; that may take up to two seconds more where other ranks are behind.
pub struct Communicator {
    config: CommConfig,
    shape: JobShape,
    title: Arc<str>,
    /// `None` for a single rank, which needs no network.
    kept: Option<KeptSession>,
    /// What a single rank has done.
    alone: Statistics,
    /// See [`wait_first`](Self::wait_first).
    patience: Duration,
    /// See [`set_tag`](Self::set_tag).
    tag: u32,
    /// Which connected.
    process: u32,
}

/// The session, and the thread that keeps it between calls.
struct KeptSession {
    shared: Arc<Turns<Session>>,
    keeper: JoinHandle<()>,
    alarm: UnixStream,
}

impl KeptSession {
    /// Has the keeper look, wherever it waits.
    fn wake(&self) {
        // Full means that it has been woken already.
        let _ = (&self.alarm).write(&[0]);
    }
}

impl Communicator {
    /// Operations that may be in flight; see [`all_reduce_async`](Self::all_reduce_async).
    pub const MAX_IN_FLIGHT: usize = MAX_OPEN;

    /// Finds the job, opens the connections and waits until the ring stands.
    ///
    /// # Errors
    /// [`Error::Config`] with the argument that is wrong, [`Error::Socket`], [`Error::Controller`]
    /// (which names the ranks that are missing), [`Error::Unreachable`].
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
        let (shape, title) = (session.shape, session.title.clone());
        let shared = Arc::new(Turns::new(session));
        let theirs = Arc::clone(&shared);
        let no_thread = |e| Error::Config(format!("cannot start a thread: {e}"));
        let (alarm, ring) = UnixStream::pair().map_err(no_thread)?;
        for end in [&alarm, &ring] {
            end.set_nonblocking(true).map_err(no_thread)?;
        }
        let keeper = std::thread::Builder::new()
            .name("netsum-keeper".to_owned())
            .spawn(move || keep(&theirs, ring))
            .map_err(no_thread)?;
        let kept = Some(KeptSession { shared, keeper, alarm });
        Ok(Self {
            config,
            shape,
            title,
            kept,
            alone: Statistics::default(),
            patience: Duration::ZERO,
            tag: 0,
            process: std::process::id(),
        })
    }

    fn alone(config: CommConfig) -> Result<Self, Error> {
        let layout = match &config.bootstrap {
            Bootstrap::Static { message_size, window, rings, .. } => {
                Layout { message_size: *message_size, window: *window, rings: *rings }
            }
            _ => Layout { message_size: 1 << 16, window: 1, rings: 1 },
        };
        let shape = JobShape { ranks: 1, mtu: 1024, layout, relaxed: false, without_box: false };
        shape.check().map_err(Error::Config)?;
        let (title, alone) = ("nothing".into(), Statistics::default());
        Ok(Self {
            config,
            shape,
            title,
            kept: None,
            alone,
            patience: Duration::ZERO,
            tag: 0,
            process: std::process::id(),
        })
    }

    /// Replaces each element by the sum over all ranks' elements at its place: `i32` modulo 2^32,
    /// `f32` as [`reference_sum`](crate::reference_sum) does it, the same bits at every rank and in
    /// every run. All ranks must call with the same length and type. What is in flight comes first.
    ///
    /// # Errors
    /// See [`Error`]. After an error the slice holds sums in some places and this rank's own
    /// elements in others.
    pub fn all_reduce<T: Element>(&mut self, data: &mut [T]) -> Result<Report, Error> {
        self.run(Collective::AllReduce(Op::Sum), &mut Slice(data))
    }

    /// One [`all_reduce`](Self::all_reduce) of several tensors, as if they were one behind the
    /// other in one slice: the same bits, and where all of them fit in a message, one message
    /// instead of many. Nothing is copied together for that. All ranks must call with the same
    /// length in all; where one tensor ends and the next begins may differ.
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
        let mut data = Slices::new(tensors);
        self.run(Collective::AllReduce(Op::Sum), &mut data).map_err(|error| match error {
            Error::NonFinite { first, end } => {
                let position = |element| {
                    let (tensor, element) = data.locate(element);
                    Position { tensor, element }
                };
                Error::NonFiniteTensors { first: position(first), last: position(end - 1) }
            }
            error => error,
        })
    }

    /// Starts an [`all_reduce`](Self::all_reduce) that goes on while the application does something
    /// else, and gives a handle that waits for its sum. The buffer goes along, a vector or whatever
    /// else holds a slice, and comes back with it. All-reduces are done in the order in which they
    /// are called for, by this call or others; the messages of the next one go out as soon as the
    /// window has room that the one before has no more use for. So a gradient's buckets can be
    /// summed while the next ones are computed.
    ///
    /// At most [`MAX_IN_FLIGHT`](Self::MAX_IN_FLIGHT) can be in flight; the call waits for the
    /// oldest where there are as many.
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
    /// See [`Error`]: what ends the communicator, or an element type that messages have no room
    /// for. Other errors come from [`Pending::wait`].
    pub fn all_reduce_async<T: Element, B>(&mut self, data: B) -> Result<Pending<B>, Error>
    where
        B: DerefMut<Target = [T]> + Send + 'static,
    {
        self.start(Collective::AllReduce(Op::Sum), Ok(Slice(data)), |owned| {
            take_back(owned).map(|Slice(data)| data)
        })
    }

    /// One [`all_reduce_async`](Self::all_reduce_async) of several tensors, as
    /// [`all_reduce_many`](Self::all_reduce_many). [`Error::NonFinite`] counts their elements as
    /// those of one slice.
    ///
    /// # Errors
    /// As [`all_reduce_async`](Self::all_reduce_async).
    pub fn all_reduce_many_async<T: Element, B>(
        &mut self,
        tensors: Vec<B>,
    ) -> Result<Pending<Vec<B>>, Error>
    where
        B: DerefMut<Target = [T]> + Send + 'static,
    {
        self.start(Collective::AllReduce(Op::Sum), Ok(Slices::new(tensors)), |owned| {
            take_back(owned).map(|Slices { tensors, .. }| tensors)
        })
    }

    /// Has operations that are started from now on wait for so long before they go on in flight, as
    /// if [`Pending::wait_for`] were called: for callers who wait for each at once. What is over by
    /// then never wakes another thread. Zero at first.
    pub fn wait_first(&mut self, patience: Duration) {
        self.patience = patience;
    }

    /// Has operations that are started from now on be the same only where all ranks have set the
    /// same number, as with MPI's tags: for what else must agree, such as how tensors are laid
    /// out. 0 at first.
    pub fn set_tag(&mut self, tag: u32) {
        self.tag = tag;
    }

    /// Starts an operation whose data the engine owns meanwhile; `data` is an error where the
    /// arguments are wrong.
    pub(super) fn start<B, D: Data + Send + 'static>(
        &mut self,
        collective: Collective,
        data: Result<D, Error>,
        back: Back<B>,
    ) -> Result<Pending<B>, Error> {
        forked(self.process)?;
        let started = data.and_then(|data| self.begin(collective, data, back));
        self.told(started)
    }

    fn begin<B>(
        &mut self,
        collective: Collective,
        mut data: impl Data + Send + 'static,
        back: Back<B>,
    ) -> Result<Pending<B>, Error> {
        let memory = data.memory();
        if memory.overlaps_itself() {
            let text = "arrays of the operation share memory, and one is written: give a copy of one. Input and output may share it where \
                        this rank's part of the longer one is just the other";
            return Err(Error::Argument(text.to_owned()));
        }
        let Some(kept) = &self.kept else {
            let outcome = self.run_alone(&mut data, Instant::now());
            return Ok(Pending::done(
                outcome.map(|report| (Box::new(data) as Owned, report)),
                back,
            ));
        };
        let pending = {
            let mut session = wait_until(kept.shared.take(), |session| Ok(!session.is_full()))?;
            let (pending, promise) = Pending::new(Arc::clone(&kept.shared), back);
            session.start(Call { collective, tag: self.tag }, Box::new(data), promise, memory)?;
            if !self.patience.is_zero() {
                session.rest(Instant::now() + self.patience, self.patience, || pending.is_done());
            }
            (self.shape, self.title) = (session.shape, session.title.clone());
            pending
        };
        if !pending.is_done() {
            // The keeper may be waiting for longer than it should now.
            kept.wake();
        }
        Ok(pending)
    }

    /// Every call passes here on its way back: one that is refused is announced.
    fn told<R>(&mut self, called: Result<R, Error>) -> Result<R, Error> {
        if let Err(Error::Argument(_) | Error::Length { .. }) = called {
            self.refuse();
        }
        called
    }

    /// Announces a call that the caller itself has refused. Ranks that make it get
    /// [`Error::Mismatch`]; where all refuse it, nothing comes of it. Calls of this type that
    /// return [`Error::Argument`] or [`Error::Length`] have done so. Never waits.
    pub fn refuse(&mut self) {
        if let Some(kept) = self.here() {
            kept.shared.take().refuse();
            kept.wake();
        }
    }

    /// Where to wait until an operation can be started without waiting.
    pub fn room(&self) -> Room {
        Room {
            turns: self.kept.as_ref().map(|kept| Arc::clone(&kept.shared)),
            process: self.process,
        }
    }

    fn run(&mut self, collective: Collective, data: &mut dyn Data) -> Result<Report, Error> {
        forked(self.process)?;
        let called = Instant::now();
        let Some(kept) = &self.kept else { return self.run_alone(data, called) };
        let mut session = wait_until(kept.shared.take(), Session::may_run)?;
        let report = session.run(Call { collective, tag: self.tag }, data, called);
        (self.shape, self.title) = (session.shape, session.title.clone());
        drop(session);
        self.told(report)
    }

    /// One rank's data is its own sum: floats keep their bits.
    fn run_alone(&mut self, data: &mut dyn Data, called: Instant) -> Result<Report, Error> {
        data.keep_own();
        self.alone.all_reduces += 1;
        let (non_finite, underflow) = (None, Underflow::default());
        let finished = Finished { mode: Mode::Ring, verified: 0, non_finite, underflow };
        finished.report(called.elapsed(), Some(0))
    }

    /// Returns once all ranks have called it, and all that was in flight before is done.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    pub fn barrier(&mut self) -> Result<(), Error> {
        self.run(Collective::Barrier, &mut Slice(&mut [0i32][..])).map(|_| ())
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

    /// What carries this rank's packets: `UDP`, or an adapter with its port and its GID's index.
    pub fn transport(&self) -> &str {
        &self.title
    }

    /// Who sums: the box, until the ranks find that none does.
    pub fn mode(&self) -> Mode {
        self.here().map_or(Mode::Ring, |kept| kept.shared.take().mode())
    }

    /// What this rank has done since it was connected.
    pub fn statistics(&self) -> Statistics {
        self.here().map_or(self.alone, |kept| kept.shared.take().statistics())
    }

    /// In a process that was forked another thread's lock stays locked.
    fn here(&self) -> Option<&KeptSession> {
        self.kept.as_ref().filter(|_| forked(self.process).is_ok())
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
        let Some(kept) = self.kept.take() else { return };
        if forked(self.process).is_err() {
            // It is the other process's to leave.
            std::mem::forget(kept);
        } else {
            let mut session = kept.shared.end();
            kept.wake();
            session.close();
            drop(session);
            // A panic there has been told on standard error.
            let _ = kept.keeper.join();
        }
    }
}
