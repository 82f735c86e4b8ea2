//! The sending half of a queue pair: it takes messages and acknowledgements, and returns packets
//! (IBTA 9.7.3 to 9.7.7).
//!
//! Packets are counted without wrapping; their PSN is the first PSN plus their number, modulo 2^24.

use std::time::{Duration, Instant};

use netsum_common::wire::{Aeth, Bth, Syndrome};

use super::congestion::Congestion;
use super::gaps::Gaps;
use super::packet::{Extended, OVERHEAD};
use super::retransmit_queue::RetransmitQueue;
use super::rtt::{PACKET_OVERHEAD, RttEstimator};
use super::segmenter::{Part, Segmenter};
use super::{Operation, Psn, QpConfig, QpError, Qpn, packets};

/// Within a message, each packet of this number requests an acknowledgement.
const ACK_EVERY: u64 = 32;
/// With more than [`ALWAYS_ACK_UP_TO`] packets in flight, the end of a message requests one only
/// after this many packets or an eighth of the window. If nothing follows, the receiver
/// acknowledges without a request.
const ACK_REQUEST_INTERVAL: u64 = 8;
/// With at most this many packets in flight, each requests one: it may be waited for, and measures
/// a round trip.
const ALWAYS_ACK_UP_TO: u64 = 4;
/// The longest backoff, as a multiple of the configured timeout.
const MAX_BACKOFF: u32 = 16;

/// Least time to wait for other acknowledgements after that of a probe.
const MIN_TIMEOUT: Duration = Duration::from_millis(2);
/// A thread that checks the clock this long after a timeout was due did not run meanwhile, and
/// perhaps no thread of its machine did.
const LATE: Duration = Duration::from_millis(1);
/// At most this many NAKs of one packet in a row mean loss; more mean another problem.
const MAX_NAKS_OF_LOSS: u32 = 8;
/// Time after which an increased minimum timeout is halved again.
const HALVING_INTERVAL: Duration = Duration::from_secs(2);

/// A packet whose round trip is measured.
#[derive(Clone, Copy, Debug)]
struct Sample {
    packet: u64,
    at: Instant,
    /// See [`RttEstimator::send`].
    load: u64,
}

/// State of the sending half.
#[derive(Debug)]
pub struct Requester {
    qpn: Qpn,
    first_psn: Psn,
    reused: bool,
    /// Where numbers are reused, identifies the connection by its first packet.
    connection_id: Option<u32>,
    segmenter: Segmenter,
    congestion: Congestion,
    /// One after the last packet that requested an acknowledgement.
    ack_requested_end: u64,
    ack_timeout: Duration,
    min_ack_timeout: Option<Duration>,
    /// Factor of the minimum timeout, which was too short: a power of two.
    timeout_factor: u32,
    /// When the factor last changed.
    factor_raised_at: Option<Instant>,
    retry_limit: Option<u32>,
    rnr_retry_limit: Option<u32>,
    /// The oldest packet that is not acknowledged.
    acked: u64,
    /// The next packet to send, after those of `retransmit_queue`.
    next: u64,
    /// The receiver keeps packets that arrive early.
    selective: bool,
    /// [`QpConfig::is_selective_bypass`].
    is_selective_bypass: bool,
    /// Packets to send again to a selective receiver.
    retransmit_queue: RetransmitQueue,
    /// One after the last packet that was ever sent.
    sent: u64,
    /// Bytes that were sent and not acknowledged.
    load: u64,
    /// When the timeout was started, and the number of packets of sums that had arrived by then.
    waiting: Option<(Instant, u64)>,
    /// Time added to the timeout because the clock was checked late.
    late_extension: Duration,
    retries: u32,
    rnr_retries: u32,
    not_before: Option<Instant>,
    probe: Probe,
    /// Packets before this one are acknowledged as soon as they arrive.
    prompt_ack_end: u64,
    /// When the oldest unacknowledged packet became one before `prompt_ack_end`.
    prompt_ack_since: Option<Instant>,
    waits_for_others: bool,
    /// After a timeout: when an acknowledgement last arrived.
    unanswered: Option<Instant>,
    /// The packet that go-back-N last returned to, and when it did; once that packet is resent, the
    /// time of the resend.
    went_back: Option<(u64, Instant)>,
    /// NAKs after the first that had the same packet sent again.
    naks: u32,
    sample: Option<Sample>,
    /// Whether a probe may still be sent when sums stop: once for each acknowledgement.
    may_probe: bool,
}

