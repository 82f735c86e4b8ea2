//! Two RC endpoints and everything between them: a network that loses, duplicates, reorders and
//! corrupts, clocks that jump, and, in half of all sequences, a forger whose packets have a correct
//! ICRC.
//!
//! Without a forger every message arrives once, in order, bit by bit, and every wait ends. With a
//! forger the endpoints must stay consistent: they do not panic, and acknowledge no message twice
//! or out of order.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use arbitrary::{Result, Unstructured};
use netsum_common::wire::{Aeth, Bth, Opcode, ROCE_PORT, Reth, Syndrome};
use netsum_worker::rc::packet::{Extended, Verifier, encode};
use netsum_worker::rc::{Endpoint, EndpointConfig, Event, Operation, Psn, QpConfig, QpId, Qpn};

pub fn run(input: &[u8]) {
    let _ = sequence(&mut Unstructured::new(input));
}

struct End {
    endpoint: Endpoint,
    qp: QpId,
    ip: IpAddr,
    /// Posted for sending and not acknowledged.
    unacknowledged: VecDeque<(u64, Vec<u8>)>,
    /// Posted by the other end and not arrived.
    to_come: VecDeque<(Vec<u8>, Option<u32>)>,
    failed: bool,
}

struct System {
    now: Instant,
    ends: [End; 2],
    /// Receiver and datagram.
    wire: Vec<(usize, Vec<u8>)>,
    forged: bool,
    any_ip_id: bool,
    posted: u64,
}

const MTU: usize = 256;
const LONGEST: usize = 5 * MTU;
const QPNS: [Qpn; 2] = [Qpn::new(0x11), Qpn::new(0xff_fffe)];

impl System {
    fn new(u: &mut Unstructured) -> Result<Self> {
        let forged: bool = u.arbitrary()?;
        let ips: [IpAddr; 2] = match u.arbitrary()? {
            true => [
                IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, 1]),
                IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, 2]),
            ],
            false => [IpAddr::from([10, 0, 0, 1]), IpAddr::from([10, 0, 0, 2])],
        };
        let psns = [u.arbitrary::<u32>()?, 0xff_ffff - u.int_in_range(0..=8u32)?].map(Psn::new);
        let operation = if u.arbitrary()? {
            Operation::Write { address: 64, rkey: 7 }
        } else {
            Operation::Send
        };
        let max_inflight = u.int_in_range(1..=16)?;
        let any_ip_id: bool = u.arbitrary()?;
        let ends = [0, 1].map(|i| {
            let mut endpoint =
                Endpoint::new(ips[i], EndpointConfig { any_ip_id, ..EndpointConfig::default() });
            let mut c = QpConfig::new(QPNS[i], ips[1 - i], QPNS[1 - i], psns[i], psns[1 - i], MTU);
            c.opcode = operation;
            c.max_inflight = max_inflight;
            // One side stores less than the other may have in flight.
            c.max_early = max_inflight.div_ceil(1 + i as u32);
            c.selective = max_inflight % 2 == 0;
            c.max_message = LONGEST;
            c.ack_timeout = Duration::from_millis(1);
            c.retry_limit = forged.then_some(7);
            let qp = endpoint.add_qp(c).expect("a queue pair");
            let (unacknowledged, to_come) = (VecDeque::new(), VecDeque::new());
            End { endpoint, qp, ip: ips[i], unacknowledged, to_come, failed: false }
        });
        Ok(Self { now: Instant::now(), ends, wire: Vec::new(), forged, any_ip_id, posted: 0 })
    }

    fn post(&mut self, from: usize, len: usize, immediate: Option<u32>) {
        self.posted += 1;
        let data: Vec<u8> = (0..len).map(|i| (i as u64 * 31 + self.posted * 7) as u8).collect();
        let end = &mut self.ends[from];
        if end.failed {
            return;
        }
        end.endpoint.post_send(end.qp, self.posted, data.clone(), immediate);
        end.unacknowledged.push_back((self.posted, data.clone()));
        self.ends[1 - from].to_come.push_back((data, immediate));
    }

    fn transmit(&mut self, from: usize, at_most: usize) -> bool {
        let mut buf = Vec::new();
        let mut any = false;
        while self.wire.len() < at_most
            && let Some(t) = self.ends[from].endpoint.poll_transmit(self.now, &mut buf)
        {
            any = true;
            assert_eq!((t.to, t.len), (self.ends[1 - from].ip, buf.len()));
            let segment = t.segment_size.unwrap_or(t.len);
            let mut verifier = Verifier::new(t.to, false);
            for datagram in buf.chunks(segment) {
                assert!(
                    verifier.decode((self.ends[from].ip, ROCE_PORT).into(), datagram).is_ok(),
                    "a segment is not a packet"
                );
                self.wire.push((1 - from, datagram.to_vec()));
            }
        }
        any
    }

    fn deliver(&mut self, at: usize) {
        let (to, datagram) = self.wire[at].clone();
        let from = (self.ends[1 - to].ip, ROCE_PORT).into();
        self.ends[to].endpoint.receive(self.now, from, false, &datagram);
        self.events(to);
    }

    fn events(&mut self, of: usize) {
        let end = &mut self.ends[of];
        while let Some(event) = end.endpoint.poll_event() {
            match event {
                Event::Sent { qp, id, data } => {
                    assert_eq!(qp, end.qp);
                    assert_eq!(
                        end.unacknowledged.pop_front(),
                        Some((id, data)),
                        "acknowledged out of order"
                    );
                }
                Event::Received { data, immediate, .. } if !self.forged => {
                    assert_eq!(end.to_come.pop_front(), Some((data, immediate)));
                }
                Event::Received { data, .. } => {
                    assert!(data.len() <= LONGEST, "longer than allowed")
                }
                Event::Failed { error, .. } => {
                    assert!(self.forged, "failed without a cause: {error}");
                    end.failed = true;
                }
            }
        }
        assert_eq!(end.endpoint.outstanding(end.qp), end.unacknowledged.len());
    }

    fn time(&mut self, step: Duration) {
        self.now += step;
        for i in 0..2 {
            self.ends[i].endpoint.handle_timeout(self.now);
            self.events(i);
        }
    }

    /// Delivers everything from now on, until all is done.
    fn finish(&mut self) {
        for _ in 0..20_000 {
            for i in 0..2 {
                let end = &mut self.ends[i];
                end.endpoint.post_receive(end.qp, Vec::new());
                self.transmit(i, usize::MAX);
            }
            if self.ends.iter().all(|e| e.unacknowledged.is_empty() && e.to_come.is_empty()) {
                return;
            }
            if self.wire.is_empty() {
                let next = self.ends.iter().filter_map(|e| e.endpoint.next_timeout()).min();
                let next = next.expect("something is outstanding, but no timer runs");
                self.time(next.saturating_duration_since(self.now) + Duration::from_nanos(1));
            }
            for at in 0..self.wire.len() {
                self.deliver(at);
            }
            self.wire.clear();
            self.now += Duration::from_micros(50);
        }
        panic!("the endpoints do not finish");
    }
}

