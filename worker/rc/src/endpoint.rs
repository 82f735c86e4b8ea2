//! The queue pairs of one address, and the order in which they send.

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use netsum_common::wire::{Bth, Opcode, Syndrome};

use super::gaps::Gaps;
use super::packet::{self, Extended, Malformed, OVERHEAD, Verifier};
use super::requester::{Effect, Requester};
use super::responder::{Arrival, Responder};
use super::rtt::RttEstimator;
use super::{
    EndpointConfig, Event, Operation, Psn, QpConfig, QpError, QpId, Qpn, SetupError, Transmit,
};

/// Most datagrams in one transmission, if the driver allows as many; the kernel's
/// `UDP_MAX_SEGMENTS` is 64 or more (include/linux/udp.h).
const MAX_SEGMENTS: usize = 32;
/// Most bytes in one transmission: those of an IP packet.
const MAX_BATCH: usize = 60_000;

/// Counters of an endpoint. Names follow `rdma statistic` where the meaning is the same.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Stats {
    /// Data packets sent, with retransmissions.
    pub sent_packets: u64,
    /// Data packets sent again.
    pub retransmissions: u64,
    /// Datagrams received.
    pub received_packets: u64,
    /// Bytes of all datagrams sent, without IP and UDP headers.
    pub sent_bytes: u64,
    /// Bytes of all datagrams received, without IP and UDP headers.
    pub received_bytes: u64,
    /// Timeouts.
    pub local_ack_timeout: u64,
    /// NAKs for a missing packet received.
    pub packet_seq_err: u64,
    /// "Receiver not ready" received.
    pub rnr_nak_retry: u64,
    /// NAKs for a missing packet sent.
    pub naks_sent: u64,
    /// Packets that arrived after a gap.
    pub out_of_sequence: u64,
    /// Duplicates.
    pub duplicate_request: u64,
    /// Datagrams with a wrong ICRC.
    pub rx_icrc_encapsulated: u64,
    /// Datagrams that are not valid packets, are for no queue pair or from another address than the
    /// queue pair's, or belong to an earlier connection.
    pub discarded: u64,
    /// Messages for which no buffer was posted.
    pub not_ready: u64,
    /// Requests that this endpoint does not support: READ, atomics, SEND with invalidate.
    pub unsupported: u64,
    /// Congestion notifications sent.
    pub cnp_sent: u64,
    /// Congestion notifications received.
    pub cnp_received: u64,
    /// Packets received with the congestion experienced mark.
    pub ce_received: u64,
}

#[derive(Debug)]
struct Qp {
    id: QpId,
    local_qpn: Qpn,
    /// The address and port that it sends from.
    source: SocketAddr,
    remote: IpAddr,
    remote_qpn: Qpn,
    requester: Requester,
    responder: Responder,
    max_message: usize,
    /// Arriving packets are sums, or ignored.
    sums: bool,
    /// A congestion notification is pending, and when the last one was sent.
    congested: bool,
    notified: Option<Instant>,
    /// Another packet has arrived before the first one.
    first_packet_missing: bool,
    /// When the latest packet was accepted.
    accepted_at: Option<Instant>,
    failed: bool,
}

impl Qp {
    fn transmit(&self, segment_size: Option<usize>, len: usize) -> Transmit {
        Transmit { port: self.source.port(), to: self.remote, segment_size, len }
    }
}

/// Queue pairs of one address.
#[derive(Debug)]
pub struct Endpoint {
    local: IpAddr,
    verifier: Verifier,
    cnp_interval: Option<Duration>,
    rtt: RttEstimator,
    qps: Vec<Qp>,
    by_qpn: HashMap<Qpn, usize>,
    next_id: u32,
    events: VecDeque<Event>,
    cursor: usize,
    max_segments: usize,
    stray: Option<IpAddr>,
    stats: Stats,
}

impl Endpoint {
    /// An endpoint without queue pairs.
    pub fn new(local: IpAddr, config: EndpointConfig) -> Self {
        Self {
            local,
            verifier: Verifier::new(local, config.any_ip_id),
            cnp_interval: config.cnp_interval,
            rtt: RttEstimator::new(),
            qps: Vec::new(),
            by_qpn: HashMap::new(),
            next_id: 0,
            events: VecDeque::new(),
            cursor: 0,
            max_segments: MAX_SEGMENTS,
            stray: None,
            stats: Stats::default(),
        }
    }

    /// Limits the datagrams in one transmission.
    pub fn set_max_segments(&mut self, segments: usize) {
        self.max_segments = segments.clamp(1, MAX_SEGMENTS);
    }

