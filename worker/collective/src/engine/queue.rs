//! Open operations in the order of the calls: how they start and end, and the check that all ranks
//! have made the same calls.

use std::time::{Duration, Instant};

use super::operation::{Operation, Outcome, RingPart};
use super::{Engine, MAX_OPEN, SumMode};
use crate::call::{Call, Collective};
use crate::channels::Channels;
use crate::error::Error;
use crate::frame::{Descriptor, Frame, Progress};
use crate::numeric::element::{Data, Owned, Slice};
use crate::numeric::layout::Plan;
use crate::numeric::quant::Underflow;

/// How long after the start of an operation a rank queries the others' progress, if no sum has
/// arrived.
const FIRST_QUERY: Duration = Duration::from_millis(2);
/// Operations of at most this many messages are announced only if they are still open at the first
/// query.
const UNANNOUNCED_MESSAGES: usize = 2;

/// The data of an operation.
pub enum Work<'a> {
    /// Passed to every step until the operation is complete. No other one may be started before.
    Lent(&'a dyn Data),
    /// Returned with the outcome.
    Owned(Owned),
}

impl Work<'_> {
    fn data(&self) -> &dyn Data {
        match self {
            Self::Lent(data) => *data,
            Self::Owned(data) => &**data,
        }
    }
}

impl Engine {
    /// Starts an operation, and returns its number. [`outcome`](Self::outcome) returns its result.
    pub fn start(
        &mut self,
        now: Instant,
        channels: &mut dyn Channels,
        call: Call,
        work: Work<'_>,
    ) -> Result<u64, Error> {
        if let Some(failure) = &self.failure {
            return Err(failure.clone());
        }
        let (dtype, length) = (work.data().dtype(), work.data().len());
        let (element, elements) = work.data().elements();
        let plan = if work.data().is_part() { Plan::of_part } else { Plan::new };
        let plan = plan(&self.settings.shape.layout, dtype, call.width, length)
            .map_err(|reason| Error::MessageSize { dtype, reason })?;
        if let Some(rank) = (0..self.member.ranks).find(|r| self.has_left(*r)) {
            // Not a failure of the session: others may still be in an operation that this rank has
            // completed.
            return Err(Error::RankLeft { rank: self.rank_of(rank) });
        }
        let number = self.own().started + 1;
        self.own().started = number;
        let descriptor = Descriptor { number, length: elements as u64, dtype: element, call };
        let mut rings = self.parts.pop().unwrap_or_default();
        rings.resize_with(self.rings.len(), RingPart::default);
        for (r, (ring, part)) in self.rings.iter_mut().zip(&mut rings).enumerate() {
            let (base, messages) = (ring.end, plan.messages(r));
            ring.end += messages as u64;
            (part.base, part.messages, part.known) = (base, messages, 0);
            part.exponents = None;
            part.buckets.clear();
        }
        self.begun += u64::from(call.collective != Collective::Refused);
        self.operations.push_back(Operation {
            descriptor,
            count: self.begun,
            data: match work {
                Work::Lent(_) => None,
                Work::Owned(data) => Some(data),
            },
            left: rings.iter().map(|r| r.messages).sum(),
            plan,
            rings,
            verified: 0,
            on_host_ring: self.sum_mode != SumMode::Box,
            non_finite: None,
            underflow: Underflow::default(),
        });
        if self.operations.len() == 1 {
            self.last_progress = now;
            self.monitor_oldest(now);
        }
        if self.session.is_some() {
            self.announce(channels);
            self.unannounced = Some(descriptor);
            let messages: usize = self.operations.back().map_or(0, |o| o.left);
            if self.sum_mode != SumMode::Box
                || self.operations.len() > 1
                || messages > UNANNOUNCED_MESSAGES
            {
                self.announce(channels);
            }
        }
        self.compare(channels);
        Ok(number)
    }

    /// Starts a [`Collective::Refused`] in the place of each of `calls` that this rank has refused.
    /// Otherwise this rank's next call would be summed with the call that the others make now.
    /// Ranks that refuse the same call agree. It starts with the next step that has room, and has
    /// no outcome.
    pub fn refuse(&mut self, calls: usize) {
        self.refused += calls;
    }

    /// Refused calls that wait for room.
    pub fn refused(&self) -> usize {
        self.refused
    }

