//! The slot machine in a system: hosts with go-back-N connections around a box, and a network that loses, doubles and
//! reorders. Every rank gets every sum exactly right, or nothing.
//!
//! The rules are written down here a second time, naively: a map from index to contributions, without slots.

use std::collections::{BTreeMap, BTreeSet};

use netsum_common::abi::{Fragments, MAX_RANKS, RingConfig, ring_flags, ring_slots};
use netsum_common::counters::Counter;
use netsum_common::serial;
use netsum_common::slot::{
    self, Fragment, GAP_PSN_AHEAD, Output, Payload, RingState, STALE_PSN_BEHIND, Slot, is_laps_behind,
    is_moved, on_fragment,
};
use proptest::prelude::*;

/// What a case is made of.
#[derive(Clone, Debug)]
struct Case {
    seed: u64,
    ranks: u32,
    window: u32,
    fragments: u32,
    messages: u32,
    relaxed: bool,
    /// Index of the first fragment; near the wrap in many cases.
    start: u32,
    /// In thousandths.
    loss: u64,
    duplicate: u64,
    reorder: u64,
    /// A rank that sends beyond its credit now and then, right values far too early.
    rogue: Option<u32>,
}

struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }
    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
}

/// What rank sends as its `n`-th fragment.
fn value(rank: u32, n: u32) -> u32 {
    (rank + 1).wrapping_mul(0x9e37_79b9) ^ n.wrapping_mul(0x85eb_ca6b)
}

/// A packet between hosts and box. `index` counts modulo 2^24 from a base that all connections share.
#[derive(Clone, Copy, Debug)]
enum Packet {
    /// Rank's data on its way to the box.
    Data { rank: u32, index: u32, value: u32 },
    /// Data, summed or not, on its way from the box to a rank.
    Result { to: u32, index: u32, value: u32 },
    /// Everything of rank `to`'s before `index` has arrived at its neighbour.
    Ack { to: u32, index: u32, nak: bool },
}

/// A rank: sender of one connection, receiver of another. Fragments are counted from 0 without wrapping.
struct Host {
    acked: u32,
    next: u32,
    received: u32,
    /// Relaxed receivers keep what comes out of order.
    early: BTreeMap<u32, u32>,
    naked: bool,
    idle: u32,
}

/// The naive rules: who contributed what to which fragment, and what has been released.
#[derive(Default)]
struct Naive {
    contributed: BTreeMap<u32, BTreeSet<u32>>,
    released: BTreeSet<u32>,
}

struct System {
    case: Case,
    ring: RingConfig,
    state: RingState,
    slots: Vec<Slot>,
    sums: Vec<u32>,
    hosts: Vec<Host>,
    /// Arrival time, tie breaker and packet.
    wire: BTreeMap<(u64, u64), Packet>,
    now: u64,
    count: u64,
    rng: Rng,
    naive: Naive,
}

impl System {
    fn new(case: Case) -> Self {
        let slots = ring_slots(Fragments(case.window * case.fragments)).unwrap();
        let ring = RingConfig {
            flags: ring_flags::ACTIVE | if case.relaxed { ring_flags::RELAXED } else { 0 },
            ranks: case.ranks,
            slots,
            credit: case.window * case.fragments,
            mtu: 256,
            cpu: 0,
        };
        let state =
            RingState { low: case.start, stopped: 0, up: case.start, expected: [case.start; MAX_RANKS] };
        let host = || Host { acked: 0, next: 0, received: 0, early: BTreeMap::new(), naked: false, idle: 0 };
        Self {
            ring,
            state,
            slots: vec![Slot::default(); slots as usize],
            sums: vec![0; slots as usize],
            hosts: (0..case.ranks).map(|_| host()).collect(),
            wire: BTreeMap::new(),
            now: 0,
            count: 0,
            rng: Rng(case.seed),
            naive: Naive::default(),
            case,
        }
    }