    /// Creates a queue pair that may send and receive at once.
    pub fn add_qp(&mut self, c: QpConfig) -> Result<QpId, SetupError> {
        if !c.mtu.is_multiple_of(4) || !(256..=4096).contains(&c.mtu) {
            return Err(SetupError::Mtu(c.mtu));
        }
        if c.remote.is_ipv4() != self.local.is_ipv4() {
            return Err(SetupError::Family { local: self.local, remote: c.remote });
        }
        if self.by_qpn.contains_key(&c.local_qpn) {
            return Err(SetupError::Exists(c.local_qpn));
        }
        let id = QpId(self.next_id);
        self.next_id += 1;
        self.by_qpn.insert(c.local_qpn, self.qps.len());
        if c.waits_for_others {
            self.rtt.widen(c.max_inflight);
        }
        self.qps.push(Qp {
            id,
            local_qpn: c.local_qpn,
            source: SocketAddr::new(self.local, c.source_port),
            remote: c.remote,
            remote_qpn: c.remote_qpn,
            requester: Requester::new(&c),
            responder: Responder::new(&c),
            max_message: c.max_message,
            sums: c.waits_for_others,
            congested: false,
            notified: None,
            first_packet_missing: false,
            accepted_at: None,
            failed: false,
        });
        Ok(id)
    }

    /// Removes a queue pair; packets for it are discarded from now on. Returns the messages that
    /// have not been acknowledged, oldest first.
    pub fn remove_qp(&mut self, id: QpId) -> Vec<(u64, Vec<u8>)> {
        let Some(at) = self.qps.iter().position(|q| q.id == id) else { return Vec::new() };
        let mut qp = self.qps.remove(at);
        self.by_qpn = self.qps.iter().enumerate().map(|(i, q)| (q.local_qpn, i)).collect();
        qp.requester.give_up(&mut self.rtt);
        qp.requester.into_messages()
    }

    fn qp(&mut self, id: QpId) -> Option<&mut Qp> {
        self.qps.iter_mut().find(|q| q.id == id)
    }

    /// Queues a message. Does nothing if the queue pair has been removed or has failed.
    pub fn post_send(&mut self, id: QpId, message: u64, data: Vec<u8>, immediate: Option<u32>) {
        if let Some(qp) = self.qp(id).filter(|q| !q.failed) {
            qp.requester.post(message, data, None, immediate);
        }
    }

    /// Queues an RDMA WRITE to an address of the other side, whatever the queue pair's own
    /// operation is. Its receiver gets an event only if it has immediate data.
    pub fn post_write(
        &mut self,
        id: QpId,
        message: u64,
        data: Vec<u8>,
        (address, rkey): (u64, u32),
        immediate: Option<u32>,
    ) {
        if let Some(qp) = self.qp(id).filter(|q| !q.failed) {
            qp.requester.post(message, data, Some(Operation::Write { address, rkey }), immediate);
        }
    }

    /// From now on a posted message, and all before it, should be acknowledged as soon as it
    /// arrives; see [`QpConfig::waits_for_others`].
    pub fn expect(&mut self, now: Instant, id: QpId, message: u64) {
        if let Some(qp) = self.qp(id) {
            qp.requester.expect(now, message);
        }
    }

    /// Adds a buffer for one message. Without a buffer the sender gets "receiver not ready".
    pub fn post_receive(&mut self, id: QpId, buffer: Vec<u8>) {
        if let Some(qp) = self.qp(id) {
            qp.responder.post(buffer);
        }
    }

    /// The number of a queue pair's messages that are not acknowledged.
    pub fn outstanding(&mut self, id: QpId) -> usize {
        self.qp(id).map_or(0, |q| q.requester.outstanding())
    }

    /// Processes a datagram's UDP payload. `from` is the sender's address and port, which the ICRC
    /// covers.
    pub fn receive(&mut self, now: Instant, from: SocketAddr, ce: bool, datagram: &[u8]) {
        self.receive_identified(now, from, ce, None, datagram);
    }

