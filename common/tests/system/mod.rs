//! The slot machine in a system: hosts around boxes, one box or a tree of them, and links that
//! lose, double and reorder.
//!
//! Ranks are numbered by place: those below one box are neighbours. A packet goes link by link, and
//! every link has faults. A second, naive description of a box is here: a map from index to
//! contributions, without slots.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use netsum_common::abi::{Fragments, RingConfig, ring_flags, ring_slots};
use netsum_common::counters::Counter;
use netsum_common::ring_box::{RingBox, passes_with};
use netsum_common::serial;
use netsum_common::slot::{
    Fragment, GAP_PSN_AHEAD, Output, Payload, Slot, Verdict, is_laps_behind,
};
use netsum_common::wire::{TOTAL, bears, mark};

/// Parameters of a case.
#[derive(Clone, Debug)]
pub struct Case {
    pub seed: u64,
    /// Levels of boxes, and the most ranks.
    pub levels: u32,
    pub ranks: u32,
    /// Members of each box by level, from the root. A random tree if empty.
    pub shape: Vec<usize>,
    pub window: u32,
    pub fragments: u32,
    pub messages: u32,
    pub relaxed: bool,
    /// Hosts keep what comes early and send again only what is missing.
    pub selective: bool,
    /// Index of the first fragment; near the wrap in many cases.
    pub start: u32,
    /// Loss of each link, in thousandths.
    pub loss: u64,
    pub duplicate: u64,
    pub reorder: u64,
    /// A rank that sends beyond its credit now and then.
    pub rogue: Option<u32>,
    /// Boxes that have only boxes as members do not add from one time to another, and let
    /// everything through.
    pub idle: Range<u64>,
    /// But the guard drops data there meanwhile.
    pub guarded: bool,
}

/// The `n`-th fragment that a rank sends.
fn value(rank: u32, n: u32) -> u32 {
    (rank + 1).wrapping_mul(0x9e37_79b9) ^ n.wrapping_mul(0x85eb_ca6b)
}

/// `index` counts modulo 2^24 from a base that all connections share.
#[derive(Clone, Copy, Debug)]
enum Packet {
    /// On the connection from `sender` to the next rank: data, or a sum in its place, and what
    /// boxes say of it.
    Data { sender: u32, index: u32, value: u32, ecn: u8 },
    /// The same with a PSN that is not data.
    Moved { sender: u32, index: u32 },
    /// To `to`: everything of its before `index` has arrived at the next rank.
    Ack { to: u32, index: u32, nak: bool },
}

/// Where a packet arrives.
#[derive(Clone, Copy, Debug)]
enum End {
    Host(u32),
    /// A box, from one of its members: the last of them may be its parent.
    Box(usize, usize),
}

#[derive(Clone, Copy, Debug)]
enum Member {
    Host(u32),
    Box(usize),
}

/// A box: its ring, and the naive account of it.
pub struct Node {
    members: Vec<Member>,
    /// The ranks below each member.
    groups: Vec<Range<u32>>,
    /// The parent, and which of its members this box is.
    pub parent: Option<(usize, usize)>,
    /// It saves of a packet's headers the sender and the index.
    ring: RingBox<(u32, u32), u32>,
    contributed: BTreeMap<u32, BTreeSet<u32>>,
    pub sent: BTreeSet<u32>,
    pub released: BTreeSet<u32>,
}

impl Node {
    fn group(&self) -> Range<u32> {
        self.groups[0].start..self.groups[self.groups.len() - 1].end
    }

    fn mark(&self) -> u8 {
        mark(self.group().len() as u32)
    }

    /// The mark that packets of a member, or of the uplink, must carry.
    fn bears(&self, from: usize) -> u8 {
        match self.members.get(from) {
            Some(Member::Host(_)) => 0,
            Some(Member::Box(_)) => mark(self.groups[from].len() as u32),
            None => TOTAL,
        }
    }

    fn has_hosts(&self) -> bool {
        self.members.iter().any(|member| matches!(member, Member::Host(_)))
    }

    /// Its parent could not tell the sum of its last member from its own; netsum refuses such
    /// members.
    fn is_like_its_last(&self) -> bool {
        let members = self.members.len();
        self.parent.is_some() && members > 1 && self.bears(members - 1) == self.mark()
    }
}