    fn total(&self) -> u32 {
        self.case.messages * self.case.fragments
    }

    fn index(&self, n: u32) -> u32 {
        serial::add(self.case.start, n)
    }

    /// The count of an index near `near`.
    fn unwrapped(&self, index: u32, near: u32) -> i64 {
        near as i64 + serial::diff(index, self.index(near)) as i64
    }

    fn put(&mut self, p: Packet) {
        if self.rng.below(1000) < self.case.loss {
            return;
        }
        let copies = 1 + (self.rng.below(1000) < self.case.duplicate) as u32;
        for _ in 0..copies {
            let late = if self.rng.below(1000) < self.case.reorder { self.rng.below(40) } else { 0 };
            self.count += 1;
            self.wire.insert((self.now + 5 + late, self.count), p);
        }
    }

    /// How far a rank may have sent: message m+W only with the sum of m.
    fn credit(&self, rank: u32) -> u32 {
        let messages_received = self.hosts[rank as usize].received / self.case.fragments;
        ((messages_received + self.case.window) * self.case.fragments).min(self.total())
    }

    fn run(&mut self) {
        for _ in 0..400_000 {
            if self.hosts.iter().all(|h| h.received == self.total() && h.acked == self.total()) {
                return;
            }
            let lacks_for_ever = |rank: u32| {
                let lacks = self.index(self.hosts[rank as usize].received);
                serial::diff(self.state.low, lacks) > self.ring.credit as i32
            };
            assert!(
                !(0..self.case.ranks).any(|rank| self.case.rogue != Some(rank) && lacks_for_ever(rank)),
                "{:?}: somebody lacks what is not replayed any more, low {}",
                self.case,
                self.state.low
            );
            if self.case.rogue.is_some_and(lacks_for_ever) {
                // The rogue itself: its connection ends with an error, and so does the job.
                return;
            }
            for rank in 0..self.case.ranks {
                let limit = self.credit(rank);
                // A few at a time, so that ranks interleave.
                for _ in 0..self.rng.below(4) {
                    let n = self.hosts[rank as usize].next;
                    if n < limit {
                        self.put(Packet::Data { rank, index: self.index(n), value: value(rank, n) });
                        self.hosts[rank as usize].next += 1;
                    }
                }
                if self.case.rogue == Some(rank) && self.rng.below(8) == 0 {
                    let n = limit + self.rng.below(self.ring.slots as u64 * 3) as u32;
                    self.put(Packet::Data { rank, index: self.index(n), value: value(rank, n) });
                }
                // The timer: nothing acknowledged for long.
                let h = &mut self.hosts[rank as usize];
                h.idle += 1;
                if h.idle > 100 && h.acked < h.next {
                    (h.next, h.idle) = (h.acked, 0);
                }
            }
            self.now += 1;
            while let Some(entry) = self.wire.first_entry().filter(|e| e.key().0 <= self.now) {
                let packet = entry.remove();
                self.deliver(packet);
            }
        }
        panic!("no end: {:?} low {}", self.case, self.state.low);
    }

    fn deliver(&mut self, packet: Packet) {
        match packet {
            Packet::Data { rank, index, value } => self.at_box(rank, index, value),
            Packet::Result { to, index, value } => self.at_receiver(to, index, value),
            Packet::Ack { to, index, nak } => {
                let near = self.hosts[to as usize].acked;
                let n = self.unwrapped(index, near);
                let h = &mut self.hosts[to as usize];
                if n > h.acked as i64 && n <= h.next.max(h.acked) as i64 {
                    h.acked = n as u32;
                    h.idle = 0;
                }
                if nak && n == h.acked as i64 {
                    if self.case.relaxed {
                        // Selective: only the one that is missing.
                        let (rank, n) = (to, h.acked);
                        if n < h.next {
                            self.put(Packet::Data { rank, index, value: value(rank, n) });
                        }
                    } else {
                        h.next = h.acked;
                    }
                }
            }
        }
    }

