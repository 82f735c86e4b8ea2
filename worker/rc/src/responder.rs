//! The receiving half of a queue pair: packets in, messages out, acknowledgements back (IBTA 9.7.4, 9.7.5, 9.7.8).
//!
//! A selective one keeps what comes early, and tells what is missing ([`Gaps`]).

use std::collections::{BTreeMap, VecDeque};

use netsum_common::serial;
use netsum_common::wire::{Aeth, Nak, Opcode, Syndrome};

use super::gaps::Gaps;
use super::packet::Packet;
use super::{Psn, QpConfig};

/// RNR NAK timer code for 0.64 ms (IBTA table 46).
const RNR_TIMER: u8 = 12;

/// State of the receiving half.
#[derive(Debug)]
pub struct Responder {
    expected: Psn,
    /// Packets taken: the number of the expected one.
    taken: u64,
    /// What has come early, by number; `None` where that is dropped.
    early: Option<BTreeMap<u64, Early>>,
    /// The last packet that came, of those that may.
    came: Psn,
    /// How far ahead of the expected packet one may be that is kept.
    reach: u64,
    msn: u32,
    /// The message that is arriving.
    partial: Option<Vec<u8>>,
    buffers: VecDeque<Vec<u8>>,
    mtu: usize,
    max_message: usize,
    /// PSN of the packet past the gap that was answered with a NAK, until the missing one arrives.
    nak_sent_for: Option<Psn>,
    /// An acknowledgement that is due.
    pending: Option<Pending>,
    /// The NAK that is due answers a packet from far ahead.
    from_far: bool,
}

/// A packet that came before its turn.
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

/// What became of a packet.
#[derive(Debug, PartialEq, Eq)]
pub enum Arrival {
    /// Taken, and with it what had come early.
    Taken,
    /// Had arrived before.
    Duplicate,
    /// Came past a gap, and is dropped or kept; whether a NAK answers it.
    OutOfSequence {
        /// A NAK answers it.
        nak: bool,
    },
    /// No buffer was posted.
    NotReady,
    /// First, middle and last do not follow each other as they must, or a packet has a wrong length.
    Invalid,
    /// The message is longer than may be.
    TooLong,
}

impl Responder {
    /// Nothing received yet.
    pub fn new(c: &QpConfig) -> Self {
        Self {
            expected: c.recv_psn,
            taken: 0,
            came: c.recv_psn,
            early: c.selective.then(BTreeMap::new),
            reach: u64::from(c.max_early),
            msn: 0,
            partial: None,
            buffers: VecDeque::new(),
            mtu: c.mtu,
            max_message: c.max_message,
            nak_sent_for: None,
            pending: None,
            from_far: false,
        }
    }

    /// Gives a buffer for one message.
    pub fn post(&mut self, mut buffer: Vec<u8>) {
        buffer.clear();
        self.buffers.push_back(buffer);
    }

    /// Takes a data packet in; `done` gets the messages that it completes.
    pub fn on_data(&mut self, p: &Packet<'_>, mut done: impl FnMut(Vec<u8>, Option<u32>)) -> Arrival {
        let psn = Psn::new(p.bth.psn);
        let ahead = psn.ahead_of(self.expected);
        if ahead < self.reach as i32 {
            self.came = psn;
        }
        if ahead < 0 {
            // Its acknowledgement may have been lost.
            self.acknowledge();
            return Arrival::Duplicate;
        }
        if ahead > 0 {
            return if self.early.is_some() { self.keep(p, ahead as u64) } else { self.past_gap(psn, ahead) };
        }
        if let Err(refused) = self.take(p.bth.opcode, p.payload, p.immediate, &mut done) {
            return refused;
        }
        self.nak_sent_for = None;
        if matches!(self.pending, Some(Pending::Nak(_))) && !self.from_far {
            // What it complained of has arrived. What the box complains of from far ahead may be a packet behind this one:
            // a gap is passed on at once, and the results before it wait for all ranks.
            self.pending = Some(Pending::Ack);
        }
        if p.bth.ack_request {
            self.acknowledge();
        }
        let filled = self.early.as_ref().is_some_and(|early| !early.is_empty());
        while let Some(next) = self.early.as_mut().and_then(|early| early.remove(&self.taken)) {
            match self.take(next.opcode, &next.payload, next.immediate, &mut done) {
                Ok(()) => {}
                // It is sent again when there is a buffer.
                Err(Arrival::NotReady) => break,
                Err(refused) => return refused,
            }
        }
        if filled {
            self.acknowledge();
        }
        Arrival::Taken
    }