/// A rank: sender of one connection, receiver of another. Fragments are counted from 0 without
/// wrapping.
#[derive(Default)]
struct Host {
    acked: u32,
    next: u32,
    received: u32,
    early: BTreeMap<u32, u32>,
    naked: bool,
    idle: u32,
    /// Its box, and which of the members it is.
    port: (usize, usize),
}

pub struct System {
    case: Case,
    pub ranks: u32,
    pub boxes: Vec<Node>,
    hosts: Vec<Host>,
    /// Arrival time, tie breaker, end and packet.
    wire: BTreeMap<(u64, u64), (End, Packet)>,
    now: u64,
    count: u64,
    rng: fastrand::Rng,
    /// Packets that crossed the links to parents.
    pub up: u64,
    /// Data packets that hosts have sent.
    pub sent: u64,
}

impl System {
    pub fn new(case: Case) -> Self {
        let rng = fastrand::Rng::with_seed(case.seed);
        let mut system = Self {
            ranks: 0,
            boxes: Vec::new(),
            hosts: Vec::new(),
            wire: BTreeMap::new(),
            now: 0,
            count: 0,
            rng,
            up: 0,
            sent: 0,
            case,
        };
        system.grow(1, None);
        system
    }

    /// Makes a box of this level with all that is below it; its number.
    fn grow(&mut self, level: u32, parent: Option<(usize, usize)>) -> usize {
        let number = self.boxes.len();
        self.boxes.push(Node {
            members: Vec::new(),
            groups: Vec::new(),
            parent,
            ring: RingBox::new(RingConfig::default(), 0),
            contributed: BTreeMap::new(),
            sent: BTreeSet::new(),
            released: BTreeSet::new(),
        });
        let fewest = if parent.is_none() { 2 } else { 1 };
        let members = match self.case.shape.get(level as usize - 1) {
            Some(&members) => members,
            None => fewest + self.rng.u64(..4) as usize,
        };
        for i in 0..members {
            let first = self.hosts.len() as u32;
            // One rank each is left for the members to come.
            let room = self.case.ranks.saturating_sub(first + (members - i) as u32);
            let branches = !self.case.shape.is_empty() || room > 0 && self.rng.u64(..4) > 0;
            let member = if level < self.case.levels && branches {
                Member::Box(self.grow(level + 1, Some((number, i))))
            } else {
                self.hosts.push(Host { port: (number, i), ..Host::default() });
                Member::Host(first)
            };
            self.boxes[number].members.push(member);
            self.boxes[number].groups.push(first..self.hosts.len() as u32);
        }
        let flags = [
            (true, ring_flags::ACTIVE),
            (self.case.relaxed, ring_flags::RELAXED),
            (parent.is_some(), ring_flags::UPLINK),
        ];
        let config = RingConfig {
            flags: flags.into_iter().filter(|(is, _)| *is).map(|(_, flag)| flag).sum(),
            ranks: (members + parent.is_some() as usize) as u32,
            slots: ring_slots(Fragments(self.case.window * self.case.fragments)).unwrap(),
            credit: self.case.window * self.case.fragments,
            mtu: 256,
            cpu: 0,
        };
        self.boxes[number].ring = RingBox::new(config, self.case.start);
        self.ranks = self.hosts.len() as u32;
        number
    }

    /// Whether netsum would take these boxes.
    pub fn is_possible(&self) -> bool {
        !self.boxes.iter().any(Node::is_like_its_last)
    }

    pub fn total(&self) -> u32 {
        self.case.messages * self.case.fragments
    }

    fn index(&self, n: u32) -> u32 {
        serial::add(self.case.start, n)
    }

    /// The count of an index near `near`.
    fn unwrapped(&self, index: u32, near: u32) -> i64 {
        near as i64 + serial::diff(index, self.index(near)) as i64
    }

    fn sum(&self, ranks: Range<u32>, index: u32) -> u32 {
        let n = serial::sub(index, self.case.start);
        ranks.fold(0u32, |sum, rank| sum.wrapping_add(value(rank, n)))
    }

