//! The receiving half of a queue pair: it takes packets, and returns messages and acknowledgements
//! (IBTA 9.7.4, 9.7.5, 9.7.8).
//!
//! A selective receiver keeps packets that arrive early, and lists missing ones in its NAKs
//! ([`Gaps`]). Behind a box a gap may be another rank's loss, and only that rank should retransmit.
//! So the receiver NAKs at once only where the box shows whose loss it is:
//!
//! - A packet after a gap between its sender and the box is moved ahead ([`GAP_PSN_AHEAD`]), or is
//!   a sum marked [`PAST_GAP`].
//! - A sum marked [`IN_ORDER`] is sent after all others: missing ones were lost between box and
//!   receiver.
//!
//! Other gaps are NAKed after a while. If the missing packets do not arrive, the NAK is repeated.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use netsum_common::serial;
use netsum_common::slot::GAP_PSN_AHEAD;
use netsum_common::wire::{Aeth, IN_ORDER, Nak, Opcode, PAST_GAP, Syndrome};

use super::gaps::Gaps;
use super::packet::Packet;
use super::rtt::LONGEST_PAUSE;
use super::{NO_LIMIT, Psn, QpConfig, connection_id, credits};

/// RNR NAK timer code for 0.64 ms (IBTA table 46).
const RNR_TIMER: u8 = 12;
/// How many packets after a gap a receiver keeps that is not selective: a kernel that coalesces
/// packets delivers some before earlier ones (Linux 6.18, net/core/gro.c).
const SWAPPED: usize = 64;
/// How long a message that does not request an acknowledgement waits for one: for later messages
/// to share it, and less than any timeout.
const UNREQUESTED_ACK_DELAY: Duration = Duration::from_millis(1);

/// State of the receiving half.
#[derive(Debug)]
pub struct Responder {
    expected: Psn,
    /// How many packets have been accepted: the number of the expected one.
    accepted: u64,
    /// Packets that arrived early, by number; `None` where they are dropped.
    early: Option<BTreeMap<u64, Early>>,
    /// For receivers that are not selective: sums that arrived shortly before the expected one. The
    /// kernel may have swapped them.
    swapped: BTreeMap<u64, Early>,
    sums: bool,
    /// Set where a gap may be another rank's loss.
    loss_tracker: Option<LossTracker>,
    /// The last packet that arrived, among those that can be accepted.
    newest: Psn,
    /// How far ahead of the expected packet one is kept.
    reach: u64,
    /// Messages received; where numbers are reused, the connection's identity.
    msn: u32,
    reused: bool,
    /// The message that is arriving.
    partial: Option<Vec<u8>>,
    buffers: VecDeque<Vec<u8>>,
    mtu: usize,
    max_message: usize,
    /// PSN of the packet after the gap that was NAKed, until the missing one arrives.
    nak_sent_for: Option<Psn>,
    /// A pending acknowledgement.
    pending: Option<Pending>,
    /// Whether messages are acknowledged that do not request it, and when that is due.
    is_selective_bypass: bool,
    unrequested_ack_at: Option<Instant>,
    /// The code of its ACKs.
    credits: u8,
    /// The pending NAK answers a packet from far ahead.
    from_far: bool,
}

/// NAKs behind a box, and when to send them. Packets have their numbers.
#[derive(Debug, Default)]
struct LossTracker {
    /// Gaps that may be another rank's loss: when to NAK packets that are missing before a packet.
    waiting: VecDeque<(u64, Instant)>,
    /// Packets missing before this one are NAKed.
    nak_before: u64,
    /// Packets that the box has not received from this connection's sender are NAKed, too.
    reported: BTreeSet<u64>,
    /// When to repeat the NAK for missing packets, and the pause before.
    again: Option<(Instant, Duration)>,
}

impl LossTracker {
    /// NAKs packets that are missing before a packet. Returns whether there was a gap before it
    /// that waits.
    fn request(&mut self, before: u64) -> bool {
        self.nak_before = self.nak_before.max(before);
        let gaps = self.waiting.partition_point(|(end, _)| *end <= before);
        self.waiting.drain(..gaps).count() > 0
    }
}

