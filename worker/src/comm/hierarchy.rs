//! Sums in two levels, as NetReduce's (Liu et al., ASPLOS 2023): the ranks of one host put their
//! data in shared memory. Rank j of each host adds the j-th part of all, and sums it with the j-th
//! ranks of the other hosts, over a ring of their own. So one copy of the data leaves each host.
//!
//! The integers of the local sum are what a rank sends, and parts begin where messages do. So
//! results have the bits of sums without hosts. Each operation is first announced over the
//! connections of all ranks, as an operation without elements: so calls that differ are named as
//! always.

use std::fs::File;
use std::io;
use std::net::Shutdown;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use netsum_collective::call::{Call, Collective, Op};
use netsum_collective::engine::{Finished, MAX_OPEN};
use netsum_collective::error::Error;
use netsum_collective::numeric::block::Width;
use netsum_collective::numeric::element::{Data, Dtype, Element};
use netsum_collective::numeric::format::Format;
use netsum_collective::numeric::layout::Layout;
use netsum_collective::numeric::memory::Memory;
use netsum_collective::numeric::operators::{Elements, Reduction};
use netsum_collective::numeric::quant::{Exponents, Underflow};
use netsum_collective::numeric::sources::Sources;
use netsum_collective::report::{Mode, Statistics};

use super::communicator::Communicator;
use super::config::{Bootstrap, CommConfig, Hierarchy, InterHostRing, Transport};
use super::core::LINGER;
use super::driver_lock::DriverLock;
use super::pending::Pending;
use super::promise::Promise;
use super::session::Session;
use crate::local::memory::{self, Part};
use crate::local::place::{self, PLACE_BYTES, Place};
use crate::local::progress::{self, CONTROL_BYTES, LocalRanks};

/// Bytes of a ring's part of a chunk, unless messages are longer. Two chunks are in memory.
const PART_BYTES: usize = 512 << 10;
/// Sums of fewer bytes are flat, unless hierarchical sums are `on`. From here on they were as fast or
/// faster in `bench wire --ranks-per-host`, at 250 Mb/s, 1 Gb/s and without a rate (`BENCHMARKS.md`).
const LEAST_BYTES: usize = 64 << 10;
/// Elements of sums that are never hierarchical: they may have formats of their own.
const SMALL: usize = 4096;
/// How often a rank that waits for its rings checks on the ranks of its host.
const CHECK: Duration = Duration::from_millis(100);
/// How long the last message of a rank that leaves may take.
const GOODBYE: Duration = Duration::from_millis(300);

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

type Driver = Arc<DriverLock<Session>>;

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