/// The state after a timeout. A timeout does not show what was lost, or whether anything was:
/// perhaps only the acknowledgement, or another rank is late. So the oldest packet is sent first as
/// a probe (as RFC 5682 does in TCP), and the others are not sent again as long as acknowledgements
/// arrive.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Probe {
    None,
    /// Only the oldest packet is sent, until an acknowledgement arrives.
    Sent,
    /// An acknowledgement has arrived; the packets before `end` wait a little longer. If it covered
    /// more than the probe, they may be in flight, and get the time that they need.
    Answered {
        end: u64,
        whole: bool,
    },
}

/// A packet to be sent.
#[derive(Debug)]
pub struct Outgoing<'a> {
    /// Base transport header.
    pub bth: Bth,
    /// Extended headers.
    pub ext: Extended,
    /// Payload.
    pub payload: &'a [u8],
    /// It is a retransmission.
    pub again: bool,
}

/// The effect of an acknowledgement.
#[derive(Debug, PartialEq, Eq)]
pub enum Effect {
    /// Nothing, or progress.
    None,
    /// Go-back-N has begun.
    WentBack,
    /// The connection has failed.
    Failed(QpError),
}

impl Requester {
    /// A half without messages.
    pub fn new(c: &QpConfig) -> Self {
        Self {
            qpn: c.remote_qpn,
            first_psn: c.send_psn,
            reused: c.reused,
            connection_id: None,
            segmenter: Segmenter::new(c.mtu, c.opcode),
            congestion: Congestion::new(c.max_inflight.max(1) as u64),
            ack_requested_end: 0,
            ack_timeout: c.ack_timeout,
            min_ack_timeout: c.min_ack_timeout,
            timeout_factor: 1,
            factor_raised_at: None,
            retry_limit: c.retry_limit,
            rnr_retry_limit: c.rnr_retry_limit,
            acked: 0,
            next: 0,
            selective: c.selective,
            is_selective_bypass: c.is_selective_bypass(),
            retransmit_queue: RetransmitQueue::default(),
            sent: 0,
            load: 0,
            waiting: None,
            late_extension: Duration::ZERO,
            retries: 0,
            rnr_retries: 0,
            not_before: None,
            probe: Probe::None,
            prompt_ack_end: if c.waits_for_others { 0 } else { u64::MAX },
            prompt_ack_since: None,
            waits_for_others: c.waits_for_others,
            unanswered: None,
            went_back: None,
            naks: 0,
            sample: None,
            may_probe: true,
        }
    }

    /// Queues a message. Without an operation it uses the queue pair's own.
    pub fn post(
        &mut self,
        id: u64,
        data: Vec<u8>,
        operation: Option<Operation>,
        immediate: Option<u32>,
    ) {
        self.segmenter.post(id, data, operation, immediate);
        if self.reused && self.connection_id.is_none() {
            self.connection_id =
                self.segmenter.packet(0).map(|first| super::connection_id(first.payload));
        }
    }

    /// Whether an acknowledgement belongs to an earlier connection that had the same numbers.
    pub fn is_of_another(&self, psn: Psn, aeth: Aeth) -> bool {
        // A receiver that has taken nothing does not know the identity yet, and NAKs the first
        // packet.
        let of_none =
            psn == self.first_psn && aeth.msn == 0 && !matches!(aeth.syndrome, Syndrome::Ack(_));
        self.connection_id.is_some_and(|connection_id| connection_id != aeth.msn) && !of_none
    }

    /// From now on a posted message, and all before it, will be acknowledged as soon as it arrives.
    pub fn expect(&mut self, now: Instant, id: u64) {
        let Some(prompt_ack_end) = self.segmenter.end(id) else { return };
        if prompt_ack_end > self.prompt_ack_end {
            if self.acked >= self.prompt_ack_end {
                self.prompt_ack_since = Some(now);
            }
            self.prompt_ack_end = prompt_ack_end;
        }
    }

    fn psn(&self, packet: u64) -> Psn {
        self.first_psn.plus(packet as u32)
    }

    /// The packet that a PSN of the other side means: the one nearest to the oldest unacknowledged
    /// one.
    fn packet(&self, psn: Psn) -> Option<u64> {
        self.acked.checked_add_signed(psn.ahead_of(self.psn(self.acked)) as i64)
    }

