//! Executes hierarchical operations, one after the other, in the same order at all ranks.

use std::ops::Range;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use netsum_collective::call::{Call, Collective, Op};
use netsum_collective::engine::Finished;
use netsum_collective::error::Error;
use netsum_collective::numeric::block::Width;
use netsum_collective::numeric::element::Element;
use netsum_collective::numeric::operators::Elements;
use netsum_collective::numeric::quant::Underflow;
use netsum_collective::numeric::sources::Sources;
use netsum_collective::report::{Mode, Report};

use super::super::driver_lock::lock;
use super::super::pending::Pending;
use super::super::progress::Driven;
use super::super::session::SharedSession;
use super::areas::{Areas, Cut};
use super::watch::GOODBYE;
use crate::local::memory::Part;
use crate::local::progress::LocalRanks;

/// How often a rank that waits for its rings checks on the ranks of its host.
const CHECK: Duration = Duration::from_millis(100);

/// A chunk whose sums are awaited.
struct Chunk {
    number: u64,
    /// Its elements in the vector.
    range: Range<usize>,
    /// Of this rank's rings: the part, and its sum.
    sums: Vec<(Range<usize>, Pending<()>)>,
}

/// Executes hierarchical operations.
pub(super) struct Runner {
    pub local_ranks: Arc<LocalRanks>,
    pub areas: Areas,
    /// This rank's rings between hosts, with their numbers.
    pub rings: Vec<(usize, Driven)>,
    /// Chunks that have been begun.
    pub chunks: u64,
    /// All ranks.
    pub summands: u32,
    /// Sessions that end with a failure.
    pub failing: Vec<SharedSession>,
    pub failure: Option<Error>,
    pub closing: Arc<Mutex<Option<Instant>>>,
}

impl Runner {
    /// Sums over all ranks. Returns the result, and how many packets were sent again.
    pub fn sum<E: Elements>(
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
    pub fn announced(&mut self, operation: Pending<()>) -> Result<u64, Error> {
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
        for (at, ring) in &self.rings {
            let part = cut.part(range.len(), *at);
            if part.is_empty() {
                continue;
            }
            // SAFETY: Only this rank uses this part of all ranks' chunks, until it has announced
            // the sums: its engine reads a message's elements before it writes them, not at one
            // time.
            let of = |place| unsafe { self.part::<E::Element>(number, place, part.clone()) };
            let data = Sources { sources: all.clone().map(of).collect(), output: of(own), divisor };
            let collective = Collective::AllReduce(op);
            let sum = ring.call_async(collective, Some(width), data, |_| Some(()))?;
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
    pub fn fail(&mut self, error: Error) -> Error {
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
    fn add(&mut self, part: &Report) {
        let all = &mut self.finished;
        if part.mode == Mode::HostRing {
            all.mode = Mode::HostRing;
        }
        all.verified += part.verified;
        all.underflow += part.underflow;
        self.retransmissions = self.retransmissions.zip(part.retransmissions).map(|(a, b)| a + b);
    }
}
