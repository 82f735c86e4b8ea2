//! The box: the data plane's state machine over real packets.

use std::collections::HashMap;
use std::net::IpAddr;

use netsum_common::abi::{Fragments, Messages, RingConfig, ring_flags, ring_slots};
use netsum_common::serial;
use netsum_common::slot::{
    Fragment, GAP_PSN_AHEAD, Output, Payload, RingState, STALE_PSN_BEHIND, Slot, advance_low, on_fragment,
};
use netsum_common::wire::{Bth, ROCE_PORT};

use crate::numeric::reference::add_lanes;
use crate::queue_pairs::RankNumbers;
use crate::shape::JobShape;
use netsum_rc::packet::{Extended, Verifier, encode};

struct Ring {
    config: RingConfig,
    state: RingState,
    slots: Vec<Slot>,
    sums: Vec<Vec<u8>>,
    headers: Vec<Vec<Option<Bth>>>,
    /// Index of the release to come, where they must come in order.
    next: u32,
}

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
    rings: Vec<Ring>,
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
        let rings = (0..shape.layout.rings).map(|_| Ring {
            config,
            state: RingState::default(),
            slots: vec![Slot::default(); slots as usize],
            sums: vec![Vec::new(); slots as usize],
            headers: vec![vec![None; n]; slots as usize],
            next: 0,
        });
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
    pub fn held(&self) -> Vec<String> {
        let slots = self.rings.iter().enumerate().flat_map(|(r, ring)| {
            let held = ring.slots.iter().filter(|s| s.is(Slot::USED) && !s.is(Slot::RELEASED));
            held.map(move |s| format!("ring {r} index {} of ranks {:#b}", s.index, s.contributors))
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
        let s = (index & (ring.config.slots - 1)) as usize;
        let relaxed = ring.config.flags & ring_flags::RELAXED != 0;
        if relaxed {
            let slots = &ring.slots;
            advance_low(&ring.config, &mut ring.state, |i| Some(slots[i as usize]));
        }
        let op = packet.bth.opcode;
        let first = if op.is_first() { Slot::FIRST } else { 0 };
        let bounds = first | if op.is_last() { Slot::LAST } else { 0 };
        let (rank, len) = (flow.rank as u32, packet.payload.len() as u32);
        let fragment = Fragment { rank, index, len, ce: false, bounds };
        let verdict = on_fragment(&ring.config, &mut ring.state, &mut ring.slots[s], fragment);
        match verdict.payload {
            Payload::Leave => {}
            Payload::Copy => {
                ring.sums[s] = packet.payload.to_vec();
                ring.headers[s].fill(None);
            }
            Payload::Add => add_lanes(&mut ring.sums[s], packet.payload),
        }
        if verdict.save_header {
            ring.headers[s][flow.rank] = Some(packet.bth);
        }
        if let (Output::Release, Some((after, how))) = (verdict.output, &mut self.spoil) {
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
        match verdict.output {
            Output::Release => {
                assert!(relaxed || index == ring.next, "index {index} released in place of {}", ring.next);
                ring.next = serial::add(index, 1);
            }
            Output::Replay | Output::Stale => {
                assert!(relaxed || serial::before(index, ring.next), "{:?} of {index}", verdict.output);
            }
            Output::Drop | Output::Gap | Output::Up => {}
        }
        let n = self.ips.len();
        let mut send = |rank: usize, bth: &Bth, payload: &[u8]| {
            let (src, dst) = (self.ips[rank], self.ips[(rank + 1) % n]);
            let mut datagram = Vec::new();
            encode(&mut datagram, src, dst, 0, bth, &Extended::default(), payload);
            out.push((src, dst, datagram));
        };
        match verdict.output {
            // Boxes have no parent here.
            Output::Drop | Output::Up => {}
            Output::Release => {
                for (rank, bth) in ring.headers[s].iter().enumerate() {
                    send(rank, &bth.expect("a header of each rank"), &ring.sums[s]);
                }
            }
            Output::Replay => send(flow.rank, &packet.bth, &ring.sums[s]),
            Output::Stale => {
                let bth = Bth { psn: serial::sub(packet.bth.psn, STALE_PSN_BEHIND), ..packet.bth };
                send(flow.rank, &bth, packet.payload);
            }
            Output::Gap => {
                let bth = Bth { psn: serial::add(packet.bth.psn, GAP_PSN_AHEAD), ..packet.bth };
                send(flow.rank, &bth, packet.payload);
            }
        }
        true
    }
}