fn forge(u: &mut Unstructured) -> Result<(Bth, Extended, Vec<u8>)> {
    let opcode = match u.int_in_range(0..=3u8)? {
        0 | 1 => Opcode::ACK,
        2 => Opcode(u.int_in_range(0..=0x0b)?),
        _ => Opcode(u.arbitrary()?),
    };
    let mut bth = Bth::new(opcode, 0, 0);
    bth.psn = match u.arbitrary::<bool>()? {
        true => u.arbitrary::<u32>()? & 0xff_ffff,
        false => (0xff_fff0 + u.int_in_range(0..=63)?) & 0xff_ffff,
    };
    bth.pad = u.int_in_range(0..=3)?;
    bth.ack_request = u.arbitrary()?;
    // The headers that the opcode needs, or others.
    let ext = Extended {
        reth: u.arbitrary::<bool>()?.then_some(Reth { address: 1, rkey: 2, length: 3 }),
        immediate: u.arbitrary()?,
        aeth: match opcode == Opcode::ACK {
            true => Some(Aeth { syndrome: Syndrome::decode(u.arbitrary()?), msn: 5 }),
            false => None,
        },
    };
    let len = u.int_in_range(0..=2 * MTU)?;
    if opcode == Opcode::ACK && len % 2 == 0 {
        // A list of missing packets near the PSN that it names.
        let (came, row) = (bth.psn + len as u32 % 40, 1 + len as u32 % 3);
        let rows = (0..len as u32 / 8).flat_map(|i| [bth.psn + 3 * i, row]);
        let lanes = std::iter::once(came).chain(rows);
        return Ok((bth, ext, lanes.flat_map(u32::to_be_bytes).collect()));
    }
    Ok((bth, ext, vec![0x55; len]))
}

fn sequence(u: &mut Unstructured) -> Result<()> {
    let mut s = System::new(u)?;
    while !u.is_empty() {
        let op = u.arbitrary::<u8>()?;
        let end = (op >> 7) as usize;
        let any = |u: &mut Unstructured, s: &System| u.choose_index(s.wire.len().max(1));
        match op & 15 {
            0 | 1 => {
                let len = u.int_in_range(0..=LONGEST)?;
                s.post(end, len, u.arbitrary()?);
            }
            2 => {
                let of = &mut s.ends[end];
                of.endpoint.post_receive(of.qp, Vec::new());
            }
            3 | 4 => _ = s.transmit(end, 200),
            5..=8 if !s.wire.is_empty() => {
                // Mostly in order.
                let at = if op & 0x40 == 0 { 0 } else { any(u, &s)? };
                s.deliver(at);
                s.wire.remove(at);
            }
            9 if !s.wire.is_empty() => {
                let at = any(u, &s)?;
                s.wire.remove(at);
            }
            10 if !s.wire.is_empty() => {
                // Delivered twice: it also stays in the queue.
                let at = any(u, &s)?;
                s.deliver(at);
            }
            // With any identification only 16 bits of the check remain, and the fuzzer would find
            // the flip that they miss.
            11 if !s.wire.is_empty() && !s.any_ip_id => {
                let at = any(u, &s)?;
                let datagram = &mut s.wire[at].1;
                let bit = u.choose_index(datagram.len() * 8)?;
                datagram[bit / 8] ^= 1 << (bit % 8);
            }
            12 | 13 => s.time(Duration::from_micros(u.arbitrary::<u16>()? as u64)),
            14 if s.forged => {
                let (mut bth, ext, payload) = forge(u)?;
                bth.qpn = QPNS[end].get();
                let mut datagram = Vec::new();
                encode(
                    &mut datagram,
                    (s.ends[1 - end].ip, ROCE_PORT).into(),
                    s.ends[end].ip,
                    0,
                    &bth,
                    &ext,
                    &payload,
                );
                s.wire.insert(0, (end, datagram));
            }
            15 => {
                let len = u.int_in_range(0..=60usize)?.min(u.len());
                let noise = u.bytes(len)?.to_vec();
                s.wire.insert(0, (end, noise));
            }
            _ => {}
        }
    }
    if !s.forged {
        s.finish();
    }
    Ok(())
}