/// A packet that arrived early.
#[derive(Debug)]
struct Early {
    opcode: Opcode,
    immediate: Option<u32>,
    payload: Vec<u8>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pending {
    Ack,
    Nak(Syndrome),
}

/// The result of receiving a packet.
#[derive(Debug, PartialEq, Eq)]
pub enum Arrival {
    /// Accepted, perhaps with packets that had arrived early.
    Taken,
    /// A duplicate.
    Duplicate,
    /// The packet is after a gap, and is dropped or kept.
    OutOfSequence {
        /// A NAK answers it.
        nak: bool,
    },
    /// No buffer was posted.
    NotReady,
    /// First, middle and last packets are not in order, or a packet has a wrong length.
    Invalid,
    /// The message is longer than allowed.
    TooLong,
}

impl Responder {
    /// Nothing received yet.
    pub fn new(c: &QpConfig) -> Self {
        Self {
            expected: c.recv_psn,
            accepted: 0,
            newest: c.recv_psn,
            early: c.selective.then(BTreeMap::new),
            swapped: BTreeMap::new(),
            sums: c.waits_for_others,
            loss_tracker: (c.selective && c.waits_for_others).then(LossTracker::default),
            reach: u64::from(c.max_early),
            msn: 0,
            reused: c.reused,
            partial: None,
            buffers: VecDeque::new(),
            mtu: c.mtu,
            max_message: c.max_message,
            nak_sent_for: None,
            pending: None,
            is_selective_bypass: c.is_selective_bypass(),
            unrequested_ack_at: None,
            credits: if c.is_selective_bypass() { credits(c.max_inflight) } else { NO_LIMIT },
            from_far: false,
        }
    }

    /// Adds a buffer for one message.
    pub fn post(&mut self, mut buffer: Vec<u8>) {
        buffer.clear();
        self.buffers.push_back(buffer);
    }

    /// Processes a data packet; `done` gets the messages that it completes. Behind a box, NAKs are
    /// repeated after `pause`.
    pub fn on_data(
        &mut self,
        p: &Packet<'_>,
        (now, pause): (Instant, Duration),
        mut done: impl FnMut(Vec<u8>, Option<u32>),
    ) -> Arrival {
        let psn = Psn::new(p.bth.psn);
        let ahead = psn.ahead_of(self.expected);
        if ahead < self.reach as i32 {
            self.newest = psn;
        }
        if ahead < 0 {
            // Its acknowledgement may have been lost.
            self.acknowledge();
            return Arrival::Duplicate;
        }
        if ahead > 0 {
            return if self.early.is_some() {
                self.keep(p, ahead as u64, (now, pause))
            } else {
                self.keep_swapped(p, ahead as u64);
                self.past_gap(psn, ahead)
            };
        }
        if let Err(refused) = self.take(p.bth.opcode, p.payload, p.immediate, &mut done) {
            return refused;
        }
        self.nak_sent_for = None;
        if matches!(self.pending, Some(Pending::Nak(_))) && !self.from_far {
            // The gap that it NAKed is filled. A packet from far ahead may follow a later gap: the
            // box forwards it at once, while the results before it wait for all ranks.
            self.pending = Some(Pending::Ack);
        }
        if p.bth.ack_request {
            self.acknowledge();
        } else if self.is_selective_bypass && p.bth.opcode.is_last() {
            self.unrequested_ack_at.get_or_insert(now + UNREQUESTED_ACK_DELAY);
        }
        let filled =
            self.early.as_ref().is_some_and(|early| !early.is_empty()) || !self.swapped.is_empty();
        while let Some(next) =
            self.early.as_mut().unwrap_or(&mut self.swapped).remove(&self.accepted)
        {
            match self.take(next.opcode, &next.payload, next.immediate, &mut done) {
                Ok(()) => {}
                // The sender repeats it when there is a buffer.
                Err(Arrival::NotReady) => break,
                Err(refused) => return refused,
            }
        }
        if filled {
            self.swapped = self.swapped.split_off(&self.accepted);
            self.acknowledge();
            if let Some(loss_tracker) = &mut self.loss_tracker {
                loss_tracker.request(self.accepted);
                loss_tracker.reported = loss_tracker.reported.split_off(&self.accepted);
            }
        }
        Arrival::Taken
    }