    /// A packet past a gap is dropped.
    fn past_gap(&mut self, psn: Psn, ahead: i32) -> Arrival {
        // One NAK for a gap, then silence until the missing packet arrives; but a PSN no farther than the one that
        // was answered shows that the sender has gone back once more, or that the first NAK may be lost.
        let far = ahead >= netsum_common::slot::GAP_PSN_AHEAD as i32;
        let nak = far || self.nak_sent_for.is_none_or(|answered| psn.ahead_of(answered) <= 0);
        if nak {
            self.from_far |= far;
            self.nak_sent_for = Some(psn);
            self.pending = Some(Pending::Nak(Syndrome::Nak(Nak::SequenceError)));
        }
        Arrival::OutOfSequence { nak }
    }

    /// A packet past a gap is kept, and the gap told of if it is a new one.
    fn keep(&mut self, p: &Packet<'_>, ahead: u64) -> Arrival {
        // Dropped, and told of as where nothing is kept: the list would not have it.
        let may = ahead < self.reach && p.payload.len() <= self.mtu;
        let Some(early) = self.early.as_mut().filter(|_| may) else {
            return self.past_gap(Psn::new(p.bth.psn), ahead as i32);
        };
        let number = self.taken + ahead;
        let behind_a_gap = early.last_key_value().map_or(self.taken, |(last, _)| last + 1) < number;
        let known = early.contains_key(&number);
        if !known {
            let (opcode, immediate) = (p.bth.opcode, p.immediate);
            early.insert(number, Early { opcode, immediate, payload: p.payload.to_vec() });
        }
        let nak = behind_a_gap || known || p.bth.ack_request;
        if nak {
            self.acknowledge();
        }
        if known { Arrival::Duplicate } else { Arrival::OutOfSequence { nak } }
    }

