//! The sending half of a queue pair: messages in, packets out, acknowledgements back (IBTA 9.7.3 to 9.7.7).
//!
//! Packets are counted without wrapping; their PSN is the first PSN plus their number, modulo 2^24.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use netsum_common::serial;
use netsum_common::wire::{Bth, Opcode, Reth};

use super::packet::{Extended, OVERHEAD};
use super::{Operation, QpConfig, QpError};

/// An acknowledgement is asked for at least this often.
const ACK_EVERY: u64 = 32;
/// Time-outs back off to at most this many times the configured one.
const MAX_BACKOFF: u32 = 16;

/// Least time for the rest to be acknowledged after a probe was.
const LEAST_PATIENCE: Duration = Duration::from_millis(2);
/// Time after which a least time-out that has grown is halved again.
const CALM: Duration = Duration::from_secs(2);
/// Until one has been measured.
const FIRST_ROUND_TRIP: Duration = Duration::from_micros(100);

#[derive(Debug)]
struct Message {
    id: u64,
    data: Vec<u8>,
    operation: Operation,
    immediate: Option<u32>,
    first: u64,
    packets: u64,
}

/// State of the sending half.
#[derive(Debug)]
pub struct Requester {
    qpn: u32,
    first_psn: u32,
    mtu: usize,
    operation: Operation,
    max_inflight: u64,
    ack_timeout: Duration,
    min_ack_timeout: Option<Duration>,
    /// What the least time-out is multiplied by, for having been too short: a power of two.
    caution: u32,
    /// When that was last changed.
    cautious: Option<Instant>,
    retry_limit: Option<u32>,
    rnr_retry_limit: Option<u32>,
    messages: VecDeque<Message>,
    /// Packets of all messages that were ever posted.
    posted: u64,
    /// The oldest packet that is not acknowledged.
    acked: u64,
    /// The next packet to send.
    next: u64,
    /// Behind the last packet that was ever sent.
    sent: u64,
    timer: Option<Instant>,
    retries: u32,
    rnr_retries: u32,
    not_before: Option<Instant>,
    probe: Probe,
    /// Packets before this one are acknowledged as soon as they arrive.
    prompt: u64,
    /// The last packet gone back to, and when.
    went_back: Option<(u64, Instant)>,
    sample: Option<(u64, Instant)>,
    round_trip: RoundTrip,
}

/// The least of the last 16 to 32 round trips. Mean and deviation (RFC 6298) would also measure how long others take to
/// recover from their losses, since a sum waits for all.
#[derive(Clone, Copy, Debug)]
struct RoundTrip {
    /// Of the 16 before.
    before: Duration,
    current: Duration,
    samples: u32,
}

impl RoundTrip {
    fn new() -> Self {
        Self { before: FIRST_ROUND_TRIP, current: Duration::MAX, samples: 0 }
    }

    fn add(&mut self, sample: Duration) {
        self.current = self.current.min(sample);
        self.samples += 1;
        if self.samples.is_multiple_of(16) {
            self.before = std::mem::replace(&mut self.current, Duration::MAX);
        }
    }

    fn least(&self) -> Duration {
        if self.samples < 16 && self.current < Duration::MAX {
            self.current
        } else {
            self.before.min(self.current)
        }
    }
}

/// Where a time-out has led. It does not say what was lost, or whether anything was: perhaps only the acknowledgement, or
/// somebody is late. So the oldest packet asks first (as RFC 5682 does in TCP), and the rest is not sent again as long as
/// acknowledgements come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Probe {
    None,
    /// Only the oldest packet is sent, until something is acknowledged.
    Sent,
    /// Something was; the packets before this one wait for a little longer.
    Answered(u64),
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
    /// It has been sent before.
    pub again: bool,
}