    fn put(&mut self, end: End, packet: Packet) {
        if self.rng.u64(..1000) < self.case.loss {
            return;
        }
        let copies = 1 + (self.rng.u64(..1000) < self.case.duplicate) as u32;
        for _ in 0..copies {
            // One in sixteen longer than any time-out.
            let most = if self.rng.u64(..16) == 0 { 1000 } else { 40 };
            let late =
                if self.rng.u64(..1000) < self.case.reorder { self.rng.u64(..most) } else { 0 };
            self.count += 1;
            self.wire.insert((self.now + 5 + late, self.count), (end, packet));
        }
    }

    /// From a box, as a switch does it.
    fn route(&mut self, number: usize, packet: Packet) {
        let to = match packet {
            Packet::Ack { to, .. } => to,
            Packet::Data { sender, .. } | Packet::Moved { sender, .. } => (sender + 1) % self.ranks,
        };
        let node = &self.boxes[number];
        let member = node.groups.iter().position(|group| group.contains(&to));
        let end = match (member.map(|member| node.members[member]), node.parent) {
            (Some(Member::Host(rank)), _) => End::Host(rank),
            (Some(Member::Box(below)), _) => End::Box(below, self.boxes[below].members.len()),
            (None, Some((parent, as_member))) => {
                self.up += 1;
                End::Box(parent, as_member)
            }
            (None, None) => panic!("no way there"),
        };
        self.put(end, packet);
    }

    fn put_from(&mut self, rank: u32, packet: Packet) {
        let (number, member) = self.hosts[rank as usize].port;
        self.put(End::Box(number, member), packet);
    }

    /// How far a rank may have sent: message m+W only with the sum of m.
    fn credit(&self, rank: u32) -> u32 {
        let messages_received = self.hosts[rank as usize].received / self.case.fragments;
        ((messages_received + self.case.window) * self.case.fragments).min(self.total())
    }

    /// Until all have all, or for a while after boxes were idle; how long it took.
    pub fn run(&mut self) -> u64 {
        let timer = 60 + 60 * self.case.levels;
        for _ in 0..1_000_000 {
            // An idle box does not know the packets that have passed it, and may wait for them.
            if !self.case.guarded
                && !self.case.idle.is_empty()
                && self.now > self.case.idle.end + 2000
            {
                return self.now;
            }
            if self.hosts.iter().all(|h| h.received == self.total() && h.acked == self.total()) {
                return self.now;
            }
            let lacks_for_ever = |rank: u32| {
                let host = &self.hosts[rank as usize];
                let node = &self.boxes[host.port.0];
                serial::diff(node.ring.state.low, self.index(host.received))
                    > node.ring.config.credit as i32
            };
            let lacking = (0..self.ranks).find(|&rank| lacks_for_ever(rank));
            match (lacking, self.case.rogue) {
                (None, _) => {}
                // The rogue itself: its connection ends with an error, and so does the job.
                (Some(rank), Some(rogue)) if rank == rogue => return self.now,
                (Some(rank), _) => {
                    panic!("{:?}: {rank} lacks a fragment that is no longer replayed", self.case)
                }
            }
            for rank in 0..self.ranks {
                let limit = self.credit(rank);
                // Only a few at a time: ranks interleave.
                for _ in 0..self.rng.u32(..4) {
                    let n = self.hosts[rank as usize].next;
                    if n < limit {
                        self.send(rank, n);
                        self.hosts[rank as usize].next += 1;
                    }
                }
                if self.case.rogue == Some(rank) && self.rng.u64(..8) == 0 {
                    let slots = self.boxes[0].ring.config.slots;
                    let n = limit + self.rng.u64(..slots as u64 * 3) as u32;
                    self.send(rank, n);
                }
                // The timer: nothing acknowledged for long.
                let h = &mut self.hosts[rank as usize];
                h.idle += 1;
                if h.idle > timer && h.acked < h.next {
                    (h.next, h.idle) = (h.acked, 0);
                }
            }
            self.now += 1;
            while let Some(entry) = self.wire.first_entry().filter(|e| e.key().0 <= self.now) {
                let (end, packet) = entry.remove();
                match (end, packet) {
                    (End::Host(rank), packet) => self.at_host(rank, packet),
                    (End::Box(number, from), Packet::Data { sender, index, value, ecn })
                        if !self.case.idle.contains(&self.now)
                            || self.boxes[number].has_hosts() =>
                    {
                        self.at_box(number, from, sender, index, value, ecn);
                    }
                    (End::Box(..), Packet::Data { .. }) if self.case.guarded => {}
                    (End::Box(number, _), packet) => self.route(number, packet),
                }
            }
        }
        let boxes: Vec<_> =
            self.boxes.iter().map(|b| (b.ring.state.low, b.ring.state.up)).collect();
        panic!("no end: {:?} {boxes:?}", self.case);
    }