    /// Whether early packets may belong to an earlier connection. They are not kept, and each one
    /// is answered with a NAK for the first packet.
    pub fn waits_for_first(&self) -> bool {
        self.reused && self.accepted == 0
    }

    /// Keeps a packet right after the expected one for a moment.
    fn keep_swapped(&mut self, p: &Packet<'_>, ahead: u64) {
        if self.sums && ahead <= SWAPPED as u64 && p.payload.len() <= self.mtu {
            let (opcode, immediate, payload) = (p.bth.opcode, p.immediate, p.payload.to_vec());
            self.swapped.insert(self.accepted + ahead, Early { opcode, immediate, payload });
        }
    }

    /// Drops a packet after a gap.
    fn past_gap(&mut self, psn: Psn, ahead: i32) -> Arrival {
        // One NAK for a gap, then silence until the missing packet arrives. But a PSN not beyond
        // the one that was answered shows that the sender has gone back once more, or that the
        // first NAK may be lost.
        let far = ahead >= GAP_PSN_AHEAD as i32;
        let nak = far
            || self.waits_for_first()
            || self.nak_sent_for.is_none_or(|answered| psn.ahead_of(answered) <= 0);
        if nak {
            self.from_far |= far;
            self.nak_sent_for = Some(psn);
            self.pending = Some(Pending::Nak(Syndrome::Nak(Nak::SequenceError)));
        }
        Arrival::OutOfSequence { nak }
    }

    /// Handles a packet from far ahead: the box received `packet` but not a packet before it from
    /// the sender. `packet` is the last one that is missing here.
    fn lost_before(&mut self, packet: u64) -> bool {
        let early = self.early.as_ref();
        let lacks = |n: &u64| early.is_some_and(|early| !early.contains_key(n));
        let lost = (self.accepted..packet).rev().find(lacks);
        if let (Some(lost), Some(loss_tracker)) = (lost, &mut self.loss_tracker) {
            loss_tracker.reported.insert(lost);
            self.newest = self.expected.plus((packet - self.accepted) as u32);
            self.acknowledge();
        }
        lost.is_some()
    }

    /// Keeps a packet after a gap, and NAKs the gap if it is new.
    fn keep(&mut self, p: &Packet<'_>, ahead: u64, (now, pause): (Instant, Duration)) -> Arrival {
        let before = ahead as i64 - i64::from(GAP_PSN_AHEAD);
        if self.loss_tracker.is_some() && before.unsigned_abs() <= self.reach {
            let lost = self.lost_before(self.accepted.saturating_add_signed(before));
            if let Some(loss_tracker) = self.loss_tracker.as_mut().filter(|_| lost) {
                loss_tracker.again = Some((now + pause, pause));
            }
            return Arrival::OutOfSequence { nak: lost };
        }
        // Drops the packet, and NAKs as a receiver without a list does: the list would not include
        // it.
        let may = ahead < self.reach && p.payload.len() <= self.mtu && !self.waits_for_first();
        let Some(early) = self.early.as_mut().filter(|_| may) else {
            return self.past_gap(Psn::new(p.bth.psn), ahead as i32);
        };
        let number = self.accepted + ahead;
        let behind_a_gap =
            early.last_key_value().map_or(self.accepted, |(last, _)| last + 1) < number;
        let known = early.contains_key(&number);
        if !known {
            let (opcode, immediate) = (p.bth.opcode, p.immediate);
            early.insert(number, Early { opcode, immediate, payload: p.payload.to_vec() });
        }
        let lost =
            self.loss_tracker.is_some() && p.bth.flags & PAST_GAP != 0 && self.lost_before(number);
        let requests = match &mut self.loss_tracker {
            // The box has sent all packets before it: missing ones are lost.
            Some(loss_tracker) if p.bth.flags & IN_ORDER != 0 => {
                loss_tracker.request(number) || behind_a_gap
            }
            Some(loss_tracker) if behind_a_gap => {
                loss_tracker.waiting.push_back((number, now + pause));
                lost
            }
            _ => behind_a_gap || lost,
        };
        if let Some(loss_tracker) = self.loss_tracker.as_mut().filter(|_| requests) {
            loss_tracker.again = Some((now + pause, pause));
        }
        let nak = requests || known || p.bth.ack_request;
        if nak {
            self.acknowledge();
        }
        if known { Arrival::Duplicate } else { Arrival::OutOfSequence { nak } }
    }

