//! The receiving half of a queue pair: packets in, messages out, acknowledgements back (IBTA 9.7.4, 9.7.5, 9.7.8).

use std::collections::VecDeque;

use netsum_common::serial;
use netsum_common::wire::{Aeth, Nak, Syndrome};

use super::Psn;
use super::packet::Packet;

/// RNR NAK timer code for 0.64 ms (IBTA table 46).
const RNR_TIMER: u8 = 12;

/// State of the receiving half.
#[derive(Debug)]
pub struct Responder {
    expected: Psn,
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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pending {
    Ack,
    Nak(Syndrome),
}

/// What became of a packet.
#[derive(Debug, PartialEq, Eq)]
pub enum Arrival {
    /// Taken; a message is complete when there is one.
    Taken(Option<(Vec<u8>, Option<u32>)>),
    /// Had arrived before.
    Duplicate,
    /// Came past a gap; whether a NAK answers it.
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
    /// Nothing received yet; messages are of so many bytes at the most.
    pub fn new(first_psn: Psn, mtu: usize, max_message: usize) -> Self {
        Self {
            expected: first_psn,
            msn: 0,
            partial: None,
            buffers: VecDeque::new(),
            mtu,
            max_message,
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

    /// Takes a data packet in.
    pub fn on_data(&mut self, p: &Packet<'_>) -> Arrival {
        let psn = Psn::new(p.bth.psn);
        let ahead = psn.ahead_of(self.expected);
        if ahead < 0 {
            // Its acknowledgement may have been lost.
            self.acknowledge();
            return Arrival::Duplicate;
        }
        if ahead > 0 {
            // One NAK for a gap, then silence until the missing packet arrives; but a PSN no farther than the one that
            // was answered shows that the sender has gone back once more, or that the first NAK may be lost.
            let far = ahead >= netsum_common::slot::GAP_PSN_AHEAD as i32;
            let nak = far || self.nak_sent_for.is_none_or(|answered| psn.ahead_of(answered) <= 0);
            if nak {
                self.from_far |= far;
                self.nak_sent_for = Some(psn);
                self.pending = Some(Pending::Nak(Syndrome::Nak(Nak::SequenceError)));
            }
            return Arrival::OutOfSequence { nak };
        }
        let op = p.bth.opcode;
        let whole = p.payload.len() == self.mtu;
        if op.is_first() != self.partial.is_none() || !op.is_last() && !whole || p.payload.len() > self.mtu {
            self.pending = Some(Pending::Nak(Syndrome::Nak(Nak::InvalidRequest)));
            return Arrival::Invalid;
        }
        if self.partial.as_ref().map_or(0, Vec::len) + p.payload.len() > self.max_message {
            self.partial = None;
            self.pending = Some(Pending::Nak(Syndrome::Nak(Nak::InvalidRequest)));
            return Arrival::TooLong;
        }
        if op.is_first() {
            match self.buffers.pop_front() {
                Some(buffer) => self.partial = Some(buffer),
                None => {
                    self.pending = Some(Pending::Nak(Syndrome::RnrNak(RNR_TIMER)));
                    // Those that follow are lost with it and need no NAK of their own.
                    self.nak_sent_for = Some(self.expected);
                    return Arrival::NotReady;
                }
            }
        }
        self.expected = self.expected.plus(1);
        self.nak_sent_for = None;
        if let Some(partial) = &mut self.partial {
            partial.extend_from_slice(p.payload);
        }
        if matches!(self.pending, Some(Pending::Nak(_))) && !self.from_far {
            // What it complained of has arrived. What the box complains of from far ahead may be a packet behind this one:
            // a gap is passed on at once, and the results before it wait for all ranks.
            self.pending = Some(Pending::Ack);
        }
        if p.bth.ack_request {
            self.acknowledge();
        }
        if !op.is_last() {
            return Arrival::Taken(None);
        }
        self.msn = serial::add(self.msn, 1);
        Arrival::Taken(self.partial.take().map(|message| (message, p.immediate)))
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

    /// The acknowledgement that is due: its PSN and AETH.
    pub fn poll(&mut self) -> Option<(Psn, Aeth)> {
        let pending = self.pending.take()?;
        self.from_far = false;
        let (psn, syndrome) = match pending {
            Pending::Ack => (self.expected.minus(1), Syndrome::Ack(0x1f)),
            Pending::Nak(syndrome) => (self.expected, syndrome),
        };
        Some((psn, Aeth { syndrome, msn: self.msn }))
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
}
