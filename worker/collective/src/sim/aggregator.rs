//! The box, or a tree of boxes: runs the data plane's state machine over real packets.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::net::IpAddr;
use std::ops::Range;
use std::time::{Duration, Instant};

use netsum_common::abi::{Fragments, Messages, RingConfig, ring_flags, ring_slots};
use netsum_common::serial;
use netsum_common::slot::{Fragment, Output, Slot};
use netsum_common::wire::{Bth, PACKET_OVERHEAD, ROCE_PORT, TOTAL, group_mark};

use super::network::Speed;
use super::ring_box::{RingBox, passes_with};
use super::rng::{Random, Rng};
use crate::numeric::layout::CHECK_BYTES;
use crate::numeric::quant;
use crate::numeric::reference::add_lanes;
use crate::queue_pairs::RankQpInfo;
use crate::shape::JobShape;
use netsum_rc::packet::{Extended, Verifier, encode};

/// A connection of a ring, at all boxes on its path.
struct Flow {
    ring: usize,
    rank: usize,
    base_psn: u32,
}

/// One box.
struct Node {
    /// The ranks below, and the boxes that they are behind; none for a leaf.
    ranks: Range<usize>,
    below: Vec<usize>,
    parent: Option<usize>,
    /// The ranks whose connections the members use, in order: each rank's, or the last rank's of
    /// each group. With a parent, the last entry is the rank before the first, whose connection
    /// comes from above.
    senders: Vec<usize>,
    rings: Vec<RingBox>,
}

/// A packet at a box.
struct Incoming {
    node: usize,
    sender: usize,
    bth: Bth,
    payload: Vec<u8>,
    /// Its PSN has been moved: it is forwarded.
    moved: bool,
}

/// Links between boxes, one for each direction. Without them packets between boxes arrive at once.
struct Wires {
    speed: Speed,
    free: HashMap<(usize, usize), Instant>,
    /// By arrival; the number breaks ties.
    flying: BTreeMap<(Instant, u64), Incoming>,
    sent: u64,
}

impl Wires {
    fn send(&mut self, now: Instant, from: usize, incoming: Incoming) {
        let bytes = (incoming.payload.len() + PACKET_OVERHEAD) as u64;
        let free = self.free.entry((from, incoming.node)).or_insert(now);
        *free = (*free).max(now) + Duration::from_nanos(u64::from(self.speed.per_byte) * bytes);
        self.sent += 1;
        self.flying.insert((*free + self.speed.latency, self.sent), incoming);
    }
}

pub(super) struct Aggregator {
    ips: Vec<IpAddr>,
    /// By receiver.
    verifiers: HashMap<IpAddr, Verifier>,
    flows: HashMap<(IpAddr, u32), Flow>,
    /// The first one has no parent.
    nodes: Vec<Node>,
    /// Losses between boxes, in millionths.
    loss: u32,
    /// The number of the one packet between boxes that is lost, counted from 0.
    victim: Option<(BoxPacket, u32)>,
    rng: Rng,
    wires: Option<Wires>,
    /// The number of the release whose sum is corrupted, and how.
    corruption: Option<(u32, Corruption)>,
    /// The first sum that was released.
    first: Vec<u8>,
}

/// Packets between boxes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum BoxPacket {
    Partial,
    Total,
}

/// How a defective box corrupts one sum, with a right ICRC.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(test), expect(dead_code, reason = "only tests of sealed jobs forge and replay"))]
pub(super) enum Corruption {
    /// One bit changes.
    Flip,
    /// Two lanes are swapped.
    Exchange,
    /// A contribution is added twice.
    Double,
    /// A lane changes, and the check lanes as they must. Messages are single packets.
    Forge,
    /// The first sum comes again.
    Replay,
}