    /// Accepts the expected packet.
    fn take(
        &mut self,
        op: Opcode,
        payload: &[u8],
        immediate: Option<u32>,
        done: &mut impl FnMut(Vec<u8>, Option<u32>),
    ) -> Result<(), Arrival> {
        let whole = payload.len() == self.mtu;
        if op.is_first() != self.partial.is_none()
            || !op.is_last() && !whole
            || payload.len() > self.mtu
        {
            self.pending = Some(Pending::Nak(Syndrome::Nak(Nak::InvalidRequest)));
            return Err(Arrival::Invalid);
        }
        if self.partial.as_ref().map_or(0, Vec::len) + payload.len() > self.max_message {
            self.partial = None;
            self.pending = Some(Pending::Nak(Syndrome::Nak(Nak::InvalidRequest)));
            return Err(Arrival::TooLong);
        }
        if op.is_first() {
            match self.buffers.pop_front() {
                Some(buffer) => self.partial = Some(buffer),
                None => {
                    self.pending = Some(Pending::Nak(Syndrome::RnrNak(RNR_TIMER)));
                    // Packets after it are lost with it, and need no NAK of their own.
                    self.nak_sent_for = Some(self.expected);
                    return Err(Arrival::NotReady);
                }
            }
        }
        if self.waits_for_first() {
            self.msn = connection_id(payload);
        }
        self.expected = self.expected.plus(1);
        self.accepted += 1;
        if let Some(partial) = &mut self.partial {
            partial.extend_from_slice(payload);
        }
        if op.is_last() {
            self.msn = if self.reused { self.msn } else { serial::add(self.msn, 1) };
            if let Some(message) = self.partial.take() {
                done(message, immediate);
            }
        }
        Ok(())
    }

    /// Refuses a request that is not data, once all packets before it have arrived. The sender gets
    /// an error and does not retry for ever.
    pub fn refuse(&mut self, psn: Psn) {
        if psn == self.expected {
            self.pending = Some(Pending::Nak(Syndrome::Nak(Nak::InvalidRequest)));
        } else if psn.ahead_of(self.expected) > 0 && self.nak_sent_for.is_none() {
            self.nak_sent_for = Some(psn);
            self.pending = Some(Pending::Nak(Syndrome::Nak(Nak::SequenceError)));
        }
    }

    fn acknowledge(&mut self) {
        // A NAK acknowledges everything that an ACK would.
        if self.pending.is_none() {
            self.pending = Some(Pending::Ack);
        }
    }

    /// When [`on_timeout`](Self::on_timeout) should be called.
    pub fn deadline(&self) -> Option<Instant> {
        let loss_tracker = self.loss_tracker.as_ref();
        let waiting = loss_tracker.and_then(|t| t.waiting.front()).map(|(_, until)| *until);
        let again = loss_tracker.and_then(|t| t.again).map(|(at, _)| at);
        [waiting, again, self.unrequested_ack_at].into_iter().flatten().min()
    }

    /// Acknowledges now what was to wait for later messages.
    pub fn acknowledge_unrequested(&mut self) {
        if self.unrequested_ack_at.take().is_some() {
            self.acknowledge();
        }
    }