    fn send(&mut self, rank: u32, n: u32) {
        self.sent += 1;
        let data =
            Packet::Data { sender: rank, index: self.index(n), value: value(rank, n), ecn: 0 };
        self.put_from(rank, data);
    }

    fn at_box(&mut self, number: usize, from: usize, sender: u32, index: u32, value: u32, ecn: u8) {
        let node = &mut self.boxes[number];
        let wanted = node.bears(from);
        if wanted != 0 && !bears(ecn, wanted) {
            assert!(!self.case.idle.is_empty(), "{:?}", self.case);
            return;
        }
        // A group is its last rank, and the way up the rank before the first.
        let group = node.groups.get(from).map_or(node.group().start, |group| group.end);
        assert_eq!(sender, (group + self.ranks - 1) % self.ranks, "{:?}", self.case);
        node.ring.advance();
        let beyond_credit =
            serial::diff(index, node.ring.state.low) >= node.ring.config.credit as i32;
        let laps_behind = is_laps_behind(&node.ring.config, node.ring.state.low, index);
        let total = ecn & TOTAL != 0;
        let fragment = Fragment { rank: from as u32, index, len: 4, ce: false, total, bounds: 0 };
        let add = |sum: &mut u32, value: &u32| *sum = sum.wrapping_add(*value);
        let verdict = node.ring.take(fragment, (sender, index), &value, add);
        let output = verdict.output;
        assert!(!laps_behind || output == Output::Stale, "{:?}, index {index}", self.case);
        let refused = verdict.counter == Counter::CreditViolation;
        assert_eq!(refused, beyond_credit, "{:?}, index {index}", self.case);
        let sum = node.ring.sums[node.ring.slot_of(index)];
        let mut saved: Vec<_> =
            node.ring.leaves_on(&fragment, output).map(|(_, saved)| *saved).collect();
        // By receiver, as boxes number their members.
        saved.sort_by_key(|(sender, _)| (sender + 1) % self.ranks);
        let goes_up = output == Output::Up;
        let is_complete = node.ring.slots[node.ring.slot_of(index)].is(Slot::COMPLETE);
        let ecn = match goes_up {
            true => node.mark() | if is_complete { TOTAL } else { 0 },
            false => TOTAL,
        };
        self.check_naively(number, from as u32, index, &verdict);
        for (sender, of) in saved {
            assert_eq!(of, index, "headers of another fragment");
            self.route(number, Packet::Data { sender, index, value: sum, ecn });
        }
        if let Some(index) = passes_with(output, index) {
            self.route(number, Packet::Moved { sender, index });
        }
    }