    /// [`receive`](Self::receive) where the IPv4 identification is known. The ICRC covers it, so a
    /// wrong one is detected, whatever [`EndpointConfig::any_ip_id`] is.
    pub fn receive_identified(
        &mut self,
        now: Instant,
        from: SocketAddr,
        ce: bool,
        id: Option<u16>,
        datagram: &[u8],
    ) {
        self.stats.received_packets += 1;
        self.stats.received_bytes += datagram.len() as u64;
        self.stats.ce_received += ce as u64;
        let packet = match self.verifier.decode_identified(from, id, datagram) {
            Ok(packet) => packet,
            Err(Malformed::Icrc) => {
                self.stats.rx_icrc_encapsulated += 1;
                return;
            }
            Err(Malformed::Header) => {
                self.stats.discarded += 1;
                return;
            }
        };
        let qp = self.by_qpn.get(&Qpn::new(packet.bth.qpn)).and_then(|i| self.qps.get_mut(*i));
        if qp.as_ref().is_none_or(|q| q.remote != from.ip()) {
            self.stray = Some(from.ip());
        }
        let Some(qp) = qp.filter(|q| q.remote == from.ip() && !q.failed) else {
            self.stats.discarded += 1;
            return;
        };
        if let Some(aeth) = packet.aeth {
            let (id, events) = (qp.id, &mut self.events);
            let done = |message, data| events.push_back(Event::Sent { qp: id, id: message, data });
            let psn = Psn::new(packet.bth.psn);
            if qp.requester.is_of_another(psn, aeth) {
                self.stats.discarded += 1;
                return;
            }
            let effect = match aeth.syndrome {
                Syndrome::Ack(credits) => {
                    qp.requester.on_ack(now, &mut self.rtt, (psn, credits), done);
                    Effect::None
                }
                Syndrome::Nak(netsum_common::wire::Nak::SequenceError) => {
                    self.stats.packet_seq_err += 1;
                    match Gaps::decode(packet.payload).filter(|_| qp.requester.is_selective()) {
                        Some(gaps) => {
                            qp.requester.on_gaps(now, &mut self.rtt, psn, &gaps, done);
                            Effect::None
                        }
                        None => qp.requester.on_sequence_error(now, &mut self.rtt, psn, done),
                    }
                }
                Syndrome::RnrNak(timer) => {
                    self.stats.rnr_nak_retry += 1;
                    qp.requester.on_rnr(now, &mut self.rtt, psn, rnr_delay(timer), done)
                }
                Syndrome::Nak(nak) => Effect::Failed(QpError::Refused(nak)),
                Syndrome::Reserved(_) => Effect::None,
            };
            if let Effect::Failed(error) = effect {
                qp.failed = true;
                qp.requester.give_up(&mut self.rtt);
                self.events.push_back(Event::Failed { qp: id, error });
            }
        } else if packet.bth.opcode.is_rc_data() {
            if ce && let Some(interval) = self.cnp_interval {
                let lately = |t: Instant| now.saturating_duration_since(t) < interval;
                qp.congested |= !qp.notified.is_some_and(lately);
            }
            let (id, events) = (qp.id, &mut self.events);
            let received =
                |data, immediate| events.push_back(Event::Received { qp: id, data, immediate });
            let arrival = qp.responder.on_data(&packet, (now, self.rtt.pause()), received);
            qp.first_packet_missing = qp.responder.waits_for_first();
            if arrival == Arrival::Taken {
                qp.accepted_at = Some(now);
                if qp.sums {
                    self.rtt.on_sum(now);
                }
            }
            match arrival {
                Arrival::Taken => {}
                Arrival::Duplicate => self.stats.duplicate_request += 1,
                Arrival::OutOfSequence { nak } => {
                    self.stats.out_of_sequence += 1;
                    self.stats.naks_sent += nak as u64;
                }
                Arrival::NotReady => self.stats.not_ready += 1,
                // Its NAK still goes out.
                Arrival::Invalid => {
                    qp.failed = true;
                    self.events
                        .push_back(Event::Failed { qp: qp.id, error: QpError::InvalidRequest });
                }
                Arrival::TooLong => {
                    qp.failed = true;
                    let error = QpError::MessageTooLong(qp.max_message);
                    self.events.push_back(Event::Failed { qp: qp.id, error });
                }
            }
        } else if packet.bth.opcode.is_rc_request() {
            self.stats.unsupported += 1;
            qp.responder.refuse(Psn::new(packet.bth.psn));
        } else if packet.bth.opcode == Opcode::CNP {
            self.stats.cnp_received += 1;
            qp.requester.on_congestion();
        } else {
            self.stats.discarded += 1;
        }
    }