    fn at_box(&mut self, rank: u32, index: u32, value: u32) {
        let s = (index & (self.ring.slots - 1)) as usize;
        if self.case.relaxed {
            let slots = &self.slots;
            slot::advance_low(&self.ring, &mut self.state, |i| Some(slots[i as usize]));
        }
        let beyond_credit = serial::diff(index, self.state.low) >= self.ring.credit as i32;
        let fragment = Fragment { rank, index, len: 4, ce: false, bounds: 0 };
        let laps_behind = is_laps_behind(&self.ring, self.state.low, index);
        let verdict = on_fragment(&self.ring, &mut self.state, &mut self.slots[s], fragment);
        assert!(!laps_behind || verdict.output == Output::Stale, "{:?}, index {index}", self.case);
        match verdict.payload {
            Payload::Copy => self.sums[s] = value,
            Payload::Add => self.sums[s] = self.sums[s].wrapping_add(value),
            Payload::Leave => {}
        }
        assert_eq!(
            verdict.counter == Counter::CreditViolation,
            beyond_credit,
            "{:?}, index {index}",
            self.case
        );
        self.check_naively(rank, index, &verdict);
        let next = (rank + 1) % self.case.ranks;
        match verdict.output {
            Output::Drop => {}
            Output::Release => {
                for to in 0..self.case.ranks {
                    self.put(Packet::Result { to, index, value: self.sums[s] });
                }
            }
            Output::Replay => self.put(Packet::Result { to: next, index, value: self.sums[s] }),
            Output::Up => unreachable!("no parent"),
            Output::Stale => {
                let index = serial::sub(index, STALE_PSN_BEHIND);
                self.put(Packet::Result { to: next, index, value });
            }
            Output::Gap => {
                let index = serial::add(index, GAP_PSN_AHEAD);
                self.put(Packet::Result { to: next, index, value });
            }
        }
    }

    /// Holds a verdict against the rules without slots.
    fn check_naively(&mut self, rank: u32, index: u32, v: &slot::Verdict) {
        let contributed = self.naive.contributed.entry(index).or_default();
        match v.payload {
            Payload::Leave => {}
            Payload::Copy | Payload::Add => {
                assert!(contributed.insert(rank), "added twice");
                assert_eq!(v.payload == Payload::Copy, contributed.len() == 1);
                assert_eq!(v.counter, Counter::Fragments);
            }
        }
        let all = contributed.len() == self.case.ranks as usize;
        match v.output {
            Output::Release => {
                assert!(all && self.naive.released.insert(index), "released too early or twice");
                if !self.case.relaxed {
                    let before = serial::sub(index, 1);
                    assert!(
                        index == self.case.start || self.naive.released.contains(&before),
                        "released out of order"
                    );
                }
            }
            Output::Replay | Output::Stale => assert!(self.naive.released.contains(&index)),
            Output::Up => unreachable!("no parent"),
            Output::Gap => assert!(!self.naive.released.contains(&index) && !self.case.relaxed),
            Output::Drop => {
                // Nothing is ever dropped that could be released now.
                let turn = self.case.relaxed
                    || index == self.case.start
                    || self.naive.released.contains(&serial::sub(index, 1));
                let refused = v.counter == Counter::CreditViolation;
                assert!(refused || !(all && turn && !self.naive.released.contains(&index)));
            }
        }
    }

