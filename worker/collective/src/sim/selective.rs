//! The second model of an endpoint: selective retransmission as in IRN (Mittal et al., "Revisiting Network Support for
//! RDMA", SIGCOMM 2018, sections 3.1 and 4). For rings whose box releases sums in any order.
//!
//! The receiver acknowledges each packet. One that is out of order is kept, and answered with a NAK whose PSN is the
//! expected one and whose MSN field is the PSN of the packet that has come. On a NAK or a time-out the sender goes into
//! recovery: it sends the oldest packet again, then each that has not arrived although a later one has, then new ones;
//! until all is acknowledged that had been sent when recovery began.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use netsum_common::serial;
use netsum_common::wire::{Aeth, Bth, Nak, Opcode, ROCE_PORT, Syndrome};

use super::stack::Stack;
use crate::buffer::Buffer;
use crate::channels::{Channel, ChannelEvent, Channels};
use crate::queue_pairs::{Numbers, RankNumbers};
use crate::shape::JobShape;
use netsum_rc::packet::{Extended, Verifier, encode};
use netsum_rc::{Psn, Qpn, Stats, Transmit};

/// As in the other model, where the acknowledgement waits for nobody.
const PROMPT_ACK_TIMEOUT: Duration = Duration::from_millis(8);
/// And where it may.
const ACK_TIMEOUT: Duration = Duration::from_micros(67_109);
/// Most packets that a receiver keeps ahead of the expected one.
const REACH: i32 = 1 << 16;

#[derive(Debug)]
struct Message {
    id: u64,
    data: Vec<u8>,
    first: u64,
    packets: u64,
}

#[derive(Clone, Copy, Debug)]
struct Recovery {
    /// The oldest packet when it began, which is lost in any case.
    from: u64,
    /// The next packet to look at.
    at: u64,
    /// Over once all before is acknowledged.
    end: u64,
}

/// A sender; packets are counted without wrapping.
#[derive(Debug)]
struct Sender {
    qpn: Qpn,
    first_psn: Psn,
    mtu: usize,
    max_inflight: u64,
    messages: VecDeque<Message>,
    posted: u64,
    acked: u64,
    sent: u64,
    /// Arrived, though something before them has not.
    sacked: BTreeSet<u64>,
    recovery: Option<Recovery>,
    /// Packets before this one are acknowledged as soon as they arrive.
    prompt: u64,
    timer: Option<Instant>,
    retries: u32,
}

impl Sender {
    fn psn(&self, packet: u64) -> Psn {
        self.first_psn.plus(packet as u32)
    }

    fn packet(&self, psn: Psn) -> Option<u64> {
        let packet = self.acked.checked_add_signed(i64::from(psn.ahead_of(self.psn(self.acked))));
        packet.filter(|p| *p <= self.sent)
    }

    fn timeout(&self) -> Duration {
        let once = if self.acked < self.prompt { PROMPT_ACK_TIMEOUT } else { ACK_TIMEOUT };
        once * (1 << self.retries.min(4))
    }

    fn rearm(&mut self, now: Instant) {
        self.timer = (self.acked < self.sent).then(|| now + self.timeout());
    }

    /// All before `packet` has arrived.
    fn acknowledge(&mut self, now: Instant, packet: u64) -> Vec<(u64, Vec<u8>)> {
        let mut done = Vec::new();
        if packet <= self.acked {
            return done;
        }
        self.acked = packet;
        self.sacked = self.sacked.split_off(&packet);
        self.retries = 0;
        if self.recovery.is_some_and(|r| packet >= r.end) {
            self.recovery = None;
        }
        while self.messages.front().is_some_and(|m| m.first + m.packets <= packet) {
            done.extend(self.messages.pop_front().map(|m| (m.id, m.data)));
        }
        self.rearm(now);
        done
    }

    fn recover(&mut self) {
        if self.recovery.is_none() && self.acked < self.sent {
            self.recovery = Some(Recovery { from: self.acked, at: self.acked, end: self.sent });
        }
    }