    /// Holds a verdict against the rules without slots.
    fn check_naively(&mut self, number: usize, from: u32, index: u32, v: &Verdict) {
        let (start, relaxed) = (self.case.start, self.case.relaxed);
        let node = &self.boxes[number];
        let members = node.members.len();
        let is_total = node.parent.is_some() && from as usize == members;
        let right = self.sum(node.group(), index);
        let node = &mut self.boxes[number];
        let contributed = node.contributed.entry(index).or_default();
        if v.payload != Payload::Leave {
            assert!(contributed.insert(from), "added twice");
            assert_eq!(v.payload == Payload::Copy, is_total || contributed.len() == 1);
            assert_eq!(v.counter, if is_total { Counter::Totals } else { Counter::Fragments });
        }
        let all = contributed.len() == node.ring.config.ranks as usize;
        let partial = (0..members as u32).all(|member| contributed.contains(&member));
        let in_turn = |done: &BTreeSet<u32>| {
            relaxed || index == start || done.contains(&serial::sub(index, 1))
        };
        match v.output {
            Output::Release => {
                assert!(
                    all && in_turn(&node.released) && node.released.insert(index),
                    "{:?}",
                    self.case
                );
            }
            Output::Up if v.counter == Counter::SentUpAgain => {
                assert!(node.sent.contains(&index) && from as usize + 1 == members);
            }
            Output::Up => {
                assert!(
                    node.parent.is_some()
                        && partial
                        && in_turn(&node.sent)
                        && node.sent.insert(index)
                );
                let sum = node.ring.sums[node.ring.slot_of(index)];
                assert_eq!(sum, right, "a wrong partial: {:?}", self.case);
            }
            Output::Replay | Output::Stale => assert!(node.released.contains(&index)),
            Output::Gap => assert!(v.gap && !node.released.contains(&index)),
            Output::Drop => {
                // Nothing is dropped that could be sent on now.
                let refused =
                    matches!(v.counter, Counter::CreditViolation | Counter::TotalUnexpected);
                let could = all && in_turn(&node.released) && !node.released.contains(&index)
                    || node.parent.is_some()
                        && partial
                        && in_turn(&node.sent)
                        && !node.sent.contains(&index);
                assert!(refused || !could, "{:?}", self.case);
            }
        }
        assert!(
            v.counter != Counter::TotalUnexpected
                || self.case.rogue.is_some()
                || !self.case.idle.is_empty(),
            "a total of nothing: {:?}",
            self.case
        );
    }

    fn at_host(&mut self, rank: u32, packet: Packet) {
        let (index, got) = match packet {
            Packet::Data { index, value, .. } => (index, Some(value)),
            Packet::Moved { index, .. } => (index, None),
            Packet::Ack { index, nak, .. } => return self.on_ack(rank, index, nak),
        };
        let expected = self.hosts[rank as usize].received;
        let n = self.unwrapped(index, expected);
        // A sender beyond its credit may make a result stale that it has not received itself. It
        // harms nobody else.
        let rogue = self.case.rogue == Some(rank);
        let right = |n: u32| (0..self.ranks).fold(0u32, |s, r| s.wrapping_add(value(r, n)));
        let is_right =
            |n: u32, got: Option<u32>| rogue || n < self.total() && got == Some(right(n));
        let h = &self.hosts[rank as usize];
        let (mut ack, mut nak) = (false, false);
        if n < expected as i64 {
            ack = true; // a duplicate: acknowledged again, not executed
        } else if n == expected as i64 {
            assert!(is_right(n as u32, got), "{rank} took {got:?} for {n}: {:?}", self.case);
            let h = &mut self.hosts[rank as usize];
            (h.received, h.naked, ack) = (h.received + 1, false, true);
            while h.early.remove(&h.received).is_some() {
                h.received += 1;
            }
        } else if self.case.selective && n < self.total() as i64 {
            assert!(is_right(n as u32, got), "{rank} took {got:?} early for {n}: {:?}", self.case);
            self.hosts[rank as usize].early.insert(n as u32, got.unwrap_or_default());
            nak = true;
        } else {
            nak = !h.naked || n >= GAP_PSN_AHEAD as i64;
            self.hosts[rank as usize].naked = true;
        }
        if ack || nak {
            let to = (rank + self.ranks - 1) % self.ranks;
            let index = self.index(self.hosts[rank as usize].received);
            self.put_from(rank, Packet::Ack { to, index, nak });
        }
    }

    fn on_ack(&mut self, rank: u32, index: u32, nak: bool) {
        let n = self.unwrapped(index, self.hosts[rank as usize].acked);
        let h = &mut self.hosts[rank as usize];
        if n > h.acked as i64 && n <= h.next.max(h.acked) as i64 {
            h.acked = n as u32;
            h.idle = 0;
        }
        if nak && n == h.acked as i64 {
            let n = h.acked;
            if !self.case.selective {
                h.next = n;
            } else if n < h.next {
                self.send(rank, n);
            }
        }
    }
}