    /// Checks the timers. Returns whether a NAK is pending.
    pub fn on_timeout(&mut self, now: Instant) -> bool {
        if self.unrequested_ack_at.is_some_and(|at| now >= at) {
            self.acknowledge_unrequested();
        }
        let Some(loss_tracker) = &mut self.loss_tracker else { return false };
        let over = loss_tracker.waiting.iter().take_while(|(_, until)| *until <= now).last();
        let over = over.map(|(end, _)| *end);
        let again = loss_tracker.again.take_if(|(at, _)| now >= *at);
        if let Some((_, pause)) = again.filter(|(_, pause)| *pause < LONGEST_PAUSE) {
            loss_tracker.again = Some((now + pause * 2, pause * 2));
        }
        if let Some(end) = over {
            loss_tracker.request(end);
        }
        let requests = (over.is_some() || again.is_some()) && self.gaps().is_some();
        if requests {
            self.acknowledge();
        } else if let Some(loss_tracker) = self.loss_tracker.as_mut().filter(|_| again.is_some()) {
            loss_tracker.again = None;
        }
        requests
    }

    /// Whether an acknowledgement is pending.
    pub fn due(&self) -> bool {
        self.pending.is_some()
    }

    /// Takes the pending acknowledgement: its PSN and AETH, and the list of gaps.
    pub fn poll(&mut self) -> Option<(Psn, Aeth, Option<Gaps>)> {
        let pending = self.pending.take()?;
        (self.from_far, self.unrequested_ack_at) = (false, None);
        let gaps = if pending == Pending::Ack { self.gaps() } else { None };
        let (psn, syndrome) = match pending {
            Pending::Ack if gaps.is_none() => (self.expected.minus(1), Syndrome::Ack(self.credits)),
            Pending::Ack => (self.expected, Syndrome::Nak(Nak::SequenceError)),
            Pending::Nak(syndrome) => (self.expected, syndrome),
        };
        Some((psn, Aeth { syndrome, msn: self.msn }, gaps))
    }