    /// The next packet to send, and whether again.
    fn choose(&mut self) -> Option<(u64, bool)> {
        if let Some(r) = &mut self.recovery {
            let behind = self.sacked.last().copied().unwrap_or(0).max(r.from + 1).min(r.end);
            // The oldest may be there, and not taken for want of a buffer.
            let lost = |p: &u64| *p == r.from || !self.sacked.contains(p);
            if let Some(p) = (r.at.max(self.acked)..behind).find(lost) {
                r.at = p + 1;
                return Some((p, true));
            }
        }
        let n = self.sent;
        if n < self.posted && n < self.acked + self.max_inflight {
            self.sent += 1;
            return Some((n, false));
        }
        None
    }

    fn encode(&mut self, now: Instant, n: u64, from: IpAddr, to: IpAddr, buf: &mut Vec<u8>) {
        let m = &self.messages[self.messages.partition_point(|m| m.first + m.packets <= n)];
        let (first, last) = (n == m.first, n + 1 == m.first + m.packets);
        let at = (n - m.first) as usize * self.mtu;
        let mut bth = Bth::new(Opcode::data(false, first, last, false), self.qpn.get(), self.psn(n).get());
        bth.ack_request = true;
        let payload = &m.data[at..m.data.len().min(at + self.mtu)];
        encode(buf, from, to, 0, &bth, &Extended::default(), payload);
        if self.timer.is_none() {
            self.rearm(now);
        }
    }
}

/// A receiver.
#[derive(Debug)]
struct Receiver {
    qpn: Qpn,
    expected: Psn,
    msn: u32,
    /// By distance from the first PSN ever.
    early: BTreeMap<u64, (Opcode, Vec<u8>)>,
    taken: u64,
    partial: Option<Vec<u8>>,
    buffers: VecDeque<Vec<u8>>,
    answers: VecDeque<(Psn, Aeth)>,
}

impl Receiver {
    fn on_data(&mut self, bth: &Bth, payload: &[u8], stats: &mut Stats) -> Vec<Vec<u8>> {
        let psn = Psn::new(bth.psn);
        let ahead = psn.ahead_of(self.expected);
        let mut messages = Vec::new();
        if ahead < 0 {
            stats.duplicate_request += 1;
        } else if ahead < REACH {
            self.early.entry(self.taken + ahead as u64).or_insert_with(|| (bth.opcode, payload.to_vec()));
        }
        while let Some((opcode, _)) = self.early.get(&self.taken) {
            if opcode.is_first() {
                // Without a buffer it is kept, and taken when it, the oldest, is sent again.
                let Some(buffer) = self.buffers.pop_front() else {
                    stats.not_ready += 1;
                    break;
                };
                self.partial = Some(buffer);
            }
            let Some((opcode, payload)) = self.early.remove(&self.taken) else { break };
            self.taken += 1;
            self.expected = self.expected.plus(1);
            let partial = self.partial.as_mut().expect("a message begins with its first packet");
            partial.extend_from_slice(&payload);
            if opcode.is_last() {
                self.msn = serial::add(self.msn, 1);
                messages.extend(self.partial.take());
            }
        }
        let answer = if psn.ahead_of(self.expected) < 0 {
            (self.expected.minus(1), Aeth { syndrome: Syndrome::Ack(0x1f), msn: self.msn })
        } else {
            stats.out_of_sequence += 1;
            stats.naks_sent += 1;
            let came = if ahead < REACH { psn } else { self.expected };
            (self.expected, Aeth { syndrome: Syndrome::Nak(Nak::SequenceError), msn: came.get() })
        };
        self.answers.push_back(answer);
        messages
    }
}

