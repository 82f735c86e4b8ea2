//! The messages of operations: they are built and sent while the window allows, and their sums are
//! verified and written back.

use std::ops::Range;
use std::time::{Duration, Instant};

use netsum_common::lanes::{CHECK_LANES, Check, MessageId, Verification};

use super::{Engine, Kept, SumMode};
use crate::buffer::Buffer;
use crate::call::Collective;
use crate::channels::{Channel, Channels};
use crate::error::Error;
use crate::frame::{DATA_HEADER, DataHeader, Descriptor, Frame, Reason};
use crate::numeric::block::{self, EXPONENT_BYTES, read_exponent};
use crate::numeric::element::{Data, Owned};
use crate::numeric::format::Format;
use crate::numeric::layout::{CHECK_BYTES, Message, Plan};
use crate::numeric::quant::{self, Exponents, Underflow};
use crate::numeric::signs::Signs;
use crate::reduction::{Chain, StepMismatch};
use crate::report::{Mode, Report};
use crate::seal::TAG_BYTES;

/// An operation in progress.
#[derive(Debug)]
pub(super) struct Operation {
    pub descriptor: Descriptor,
    /// Its number among all that this rank has not refused, also over earlier connections.
    pub count: u64,
    /// `None` where it is lent.
    pub data: Option<Owned>,
    pub plan: Plan,
    pub rings: Vec<RingPart>,
    /// Messages without a verified sum.
    pub left: usize,
    pub verified: u64,
    pub on_host_ring: bool,
    pub non_finite: Option<Range<usize>>,
    pub underflow: Underflow,
}

#[derive(Debug, Default)]
pub(super) struct RingPart {
    /// Number of the first message.
    pub base: u64,
    pub messages: usize,
    /// Data messages whose exponents are known: they come in order.
    pub known: usize,
    /// Their blocks' largest exponents over all ranks.
    pub buckets: Vec<u8>,
    /// The largest exponents over all ranks in a small operation, once known.
    pub exponents: Option<Exponents>,
}

impl RingPart {
    /// The format of a data message's floats, once its exponents are known.
    fn format(
        &self,
        plan: &Plan,
        ring: u32,
        data_message: usize,
        ranks: u32,
    ) -> Option<Format<'_>> {
        if let Some(exponents) = self.exponents {
            return plan.limb_format(exponents, ranks).map(Format::Limbs);
        }
        let buckets = self.buckets.get(plan.blocks(ring as usize, data_message))?;
        plan.block_format(buckets, ranks).map(Format::Blocks)
    }
}

impl Operation {
    pub fn number(&self) -> u64 {
        self.descriptor.number
    }

    /// Such an operation has no outcome.
    pub fn is_refused(&self) -> bool {
        self.descriptor.call.collective == Collective::Refused
    }

    /// The end of its messages in a ring.
    pub fn end(&self, ring: u32) -> u64 {
        let part = &self.rings[ring as usize];
        part.base + part.messages as u64
    }

    fn message(&self, ring: u32, number: u64) -> Message {
        self.plan.message(ring as usize, (number - self.rings[ring as usize].base) as usize)
    }

    /// The identity of a message, which its check lanes contain.
    fn id(&self, session: u64, ring: u32, number: u64) -> MessageId {
        MessageId { run: session, ring, number, tag: self.descriptor.tag() }
    }

    /// As [`RingPart::format`].
    fn format(&self, ring: u32, data_message: usize, ranks: u32) -> Option<Format<'_>> {
        self.rings[ring as usize].format(&self.plan, ring, data_message, ranks)
    }
}

/// The outcome of an operation, with its number and data.
#[derive(Debug)]
pub struct Outcome {
    pub number: u64,
    pub result: Result<Finished, Error>,
    /// The data, if the engine owns it.
    pub data: Option<Owned>,
}

/// The result of an operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finished {
    pub mode: Mode,
    pub verified: u64,
    /// Elements of the first block with an infinity or a NaN.
    pub non_finite: Option<Range<usize>>,
    /// Floats for which the scales of their blocks were too coarse.
    pub underflow: Underflow,
    /// See [`Report::hierarchical`].
    pub hierarchical: bool,
}

impl Finished {
    /// The report for the caller.
    pub fn report(self, elapsed: Duration, retransmissions: Option<u64>) -> Result<Report, Error> {
        match self.non_finite {
            Some(range) => Err(Error::NonFinite { first: range.start, end: range.end }),
            None => Ok(Report {
                mode: self.mode,
                verified: self.verified,
                elapsed,
                retransmissions,
                underflow: self.underflow,
                hierarchical: self.hierarchical,
            }),
        }
    }
}

