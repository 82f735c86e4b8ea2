//! Sums in two levels, as NetReduce's (Liu et al., ASPLOS 2023): the ranks of one host put their
//! data in shared memory. Rank j of each host adds the j-th part of all, and sums it with the j-th
//! ranks of the other hosts, over a ring of their own. So one copy of the data leaves each host.
//!
//! The integers of the local sum are what a rank sends, and parts begin where messages do. So
//! results have the bits of sums without hosts. Each operation is first announced over the
//! connections of all ranks, as an operation without elements: so calls that differ are named as
//! always.
//!
//! | module | what lives there |
//! | --- | --- |
//! | [`hosts`] | which ranks share a host, and the rings between hosts |
//! | [`areas`] | how vectors are cut, and where the parts are in the shared memory |
//! | [`runner`] | executes the operations |
//! | [`watch`] | notices the end of processes of this host |

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Condvar, Mutex, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::Instant;

use netsum_collective::call::{Call, Collective};
use netsum_collective::engine::{Finished, MAX_OPEN};
use netsum_collective::error::Error;
use netsum_collective::numeric::element::{Data, Dtype};
use netsum_collective::numeric::format::Format;
use netsum_collective::numeric::memory::Memory;
use netsum_collective::numeric::operators::{Elements, Reduction};
use netsum_collective::numeric::quant::{Exponents, Underflow};
use netsum_collective::report::Statistics;

use super::config::CommConfig;
use super::core::LINGER;
use super::driver_lock::lock;
use super::pending::Pending;
use super::progress::Driven;
use super::promise::Promise;
use super::session::SharedSession;
use hosts::Hosts;
use runner::Runner;
use watch::Watch;

mod areas;
mod hosts;
mod runner;
mod watch;

/// Sums of fewer bytes are flat, unless hierarchical sums are `on`. From here on they were as fast
/// or faster in `bench wire --ranks-per-host`, at 250 Mb/s, 1 Gb/s and without a rate
/// (`BENCHMARKS.md`).
const LEAST_BYTES: usize = 64 << 10;
/// Elements of sums that are never hierarchical: they may have formats of their own.
const SMALL: usize = 4096;

/// An operation on all ranks' connections that says what a hierarchical one is. It has no elements
/// itself.
pub(super) struct Announcement {
    pub dtype: Dtype,
    pub elements: usize,
    pub memory: Memory,
}

impl Data for Announcement {
    fn dtype(&self) -> Dtype {
        self.dtype
    }
    fn len(&self) -> usize {
        0
    }
    fn elements(&self) -> (Dtype, usize) {
        (self.dtype, self.elements)
    }
    fn exponents(&self, _: Range<usize>) -> Exponents {
        Exponents::default()
    }
    fn load(&self, _: Range<usize>, _: Option<Format<'_>>, out: &mut [u8]) {
        out.fill(0);
    }
    fn underflow(&self, _: Range<usize>, _: Format<'_>) -> Underflow {
        Underflow::default()
    }
    fn store(&mut self, _: Range<usize>, _: Option<Format<'_>>, _: &[u8]) {}
    fn memory(&self) -> Memory {
        self.memory.clone()
    }
}

/// A queued operation.
type Task = Box<dyn FnOnce(&mut Runner) + Send>;

/// What the thread that executes operations and the callers share.
struct Shared {
    runner: Mutex<Runner>,
    /// Memory of queued operations, in their order, the one at work included.
    open: Mutex<Vec<Memory>>,
    fewer: Condvar,
    done: AtomicU64,
}

/// The hierarchical operations of a communicator.
pub(super) struct Hierarchical {
    shared: Arc<Shared>,
    queue: Option<mpsc::Sender<Task>>,
    thread: Option<JoinHandle<()>>,
    _watch: Watch,
    /// Of the rings.
    sessions: Vec<SharedSession>,
    /// Until when operations may take; set when the communicator is dropped.
    closing: Arc<Mutex<Option<Instant>>>,
    least_bytes: usize,
}

impl Hierarchical {
    /// Connects the rings. `None` if sums stay flat.
    ///
    /// # Errors
    /// Of the connections of all ranks.
    pub fn new(flat: &Driven, config: &CommConfig) -> Result<Option<Self>, Error> {
        let Some(hosts) = Hosts::connect(flat, config)? else { return Ok(None) };
        let Hosts { count, wants_short, local_ranks, areas, rings } = hosts;
        let sessions: Vec<_> = rings.iter().map(|(_, ring)| Arc::clone(&ring.session)).collect();
        let (closing, local_ranks) = (Arc::default(), Arc::new(local_ranks));
        let flat = &flat.session;
        let failing: Vec<_> = sessions.iter().chain([flat]).map(Arc::clone).collect();
        let no_thread = |e| Error::Config(format!("cannot start a thread: {e}"));
        let watch = Watch::start(Arc::clone(&local_ranks), Arc::clone(flat), failing.clone())
            .map_err(no_thread)?;
        let number_of_rings = areas.rings;
        let runner = Runner {
            local_ranks,
            areas,
            rings,
            chunks: 0,
            summands: flat.lock().shape.ranks,
            failing,
            failure: None,
            closing: Arc::clone(&closing),
        };
        let shared = Arc::new(Shared {
            runner: Mutex::new(runner),
            open: Mutex::default(),
            fewer: Condvar::new(),
            done: AtomicU64::new(0),
        });
        let (queue, tasks) = mpsc::channel::<Task>();
        let worker = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("netsum-hosts".to_owned())
            .spawn(move || {
                for task in tasks {
                    let mut runner = lock(&worker.runner);
                    // A task calls the application's function.
                    if catch_unwind(AssertUnwindSafe(|| task(&mut runner))).is_err() {
                        runner.fail(Error::Protocol("a function of `when_done` panicked".into()));
                    }
                    worker.fewer.notify_all();
                }
            })
            .map_err(no_thread)?;
        log::info!(
            "rank {}: hierarchical sums over {count} hosts, by {number_of_rings} rings",
            config.rank
        );
        let least_bytes = if wants_short { 0 } else { LEAST_BYTES };
        let (queue, thread) = (Some(queue), Some(thread));
        Ok(Some(Self { shared, queue, thread, _watch: watch, sessions, closing, least_bytes }))
    }