/// All connections of a rank.
#[derive(Debug)]
pub(super) struct Selective {
    local: IpAddr,
    next: IpAddr,
    previous: IpAddr,
    verifier: Verifier,
    senders: Vec<(Channel, Sender)>,
    receivers: Vec<(Channel, Receiver)>,
    /// Which queue pair: in `senders` when true.
    by_qpn: HashMap<Qpn, (bool, Channel)>,
    events: VecDeque<ChannelEvent>,
    cursor: usize,
    stats: Stats,
}

impl Selective {
    pub fn new(shape: &JobShape, rank: u32, ranks: &[RankNumbers]) -> Self {
        let (n, r) = (ranks.len(), rank as usize);
        let (own, next, previous) = (&ranks[r], &ranks[(r + 1) % n], &ranks[(r + n - 1) % n]);
        let mut all = Self {
            local: own.ip,
            next: next.ip,
            previous: previous.ip,
            verifier: Verifier::new(own.ip, false),
            senders: Vec::new(),
            receivers: Vec::new(),
            by_qpn: HashMap::new(),
            events: VecDeque::new(),
            cursor: 0,
            stats: Stats::default(),
        };
        let fragments = u64::from(shape.layout.message_size.div_ceil(shape.mtu));
        let mtu = shape.mtu as usize;
        let mut connect = |out, into, own: Numbers, next: Numbers, previous: Numbers, max_inflight| {
            all.by_qpn.insert(own.send_qpn, (true, out));
            all.by_qpn.insert(own.receive_qpn, (false, into));
            let sender = Sender {
                qpn: next.receive_qpn,
                first_psn: own.first_psn,
                mtu,
                max_inflight,
                messages: VecDeque::new(),
                posted: 0,
                acked: 0,
                sent: 0,
                sacked: BTreeSet::new(),
                recovery: None,
                prompt: if out == Channel::PlainOut { u64::MAX } else { 0 },
                timer: None,
                retries: 0,
            };
            let receiver = Receiver {
                qpn: previous.send_qpn,
                expected: previous.first_psn,
                msn: 0,
                early: BTreeMap::new(),
                taken: 0,
                partial: None,
                buffers: VecDeque::new(),
                answers: VecDeque::new(),
            };
            all.senders.push((out, sender));
            all.receivers.push((into, receiver));
        };
        connect(Channel::PlainOut, Channel::PlainIn, own.plain, next.plain, previous.plain, 128);
        for i in 0..shape.layout.rings as usize {
            let (out, into) = (Channel::RingOut(i as u32), Channel::RingIn(i as u32));
            let credit = fragments * u64::from(shape.layout.window);
            connect(out, into, own.rings[i], next.rings[i], previous.rings[i], credit);
        }
        all
    }

    fn sender(&mut self, channel: Channel) -> Option<&mut Sender> {
        self.senders.iter_mut().find(|s| s.0 == channel).map(|s| &mut s.1)
    }
}

impl Channels for Selective {
    fn send(&mut self, channel: Channel, id: u64, data: Buffer) {
        let data = data.into_vec();
        if let Some(s) = self.sender(channel) {
            let packets = data.len().div_ceil(s.mtu).max(1) as u64;
            s.messages.push_back(Message { id, data, first: s.posted, packets });
            s.posted += packets;
        }
    }

    fn expect(&mut self, now: Instant, channel: Channel, id: u64) {
        let Some(s) = self.sender(channel) else { return };
        if let Some(m) = s.messages.iter().rev().find(|m| m.id == id) {
            s.prompt = s.prompt.max(m.first + m.packets);
            let due = now + s.timeout();
            s.timer = s.timer.map(|t| t.min(due));
        }
    }

    fn receive_into(&mut self, channel: Channel, buffer: Buffer) {
        let mut buffer = buffer.into_vec();
        buffer.clear();
        if let Some((_, r)) = self.receivers.iter_mut().find(|r| r.0 == channel) {
            r.buffers.push_back(buffer);
        }
    }

    fn poll(&mut self) -> Option<ChannelEvent> {
        self.events.pop_front()
    }