    fn at_receiver(&mut self, to: u32, index: u32, got: u32) {
        let sender = (to + self.case.ranks - 1) % self.case.ranks;
        let total: u32 = self.total();
        let expected = self.hosts[to as usize].received;
        let n = self.unwrapped(index, expected);
        // Who sends beyond its credit may make a result stale that it has not received itself. It harms nobody else.
        let rogue = self.case.rogue == Some(to);
        let right = |n: u32| (0..self.case.ranks).fold(0u32, |s, r| s.wrapping_add(value(r, n)));
        let (mut ack, mut nak) = (false, false);
        if n < expected as i64 {
            ack = true; // a duplicate: acknowledged again, not executed
        } else if n == expected as i64 {
            assert!(
                rogue || (n as u32) < total && got == right(n as u32),
                "rank {to} took {got:#x} for fragment {n}: {:?}",
                self.case
            );
            let h = &mut self.hosts[to as usize];
            (h.received, h.naked, ack) = (h.received + 1, false, true);
            while let Some(value) = h.early.remove(&h.received) {
                assert!(rogue || value == right(h.received));
                h.received += 1;
            }
        } else if self.case.relaxed && n < total as i64 {
            assert!(rogue || got == right(n as u32), "rank {to} took a wrong sum out of order");
            self.hosts[to as usize].early.insert(n as u32, got);
            nak = true;
        } else {
            nak = !self.hosts[to as usize].naked || n >= GAP_PSN_AHEAD as i64;
            self.hosts[to as usize].naked = true;
        }
        if ack || nak {
            let index = self.index(self.hosts[to as usize].received);
            self.put(Packet::Ack { to: sender, index, nak });
        }
    }
}

fn cases() -> impl Strategy<Value = Case> {
    let ranks = prop_oneof![4 => 2u32..6, 1 => Just(8), 1 => Just(33), 1 => Just(64)];
    (any::<u64>(), ranks, 1u32..4, 1u32..6, 1u32..12, any::<bool>(), any::<bool>(), 0u64..4, any::<bool>())
        .prop_map(|(seed, ranks, window, fragments, messages, relaxed, wrap, faults, rogue)| Case {
            seed,
            ranks,
            window,
            fragments,
            messages,
            relaxed,
            // Slots count from 0, so a start must be a multiple of them for `low` to match an empty ring.
            start: if wrap { serial::sub(0, 16) } else { 0 },
            loss: [0, 10, 50, 150][faults as usize],
            duplicate: [0, 10, 50, 50][faults as usize],
            reorder: [0, 10, 50, 200][faults as usize],
            rogue: rogue.then_some(0),
        })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(5000) })]

    #[test]
    fn every_rank_gets_every_sum_exactly_right_or_nothing(case in cases()) {
        System::new(case).run();
    }
}

#[test]
fn a_rogue_on_a_relaxed_ring_takes_no_slot_that_others_still_need() {
    // Once: a relaxed ring granted as much credit as it had slots, and the rogue made results stale before all had them.
    for seed in 0..200 {
        let (ranks, window, fragments, messages) = (8, 3, 5, 2);
        let (loss, duplicate, reorder) = (150, 50, 200);
        let case = Case {
            seed,
            ranks,
            window,
            fragments,
            messages,
            relaxed: true,
            start: 0,
            loss,
            duplicate,
            reorder,
            rogue: Some(0),
        };
        System::new(case).run();
    }
}

#[test]
fn nothing_is_replayed_or_refused_without_faults() {
    for ranks in [2, 3, 64] {
        let case = Case {
            seed: 1,
            ranks,
            window: 2,
            fragments: 4,
            messages: 40,
            relaxed: false,
            start: 0,
            loss: 0,
            duplicate: 0,
            reorder: 0,
            rogue: None,
        };
        let mut system = System::new(case);
        system.run();
        assert_eq!(system.naive.released.len(), 160);
    }
}