    pub(super) fn start_refused(&mut self, now: Instant, channels: &mut dyn Channels) {
        while self.refused > 0 && self.has_room() {
            self.refused -= 1;
            let nothing = Work::Owned(Box::new(Slice(vec![0])));
            // An error means that the session has failed, which the ranks know.
            let _ = self.start(now, channels, Collective::Refused.into(), nothing);
        }
    }

    /// Announces a started operation to the next rank, unless that has been done. Operations of few
    /// messages are announced late: their sums already show that all ranks have made the same call,
    /// and an announcement and its acknowledgement are two packets of six. Long ones are announced
    /// at once, because losses are detected sooner where all ranks are known to have started.
    pub(super) fn announce(&mut self, channels: &mut dyn Channels) {
        if let Some(descriptor) = self.unannounced.take() {
            self.send_frame(channels, &Frame::Operation(descriptor));
        }
    }

    /// The outcome of the next operation, in their order, once it is complete.
    pub fn outcome(&mut self) -> Option<Outcome> {
        self.outcomes.pop_front()
    }

    /// Operations that are open.
    pub fn open(&self) -> usize {
        self.operations.len()
    }

    /// Begins to monitor the progress of the operation that is now the oldest open one.
    pub(super) fn monitor_oldest(&mut self, now: Instant) {
        self.all_started = None;
        self.query_interval = FIRST_QUERY;
        self.next_query = now + FIRST_QUERY;
    }

    /// Gives up the operations after one of them.
    pub(super) fn give_up(&mut self, behind: u64, error: &Error) {
        let from = self.operations.partition_point(|o| o.number() <= behind);
        let given_up = self.operations.drain(from..).filter(|o| !o.is_refused()).map(|o| Outcome {
            number: o.number(),
            result: Err(error.clone()),
            data: o.data,
        });
        self.outcomes.extend(given_up);
    }

    /// Gives up all open operations of this rank; the others receive its goodbye.
    pub fn abandon(&mut self, error: &Error) {
        self.give_up(0, error);
    }

    /// The index of the operation that a message belongs to.
    pub(super) fn operation_of(&self, ring: u32, number: u64) -> Option<usize> {
        let i = self.operations.partition_point(|o| o.end(ring) <= number);
        self.operations.get(i).filter(|o| o.rings[ring as usize].base <= number).map(|_| i)
    }

    /// The previous rank has started an operation.
    pub(super) fn on_operation(&mut self, channels: &mut dyn Channels, d: Descriptor) {
        // It can be only so far ahead of this rank, and starts each operation once.
        let latest = self.announced.back().map_or(0, |d| d.number);
        if d.number <= latest || !self.can_be_at(Progress { started: d.number, completed: 0 }) {
            let text = format!(
                "rank {} cannot have started operation {}",
                self.rank_of(self.previous()),
                d.number
            );
            self.fail(channels, Error::Protocol(text));
            return;
        }
        let previous = self.previous() as usize;
        let started = &mut self.progress[previous].started;
        *started = (*started).max(d.number);
        self.announced.push_back(d);
        self.compare(channels);
    }

    /// Whether a rank can have this progress: no operation completes without this rank's part, and
    /// at most [`MAX_OPEN`] are open.
    pub(super) fn can_be_at(&self, theirs: Progress) -> bool {
        let own = self.progress[self.member.rank as usize].started;
        theirs.completed <= own && theirs.started <= own + MAX_OPEN as u64
    }

    /// Compares operations with what the previous rank has announced.
    fn compare(&mut self, channels: &mut dyn Channels) {
        let started = self.own().started;
        while let Some(theirs) = self.announced.pop_front_if(|d| d.number <= started) {
            // Operations that are complete were the same.
            let own =
                self.operations.iter().map(|o| o.descriptor).find(|d| d.number == theirs.number);
            if let Some(own) = own.filter(|own| *own != theirs) {
                self.fail(
                    channels,
                    Error::Mismatch(format!(
                        "operation {}: rank {} calls for {theirs}, rank {} for {own}; all ranks \
                         must call for the same",
                        own.number,
                        self.rank_of(self.previous()),
                        self.own_rank()
                    )),
                );
                return;
            }
        }
    }
}