impl Aggregator {
    /// A tree of boxes; `branches` has the number of boxes below each box, level by level (empty:
    /// one box). Between boxes `loss` of a million packets are lost.
    pub fn new(
        shape: &JobShape,
        ranks: &[RankQpInfo],
        branches: &[usize],
        loss: u32,
        speed: Option<Speed>,
        seed: u64,
    ) -> Self {
        let n = ranks.len();
        let flows = (0..n).flat_map(|rank| {
            let next = &ranks[(rank + 1) % n];
            (0..shape.layout.rings as usize).map(move |ring| {
                let key = (next.ip, next.rings[ring].receive_qpn.get());
                (key, Flow { ring, rank, base_psn: ranks[rank].rings[ring].first_psn.get() })
            })
        });
        let mut nodes = Vec::new();
        grow(&mut nodes, shape, n, branches, 0..n, None);
        Self {
            ips: ranks.iter().map(|r| r.ip).collect(),
            verifiers: ranks.iter().map(|r| (r.ip, Verifier::new(r.ip, false))).collect(),
            flows: flows.collect(),
            nodes,
            loss,
            victim: None,
            rng: Rng::with_seed(seed ^ 0x7570_6c69_6e6b_7300),
            wires: speed.map(|speed| Wires {
                speed,
                free: HashMap::new(),
                flying: BTreeMap::new(),
                sent: 0,
            }),
            corruption: None,
            first: Vec::new(),
        }
    }

    /// Corrupts the sum that is released after `after` others.
    pub fn corrupt(&mut self, after: u32, how: Corruption) {
        self.corruption = Some((after, how));
    }

    /// Loses one packet between boxes.
    #[cfg(test)]
    pub fn lose(&mut self, what: BoxPacket, nth: u32) {
        self.victim = Some((what, nth));
    }

    /// From now on all fragments are beyond their credit.
    pub fn drop_all(&mut self) {
        for ring in self.nodes.iter_mut().flat_map(|node| &mut node.rings) {
            ring.config.credit = 0;
        }
    }

    /// Swaps a rank's flows: each counts for the ring after its own, as if registered so.
    #[cfg(test)]
    pub fn exchange_rings(&mut self, rank: usize) {
        let rings = self.nodes[0].rings.len();
        self.flows
            .values_mut()
            .filter(|f| f.rank == rank)
            .for_each(|f| f.ring = (f.ring + 1) % rings);
    }

    /// Describes slots that were claimed and not released.
    pub fn unreleased(&self) -> Vec<String> {
        let rings = self.nodes.iter().flat_map(|node| node.rings.iter().enumerate());
        let slots = rings.flat_map(|(r, ring)| {
            let unreleased =
                ring.slots.iter().filter(|s| s.is(Slot::USED) && !s.is(Slot::RELEASED));
            unreleased
                .map(move |s| format!("ring {r} index {} of ranks {:#b}", s.index, s.contributors))
        });
        slots.collect()
    }

    /// Processes a datagram if it is data of a flow. Returns the resulting datagrams, with their
    /// addresses.
    pub fn take(
        &mut self,
        now: Instant,
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
        let sender = flow.rank;
        assert_eq!(src, self.ips[sender]);
        let node = self.box_of(sender);
        let payload = packet.payload.to_vec();
        self.all_at_box(
            now,
            Incoming { node, sender, bth: packet.bth, payload, moved: false },
            out,
        );
        true
    }

    /// When the next packet between boxes arrives.
    pub fn next(&self) -> Option<Instant> {
        Some(self.wires.as_ref()?.flying.first_key_value()?.0.0)
    }

    /// Delivers that packet.
    pub fn arrive(&mut self, out: &mut Vec<(IpAddr, IpAddr, Vec<u8>)>) {
        let first = self.wires.as_mut().and_then(|wires| wires.flying.pop_first());
        if let Some(((now, _), incoming)) = first {
            self.all_at_box(now, incoming, out);
        }
    }