#[test]
fn a_gap_is_seen_after_a_sender_has_jumped_over_what_was_acknowledged() {
    let ring = RingConfig { flags: ring_flags::ACTIVE, ranks: 2, slots: 32, credit: 16, mtu: 256, cpu: 0 };
    let mut state = RingState::default();
    let mut slots = vec![Slot::default(); 32];
    let mut output = |rank, index| {
        let fragment = Fragment { rank, index, len: 4, ce: false, bounds: 0 };
        on_fragment(&ring, &mut state, &mut slots[index as usize % 32], fragment).output
    };
    for index in 0..8 {
        output(1, index);
    }
    // Rank 0 loses 0, sends 1 to 7, and goes back. Its 0 to 3 arrive again, then those of rank 1, sent again too, bring
    // the other results out.
    for index in (1..8).chain(0..4) {
        output(0, index);
    }
    for index in 4..8 {
        assert_eq!(output(1, index), Output::Release, "{index}");
    }
    // With that all is acknowledged, and rank 0 goes on behind it: in order, nothing is missing.
    assert_eq!(output(0, 8), Output::Drop);
    // It loses 9, and that is a gap of one.
    assert_eq!(output(0, 10), Output::Gap);
}

#[test]
fn what_no_connection_can_lack_is_not_replayed() {
    let ring = RingConfig { flags: ring_flags::ACTIVE, ranks: 2, slots: 16, credit: 4, mtu: 256, cpu: 0 };
    let (mut state, mut slots) = (RingState::default(), [Slot::default(); 16]);
    let mut at = |index: u32, rank| {
        let fragment = Fragment { rank, index, len: 4, ce: false, bounds: 0 };
        on_fragment(&ring, &mut state, &mut slots[index as usize % 16], fragment).output
    };
    for index in 0..10 {
        assert_eq!((at(index, 0), at(index, 1)), (Output::Drop, Output::Release));
    }
    // 10 is next. Who lacks 6 has sent nothing of 10; who lacked 5 could not have sent 9, which is released.
    for index in 0..10 {
        assert_eq!(at(index, 0), if index < 6 { Output::Stale } else { Output::Replay }, "index {index}");
    }
}

#[test]
fn a_sender_whose_stream_has_slipped_stops_the_ring() {
    let ring = RingConfig { flags: ring_flags::ACTIVE, ranks: 2, slots: 16, credit: 8, mtu: 256, cpu: 0 };
    let (mut state, mut slots) = (RingState::default(), [Slot::default(); 16]);
    let mut at = |rank, index: u32, bounds| {
        let fragment = Fragment { rank, index, len: 4, ce: false, bounds };
        on_fragment(&ring, &mut state, &mut slots[index as usize], fragment)
    };
    let bounds = |index: u32| [Slot::FIRST, 0, 0, Slot::LAST][index as usize % 4];
    for index in 0..8 {
        at(0, index, bounds(index));
    }
    assert_eq!(at(1, 0, bounds(0)).output, Output::Release);
    // One PSN late: its first is where the others have their second.
    let slipped = at(1, 5, Slot::FIRST);
    assert_eq!((slipped.output, slipped.counter), (Output::Drop, Counter::LayoutMismatch));
    for index in 1..8 {
        let verdict = at(1, index, bounds(index));
        assert_eq!((verdict.payload, verdict.output), (Payload::Leave, Output::Drop), "index {index}");
        assert_eq!(verdict.counter, Counter::RingStopped);
    }
    assert_eq!(state.stopped, 2);
}

#[test]
fn moved_psns_are_told_from_those_of_a_flow_that_is_where_its_next_one_is_expected() {
    for next in [0, 5, 0x3f_ffff, serial::MASK] {
        let near = |n: i32| serial::add(next, n as u32);
        for n in [-65_536, -1, 0, 1, 65_536] {
            assert!(!is_moved(near(n), next), "{n} from {next:#x}");
            assert!(is_moved(serial::add(near(n), GAP_PSN_AHEAD), next), "{n} from {next:#x}, past a gap");
        }
        for behind in [0, 1, 65_536, 200_000] {
            let stale = serial::sub(near(-behind), STALE_PSN_BEHIND);
            assert!(is_moved(stale, next), "{behind} behind {next:#x}");
        }
        let any = (0..64).filter(|n| is_moved(near(n << 18), next)).count();
        assert!(any <= 4, "{any} of 64 PSNs anywhere");
    }
}