    /// Takes the expected packet in.
    fn take(
        &mut self,
        op: Opcode,
        payload: &[u8],
        immediate: Option<u32>,
        done: &mut impl FnMut(Vec<u8>, Option<u32>),
    ) -> Result<(), Arrival> {
        let whole = payload.len() == self.mtu;
        if op.is_first() != self.partial.is_none() || !op.is_last() && !whole || payload.len() > self.mtu {
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
                    // Those that follow are lost with it and need no NAK of their own.
                    self.nak_sent_for = Some(self.expected);
                    return Err(Arrival::NotReady);
                }
            }
        }
        self.expected = self.expected.plus(1);
        self.taken += 1;
        if let Some(partial) = &mut self.partial {
            partial.extend_from_slice(payload);
        }
        if op.is_last() {
            self.msn = serial::add(self.msn, 1);
            if let Some(message) = self.partial.take() {
                done(message, immediate);
            }
        }
        Ok(())
    }

    /// Refuses a request that is none of data, when its turn comes: the sender is told, and not left to try for ever.
    pub fn refuse(&mut self, psn: Psn) {
        if psn == self.expected {
            self.pending = Some(Pending::Nak(Syndrome::Nak(Nak::InvalidRequest)));
        } else if psn.ahead_of(self.expected) > 0 && self.nak_sent_for.is_none() {
            self.nak_sent_for = Some(psn);
            self.pending = Some(Pending::Nak(Syndrome::Nak(Nak::SequenceError)));
        }
    }

    fn acknowledge(&mut self) {
        // A NAK acknowledges all that an ACK would.
        if self.pending.is_none() {
            self.pending = Some(Pending::Ack);
        }
    }

    /// Whether an acknowledgement is due.
    pub fn due(&self) -> bool {
        self.pending.is_some()
    }

    /// The acknowledgement that is due: its PSN and AETH, and what is missing.
    pub fn poll(&mut self) -> Option<(Psn, Aeth, Option<Gaps>)> {
        let pending = self.pending.take()?;
        self.from_far = false;
        let gaps = if pending == Pending::Ack { self.gaps() } else { None };
        let (psn, syndrome) = match pending {
            Pending::Ack if gaps.is_none() => (self.expected.minus(1), Syndrome::Ack(0x1f)),
            Pending::Ack => (self.expected, Syndrome::Nak(Nak::SequenceError)),
            Pending::Nak(syndrome) => (self.expected, syndrome),
        };
        Some((psn, Aeth { syndrome, msn: self.msn }, gaps))
    }

    fn gaps(&self) -> Option<Gaps> {
        let early = self.early.as_ref()?;
        let psn = |number: u64| self.expected.plus((number - self.taken) as u32);
        if early.is_empty() {
            return None;
        }
        let (mut missing, mut next) = (Vec::new(), self.taken);
        for &number in early.keys() {
            if number > next {
                missing.push((psn(next), (number - next) as u32));
            }
            next = number + 1;
        }
        Some(Gaps { came: self.came, missing })
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
            let config = QpConfig::new(Qpn::new(1), peer, Qpn::new(2), Psn::new(0), Psn::new(0), MTU);
            let qp = endpoint.add_qp(QpConfig { max_message: packets as usize * MTU, ..config }).unwrap();
            endpoint.post_receive(qp, Vec::new());
            for psn in 0..packets.max(last.min(1000)) {
                let mut datagram = Vec::new();
                let bth = Bth::new(Opcode::data(false, psn == 0, psn == last, false), 1, psn);
                encode(&mut datagram, peer, own, 0, &bth, &Extended::default(), &[7; MTU]);
                endpoint.receive(Instant::now(), (peer, ROCE_PORT).into(), false, &datagram);
            }
            let event = endpoint.poll_event();
            if last < packets {
                assert!(matches!(event, Some(Event::Received { data, .. }) if data.len() == 5 * MTU));
                continue;
            }
            assert_eq!(event, Some(Event::Failed { qp, error: QpError::MessageTooLong(5 * MTU) }));
            assert_eq!(endpoint.poll_event(), None, "nothing more happens on it");
            let mut buf = Vec::new();
            assert!(endpoint.poll_transmit(Instant::now(), &mut buf).is_some());
            let mut verifier = Verifier::new(peer, false);
            let nak = verifier.decode((own, ROCE_PORT).into(), &buf).unwrap();
            assert_eq!(nak.aeth.unwrap().syndrome, Syndrome::Nak(Nak::InvalidRequest));
        }
    }

    #[test]
    fn no_more_is_kept_than_may_be() {
        let [peer, own]: [IpAddr; 2] = [[10, 0, 0, 1], [10, 0, 0, 2]].map(IpAddr::from);
        let config = QpConfig::new(Qpn::new(1), peer, Qpn::new(2), Psn::new(0), Psn::new(0), MTU);
        let mut responder = Responder::new(&QpConfig { selective: true, max_early: 8, ..config });
        let mut take = |psn, len| {
            let mut datagram = Vec::new();
            let bth = Bth::new(Opcode::SEND_MIDDLE, 1, psn);
            encode(&mut datagram, peer, own, 0, &bth, &Extended::default(), &vec![7; len]);
            let mut verifier = Verifier::new(own, false);
            let packet = verifier.decode((peer, ROCE_PORT).into(), &datagram).unwrap();
            responder.on_data(&packet, |_, _| panic!("nothing is complete"));
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
}