    /// Whether there is something to send now.
    pub fn ready(&self, now: Instant) -> bool {
        // After the window has shrunk, perhaps no packet in flight requests an acknowledgement.
        // Then another one may be sent that does.
        let may_send = match self.probe {
            Probe::Sent => self.next == self.acked,
            _ => {
                self.next < self.acked + self.congestion.window()
                    || self.ack_requested_end <= self.acked
            }
        };
        let new = self.next < self.segmenter.posted && may_send;
        (new || self.retransmit_queue.first().is_some()) && self.not_before.is_none_or(|t| now >= t)
    }

    /// Whether only missing packets are sent again.
    pub fn is_selective(&self) -> bool {
        self.selective
    }

    /// Whether packets should be sent one by one: the oldest packet was lost twice, or a timeout
    /// has expired, and no acknowledgement has arrived since.
    pub fn sends_singly(&self) -> bool {
        self.probe == Probe::Sent || self.retransmit_queue.lost_oldest_twice()
    }

    /// Length of the next packet's datagram in bytes, whether or not it may be sent now; 0 when
    /// there is none.
    pub fn next_len(&self) -> usize {
        let n = self.retransmit_queue.first().unwrap_or(self.next);
        let length = |part: Part<'_>| {
            OVERHEAD + part.opcode.extended_len() + part.payload.len().next_multiple_of(4)
        };
        self.segmenter.packet(n).map_or(0, length)
    }

    /// The next packet, if one may be sent.
    pub(super) fn poll(&mut self, now: Instant, rtt: &mut RttEstimator) -> Option<Outgoing<'_>> {
        if !self.ready(now) {
            return None;
        }
        self.not_before = None;
        let repeat = self.retransmit_queue.next(now, self.sent, rtt);
        let n = repeat.map_or(self.next, |r| r.packet);
        let window = self.congestion.window();
        let window_end = self.probe == Probe::Sent || n + 1 >= self.acked + window;
        let (psn, again) = (self.psn(n), n < self.sent);
        let part = self.segmenter.packet(n)?;
        let eighth = n + 1 >= self.ack_requested_end + window.div_ceil(8);
        let often = self.congestion.is_limited() && eighth;
        let must_ask = !self.is_selective_bypass || again || n < self.acked + ALWAYS_ACK_UP_TO;
        let ends = part.last
            && (must_ask || eighth || n + 1 >= self.ack_requested_end + ACK_REQUEST_INTERVAL);
        let mut bth = Bth::new(part.opcode, self.qpn.get(), psn.get());
        bth.pad = (part.payload.len().wrapping_neg() & 3) as u8;
        let last_repeat = repeat.is_some_and(|r| r.last);
        bth.ack_request = ends
            || window_end
            || often
            || last_repeat
            || part.in_message % ACK_EVERY == ACK_EVERY - 1;
        let ext = Extended { reth: part.reth, immediate: part.immediate, aeth: None };
        if repeat.is_none() {
            self.next += 1;
            self.congestion.on_sent(self.next - self.acked);
        }
        if bth.ack_request {
            self.ack_requested_end = self.ack_requested_end.max(n + 1);
        }
        if again {
            self.sample = None; // Karn's rule
            // The caller's clock may be older than the timeout.
            if let Some((_, at)) = self.went_back.as_mut().filter(|(to, _)| *to == n) {
                *at = now;
            }
        } else {
            self.sent = self.next;
            let bytes = part.payload.len() as u64 + PACKET_OVERHEAD;
            self.load += bytes;
            let load = rtt.send(bytes);
            // A packet behind twice as much load is a better sample: the first packets may find the
            // link idle in both directions.
            let tells_more = self.sample.is_none_or(|s| load > 2 * s.load);
            if bth.ack_request && tells_more && n < self.prompt_ack_end {
                self.sample = Some(Sample { packet: n, at: now, load });
            }
        }
        self.waiting.get_or_insert((now, rtt.sums()));
        Some(Outgoing { bth, ext, payload: part.payload, again })
    }

    /// When the oldest packet is to be sent again, if it is not acknowledged. Sending other packets
    /// postpones it.
    fn due(&self, rtt: &RttEstimator) -> Option<Instant> {
        self.without_late_extension(rtt).map(|due| due + self.late_extension)
    }

    fn without_late_extension(&self, rtt: &RttEstimator) -> Option<Instant> {
        let waiting = rtt.since(self.waiting?);
        let longest = rtt.longest();
        match self.probe {
            Probe::Answered { whole: true, .. } => {
                return Some(waiting + longest.max(MIN_TIMEOUT));
            }
            Probe::Answered { whole: false, .. } => {
                return Some(waiting + rtt.usual().max(MIN_TIMEOUT));
            }
            Probe::None | Probe::Sent => {}
        }
        let backoff = 1 << self.retries.min(MAX_BACKOFF.ilog2());
        let cap = longest.max(self.ack_timeout);
        let due = waiting + cap * backoff;
        Some(match self.min_ack_timeout {
            Some(min) if self.acked < self.prompt_ack_end => {
                let timeout = longest.max(min * self.timeout_factor) * backoff;
                due.min(
                    self.prompt_ack_since.map_or(waiting, |t| t.max(waiting)) + timeout.min(cap),
                )
            }
            _ => due,
        })
    }

    /// Removes this queue pair's bytes from the endpoint's bytes in flight: it sends no more.
    pub(super) fn give_up(&mut self, rtt: &mut RttEstimator) {
        rtt.release(std::mem::take(&mut self.load));
    }

    /// Everything before `packet` has arrived.
    fn acknowledge(
        &mut self,
        now: Instant,
        rtt: &mut RttEstimator,
        packet: u64,
        done: &mut impl FnMut(u64, Vec<u8>),
    ) {
        if packet <= self.acked {
            return;
        }
        let more_than_one = packet > self.acked + 1;
        match self.probe {
            Probe::Sent => self.learn_from_probe(now, rtt, more_than_one),
            // Packets that were not sent again have arrived, so nothing had been lost (RFC 5682,
            // 2.1, step 3b). Not so behind a box: sums that wait for other ranks arrive out of
            // order.
            Probe::Answered { end, whole: false }
                if !self.waits_for_others
                    && !self.retransmit_queue.have_retransmitted(self.acked..packet) =>
            {
                self.on_spurious_timeout(now, rtt);
                self.probe = Probe::Answered { end, whole: true };
            }
            Probe::Answered { .. } | Probe::None => {}
        }
        let bytes = self.segmenter.bytes(self.acked, packet);
        self.load -= bytes;
        rtt.release(bytes);
        if self.probe == Probe::Sent
            && !more_than_one
            && let Some((_, at)) = self.went_back
        {
            // The only sample, if every round trip has a loss in it.
            rtt.measure(now.saturating_duration_since(at), bytes, self.waits_for_others);
        }
        self.congestion.on_acknowledged(packet - self.acked, packet, self.sent);
        self.acked = packet;
        self.may_probe = true;
        self.next = self.next.max(packet);
        self.retransmit_queue.acknowledge(packet);
        self.retries = 0;
        self.rnr_retries = 0;
        if self.probe == Probe::Sent {
            self.probe = Probe::Answered { end: self.sent, whole: more_than_one };
            self.next = self.sent;
        }
        // If a later packet is acknowledged with it, its own acknowledgement may have been lost.
        if let Some(sample) =
            self.sample.take_if(|s| packet > s.packet).filter(|s| packet == s.packet + 1)
        {
            rtt.measure(
                now.saturating_duration_since(sample.at),
                sample.load,
                self.waits_for_others,
            );
            if self
                .factor_raised_at
                .is_some_and(|t| now.saturating_duration_since(t) >= HALVING_INTERVAL)
            {
                self.timeout_factor /= 2;
                self.factor_raised_at = (self.timeout_factor > 1).then_some(now);
            }
        }
        self.segmenter.acknowledge(packet, done);
        if matches!(self.probe, Probe::Answered { end, .. } if packet >= end) {
            self.probe = Probe::None;
        }
        self.waiting = (self.acked < self.sent).then(|| (now, rtt.sums()));
        self.late_extension = Duration::ZERO;
    }

    /// The answer to a probe. If it covered more than the probe, nothing was lost except perhaps an
    /// acknowledgement, and the probe brings that at once. If it took long, the timeout was too
    /// short: a host was late, for example because it has more to do than CPUs, and will be late
    /// again; or the link is slower than was known.
    fn learn_from_probe(
        &mut self,
        now: Instant,
        rtt: &mut RttEstimator,
        more_than_the_probe: bool,
    ) {
        let took =
            self.went_back.map_or(Duration::ZERO, |(_, at)| now.saturating_duration_since(at));
        if !more_than_the_probe {
            return;
        }
        if took > rtt.least() * 4 {
            // After a single probe that took no longer than usual, it may be chance.
            self.unanswered.take_if(|_| self.retries <= 1 && took <= rtt.usual());
            self.on_spurious_timeout(now, rtt);
        }
        self.unanswered = None;
    }

    /// A timeout without a loss before it.
    fn on_spurious_timeout(&mut self, now: Instant, rtt: &mut RttEstimator) {
        let longest =
            self.min_ack_timeout.map_or(1, |min| self.ack_timeout.div_duration_f32(min) as u32);
        (self.timeout_factor, self.factor_raised_at) =
            ((self.timeout_factor * 2).min(longest.max(1)), Some(now));
        if let Some(since) = self.unanswered.take().filter(|_| !self.waits_for_others) {
            let took = now.saturating_duration_since(since);
            let probe =
                self.went_back.map_or(Duration::ZERO, |(_, at)| now.saturating_duration_since(at));
            // A timeout is four times the learned value. Perhaps only acknowledgements were lost:
            // learning the whole wait would then multiply each timeout by four. So it learns a
            // quarter of the wait, plus the probe's own round trip, which is new.
            rtt.raise_estimate(if self.retries > 1 {
                took / 4
            } else {
                (took / 4 + probe).min(took)
            });
        }
    }

    /// An ACK: everything up to `psn` has arrived.
    pub(super) fn on_ack(
        &mut self,
        now: Instant,
        rtt: &mut RttEstimator,
        (psn, credits): (Psn, u8),
        mut done: impl FnMut(u64, Vec<u8>),
    ) {
        // A PSN that was never sent: the ACK is a stale one.
        if let Some(packet) = self.packet(psn).filter(|p| *p < self.sent) {
            if let Some(most) = packets(credits).filter(|_| self.is_selective_bypass) {
                self.congestion.limit(most);
            }
            self.acknowledge(now, rtt, packet + 1, &mut done);
        }
    }

    /// The other side has received a packet with a congestion mark.
    pub(super) fn on_congestion(&mut self) {
        self.congestion.on_notification(self.acked, self.sent);
    }

    /// A NAK for a missing packet: everything before `psn` has arrived, `psn` has not.
    pub(super) fn on_sequence_error(
        &mut self,
        now: Instant,
        rtt: &mut RttEstimator,
        psn: Psn,
        mut done: impl FnMut(u64, Vec<u8>),
    ) -> Effect {
        let Some(packet) = self.packet(psn).filter(|p| *p < self.sent && *p >= self.acked) else {
            return Effect::None;
        };
        self.acknowledge(now, rtt, packet, &mut done);
        // One loss causes several NAKs. Those that arrive before the resent packet can have arrived
        // are not news. If the packet is lost again and again, perhaps because of the
        // retransmissions, the time between two of them grows.
        let again = self.went_back.filter(|(to, _)| *to == packet);
        let patience = (rtt.least() * (1 << self.naks.saturating_sub(MAX_NAKS_OF_LOSS).min(16)))
            .min(self.ack_timeout);
        if again.is_some_and(|(_, at)| now.saturating_duration_since(at) < patience) {
            return Effect::None;
        }
        rtt.on_gap();
        self.naks = if again.is_some() { self.naks + 1 } else { 0 };
        self.go_back(now, rtt);
        // A receiver without a list has kept nothing.
        self.retransmit_queue.clear();
        (self.next, self.ack_requested_end) = (self.acked, self.acked);
        Effect::WentBack
    }

    /// A selective receiver's list: everything before `psn` has arrived, and some packets after it.
    pub(super) fn on_gaps(
        &mut self,
        now: Instant,
        rtt: &mut RttEstimator,
        psn: Psn,
        gaps: &Gaps,
        mut done: impl FnMut(u64, Vec<u8>),
    ) {
        let sent = self.sent;
        let Some(packet) = self.packet(psn).filter(|p| (self.acked..sent).contains(p)) else {
            return;
        };
        let newest =
            self.packet(gaps.newest).filter(|p| *p < sent).map(|p| self.retransmit_queue.newest(p));
        self.acknowledge(now, rtt, packet, &mut done);
        rtt.on_gap();
        rtt.note_gap(now);
        for &(first, len) in &gaps.missing {
            let Some(first) = self.packet(first).filter(|p| *p >= self.acked) else { continue };
            let row = first..sent.min(first + u64::from(len));
            let overdue = self.waits_for_others.then(|| rtt.pause());
            self.retransmit_queue.add_missing(
                row,
                newest,
                self.acked,
                overdue,
                (now, rtt, self.ack_timeout),
            );
        }
        // The receiver lives. The timeout for retransmitted packets starts now.
        self.retries = 0;
        self.waiting = Some((now, rtt.sums()));
        self.late_extension = Duration::ZERO;
    }

    /// The receiver had no buffer for `psn`: all before has arrived, try again after `delay`.
    pub(super) fn on_rnr(
        &mut self,
        now: Instant,
        rtt: &mut RttEstimator,
        psn: Psn,
        delay: Duration,
        mut done: impl FnMut(u64, Vec<u8>),
    ) -> Effect {
        let Some(packet) = self.packet(psn).filter(|p| *p < self.sent && *p >= self.acked) else {
            return Effect::None;
        };
        self.acknowledge(now, rtt, packet, &mut done);
        self.retries = 0; // the receiver lives
        self.rnr_retries += 1;
        if self.rnr_retry_limit.is_some_and(|limit| self.rnr_retries > limit) {
            return Effect::Failed(QpError::RnrRetryExceeded);
        }
        self.go_back(now, rtt);
        self.not_before = Some(now + delay);
        Effect::WentBack
    }

    fn go_back(&mut self, now: Instant, rtt: &RttEstimator) {
        self.probe = Probe::None;
        self.unanswered = None;
        if self.selective {
            self.retransmit_queue.add(self.acked);
        } else {
            (self.next, self.ack_requested_end) = (self.acked, self.acked);
        }
        self.went_back = Some((self.acked, now));
        self.sample = None;
        self.waiting = Some((now, rtt.sums()));
        self.late_extension = Duration::ZERO;
    }

    /// When [`on_timeout`](Self::on_timeout) or [`poll`](Self::poll) should be called next.
    pub(super) fn deadline(&self, rtt: &RttEstimator) -> Option<Instant> {
        [self.due(rtt), self.not_before, self.retransmit_queue.deadline(), self.tail(rtt)]
            .into_iter()
            .flatten()
            .min()
    }

    /// When the oldest packet probes, behind a box: a loss at the end of the credit delays all
    /// sums, and no gap shows it.
    fn tail(&self, rtt: &RttEstimator) -> Option<Instant> {
        let probes =
            self.waits_for_others && self.selective && self.may_probe && self.probe == Probe::None;
        rtt.may_be_lost(self.waiting.filter(|_| probes && self.acked < self.sent)?)
    }

    /// Checks the timers.
    pub(super) fn on_timeout(&mut self, now: Instant, rtt: &RttEstimator) -> Effect {
        if self.not_before.is_some_and(|t| now >= t) {
            self.not_before = None;
        }
        let tail = self.tail(rtt).is_some_and(|t| now >= t);
        self.may_probe &= !tail;
        if (self.retransmit_queue.probes(now) || tail) && self.acked < self.sent {
            // A box that has the last packet absorbs it, and nobody answers. The oldest one may
            // itself be what is missing.
            let probe = if self.waits_for_others { self.acked } else { self.sent - 1 };
            self.retransmit_queue.add(probe);
        }
        let Some(due) = self.due(rtt).filter(|t| now >= *t) else { return Effect::None };
        if self.acked == self.sent {
            self.waiting = None;
            return Effect::None;
        }
        let late = now - due;
        if late >= LATE && self.late_extension.is_zero() {
            // Waits as long again, once.
            self.late_extension = late + late.min(self.ack_timeout);
            return Effect::None;
        }
        let answered = matches!(self.probe, Probe::Answered { .. });
        self.retries += u32::from(!answered);
        if self.retry_limit.is_some_and(|limit| self.retries > limit) {
            return Effect::Failed(QpError::RetryExceeded);
        }
        let since = self
            .unanswered
            .filter(|_| self.probe == Probe::Sent)
            .or(self.waiting.map(|(since, _)| since));
        self.go_back(now, rtt);
        if self.selective {
            // The probe's answer shows what else is missing.
            self.retransmit_queue.add(self.sent - 1);
        }
        if !answered {
            self.unanswered = since;
            self.probe = Probe::Sent;
        }
        Effect::WentBack
    }

    /// Messages that are not acknowledged, oldest first.
    pub fn into_messages(self) -> Vec<(u64, Vec<u8>)> {
        self.segmenter.into_messages()
    }

    /// The number of messages that are not acknowledged.
    pub fn outstanding(&self) -> usize {
        self.segmenter.len()
    }
}