    /// Processes a packet at a box, and resulting packets at other boxes.
    fn all_at_box(
        &mut self,
        now: Instant,
        incoming: Incoming,
        out: &mut Vec<(IpAddr, IpAddr, Vec<u8>)>,
    ) {
        let mut queue = VecDeque::from([incoming]);
        while let Some(incoming) = queue.pop_front() {
            let from = incoming.node;
            let mut sent = VecDeque::new();
            self.at_box(incoming, &mut sent, out);
            match &mut self.wires {
                Some(wires) => {
                    sent.into_iter().for_each(|incoming| wires.send(now, from, incoming))
                }
                None => queue.append(&mut sent),
            }
        }
    }

    /// The box whose port leads to a rank.
    fn box_of(&self, rank: usize) -> usize {
        let has = |node: &Node| node.below.is_empty() && node.ranks.contains(&rank);
        self.nodes.iter().position(has).expect("a box")
    }

    fn at_box(
        &mut self,
        incoming: Incoming,
        queue: &mut VecDeque<Incoming>,
        out: &mut Vec<(IpAddr, IpAddr, Vec<u8>)>,
    ) {
        let Incoming { node, sender, bth, payload, moved } = incoming;
        if moved {
            return self.route(node, sender, bth, &payload, true, queue, out);
        }
        let flow = &self.flows[&(self.ips[(sender + 1) % self.ips.len()], bth.qpn)];
        let Node { senders, rings, below, ranks, .. } = &mut self.nodes[node];
        let place = senders.iter().position(|rank| *rank == sender).expect("a member");
        let ring = &mut rings[flow.ring];
        let index = serial::sub(bth.psn, flow.base_psn);
        let op = bth.opcode;
        let first = if op.is_first() { Slot::FIRST } else { 0 };
        let bounds = first | if op.is_last() { Slot::LAST } else { 0 };
        let (rank, len) = (place as u32, payload.len() as u32);
        let fragment =
            Fragment { rank, index, len, ce: false, total: bth.flags & TOTAL != 0, bounds };
        let output = ring.take(fragment, bth, &payload);
        let s = ring.slot_of(index);
        if let (Output::Release, Some((after, how))) = (output, &mut self.corruption) {
            if *after == 0 {
                let sum = &mut ring.sums[s];
                let right = sum.clone();
                match how {
                    Corruption::Flip => *sum.last_mut().unwrap() ^= 4,
                    Corruption::Exchange => sum.rotate_left(4),
                    Corruption::Double => add_lanes(sum, &payload),
                    Corruption::Forge => {
                        let mut change = vec![0; sum.len()];
                        change[CHECK_BYTES] = 1;
                        let sums = quant::check_sums(&change[CHECK_BYTES..]);
                        let sums = sums.map(u32::to_le_bytes);
                        let place = CHECK_BYTES - sums.as_flattened().len();
                        change[place..CHECK_BYTES].copy_from_slice(sums.as_flattened());
                        add_lanes(sum, &change);
                    }
                    Corruption::Replay => sum.clone_from(&self.first),
                }
                // Swapping zeros, or adding them twice, leaves the sum right.
                if *sum != right {
                    self.corruption = None;
                }
            } else {
                if self.first.is_empty() {
                    self.first.clone_from(&ring.sums[s]);
                }
                *after -= 1;
            }
        }
        let goes_up = output == Output::Up;
        let slot = &ring.slots[s];
        // As `egress` writes it.
        let total = if goes_up { slot.is(Slot::COMPLETE) } else { !below.is_empty() };
        let below = ranks.len() as u32;
        let marks =
            |member| if goes_up { group_mark(below) } else { slot.receiver_marks(member) } | if total { TOTAL } else { 0 };
        let leaving = ring.leaves_on(&fragment, output);
        let leaving = leaving.map(|(member, bth)| (member, Bth { flags: marks(member), ..*bth }));
        let leaving: Vec<(u32, Bth)> = leaving.collect();
        let sum = ring.sums[s].clone();
        for (member, bth) in leaving {
            let sender = self.nodes[node].senders[member as usize];
            self.route(node, sender, bth, &sum, false, queue, out);
        }
        if let Some(psn) = passes_with(output, bth.psn) {
            self.route(node, sender, Bth { psn, ..bth }, &payload, true, queue, out);
        }
    }