    /// Whether a sum of these elements is hierarchical: the same at all ranks.
    pub fn takes<E: Elements>(&self, collective: Collective, data: &Reduction<E>) -> bool {
        let (dtype, len) = data.elements();
        matches!(collective, Collective::AllReduce(_))
            && data.is_plain()
            && len > SMALL
            && len * dtype.bytes() >= self.least_bytes
    }

    /// Whether operations at work use this memory.
    pub fn check(&self, memory: &Memory) -> Result<(), Error> {
        let open = lock(&self.shared.open);
        match open.iter().position(|other| other.collides(memory)) {
            Some(other) => Err(Error::InFlight(format!(
                "the array shares memory with that of hierarchical operation {} of {} in flight, \
                 counted from the oldest: wait for that operation first, or pass a copy",
                other + 1,
                open.len()
            ))),
            None => Ok(()),
        }
    }

    /// Queues an operation that has been announced.
    pub fn enqueue<E: Elements + Send + 'static>(
        &self,
        call: Call,
        mut data: Reduction<E>,
        announced: Pending<()>,
        promise: Promise,
    ) {
        let mut open = lock(&self.shared.open);
        while open.len() >= MAX_OPEN {
            open = self.shared.fewer.wait(open).unwrap_or_else(PoisonError::into_inner);
        }
        open.push(data.memory());
        drop(open);
        let shared = Arc::clone(&self.shared);
        let task = Box::new(move |runner: &mut Runner| {
            let summed = runner
                .announced(announced)
                .and_then(|verified| runner.sum(call, &mut data.elements, verified));
            shared.done.fetch_add(summed.is_ok().into(), Relaxed);
            // The caller may use the memory again as soon as it has the outcome.
            lock(&shared.open).remove(0);
            match summed {
                Ok((finished, again)) => promise.settle(Ok(finished), Box::new(data), again),
                Err(error) => promise.fail(error),
            }
        });
        if let Some(queue) = &self.queue {
            // The thread lives as long as the queue.
            let _ = queue.send(task);
        }
    }

    /// Waits until all queued operations are complete.
    pub fn complete(&self) {
        let mut open = lock(&self.shared.open);
        while !open.is_empty() {
            open = self.shared.fewer.wait(open).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Executes an operation that has been announced, after those that are queued.
    pub fn run<E: Elements>(
        &self,
        call: Call,
        elements: &mut E,
        announced: Pending<()>,
    ) -> Result<(Finished, Option<u64>), Error> {
        self.complete();
        let mut runner = lock(&self.shared.runner);
        let verified = runner.announced(announced)?;
        let summed = runner.sum(call, elements, verified);
        self.shared.done.fetch_add(summed.is_ok().into(), Relaxed);
        summed
    }

    /// Statistics with those of the rings.
    pub fn statistics(&self, flat: Statistics) -> Statistics {
        let rings = self.sessions.iter().map(|session| session.lock().statistics());
        let mut all = rings.fold(flat, Statistics::plus);
        all.all_reduces = flat.all_reduces;
        all.hierarchical = self.shared.done.load(Relaxed);
        all
    }
}

impl Drop for Hierarchical {
    fn drop(&mut self) {
        *lock(&self.closing) = Some(Instant::now() + LINGER);
        drop(self.queue.take());
        if let Some(thread) = self.thread.take() {
            // Standard error already has the message of a panic in the thread.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests;