/// What an acknowledgement brought about.
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
    /// Nothing posted yet.
    pub fn new(c: &QpConfig) -> Self {
        Self {
            qpn: c.remote_qpn,
            first_psn: c.send_psn & serial::MASK,
            mtu: c.mtu,
            operation: c.opcode,
            max_inflight: c.max_inflight.max(1) as u64,
            ack_timeout: c.ack_timeout,
            min_ack_timeout: c.min_ack_timeout,
            caution: 1,
            cautious: None,
            retry_limit: c.retry_limit,
            rnr_retry_limit: c.rnr_retry_limit,
            messages: VecDeque::new(),
            posted: 0,
            acked: 0,
            next: 0,
            sent: 0,
            timer: None,
            retries: 0,
            rnr_retries: 0,
            not_before: None,
            probe: Probe::None,
            prompt: if c.waits_for_others { 0 } else { u64::MAX },
            went_back: None,
            sample: None,
            round_trip: RoundTrip::new(),
        }
    }

    /// Queues a message. Without an operation it takes the queue pair's own.
    pub fn post(&mut self, id: u64, data: Vec<u8>, operation: Option<Operation>, immediate: Option<u32>) {
        let operation = operation.unwrap_or(self.operation);
        let packets = data.len().div_ceil(self.mtu).max(1) as u64;
        self.messages.push_back(Message { id, data, operation, immediate, first: self.posted, packets });
        self.posted += packets;
    }

    /// From now on a posted message, and all before it, is acknowledged as soon as it arrives.
    pub fn expect(&mut self, now: Instant, id: u64) {
        let Some(m) = self.messages.iter().rev().find(|m| m.id == id) else { return };
        let prompt = m.first + m.packets;
        if prompt > self.prompt {
            self.prompt = prompt;
            let due = now + self.timeout();
            self.timer = self.timer.map(|t| t.min(due));
        }
    }

    fn psn(&self, packet: u64) -> u32 {
        serial::add(self.first_psn, packet as u32 & serial::MASK)
    }

    /// The packet that a PSN from the other side means, near the oldest unacknowledged one.
    fn packet(&self, psn: u32) -> Option<u64> {
        self.acked.checked_add_signed(serial::diff(psn, self.psn(self.acked)) as i64)
    }

    /// Whether there is something to send now.
    pub fn ready(&self, now: Instant) -> bool {
        let window = if self.probe == Probe::Sent { 1 } else { self.max_inflight };
        self.next < self.posted && self.next < self.acked + window && self.not_before.is_none_or(|t| now >= t)
    }

    /// Length of the next packet's datagram in bytes, whether or not it may be sent now; 0 when there is none.
    pub fn next_len(&self) -> usize {
        let i = self.messages.partition_point(|m| m.first + m.packets <= self.next);
        let Some(m) = self.messages.get(i) else { return 0 };
        let (first, last) = (self.next == m.first, self.next + 1 == m.first + m.packets);
        let at = (self.next - m.first) as usize * self.mtu;
        let write = matches!(m.operation, Operation::Write { .. });
        let opcode = Opcode::data(write, first, last, m.immediate.is_some());
        OVERHEAD + opcode.extended_len() + self.mtu.min(m.data.len() - at).next_multiple_of(4)
    }

    /// The next packet, if one may be sent.
    pub fn poll(&mut self, now: Instant) -> Option<Outgoing<'_>> {
        if !self.ready(now) {
            return None;
        }
        self.not_before = None;
        let n = self.next;
        let i = self.messages.partition_point(|m| m.first + m.packets <= n);
        let window_end = self.probe == Probe::Sent || n + 1 == self.acked + self.max_inflight;
        let psn = self.psn(n);
        let m = &self.messages[i];
        let (first, last) = (n == m.first, n + 1 == m.first + m.packets);
        let at = (n - m.first) as usize * self.mtu;
        let payload = &m.data[at..m.data.len().min(at + self.mtu)];
        let write = matches!(m.operation, Operation::Write { .. });
        let mut bth = Bth::new(Opcode::data(write, first, last, m.immediate.is_some()), self.qpn, psn);
        bth.pad = (payload.len().wrapping_neg() & 3) as u8;
        bth.ack_request = last || window_end || (n - m.first) % ACK_EVERY == ACK_EVERY - 1;
        let reth = match m.operation {
            Operation::Write { address, rkey } if first => {
                Some(Reth { address, rkey, length: m.data.len() as u32 })
            }
            _ => None,
        };
        let ext = Extended { reth, immediate: m.immediate.filter(|_| last), aeth: None };
        let again = n < self.sent;
        self.next += 1;
        if again {
            self.sample = None; // Karn's rule
        } else {
            self.sent = self.next;
            if bth.ack_request && self.sample.is_none() && n < self.prompt {
                self.sample = Some((n, now));
            }
        }
        if self.timer.is_none() {
            self.timer = Some(now + self.timeout());
        }
        Some(Outgoing { bth, ext, payload, again })
    }

    fn timeout(&self) -> Duration {
        let backoff = 1 << self.retries.min(MAX_BACKOFF.ilog2());
        match self.min_ack_timeout {
            Some(min) if self.acked < self.prompt => {
                ((self.round_trip.least() * 4).max(min * self.caution) * backoff).min(self.ack_timeout)
            }
            _ => self.ack_timeout * backoff,
        }
    }

    /// Everything before `packet` has arrived. Whether that is new.
    fn acknowledge(&mut self, now: Instant, packet: u64, done: &mut impl FnMut(u64, Vec<u8>)) -> bool {
        if packet <= self.acked {
            return false;
        }
        if self.probe == Probe::Sent {
            self.learn_from_probe(now, packet > self.acked + 1);
        }
        self.acked = packet;
        self.next = self.next.max(packet);
        self.retries = 0;
        self.rnr_retries = 0;
        if self.probe == Probe::Sent {
            self.probe = Probe::Answered(self.sent);
            self.next = self.sent;
        }
        if let Some((n, at)) = self.sample
            && packet > n
        {
            self.round_trip.add(now.saturating_duration_since(at));
            self.sample = None;
            if self.cautious.is_some_and(|t| now.saturating_duration_since(t) >= CALM) {
                self.caution /= 2;
                self.cautious = (self.caution > 1).then_some(now);
            }
        }
        while self.messages.front().is_some_and(|m| m.first + m.packets <= packet) {
            if let Some(m) = self.messages.pop_front() {
                done(m.id, m.data);
            }
        }
        let timeout = match self.probe {
            Probe::Answered(end) if packet < end => (self.round_trip.least() * 4).max(LEAST_PATIENCE),
            _ => {
                self.probe = Probe::None;
                self.timeout()
            }
        };
        self.timer = (self.acked < self.sent).then(|| now + timeout);
        true
    }

    /// A probe was answered. Where more than the probe was acknowledged, nothing was lost but perhaps an acknowledgement, and
    /// that the probe brings at once. Where it took its time, somebody was late, as on a host with more to do than CPUs, and
    /// will be again.
    fn learn_from_probe(&mut self, now: Instant, more_than_the_probe: bool) {
        let took = self.went_back.map_or(Duration::ZERO, |(_, at)| now.saturating_duration_since(at));
        if more_than_the_probe && took > self.round_trip.least() * 4 {
            let longest = self.min_ack_timeout.map_or(1, |min| self.ack_timeout.div_duration_f32(min) as u32);
            (self.caution, self.cautious) = ((self.caution * 2).min(longest.max(1)), Some(now));
        }
    }

    /// An ACK: everything up to `psn` has arrived.
    pub fn on_ack(&mut self, now: Instant, psn: u32, mut done: impl FnMut(u64, Vec<u8>)) {
        // A PSN that was never sent is a ghost's.
        if let Some(packet) = self.packet(psn).filter(|p| *p < self.sent) {
            self.acknowledge(now, packet + 1, &mut done);
        }
    }

    /// A NAK for a missing packet: everything before `psn` has arrived, `psn` has not.
    pub fn on_sequence_error(
        &mut self,
        now: Instant,
        psn: u32,
        mut done: impl FnMut(u64, Vec<u8>),
    ) -> Effect {
        let Some(packet) = self.packet(psn).filter(|p| *p < self.sent && *p >= self.acked) else {
            return Effect::None;
        };
        self.acknowledge(now, packet, &mut done);
        // One loss brings several NAKs; those that come before the resent packet can have arrived tell nothing new.
        if let Some((to, at)) = self.went_back
            && to == packet
            && now.saturating_duration_since(at) < self.round_trip.least()
        {
            return Effect::None;
        }
        self.go_back(now);
        Effect::WentBack
    }

    /// The receiver had no buffer for `psn`: all before has arrived, try again after `delay`.
    pub fn on_rnr(
        &mut self,
        now: Instant,
        psn: u32,
        delay: Duration,
        mut done: impl FnMut(u64, Vec<u8>),
    ) -> Effect {
        let Some(packet) = self.packet(psn).filter(|p| *p < self.sent && *p >= self.acked) else {
            return Effect::None;
        };
        self.acknowledge(now, packet, &mut done);
        self.rnr_retries += 1;
        if self.rnr_retry_limit.is_some_and(|limit| self.rnr_retries > limit) {
            return Effect::Failed(QpError::RnrRetryExceeded);
        }
        self.go_back(now);
        self.not_before = Some(now + delay);
        Effect::WentBack
    }

    fn go_back(&mut self, now: Instant) {
        self.probe = Probe::None;
        self.next = self.acked;
        self.went_back = Some((self.acked, now));
        self.sample = None;
        self.timer = Some(now + self.timeout());
    }

    /// When [`on_timeout`](Self::on_timeout) or [`poll`](Self::poll) should be called next.
    pub fn deadline(&self) -> Option<Instant> {
        match (self.timer, self.not_before) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }

    /// Looks at the clock.
    pub fn on_timeout(&mut self, now: Instant) -> Effect {
        if self.not_before.is_some_and(|t| now >= t) {
            self.not_before = None;
        }
        if self.timer.is_none_or(|t| now < t) {
            return Effect::None;
        }
        if self.acked == self.sent {
            self.timer = None;
            return Effect::None;
        }
        let answered = matches!(self.probe, Probe::Answered(_));
        self.retries += u32::from(!answered);
        if self.retry_limit.is_some_and(|limit| self.retries > limit) {
            return Effect::Failed(QpError::RetryExceeded);
        }
        self.go_back(now);
        if !answered {
            self.probe = Probe::Sent;
        }
        Effect::WentBack
    }

    /// The messages that were posted and not acknowledged, oldest first.
    pub fn into_messages(self) -> Vec<(u64, Vec<u8>)> {
        self.messages.into_iter().map(|m| (m.id, m.data)).collect()
    }

    /// Messages that were posted and not acknowledged.
    pub fn outstanding(&self) -> usize {
        self.messages.len()
    }
}