    /// Sends a packet from a box, on the connection of a rank: to the next rank, or to the box on
    /// the path to it.
    #[expect(clippy::too_many_arguments, reason = "a packet, where it is, and where it may go")]
    fn route(
        &mut self,
        node: usize,
        sender: usize,
        bth: Bth,
        payload: &[u8],
        moved: bool,
        queue: &mut VecDeque<Incoming>,
        out: &mut Vec<(IpAddr, IpAddr, Vec<u8>)>,
    ) {
        let receiver = (sender + 1) % self.ips.len();
        let here = &self.nodes[node];
        let below = here.below.iter().find(|&&below| self.nodes[below].ranks.contains(&receiver));
        if below.is_none() && here.ranks.contains(&receiver) {
            let (src, dst) = (self.ips[sender], self.ips[receiver]);
            let mut datagram = Vec::new();
            encode(
                &mut datagram,
                (src, ROCE_PORT).into(),
                dst,
                0,
                &bth,
                &Extended::default(),
                payload,
            );
            return out.push((src, dst, datagram));
        }
        let next = below.or(here.parent.as_ref()).copied().expect("a way up");
        let what = if below.is_some() { BoxPacket::Total } else { BoxPacket::Partial };
        let mut lost = self.rng.chance(self.loss);
        if let Some((_, nth)) = self.victim.as_mut().filter(|(victim, _)| *victim == what && !moved)
        {
            lost |= *nth == 0;
            *nth = nth.wrapping_sub(1);
        }
        if !lost {
            queue.push_back(Incoming { node: next, sender, bth, payload: payload.to_vec(), moved });
        }
    }
}

/// Creates a box with all boxes below it. Returns its number.
fn grow(
    nodes: &mut Vec<Node>,
    shape: &JobShape,
    n: usize,
    branches: &[usize],
    ranks: Range<usize>,
    parent: Option<usize>,
) -> usize {
    let number = nodes.len();
    let groups: Vec<Range<usize>> = match branches.first() {
        Some(&boxes) => {
            let first = |i: usize| ranks.start + i * ranks.len() / boxes;
            (0..boxes).map(|i| first(i)..first(i + 1)).collect()
        }
        None => ranks.clone().map(|rank| rank..rank + 1).collect(),
    };
    let before = parent.map(|_| (ranks.start + n - 1) % n);
    let senders: Vec<usize> = groups.iter().map(|group| group.end - 1).chain(before).collect();
    let flags =
        [(parent.is_some(), ring_flags::UPLINK), (!branches.is_empty(), ring_flags::GROUPS)];
    let flags = flags.into_iter().filter(|(is, _)| *is).map(|(_, flag)| flag).sum();
    nodes.push(Node::new(shape, ranks, parent, senders, flags));
    if let [_, further @ ..] = branches {
        let below =
            groups.into_iter().map(|group| grow(nodes, shape, n, further, group, Some(number)));
        nodes[number].below = below.collect();
    }
    number
}

impl Node {
    fn new(
        shape: &JobShape,
        ranks: Range<usize>,
        parent: Option<usize>,
        senders: Vec<usize>,
        flags: u32,
    ) -> Self {
        let fragments = Fragments((shape.message_room() as u32).div_ceil(shape.mtu));
        let credit = Messages(shape.layout.window).of(fragments).expect("a credit");
        let config = RingConfig {
            flags: ring_flags::ACTIVE | flags | if shape.relaxed { ring_flags::RELAXED } else { 0 },
            members: senders.len() as u32,
            slots: ring_slots(credit).expect("the credit fits in a ring"),
            credit: credit.0,
            mtu: shape.mtu,
            ..RingConfig::default()
        };
        let rings = (0..shape.layout.rings).map(|_| RingBox::new(config)).collect();
        Self { ranks, below: Vec::new(), parent, senders, rings }
    }
}