    /// Writes the next datagrams to send to `buf`. Congestion notifications and acknowledgements go
    /// first, then queue pairs in round robin.
    pub fn poll_transmit(&mut self, now: Instant, buf: &mut Vec<u8>) -> Option<Transmit> {
        buf.clear();
        for qp in &mut self.qps {
            if std::mem::take(&mut qp.congested) {
                qp.notified = Some(now);
                packet::encode_cnp(buf, qp.source, qp.remote, qp.remote_qpn);
                self.stats.cnp_sent += 1;
                self.stats.sent_bytes += buf.len() as u64;
                return Some(qp.transmit(None, buf.len()));
            }
            if let Some((psn, aeth, gaps)) = qp.responder.poll() {
                let ext = Extended { aeth: Some(aeth), ..Extended::default() };
                let bth = Bth::new(Opcode::ACK, qp.remote_qpn.get(), psn.get());
                let gaps = gaps.map(|gaps| gaps.encode()).unwrap_or_default();
                packet::encode(buf, qp.source, qp.remote, 0, &bth, &ext, &gaps);
                self.stats.sent_bytes += buf.len() as u64;
                return Some(qp.transmit(None, buf.len()));
            }
        }
        for i in 0..self.qps.len() {
            let at = (self.cursor + i) % self.qps.len();
            let qp = &mut self.qps[at];
            if qp.failed || !qp.requester.ready(now) {
                continue;
            }
            self.cursor = at + 1;
            let mut segment = 0;
            let mut count = 0;
            while count < self.max_segments && buf.len() + segment.max(OVERHEAD) <= MAX_BATCH {
                // A last packet with immediate data may be longer than those before it, and must go
                // alone. So must packets that were lost twice: some paths lose whole batches.
                if count > 0 && (qp.requester.next_len() > segment || qp.requester.sends_singly()) {
                    break;
                }
                let Some(out) = qp.requester.poll(now, &mut self.rtt) else { break };
                let start = buf.len();
                packet::encode(
                    buf,
                    qp.source,
                    qp.remote,
                    count as u16,
                    &out.bth,
                    &out.ext,
                    out.payload,
                );
                self.stats.sent_packets += 1;
                self.stats.retransmissions += out.again as u64;
                let len = buf.len() - start;
                count += 1;
                if count == 1 {
                    segment = len;
                    // A first WRITE packet is longer than those that follow, and an only or last
                    // one may be shorter.
                    if out.ext.reth.is_some() || out.bth.opcode.is_last() {
                        break;
                    }
                } else if len < segment || out.bth.opcode.is_last() {
                    break;
                }
            }
            self.stats.sent_bytes += buf.len() as u64;
            let segment_size = (count > 1).then_some(segment);
            return Some(qp.transmit(segment_size, buf.len()));
        }
        None
    }

    /// When [`handle_timeout`](Self::handle_timeout) should be called next.
    pub fn next_timeout(&self) -> Option<Instant> {
        let deadlines = |q: &Qp| [q.requester.deadline(&self.rtt), q.responder.deadline()];
        self.qps.iter().filter(|q| !q.failed).flat_map(deadlines).flatten().min()
    }

    /// Checks the timers.
    pub fn handle_timeout(&mut self, now: Instant) {
        for qp in self.qps.iter_mut().filter(|q| !q.failed) {
            self.stats.naks_sent += u64::from(qp.responder.on_timeout(now));
            match qp.requester.on_timeout(now, &self.rtt) {
                Effect::None => {}
                Effect::WentBack => self.stats.local_ack_timeout += 1,
                Effect::Failed(error) => {
                    qp.failed = true;
                    qp.requester.give_up(&mut self.rtt);
                    self.events.push_back(Event::Failed { qp: qp.id, error });
                }
            }
        }
    }

    /// Acknowledges at once all that has been received: this end is about to be closed.
    pub fn acknowledge_all(&mut self) {
        self.qps.iter_mut().for_each(|qp| qp.responder.acknowledge_unrequested());
    }

    /// The next event.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// Whether all packets that have arrived on a queue pair with [reused](QpConfig::reused)
    /// numbers are after its first packet: the other side still has an earlier connection.
    pub fn is_of_earlier(&self, id: QpId) -> bool {
        self.qps.iter().any(|q| q.id == id && q.first_packet_missing)
    }

    /// When a queue pair last accepted a packet, be it in the middle of a message.
    pub fn last_taken(&self, id: QpId) -> Option<Instant> {
        self.qps.iter().find(|q| q.id == id)?.accepted_at
    }

    /// The address that sent the latest packet for an unknown queue pair, or for one of another
    /// address.
    pub fn stray(&self) -> Option<IpAddr> {
        self.stray
    }

    /// Bytes that were sent and not acknowledged, by all queue pairs.
    pub fn in_flight(&self) -> u64 {
        self.rtt.load()
    }

    /// The counters.
    pub fn stats(&self) -> &Stats {
        &self.stats
    }

    /// This endpoint's address.
    pub fn local(&self) -> IpAddr {
        self.local
    }
}

/// The delay of an RNR NAK timer code (IBTA table 46).
fn rnr_delay(code: u8) -> Duration {
    // In hundredths of a millisecond.
    const TABLE: [u64; 32] = [
        65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024,
        1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
    ];
    Duration::from_micros(TABLE[code as usize & 31] * 10)
}
