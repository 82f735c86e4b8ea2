//! The box: the data plane's state machine over real packets.

use std::collections::HashMap;
use std::net::IpAddr;

use netsum_common::abi::{Fragments, Messages, RingConfig, ring_flags, ring_slots};
use netsum_common::ring_box::{RingBox, passes_with};
use netsum_common::serial;
use netsum_common::slot::{Fragment, Output, Slot};
use netsum_common::wire::{Bth, ROCE_PORT};

use crate::numeric::reference::add_lanes;
use crate::queue_pairs::RankNumbers;
use crate::shape::JobShape;
use netsum_rc::packet::{Extended, Verifier, encode};

struct Flow {
    ring: usize,
    rank: usize,
    base_psn: u32,
}

pub(super) struct Aggregator {
    ips: Vec<IpAddr>,
    /// By receiver.
    verifiers: HashMap<IpAddr, Verifier>,
    flows: HashMap<(IpAddr, u32), Flow>,
    rings: Vec<RingBox<Bth, [u8]>>,
    /// The release to come whose sum is spoilt, and how.
    spoil: Option<(u32, Spoil)>,
}

/// What a defective box does to one sum, with a right ICRC.
#[derive(Clone, Copy, Debug)]
pub(super) enum Spoil {
    /// One bit changes.
    Flip,
    /// Two lanes change places.
    Exchange,
    /// A contribution is added twice.
    Double,
}

impl Aggregator {
    pub fn new(shape: &JobShape, ranks: &[RankNumbers]) -> Self {
        let fragments = Fragments(shape.layout.message_size.div_ceil(shape.mtu));
        let credit = Messages(shape.layout.window).of(fragments).unwrap();
        let slots = ring_slots(credit).unwrap();
        let config = RingConfig {
            flags: ring_flags::ACTIVE | if shape.relaxed { ring_flags::RELAXED } else { 0 },
            ranks: shape.ranks,
            slots,
            credit: credit.0,
            mtu: shape.mtu,
            cpu: 0,
        };
        let n = ranks.len();
        let rings = (0..shape.layout.rings).map(|_| RingBox::new(config, 0));
        let flows = (0..n).flat_map(|rank| {
            let next = &ranks[(rank + 1) % n];
            (0..shape.layout.rings as usize).map(move |ring| {
                let key = (next.ip, next.rings[ring].receive_qpn.get());
                (key, Flow { ring, rank, base_psn: ranks[rank].rings[ring].first_psn.get() })
            })
        });
        Self {
            ips: ranks.iter().map(|r| r.ip).collect(),
            verifiers: ranks.iter().map(|r| (r.ip, Verifier::new(r.ip, false))).collect(),
            flows: flows.collect(),
            rings: rings.collect(),
            spoil: None,
        }
    }

    /// Spoils the sum that is released after `after` others.
    pub fn spoil(&mut self, after: u32, how: Spoil) {
        self.spoil = Some((after, how));
    }

    /// From now on no fragment is within its credit.
    pub fn swallow(&mut self) {
        for ring in &mut self.rings {
            ring.config.credit = 0;
        }
    }

    /// Has each of a rank's flows in the ring behind its own, as if they had been registered so.
    #[cfg(test)]
    pub fn exchange_rings(&mut self, rank: usize) {
        let rings = self.rings.len();
        self.flows.values_mut().filter(|f| f.rank == rank).for_each(|f| f.ring = (f.ring + 1) % rings);
    }

    /// Slots that were claimed and not released, described.
    pub fn unreleased(&self) -> Vec<String> {
        let slots = self.rings.iter().enumerate().flat_map(|(r, ring)| {
            let unreleased = ring.slots.iter().filter(|s| s.is(Slot::USED) && !s.is(Slot::RELEASED));
            unreleased.map(move |s| format!("ring {r} index {} of ranks {:#b}", s.index, s.contributors))
        });
        slots.collect()
    }

    /// Takes a datagram if it is a flow's data, and gives those that come of it, with their addresses.
    pub fn take(
        &mut self,
        src: IpAddr,
        dst: IpAddr,
        datagram: &[u8],
        out: &mut Vec<(IpAddr, IpAddr, Vec<u8>)>,
    ) -> bool {
        let Some(Ok(packet)) =
            self.verifiers.get_mut(&dst).map(|v| v.decode((src, ROCE_PORT).into(), datagram))
        else {
            return false;
        };
        let Some(flow) = self.flows.get(&(dst, packet.bth.qpn)) else { return false };
        if !packet.bth.opcode.is_rc_data() {
            return false;
        }
        assert_eq!(src, self.ips[flow.rank]);
        let ring = &mut self.rings[flow.ring];
        let index = serial::sub(packet.bth.psn, flow.base_psn);
        let op = packet.bth.opcode;
        let first = if op.is_first() { Slot::FIRST } else { 0 };
        let bounds = first | if op.is_last() { Slot::LAST } else { 0 };
        let (rank, len) = (flow.rank as u32, packet.payload.len() as u32);
        let fragment = Fragment { rank, index, len, ce: false, total: false, bounds };
        let output =
            ring.take(fragment, packet.bth, packet.payload, |sum, payload| add_lanes(sum, payload)).output;
        let s = ring.slot_of(index);
        if let (Output::Release, Some((after, how))) = (output, &mut self.spoil) {
            if *after == 0 {
                let sum = &mut ring.sums[s];
                let right = sum.clone();
                match how {
                    Spoil::Flip => *sum.last_mut().unwrap() ^= 4,
                    Spoil::Exchange => sum.rotate_left(4),
                    Spoil::Double => add_lanes(sum, packet.payload),
                }
                // Zeros exchanged or added twice are still right.
                if *sum != right {
                    self.spoil = None;
                }
            } else {
                *after -= 1;
            }
        }
        let n = self.ips.len();
        let mut send = |rank: usize, bth: &Bth, payload: &[u8]| {
            let (src, dst) = (self.ips[rank], self.ips[(rank + 1) % n]);
            let mut datagram = Vec::new();
            encode(&mut datagram, src, dst, 0, bth, &Extended::default(), payload);
            out.push((src, dst, datagram));
        };
        for (rank, bth) in ring.leaves_on(&fragment, output) {
            let bth = Bth { ecn: ring.slots[s].tells(rank), ..*bth };
            send(rank as usize, &bth, &ring.sums[s]);
        }
        if let Some(psn) = passes_with(output, packet.bth.psn) {
            send(flow.rank, &Bth { psn, ..packet.bth }, packet.payload);
        }
        true
    }
}