impl Engine {
    /// Sends what may be sent.
    pub(super) fn pump(&mut self, now: Instant, channels: &mut dyn Channels, data: &mut dyn Data) {
        let window = self.window();
        let Some(session) = self.session else { return };
        for ring in 0..self.rings.len() as u32 {
            while self.sum_mode != SumMode::Agreeing {
                let state = &self.rings[ring as usize];
                let number = state.next;
                if number >= state.verified + window || state.speculated > state.verified {
                    break;
                }
                let Some(at) = self.operation_of(ring, number) else { break };
                let op = &self.operations[at];
                let message = op.message(ring, number);
                if let Some((i, _)) = &message.data
                    && !message.is_speculative()
                    && op.plan.has_exponents()
                    && op.rings[ring as usize].known <= *i
                {
                    break;
                }
                let mut payload = self.messages.take(channels);
                let id = op.id(session, ring, number);
                let lent: &dyn Data = data;
                let of_op = op.data.as_ref().map_or(lent, |data| &**data);
                let signs = self.build(op, of_op, id, &message, &mut payload);
                let chains = self.chains(op, of_op, &message, payload.len());
                if let Some(seal) = &mut self.seal {
                    let parts = (message.exponent_bytes, signs);
                    seal.close((ring, number), CHECK_BYTES, parts, &mut payload);
                }
                let state = &mut self.rings[ring as usize];
                state.next += 1;
                if message.is_speculative() {
                    state.speculated = state.next;
                }
                if self.sum_mode == SumMode::Box {
                    self.statistics.box_bytes += payload.len() as u64;
                    self.rings[ring as usize].kept.push_back(Kept {
                        number,
                        payload: None,
                        chains,
                    });
                    channels.send(Channel::RingOut(ring), number, payload);
                } else {
                    self.contribute(now, channels, data, (ring, number), payload, chains);
                }
            }
        }
    }

    /// Tells the connections which messages must be acknowledged soon. A message whose sum this
    /// rank has received has been released to all. And once every rank has started an operation,
    /// each sends its part of every message as soon as this rank does, because the same sums give
    /// credit to all.
    pub(super) fn expect_acknowledgements(&mut self, now: Instant, channels: &mut dyn Channels) {
        if self.sum_mode != SumMode::Box {
            return;
        }
        let started = self.progress.iter().map(|p| p.started).min().unwrap_or(0);
        let begun = self.operations.partition_point(|o| o.number() <= started).checked_sub(1);
        let begun = begun.map(|latest| &self.operations[latest]);
        for (i, ring) in self.rings.iter_mut().enumerate() {
            let sent = begun.map_or(0, |op| op.end(i as u32).min(ring.next));
            let expected = ring.verified.max(sent);
            if expected > ring.expected {
                ring.expected = expected;
                channels.expect(now, Channel::RingOut(i as u32), expected - 1);
            }
        }
    }

    fn build(
        &self,
        op: &Operation,
        data: &dyn Data,
        id: MessageId,
        message: &Message,
        out: &mut Buffer,
    ) -> Signs {
        let ring = id.ring;
        let (element, format) = self.element(op, ring, message);
        out.resize(message.len(element));
        let (check, lanes) = out.split_at_mut(CHECK_BYTES);
        let (exponents, values) = lanes.split_at_mut(message.exponent_bytes);
        if message.is_speculative() {
            quant::write_histogram(data.exponents(op.plan.range(ring as usize, 0)), exponents);
        } else {
            let ranges = message.exponents.clone();
            let ranges = ranges.flat_map(|i| op.plan.block_ranges(ring as usize, i));
            for (range, counts) in ranges.zip(exponents.chunks_mut(EXPONENT_BYTES)) {
                data.write_exponent(range, counts);
            }
        }
        if let Some((_, range)) = &message.data
            && !values.is_empty()
        {
            let (values, padding) = values.split_at_mut(range.len() * element);
            let format = format.map(|f| f.of_rank(self.own_rank(), op.count, range.start));
            data.load(range.clone(), format, values);
            padding.fill(0);
        }
        let data = quant::check_sums(lanes);
        let lanes = Check { stamp: id.of(self.member.rank), data }.encode();
        for (out, lane) in check.as_chunks_mut::<4>().0.iter_mut().zip(lanes) {
            *out = lane.to_le_bytes();
        }
        format.map_or(Signs::Signed, Format::signs)
    }