/// Ends sessions when a process of this host ends whose rank has not left.
struct Watch {
    /// Closed to end the thread.
    alarm: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    fn start(local_ranks: Arc<LocalRanks>, flat: Driver, failing: Vec<Driver>) -> io::Result<Self> {
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

/// The hierarchical operations of a communicator.
pub(super) struct Hierarchical {
    shared: Arc<Shared>,
    queue: Option<mpsc::Sender<Task>>,
    thread: Option<JoinHandle<()>>,
    _watch: Watch,
    /// Of the rings.
    drivers: Vec<Driver>,
    /// Until when operations may take; set when the communicator is dropped.
    closing: Arc<Mutex<Option<Instant>>>,
    least_bytes: usize,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Gathers bytes of all ranks.
fn gather(comm: &mut Communicator, own: &[u8]) -> Result<Vec<u8>, Error> {
    let all = vec![0; own.len() * comm.ranks() as usize];
    let ((_, all), _) = comm.all_gather_async(own.to_vec(), all)?.wait()?;
    Ok(all)
}

/// Whether all ranks have succeeded. A rank that has not says why.
fn agreed<T>(comm: &mut Communicator, own: &Result<T, String>) -> Result<bool, Error> {
    if let Err(why) = own {
        log::warn!("rank {}: sums are not hierarchical: {why}", comm.rank());
    }
    Ok(gather(comm, &[own.is_ok().into()])?.iter().all(|ok| *ok != 0))
}

fn this_host(_config: &CommConfig) -> io::Result<u64> {
    let host = place::host()?;
    // Unit tests have hosts on one machine.
    #[cfg(test)]
    let host = match _config.ip {
        std::net::IpAddr::V4(ip) => host ^ u64::from(ip.to_bits()),
        std::net::IpAddr::V6(_) => host,
    };
    Ok(host)
}

impl Hierarchical {
    /// Finds out which ranks share a host, and connects the rings. `None` if sums stay flat.
    ///
    /// # Errors
    /// Of the communicator of all ranks.
    pub fn new(
        comm: &mut Communicator,
        config: &CommConfig,
        flat: &Driver,
    ) -> Result<Option<Self>, Error> {
        let file = memory::create().map(File::from);
        let host = this_host(config);
        let place = Place {
            host: *host.as_ref().unwrap_or(&0),
            pid: std::process::id(),
            file: file.as_ref().map_or(0, |file| file.as_raw_fd() as u32),
            // AF_XDP has one user of an interface.
            is_willing: host.is_ok()
                && file.is_ok()
                && config.transport != Transport::Xdp
                && config.hierarchy != Hierarchy::Off,
            wants_short: config.hierarchy == Hierarchy::On,
        };
        let all = gather(comm, &place.encode())?;
        let places: Vec<Place> =
            all.as_chunks::<PLACE_BYTES>().0.iter().map(Place::decode).collect();
        let hosts = place::by_host(&places.iter().map(|p| p.host).collect::<Vec<_>>());
        if hosts.len() < 2 || hosts.len() == places.len() || !places.iter().all(|p| p.is_willing) {
            if config.hierarchy == Hierarchy::On {
                log::warn!(
                    "rank {}: sums are not hierarchical: that needs two hosts, two ranks in the \
                     same namespaces at one of them, and no rank with NETSUM_HIERARCHY=off or \
                     NETSUM_TRANSPORT=xdp",
                    comm.rank()
                );
            }
            return Ok(None);
        }
        let rings = hosts.iter().map(Vec::len).max().unwrap_or(0);
        let areas = Areas::new(rings, &comm.layout());
        let local_ranks = local_ranks(comm.rank(), &hosts, &places, &areas)
            .map_err(|e| format!("cannot share memory with the other ranks of this host: {e}"));
        let shared_memory = agreed(comm, &local_ranks)?;
        let (Ok(local_ranks), true) = (local_ranks, shared_memory) else { return Ok(None) };
        // Rings in their order at all ranks: no rank waits for another one in a later ring.
        let own = (0..rings).filter(|ring| ring % local_ranks.len() == local_ranks.own_place());
        let connected: Result<Vec<_>, String> = own
            .map(|ring| {
                let members: Vec<u32> = hosts.iter().map(|h| h[ring % h.len()]).collect();
                let config = ring_config(config, ring, &members, places.len());
                let ring_comm = Communicator::connect(config).map_err(|e| e.to_string())?;
                if ring_comm.mode() == Mode::HostRing && comm.mode() == Mode::Box {
                    return Err(format!("the box has no room for ring {ring} of the hosts"));
                }
                Ok((ring, ring_comm))
            })
            .collect();
        let is_connected = agreed(comm, &connected)?;
        let (Ok(own), true) = (connected, is_connected) else { return Ok(None) };
        let drivers: Vec<_> = own.iter().filter_map(|(_, comm)| comm.driver()).collect();
        let (closing, local_ranks) = (Arc::default(), Arc::new(local_ranks));
        let failing: Vec<Driver> = drivers.iter().chain([flat]).map(Arc::clone).collect();
        let no_thread = |e| Error::Config(format!("cannot start a thread: {e}"));
        let watch = Watch::start(Arc::clone(&local_ranks), Arc::clone(flat), failing.clone())
            .map_err(no_thread)?;
        let runner = Runner {
            local_ranks,
            areas,
            rings: own,
            chunks: 0,
            summands: places.len() as u32,
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
            "rank {}: hierarchical sums over {} hosts, by {rings} rings",
            comm.rank(),
            hosts.len()
        );
        let least_bytes = if places.iter().any(|p| p.wants_short) { 0 } else { LEAST_BYTES };
        let (queue, thread) = (Some(queue), Some(thread));
        Ok(Some(Self { shared, queue, thread, _watch: watch, drivers, closing, least_bytes }))
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
        let rings = self.drivers.iter().map(|driver| driver.lock().statistics());
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

fn local_ranks(
    rank: u32,
    hosts: &[Vec<u32>],
    places: &[Place],
    areas: &Areas,
) -> io::Result<LocalRanks> {
    let mine = hosts.iter().find(|ranks| ranks.contains(&rank)).ok_or(io::ErrorKind::NotFound)?;
    let own = mine.iter().position(|r| *r == rank).unwrap_or(0);
    let first = places[mine[0] as usize];
    let file = memory::open(first.pid, first.file)?;
    let memory = progress::map(&file, areas.bytes(mine.len()))?;
    let processes: Vec<u32> = mine.iter().map(|r| places[*r as usize].pid).collect();
    LocalRanks::new(memory, own, mine.clone(), &processes)
}

/// The configuration of a ring that has one rank of each host.
fn ring_config(config: &CommConfig, ring: usize, members: &[u32], summands: usize) -> CommConfig {
    let bootstrap = config.bootstrap.of_members(members);
    let rank = members.iter().position(|r| *r == config.rank).unwrap_or(0) as u32;
    // The controller has a group for each ring.
    let group = match (&config.bootstrap, &config.group) {
        (Bootstrap::Static { .. }, _) => None,
        (_, None) => Some(format!("h{ring}")),
        (_, Some(group)) => Some(format!("{group}.h{ring}")),
    };
    CommConfig {
        rank,
        ranks: members.len() as u32,
        bootstrap,
        group,
        hierarchy: Hierarchy::Off,
        inter_host_ring: Some(InterHostRing {
            number: ring as u32,
            ranks: members.to_vec(),
            summands: summands as u32,
        }),
        ..config.clone()
    }
}

/// Where chunks are in the shared memory: two of each rank.
#[derive(Debug)]
struct Areas {
    rings: usize,
    layout: Layout,
    /// Of a ring's part of a chunk.
    part_bytes: usize,
}

impl Areas {
    fn new(rings: usize, layout: &Layout) -> Self {
        // A message in 16 bits has up to half as many floats as bytes.
        let part_bytes = PART_BYTES.max(2 * layout.message_size as usize);
        Self { rings, layout: *layout, part_bytes: part_bytes.next_multiple_of(4096) }
    }

    fn chunk_bytes(&self) -> usize {
        self.rings * self.part_bytes
    }

    fn bytes(&self, local_ranks: usize) -> usize {
        2 * local_ranks * self.chunk_bytes()
    }

    /// Where a rank's chunk begins.
    fn start(&self, chunk: u64, local_ranks: usize, place: usize) -> usize {
        CONTROL_BYTES + ((chunk % 2) as usize * local_ranks + place) * self.chunk_bytes()
    }

    /// How vectors of this type are cut.
    fn cut(&self, dtype: Dtype, width: Width) -> Result<Cut, Error> {
        let message = self
            .layout
            .elements(dtype, width)
            .map_err(|reason| Error::MessageSize { dtype, reason })?;
        let messages = (self.part_bytes / (message * dtype.bytes())).max(1);
        Ok(Cut { rings: self.rings, message, chunk: self.rings * messages * message })
    }
}

/// How vectors are cut: chunks and parts begin where messages of a flat sum do.
#[derive(Clone, Copy, Debug)]
struct Cut {
    rings: usize,
    /// Elements of a message.
    message: usize,
    /// Elements of a chunk.
    chunk: usize,
}

impl Cut {
    /// A ring's part of a chunk.
    fn part(&self, elements: usize, ring: usize) -> Range<usize> {
        let messages = elements.div_ceil(self.message);
        let at = |ring: usize| (messages * ring / self.rings * self.message).min(elements);
        at(ring)..at(ring + 1)
    }
}

/// A chunk whose sums are awaited.
struct Chunk {
    number: u64,
    /// Its elements in the vector.
    range: Range<usize>,
    /// Of this rank's rings: the part, and its sum.
    sums: Vec<(Range<usize>, Pending<()>)>,
}

/// Executes hierarchical operations, one after the other, in the same order at all ranks.
pub(super) struct Runner {
    local_ranks: Arc<LocalRanks>,
    areas: Areas,
    /// Those of this rank, with their numbers.
    rings: Vec<(usize, Communicator)>,
    /// Chunks that have been begun.
    chunks: u64,
    /// All ranks.
    summands: u32,
    /// Sessions that end with a failure.
    failing: Vec<Driver>,
    failure: Option<Error>,
    closing: Arc<Mutex<Option<Instant>>>,
}

impl Runner {
    /// Sums over all ranks. Returns the result, and how many packets were sent again.
    fn sum<E: Elements>(
        &mut self,
        call: Call,
        elements: &mut E,
        verified: u64,
    ) -> Result<(Finished, Option<u64>), Error> {
        if let Some(failure) = &self.failure {
            return Err(failure.clone());
        }
        let mut all = Totals {
            finished: Finished {
                mode: Mode::Box,
                verified,
                non_finite: None,
                underflow: Underflow::default(),
                hierarchical: true,
            },
            retransmissions: Some(0),
        };
        self.sum_chunks(call, elements, &mut all).map_err(|error| self.fail(error))?;
        Ok((all.finished, all.retransmissions))
    }

    fn sum_chunks<E: Elements>(
        &mut self,
        call: Call,
        elements: &mut E,
        all: &mut Totals,
    ) -> Result<(), Error> {
        let Collective::AllReduce(op) = call.collective else { return Ok(()) };
        let cut = self.areas.cut(E::Element::DTYPE, call.width)?;
        let len = elements.len();
        // One chunk is copied while the other one's sums are on their way.
        let mut before = None;
        for start in (0..len).step_by(cut.chunk) {
            let chunk =
                self.begin(op, call.width, cut, elements, start..(start + cut.chunk).min(len))?;
            if let Some(before) = before.replace(chunk) {
                self.finish(cut, elements, before, all)?;
            }
        }
        before.map_or(Ok(()), |last| self.finish(cut, elements, last, all))
    }

    /// Why this rank cannot wait any longer, if so.
    fn give_up(&self) -> impl Fn() -> Option<Error> + use<> {
        let (closing, failing) = (Arc::clone(&self.closing), self.failing.clone());
        move || {
            let is_late = lock(&closing).is_some_and(|until| Instant::now() > until);
            let failure = || failing.iter().find_map(|driver| driver.try_lock()?.failure());
            if is_late { Some(Error::Closed) } else { failure() }
        }
    }

    /// Waits until all ranks have announced an operation. Returns how many messages that verified.
    fn announced(&mut self, operation: Pending<()>) -> Result<u64, Error> {
        let give_up = self.give_up();
        while !operation.wait_for(CHECK) {
            if let Some(error) = give_up() {
                return Err(self.fail(error));
            }
        }
        operation.wait().map(|((), report)| report.verified).map_err(|error| match give_up() {
            // The others on this host must not wait for this rank.
            Some(_) => self.fail(error),
            // All ranks have this error.
            None => error,
        })
    }

    /// A range of elements of a rank's chunk.
    ///
    /// # Safety
    /// As [`Part::new`].
    unsafe fn part<T: Element>(&self, chunk: u64, place: usize, range: Range<usize>) -> Part<T> {
        let start = self.areas.start(chunk, self.local_ranks.len(), place);
        let start = start + range.start * size_of::<T>();
        // SAFETY: The caller's promise.
        unsafe { Part::new(self.local_ranks.memory(), start, range.len()) }
    }

    /// Copies a chunk in, and starts its sums once all ranks of the host have.
    fn begin<E: Elements>(
        &mut self,
        op: Op,
        width: Width,
        cut: Cut,
        elements: &E,
        range: Range<usize>,
    ) -> Result<Chunk, Error> {
        let number = self.chunks;
        self.chunks += 1;
        let (local_ranks, own) = (&self.local_ranks, self.local_ranks.own_place());
        // The chunk before the last one had the same memory.
        local_ranks.wait(number.saturating_sub(1), |steps| &steps.copied_out, self.give_up())?;
        {
            // SAFETY: All ranks have copied out what was there, and others read it only after this
            // one has announced it.
            let mut chunk = unsafe { self.part::<E::Element>(number, own, 0..range.len()) };
            elements.read(range.start, &mut chunk);
        }
        local_ranks.announce(&local_ranks.own().copied_in, number + 1);
        local_ranks.wait(number + 1, |steps| &steps.copied_in, self.give_up())?;
        let divisor = if op == Op::Average { self.summands } else { 1 };
        let (all, mut sums) = (0..local_ranks.len(), Vec::new());
        let rings: Vec<(usize, Range<usize>)> =
            self.rings.iter().map(|(ring, _)| (*ring, cut.part(range.len(), *ring))).collect();
        for (at, (_, part)) in
            rings.into_iter().enumerate().filter(|(_, (_, part))| !part.is_empty())
        {
            // SAFETY: Only this rank uses this part of all ranks' chunks, until it has announced
            // the sums: its engine reads a message's elements before it writes them, not at one
            // time.
            let of = |place| unsafe { self.part::<E::Element>(number, place, part.clone()) };
            let data = Sources { sources: all.clone().map(of).collect(), output: of(own), divisor };
            let (_, ring) = &mut self.rings[at];
            ring.set_wire(Some(width));
            let sum = ring.call_async(Collective::AllReduce(op), Ok(data), |_| Some(()))?;
            sums.push((part, sum));
        }
        Ok(Chunk { number, range, sums })
    }

    /// Waits for a chunk's sums, and copies them out.
    fn finish<E: Elements>(
        &mut self,
        cut: Cut,
        elements: &mut E,
        chunk: Chunk,
        all: &mut Totals,
    ) -> Result<(), Error> {
        let Chunk { number, range, sums } = chunk;
        let local_ranks = &self.local_ranks;
        let mut non_finite = None;
        for (part, sum) in sums {
            while !sum.wait_for(CHECK) {
                local_ranks.check()?;
                if lock(&self.closing).is_some_and(|until| Instant::now() > until) {
                    return Err(Error::Closed);
                }
            }
            match sum.wait() {
                Ok(((), report)) => all.add(&report),
                Err(Error::NonFinite { first, end }) => {
                    non_finite.get_or_insert(part.start + first..part.start + end);
                }
                Err(error) => return Err(error),
            }
        }
        let area = (number % 2) as usize;
        let found = non_finite.unwrap_or(0..0);
        let [first, end] = &local_ranks.own().non_finite[area];
        first.store(found.start as u64, Release);
        end.store(found.end as u64, Release);
        local_ranks.announce(&local_ranks.own().summed, number + 1);
        local_ranks.wait(number + 1, |steps| &steps.summed, self.give_up())?;
        let found = local_ranks.all().iter().map(|steps| {
            let [first, end] = steps.non_finite[area].each_ref().map(|e| e.load(Acquire) as usize);
            range.start + first..range.start + end
        });
        if let Some(block) = found.filter(|r| !r.is_empty()).min_by_key(|r| r.start)
            && all.finished.non_finite.as_ref().is_none_or(|first| block.start < first.start)
        {
            all.finished.non_finite = Some(block);
        }
        for ring in 0..cut.rings {
            let part = cut.part(range.len(), ring);
            // SAFETY: Its rank has announced the sums, and writes there only after all ranks have
            // copied them out.
            let sums =
                unsafe { self.part::<E::Element>(number, ring % local_ranks.len(), part.clone()) };
            elements.write(range.start + part.start, &sums);
        }
        local_ranks.announce(&local_ranks.own().copied_out, number + 1);
        Ok(())
    }

    /// Ends hierarchical sums, and sessions, at all ranks. Returns what this rank's caller gets.
    fn fail(&mut self, error: Error) -> Error {
        if matches!(error, Error::MessageSize { .. }) {
            return error;
        }
        let mut error = error;
        if matches!(error, Error::RankDied { .. }) {
            // A rank that ends because of another one's failure is not its cause.
            std::thread::sleep(GOODBYE);
            let cause = self.failing.iter().find_map(|driver| driver.lock().failure());
            error = cause.unwrap_or(error);
        }
        let error = self.local_ranks.fail(error);
        if error != Error::Closed {
            for driver in &self.failing {
                driver.lock().fail(&error);
            }
        }
        self.failure.insert(error).clone()
    }
}

/// Results of all parts.
struct Totals {
    finished: Finished,
    retransmissions: Option<u64>,
}

impl Totals {
    fn add(&mut self, part: &netsum_collective::report::Report) {
        let all = &mut self.finished;
        if part.mode == Mode::HostRing {
            all.mode = Mode::HostRing;
        }
        all.verified += part.verified;
        all.underflow += part.underflow;
        self.retransmissions = self.retransmissions.zip(part.retransmissions).map(|(a, b)| a + b);
    }
}

#[cfg(test)]
mod tests;