    fn close(&mut self, channel: Channel) -> Vec<(u64, Buffer)> {
        self.by_qpn.retain(|_, (_, c)| *c != channel);
        self.receivers.retain(|r| r.0 != channel);
        let at = self.senders.iter().position(|s| s.0 == channel);
        let messages = at.map(|at| self.senders.remove(at).1.messages);
        messages.into_iter().flatten().map(|m| (m.id, m.data.into())).collect()
    }
}

impl Stack for Selective {
    fn receive(&mut self, now: Instant, from: IpAddr, datagram: &[u8]) {
        let Ok(packet) = self.verifier.decode((from, ROCE_PORT).into(), datagram) else {
            self.stats.rx_icrc_encapsulated += 1;
            return;
        };
        let Some((sends, channel)) = self.by_qpn.get(&Qpn::new(packet.bth.qpn)).copied() else { return };
        match (sends, packet.aeth) {
            (true, Some(aeth)) if from == self.next => {
                let Some((_, s)) = self.senders.iter_mut().find(|s| s.0 == channel) else { return };
                let nak = aeth.syndrome == Syndrome::Nak(Nak::SequenceError);
                // An ACK names the last that has arrived, a NAK the first that has not.
                let psn = Psn::new(packet.bth.psn).plus(u32::from(!nak));
                let Some(packet) = s.packet(psn) else { return };
                let done = s.acknowledge(now, packet);
                if nak {
                    let came = s.packet(Psn::new(aeth.msn)).filter(|p| *p > s.acked && *p < s.sent);
                    s.sacked.extend(came);
                    self.stats.packet_seq_err += 1;
                    s.recover();
                }
                let sent = |(id, data): (u64, Vec<u8>)| ChannelEvent::Sent { channel, id, data: data.into() };
                self.events.extend(done.into_iter().map(sent));
            }
            (false, None) if from == self.previous && packet.bth.opcode.is_rc_data() => {
                let Some((_, r)) = self.receivers.iter_mut().find(|r| r.0 == channel) else { return };
                let messages = r.on_data(&packet.bth, packet.payload, &mut self.stats);
                let received = |data: Vec<u8>| ChannelEvent::Received { channel, data: data.into() };
                self.events.extend(messages.into_iter().map(received));
            }
            _ => self.stats.discarded += 1,
        }
    }

    fn poll_transmit(&mut self, now: Instant, buf: &mut Vec<u8>) -> Option<Transmit> {
        buf.clear();
        for (_, r) in &mut self.receivers {
            if let Some((psn, aeth)) = r.answers.pop_front() {
                let ext = Extended { aeth: Some(aeth), ..Extended::default() };
                encode(
                    buf,
                    self.local,
                    self.previous,
                    0,
                    &Bth::new(Opcode::ACK, r.qpn.get(), psn.get()),
                    &ext,
                    &[],
                );
                return Some(Transmit { to: self.previous, segment_size: None, len: buf.len() });
            }
        }
        for i in 0..self.senders.len() {
            let at = (self.cursor + i) % self.senders.len();
            let s = &mut self.senders[at].1;
            if let Some((n, again)) = s.choose() {
                s.encode(now, n, self.local, self.next, buf);
                self.cursor = at + 1;
                self.stats.sent_packets += 1;
                self.stats.retransmissions += u64::from(again);
                return Some(Transmit { to: self.next, segment_size: None, len: buf.len() });
            }
        }
        None
    }

    fn next_timeout(&self) -> Option<Instant> {
        self.senders.iter().filter_map(|s| s.1.timer).min()
    }

    fn handle_timeout(&mut self, now: Instant) {
        for (_, s) in &mut self.senders {
            if s.timer.is_some_and(|t| now >= t) {
                s.retries += 1;
                s.rearm(now);
                s.recovery = None;
                s.recover();
                self.stats.local_ack_timeout += 1;
            }
        }
    }

    fn stats(&self) -> Stats {
        self.stats
    }
}