    /// The bytes of an element in a message, and the format of floats.
    fn element<'a>(
        &self,
        op: &'a Operation,
        ring: u32,
        message: &Message,
    ) -> (usize, Option<Format<'a>>) {
        let ranks = self.settings.summands;
        if message.is_speculative() {
            let predicted = self.predicted(ring, message);
            return (predicted.map_or(0, Format::bytes), predicted);
        }
        let format = message.data.as_ref().and_then(|(i, _)| op.format(ring, *i, ranks));
        (format.map_or(4, Format::bytes), format)
    }

    fn predicted(&self, ring: u32, message: &Message) -> Option<Format<'static>> {
        let ring = &self.rings[ring as usize];
        ring.predictor.predict(message, self.settings.summands).map(Format::Limbs)
    }

    /// A message from a ring's connection: it should be the next sum.
    pub(super) fn on_sum(
        &mut self,
        now: Instant,
        channels: &mut dyn Channels,
        data: &mut dyn Data,
        ring: u32,
        sum: &mut [u8],
    ) {
        if self.sum_mode != SumMode::Box || self.failure.is_some() || !self.is_open() {
            return;
        }
        if self.is_abandoned(ring) {
            return;
        }
        match self.open_and_examine(ring, sum, true) {
            Verification::Sum => self.accept(now, data, ring, sum, true),
            Verification::Unsummed => {
                self.statistics.unsummed += 1;
                self.fall_back(channels, Reason::Unsummed, self.member.rank);
            }
            Verification::Stray => {
                self.statistics.wrong += 1;
                self.fall_back(channels, Reason::Stray, self.member.rank);
            }
            Verification::Wrong => {
                self.statistics.wrong += 1;
                self.fall_back(channels, Reason::Wrong, self.member.rank);
            }
        }
    }

    /// Whether a ring's next sum is one of an operation that has been given up, because a rank has
    /// left.
    fn is_abandoned(&self, ring: u32) -> bool {
        let verified = self.rings[ring as usize].verified;
        (self.left != 0 || self.leaving)
            && verified < self.rings[ring as usize].end
            && self.operation_of(ring, verified).is_none()
    }

    /// Takes the pads of a sealed sum away first. As [`examine`](Self::examine).
    fn open_and_examine(&self, ring: u32, sum: &mut [u8], is_whole: bool) -> Verification {
        let Some(seal) = &self.seal else { return self.examine(ring, sum, is_whole) };
        let id = (ring, self.rings[ring as usize].verified);
        seal.open(id, sum);
        let found = self.examine(ring, sum, is_whole);
        if found != Verification::Wrong {
            return found;
        }
        seal.reopen(id, sum);
        let unsummed = self.examine(ring, sum, is_whole) == Verification::Unsummed;
        if unsummed { Verification::Unsummed } else { Verification::Wrong }
    }

    /// Whether exponents count all ranks. That finds a single count of finite exponents that has
    /// changed, where the sums over all lanes cannot be checked. A changed count of infinities and
    /// NaNs in a histogram makes this rank wait for a message that no other sends: an error.
    fn counts_all(&self, message: &Message, exponents: &[u8]) -> bool {
        let ranks = self.member.ranks;
        if message.is_speculative() {
            return quant::histogram_counts_all(exponents, ranks);
        }
        exponents.chunks(EXPONENT_BYTES).all(|counts| block::counts_all(counts, ranks))
    }

    /// Checks a ring's next sum. Where this rank does not have all lanes of it, the sums over them
    /// cannot be checked, but only the message's identity, that all ranks take part, and that its
    /// exponents count all ranks.
    fn examine(&self, ring: u32, sum: &[u8], is_whole: bool) -> Verification {
        let tag = if self.seal.is_some() { TAG_BYTES } else { 0 };
        let Some((sum, tag)) = sum.len().checked_sub(tag).map(|at| sum.split_at(at)) else {
            return Verification::Wrong;
        };
        let (check, lanes) = match sum.split_at_checked(CHECK_BYTES) {
            Some((check, lanes)) if sum.len().is_multiple_of(4) => {
                (check.as_chunks::<4>().0, lanes)
            }
            _ => return Verification::Wrong,
        };
        let check: [u32; CHECK_LANES] = std::array::from_fn(|i| u32::from_le_bytes(check[i]));
        let check = Check::decode(check);
        let sums = if is_whole { quant::check_sums(lanes) } else { check.data };
        let state = &self.rings[ring as usize];
        let own = self.operation_of(ring, state.verified).filter(|_| state.verified < state.next);
        let (Some(op), Some(session)) = (own.map(|at| &self.operations[at]), self.session) else {
            // This rank has not sent its part, so this cannot be the sum.
            return match check.stamp.count {
                1 if check.data == sums => Verification::Unsummed,
                n if n == self.member.ranks && check.data == sums => Verification::Stray,
                _ => Verification::Wrong,
            };
        };
        let id = op.id(session, ring, state.verified);
        match check.examine(&id, self.member.ranks, self.previous(), &sums) {
            Verification::Sum => {
                let message = op.message(ring, state.verified);
                let (element, format) = self.element(op, ring, &message);
                let signs = format.map_or(Signs::Signed, Format::signs);
                let parts = (message.exponent_bytes, signs);
                let exponents = || &lanes[..message.exponent_bytes];
                let right = sum.len() == message.len(element)
                    && (is_whole || self.counts_all(&message, exponents()))
                    && self.seal.as_ref().is_none_or(|seal| {
                        seal.is_right((ring, state.verified), tag, lanes, parts)
                    });
                if right { Verification::Sum } else { Verification::Wrong }
            }
            finding => finding,
        }
    }

    /// Writes back a verified sum, unless this rank has only some of its lanes, and notes the
    /// scales of later messages that it contains.
    fn accept(&mut self, now: Instant, lent: &mut dyn Data, ring: u32, sum: &[u8], is_whole: bool) {
        let (ranks, window) = (self.settings.summands, self.window());
        let Some(at) = self.operation_of(ring, self.rings[ring as usize].verified) else { return };
        let number = self.rings[ring as usize].verified;
        let message = self.operations[at].message(ring, number);
        let predicted = self.predicted(ring, &message);
        let (state, op) = (&mut self.rings[ring as usize], &mut self.operations[at]);
        let part = &mut op.rings[ring as usize];
        let end = sum.len() - if self.seal.is_some() { TAG_BYTES } else { 0 };
        let (exponents, values) = sum[CHECK_BYTES..end].split_at(message.exponent_bytes);
        part.known += message.exponents.len();
        if message.is_speculative() {
            let exponents = quant::read_histogram(exponents);
            part.exponents = Some(exponents);
            state.predictor.learn(&message, exponents);
        } else {
            part.buckets.extend(exponents.chunks(EXPONENT_BYTES).map(read_exponent));
        }
        let mut again = false;
        if let Some((i, range)) = message.data.clone() {
            let format = part.format(&op.plan, ring, i, ranks);
            // If the prediction was wrong, the next message brings the sum.
            again = message.is_speculative() && predicted != format;
            if !again {
                let data: &mut dyn Data = op.data.as_mut().map_or(lent, |data| &mut **data);
                if let Some(format) = format {
                    op.underflow += data.underflow(range.clone(), format);
                    if let Some(block) = format.non_finite(range.len()) {
                        let block = range.start + block.start..range.start + block.end;
                        if op.non_finite.as_ref().is_none_or(|first| block.start < first.start) {
                            op.non_finite = Some(block);
                        }
                    }
                }
                if is_whole {
                    data.store(range, format, values);
                }
            }
        }
        op.verified += u64::from(is_whole);
        if again {
            op.rings[ring as usize].messages += 1;
        } else {
            op.left -= 1;
        }
        // A sum shows that all ranks have started the operation.
        for rank in &mut self.progress {
            rank.started = rank.started.max(op.number());
        }
        op.on_host_ring |= self.sum_mode != SumMode::Box;
        self.statistics.verified += u64::from(is_whole);
        self.last_progress = now;
        state.verified += 1;
        while let Some(committed) = state.kept.pop_front_if(|k| k.number + window < state.verified)
        {
            if let Some(payload) = committed.payload {
                self.messages.give(payload);
            }
        }
        if again {
            state.end += 1;
            for later in self.operations.range_mut(at + 1..) {
                later.rings[ring as usize].base += 1;
            }
        }
        // With several rings a later operation may have all its sums first; it waits.
        while let Some(op) = self.operations.pop_front_if(|op| op.left == 0) {
            self.own().completed = op.number();
            self.unannounced.take_if(|d| d.number == op.number());
            self.monitor_oldest(now);
            let is_refused = op.is_refused();
            self.parts.push(op.rings);
            if is_refused {
                continue;
            }
            self.statistics.all_reduces += 1;
            let mode = if op.on_host_ring { Mode::HostRing } else { Mode::Box };
            self.statistics.underflows += op.underflow.zeroed;
            let finished = Finished {
                mode,
                verified: op.verified,
                non_finite: op.non_finite,
                underflow: op.underflow,
                hierarchical: false,
            };
            self.outcomes.push_back(Outcome {
                number: op.descriptor.number,
                result: Ok(finished),
                data: op.data,
            });
        }
    }

    /// Gives this rank's part of a message to the hosts' ring.
    pub(super) fn contribute(
        &mut self,
        now: Instant,
        channels: &mut dyn Channels,
        data: &mut dyn Data,
        (ring, number): (u32, u64),
        payload: Buffer,
        chains: Vec<Chain>,
    ) {
        let (steps, out) = (&mut self.steps, &mut self.outgoing);
        let reduction = self.reductions.of(ring, number);
        let done = reduction.contribute(self.member, payload, chains, |step, lanes| {
            out.push(data_frame(steps.take(channels), ring, number, step, lanes));
        });
        self.after_steps(now, channels, data, ring, done);
    }

    /// A step of the hosts' ring.
    pub(super) fn on_data(
        &mut self,
        now: Instant,
        channels: &mut dyn Channels,
        data: &mut dyn Data,
        h: DataHeader,
        lanes: &[u8],
    ) {
        if self.failure.is_some() {
            return;
        }
        // The previous rank sends a message only after it has the sum of the one a window before,
        // which includes this rank's part. And the ring starts at most a window before the first
        // message that this rank has not verified.
        let (window, verified) = (self.window(), self.rings[h.ring as usize].verified);
        if h.number.saturating_add(window) < verified || h.number >= verified + 2 * window {
            let text = format!(
                "rank {} is at message {} of ring {}, rank {} at {verified}",
                self.rank_of(self.previous()),
                h.number,
                h.ring,
                self.own_rank()
            );
            self.suspect(now, Error::Protocol(text));
            return;
        }
        let (steps, out) = (&mut self.steps, &mut self.outgoing);
        let done =
            self.reductions.of(h.ring, h.number).step(self.member, h.step, lanes, |step, lanes| {
                out.push(data_frame(steps.take(channels), h.ring, h.number, step, lanes));
            });
        self.after_steps(now, channels, data, h.ring, done);
    }

    fn after_steps(
        &mut self,
        now: Instant,
        channels: &mut dyn Channels,
        data: &mut dyn Data,
        ring: u32,
        done: Result<(), StepMismatch>,
    ) {
        let mut out = std::mem::take(&mut self.outgoing);
        for frame in out.drain(..) {
            self.statistics.ring_bytes += (frame.len() - DATA_HEADER) as u64;
            self.send_bypass(channels, frame);
        }
        self.outgoing = out;
        if done == Err(StepMismatch) {
            self.suspect(
                now,
                Error::Protocol(format!(
                    "a step of ring {ring} from rank {} does not fit this rank's message",
                    self.rank_of(self.previous())
                )),
            );
            return;
        }
        // Discards sums that this rank has already.
        let (member, verified) = (self.member, self.rings[ring as usize].verified);
        self.reductions.forget_done(member, ring, verified, verified.saturating_sub(self.window()));
        while !self.is_abandoned(ring) {
            let number = self.rings[ring as usize].verified;
            let done = self.reductions.take_done(member, ring, number);
            let Some((mut sum, is_whole)) = done else { return };
            if self.open_and_examine(ring, &mut sum, is_whole) != Verification::Sum {
                self.statistics.wrong += 1;
                self.suspect(now, Error::Protocol("a sum of the hosts' ring is wrong".to_owned()));
                return;
            }
            self.accept(now, data, ring, &sum, is_whole);
            self.messages.give(sum);
        }
    }
}

fn data_frame(
    mut frame: Buffer,
    ring: u32,
    number: u64,
    step: u32,
    pieces: &mut dyn Iterator<Item = &[u8]>,
) -> Buffer {
    frame.resize(0);
    Frame::Data(DataHeader { ring, step, number }).encode_to(&mut frame);
    pieces.for_each(|lanes| frame.extend_from_slice(lanes));
    frame
}