    fn gaps(&self) -> Option<Gaps> {
        let early = self.early.as_ref()?;
        let psn = |number: u64| self.expected.plus((number - self.accepted) as u32);
        let nak_before =
            self.loss_tracker.as_ref().map_or(u64::MAX, |loss_tracker| loss_tracker.nak_before);
        let (mut missing, mut next) = (Vec::new(), self.accepted);
        for &number in early.keys() {
            let end = number.min(nak_before);
            if end > next {
                missing.push((psn(next), (end - next) as u32));
            }
            next = number + 1;
        }
        let reported = self
            .loss_tracker
            .iter()
            .flat_map(|loss_tracker| loss_tracker.reported.range(nak_before.max(self.accepted)..));
        missing.extend(reported.filter(|n| !early.contains_key(n)).map(|n| (psn(*n), 1)));
        (!missing.is_empty()).then_some(Gaps { newest: self.newest, missing })
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;
    use std::time::Instant;

    use netsum_common::wire::{Bth, Opcode, ROCE_PORT};

    use super::*;
    use crate::packet::{Extended, Verifier, encode};
    use crate::{Endpoint, EndpointConfig, Event, QpConfig, QpError, Qpn};

    const MTU: usize = 256;

    #[test]
    fn a_message_without_an_end_is_refused_at_its_bound() {
        let [peer, own]: [IpAddr; 2] = [[10, 0, 0, 1], [10, 0, 0, 2]].map(IpAddr::from);
        let packets = 5;
        for last in [packets - 1, u32::MAX] {
            let mut endpoint = Endpoint::new(own, EndpointConfig::default());
            let config =
                QpConfig::new(Qpn::new(1), peer, Qpn::new(2), Psn::new(0), Psn::new(0), MTU);
            let qp = endpoint
                .add_qp(QpConfig { max_message: packets as usize * MTU, ..config })
                .unwrap();
            endpoint.post_receive(qp, Vec::new());
            for psn in 0..packets.max(last.min(1000)) {
                let mut datagram = Vec::new();
                let bth = Bth::new(Opcode::data(false, psn == 0, psn == last, false), 1, psn);
                encode(
                    &mut datagram,
                    (peer, ROCE_PORT).into(),
                    own,
                    0,
                    &bth,
                    &Extended::default(),
                    &[7; MTU],
                );
                endpoint.receive(Instant::now(), (peer, ROCE_PORT).into(), false, &datagram);
            }
            let event = endpoint.poll_event();
            if last < packets {
                assert!(
                    matches!(event, Some(Event::Received { data, .. }) if data.len() == 5 * MTU)
                );
                continue;
            }
            assert_eq!(event, Some(Event::Failed { qp, error: QpError::MessageTooLong(5 * MTU) }));
            assert_eq!(endpoint.poll_event(), None, "it has no further events");
            let mut buf = Vec::new();
            assert!(endpoint.poll_transmit(Instant::now(), &mut buf).is_some());
            let mut verifier = Verifier::new(peer, false);
            let nak = verifier.decode((own, ROCE_PORT).into(), &buf).unwrap();
            assert_eq!(nak.aeth.unwrap().syndrome, Syndrome::Nak(Nak::InvalidRequest));
        }
    }

    #[test]
    fn stored_packets_are_bounded() {
        let [peer, own]: [IpAddr; 2] = [[10, 0, 0, 1], [10, 0, 0, 2]].map(IpAddr::from);
        let config = QpConfig::new(Qpn::new(1), peer, Qpn::new(2), Psn::new(0), Psn::new(0), MTU);
        let mut responder = Responder::new(&QpConfig { selective: true, max_early: 8, ..config });
        let mut take = |psn, len| {
            let mut datagram = Vec::new();
            let bth = Bth::new(Opcode::SEND_MIDDLE, 1, psn);
            encode(
                &mut datagram,
                (peer, ROCE_PORT).into(),
                own,
                0,
                &bth,
                &Extended::default(),
                &vec![7; len],
            );
            let mut verifier = Verifier::new(own, false);
            let packet = verifier.decode((peer, ROCE_PORT).into(), &datagram).unwrap();
            responder.on_data(&packet, (Instant::now(), Duration::ZERO), |_, _| {
                panic!("nothing is complete")
            });
            let early = responder.early.as_ref().unwrap();
            assert!(early.len() < 8 && early.values().all(|early| early.payload.len() <= MTU));
            responder.poll().map(|(psn, _, gaps)| (psn, gaps.map(|gaps| gaps.missing)))
        };
        for psn in (1..200).chain([1 << 22, (1 << 23) - 1]).cycle().take(1000) {
            take(psn, 60_000);
            take(psn, MTU);
        }
        let missing = vec![(Psn::new(0), 1)];
        assert_eq!(take(7, MTU), Some((Psn::new(0), Some(missing))));
        assert_eq!(take(1, 60_000), Some((Psn::new(0), None)), "the sender goes back");
    }

    /// A selective receiver that expects PSN 0, where the pause is 10 ms.
    struct Receiver {
        responder: Responder,
        start: Instant,
    }

    const PAUSE: Duration = Duration::from_millis(10);

    impl Receiver {
        fn new(waits_for_others: bool) -> Self {
            let peer = IpAddr::from([10, 0, 0, 1]);
            let config =
                QpConfig::new(Qpn::new(1), peer, Qpn::new(2), Psn::new(0), Psn::new(0), MTU);
            let mut responder =
                Responder::new(&QpConfig { selective: true, waits_for_others, ..config });
            (0..9).for_each(|_| responder.post(Vec::new()));
            Self { responder, start: Instant::now() }
        }

        /// Receives packets, some with marks; returns the rows that a NAK lists then.
        fn take(&mut self, packets: &[(u32, u8)]) -> Vec<(u32, u32)> {
            for &(psn, ecn) in packets {
                let bth = Bth { flags: ecn, ..Bth::new(Opcode::SEND_ONLY, 1, psn) };
                let packet = Packet { bth, immediate: None, aeth: None, payload: &[7; MTU] };
                self.responder.on_data(&packet, (self.start, PAUSE), |_, _| ());
            }
            self.requests()
        }

        fn requests(&mut self) -> Vec<(u32, u32)> {
            let gaps = self.responder.poll().and_then(|(_, _, gaps)| gaps);
            gaps.map_or(vec![], |g| {
                g.missing.iter().map(|(first, len)| (first.get(), *len)).collect()
            })
        }

        fn at(&mut self, after: Duration) -> Vec<(u32, u32)> {
            self.responder.on_timeout(self.start + after);
            self.requests()
        }
    }

    #[test]
    fn a_gap_is_asked_for_at_once_where_no_box_is() {
        let mut receiver = Receiver::new(false);
        assert_eq!(receiver.take(&[(1, 0)]), [(0, 1)]);
        assert_eq!(receiver.responder.deadline(), None);
    }

    #[test]
    fn packets_of_an_earlier_connection_are_not_accepted() {
        let peer = IpAddr::from([10, 0, 0, 1]);
        let config = QpConfig::new(Qpn::new(1), peer, Qpn::new(2), Psn::new(0), Psn::new(0), MTU);
        let mut responder = Responder::new(&QpConfig { selective: true, reused: true, ..config });
        (0..9).for_each(|_| responder.post(Vec::new()));
        let mut got = Vec::new();
        for (psn, payload) in [(5, [1; MTU])].into_iter().chain((0..6).map(|psn| (psn, [2; MTU]))) {
            let bth = Bth::new(Opcode::SEND_ONLY, 1, psn);
            let packet = Packet { bth, immediate: None, aeth: None, payload: &payload };
            responder.on_data(&packet, (Instant::now(), PAUSE), |message, _| got.push(message[0]));
        }
        assert_eq!(got, [2; 6]);
    }

    #[test]
    fn behind_a_box_a_gap_gets_a_nak_when_the_box_shows_whose_it_is() {
        let mut receiver = Receiver::new(true);
        assert_eq!(
            receiver.take(&[(0, IN_ORDER), (2, 0), (3, 0), (5, 0)]),
            [],
            "another rank's, perhaps"
        );
        // All sums before 3 were released: 1 was lost between box and receiver; 4 may still come.
        assert_eq!(receiver.take(&[(3, IN_ORDER)]), [(1, 1)]);
        assert_eq!(receiver.take(&[(6 + GAP_PSN_AHEAD, 0)]), [(1, 1), (4, 1)], "the sender's");
        assert_eq!(receiver.take(&[(1, 0), (4, 0)]), []);
        assert_eq!(
            receiver.take(&[(7, PAST_GAP)]),
            [(6, 1)],
            "the sender's loss, and this is a sum"
        );
        assert_eq!(receiver.take(&[(6, 0)]), []);
        assert_eq!(receiver.at(PAUSE), []);
        assert_eq!(receiver.responder.deadline(), None, "all have arrived");
    }

    #[test]
    fn behind_a_box_an_unmarked_gap_gets_a_nak_after_a_pause_and_again() {
        let mut receiver = Receiver::new(true);
        assert_eq!(receiver.take(&[(1, 0)]), []);
        assert_eq!(receiver.responder.deadline(), Some(receiver.start + PAUSE));
        assert_eq!(receiver.at(PAUSE / 2), []);
        assert_eq!(receiver.at(PAUSE), [(0, 1)]);
        assert_eq!(receiver.take(&[(3 + GAP_PSN_AHEAD, 0)]), [(0, 1), (2, 1)]);
        // The packet or the NAK was lost.
        assert_eq!(receiver.at(PAUSE), [(0, 1), (2, 1)]);
        assert_eq!(receiver.at(2 * PAUSE), []);
        assert_eq!(receiver.at(3 * PAUSE), [(0, 1), (2, 1)]);
        assert_eq!(receiver.responder.deadline(), None, "timeouts handle the rest");
    }
}
