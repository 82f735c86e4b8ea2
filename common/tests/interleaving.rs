//! Every order in which a ring's CPU and the egress of what it has redirected can run, for small
//! rings.
//!
//! A CPU of the CPU map handles a batch of packets and sends what it redirected at the batch's end;
//! each port has a queue of its own. So a clone reads the slot and the saved headers *after* later
//! packets have changed them. May it? Ranks keep to their credit here, but anything that they have
//! ever sent may arrive again, at any time, and any packet may be lost.
//!
//! And every order in which packets can arrive in a small tree of boxes, below:
//! `interleaving/tree.rs`.
//!
//! The slot machine is the real one; hosts, queues and egress are models. All reachable states are
//! visited.

use std::collections::{HashSet, VecDeque};

use netsum_common::abi::{RingConfig, ring_flags};
use netsum_common::slot::{Fragment, Output, Slot};

#[path = "interleaving/ring.rs"]
mod ring;
#[path = "interleaving/tree.rs"]
mod tree;

use ring::Ring;

/// The state that egress reads before it writes a clone's headers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Egress {
    /// That the slot still holds the tag's index, released.
    Checks,
    /// Nothing: the tag names the slot.
    Trusts,
    /// As `Checks`, but on another CPU than the ring's: anything may happen between looking and
    /// reading.
    ChecksElsewhere,
}

/// A clone on its way out.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct Clone_ {
    index: u32,
    payload: u32,
    /// Has been checked and waits to be written.
    checked: bool,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct State {
    ring: Ring,
    /// By receiving rank.
    queues: Vec<VecDeque<Clone_>>,
    /// Sums that each rank has.
    received: Vec<u32>,
}

struct Model {
    ring: RingConfig,
    messages: u32,
    queue: usize,
    egress: Egress,
    /// Whatever a slot still holds is replayed, also what nobody can lack.
    replays_all: bool,
    /// This rank ignores its credit, and what it takes itself does not matter.
    rogue: Option<u32>,
}

impl Model {
    fn new(ranks: u32, credit: u32, relaxed: bool, egress: Egress) -> Self {
        let flags = ring_flags::ACTIVE | if relaxed { ring_flags::RELAXED } else { 0 };
        let slots = 2 * credit;
        let ring =
            RingConfig { flags, members: ranks, slots, credit, mtu: 256, ..RingConfig::default() };
        Self { ring, messages: 2 * credit + 2, queue: 2, egress, replays_all: false, rogue: None }
    }

    /// The fragments of a rank. The first sum of each slot is nothing but zeros, whose CRC is 0, as
    /// that of a new slot.
    fn value(&self, rank: u32, index: u32) -> u32 {
        if (index / self.ring.slots).is_multiple_of(2) { 0 } else { (index + 1) << (8 * rank) }
    }

    fn sum(&self, index: u32) -> u32 {
        (0..self.ring.members).map(|r| self.value(r, index)).sum()
    }

    fn start(&self) -> State {
        let ranks = self.ring.members as usize;
        State {
            ring: Ring::new(&self.ring),
            queues: vec![VecDeque::new(); ranks],
            received: vec![0; ranks],
        }
    }

    /// A fragment arrives at the ring's CPU. `None` where a queue is full: the batch ends before.
    fn arrive(&self, state: &State, rank: u32, index: u32) -> Option<State> {
        let mut s = state.clone();
        let fragment = Fragment { rank, index, len: 4, ce: false, total: false, bounds: 0 };
        let v = s.ring.take(&self.ring, fragment, self.value(rank, index));
        let (slot, sum) = s.ring.at(index);
        let next = ((rank + 1) % self.ring.members) as usize;
        let still_there = slot.is(Slot::RELEASED) && slot.index == index;
        let output = if self.replays_all && still_there && v.output == Output::Stale {
            Output::Replay
        } else {
            v.output
        };
        let to = match output {
            Output::Release => 0..self.ring.members as usize,
            Output::Replay => next..next + 1,
            Output::Stale => {
                assert!(
                    state.received[next] > index || self.rogue == Some(next as u32),
                    "who gets a stale fragment must have its sum"
                );
                0..0
            }
            Output::Drop | Output::Gap | Output::Up => 0..0,
        };
        for receiver in to {
            if s.queues[receiver].len() == self.queue {
                return None;
            }
            s.queues[receiver].push_back(Clone_ { index, payload: sum, checked: false });
        }
        Some(s)
    }

    /// Lets the first clone in a queue leave; returns what arrives, if anything does.
    fn leave(&self, s: &mut State, receiver: usize) -> Option<(u32, u32)> {
        let clone = s.queues[receiver].front_mut()?;
        let (slot, _) = s.ring.at(clone.index);
        let same = slot.index == clone.index && slot.is(Slot::RELEASED);
        match self.egress {
            Egress::ChecksElsewhere if !clone.checked && same => {
                clone.checked = true;
                return None;
            }
            Egress::Trusts => {}
            Egress::ChecksElsewhere if clone.checked => {}
            _ if same => {}
            _ => {
                s.queues[receiver].pop_front();
                return None;
            }
        }
        let Clone_ { index, payload, .. } = *clone;
        s.queues[receiver].pop_front();
        let source = (receiver as u32 + self.ring.members - 1) % self.ring.members;
        let psn = s.ring.header(index, source)?;
        // Otherwise the ICRC is wrong, and the receiver drops it.
        (slot.crc == payload).then_some((psn, payload))
    }

    /// Visits all states. How many there are, or the first wrong sum that somebody takes.
    fn explore(&self) -> Result<usize, String> {
        let (mut seen, mut todo) = (HashSet::from([self.start()]), vec![self.start()]);
        let mut finished = false;
        while let Some(state) = todo.pop() {
            let mut next = Vec::new();
            let lacks = |rank: &u32| {
                let received = state.received[*rank as usize];
                self.rogue != Some(*rank) && state.ring.low() > received + self.ring.credit
            };
            if let Some(rank) = (0..self.ring.members).find(lacks) {
                return Err(format!("rank {rank} lacks what is no longer replayed: {state:?}"));
            }
            for rank in 0..self.ring.members {
                // Everything that it may have sent so far, again or for the first time.
                let credit =
                    if self.rogue == Some(rank) { self.messages } else { self.ring.credit };
                let end = (state.received[rank as usize] + credit).min(self.messages);
                next.extend((0..end).filter_map(|index| self.arrive(&state, rank, index)));
            }
            for receiver in 0..state.received.len() {
                let mut s = state.clone();
                let arrived = self.leave(&mut s, receiver);
                if let Some((psn, payload)) = arrived
                    && psn == state.received[receiver]
                {
                    if payload != self.sum(psn) && self.rogue != Some(receiver as u32) {
                        return Err(format!(
                            "rank {receiver} takes {payload} for {psn}: {state:?}"
                        ));
                    }
                    let mut taken = s.clone();
                    taken.received[receiver] += 1;
                    finished |= taken.received.iter().all(|r| *r == self.messages);
                    next.push(taken);
                }
                // Lost on the way, or not what the receiver waits for.
                next.push(s);
            }
            for s in next {
                if seen.insert(s.clone()) {
                    todo.push(s);
                }
            }
        }
        assert!(finished, "the end must be among the states, or all of this shows nothing");
        Ok(seen.len())
    }
}

/// Rings with their ranks, credit, order, and how many states they can reach.
const RINGS: [(u32, u32, bool, usize); 5] = [
    (2, 1, false, 306),
    (2, 1, true, 306),
    (3, 1, false, 2998),
    (2, 2, false, 28402),
    (2, 2, true, 131_795),
];

#[test]
fn a_clone_may_leave_any_time_later_if_egress_looks_at_its_index() {
    for (ranks, credit, relaxed, states) in RINGS {
        let model = Model::new(ranks, credit, relaxed, Egress::Checks);
        assert_eq!(
            model.explore(),
            Ok(states),
            "{ranks} ranks, credit {credit}, relaxed {relaxed}"
        );
        let all = Model { replays_all: true, ..model };
        assert!(all.explore().unwrap() > states, "also if old results are replayed");
    }
}

#[test]
fn sums_that_all_ranks_have_are_never_replayed() {
    // A second line: egress looks all the same.
    for (ranks, credit, relaxed, _) in RINGS {
        for egress in [Egress::Trusts, Egress::ChecksElsewhere] {
            Model::new(ranks, credit, relaxed, egress).explore().unwrap();
        }
    }
}

#[test]
fn a_tag_without_index_misdelivers_a_late_replay() {
    let model = Model { replays_all: true, ..Model::new(2, 1, false, Egress::Trusts) };
    let wrong = model.explore().unwrap_err();
    assert!(wrong.contains("takes 0 for"), "{wrong}");
}

#[test]
fn egress_on_another_cpu_than_the_rings_would_not_be_safe() {
    let model = Model { replays_all: true, ..Model::new(2, 1, false, Egress::ChecksElsewhere) };
    let wrong = model.explore().unwrap_err();
    assert!(wrong.contains("takes 0 for"), "{wrong}");
}

#[test]
fn a_rank_that_ignores_its_credit_spoils_no_sum_of_others() {
    for (ranks, credit, relaxed) in [(2, 1, false), (2, 1, true), (3, 1, false), (3, 1, true)] {
        let rogue = Model { rogue: Some(0), ..Model::new(ranks, credit, relaxed, Egress::Checks) };
        rogue.explore().unwrap();
    }
}

#[test]
#[should_panic(expected = "who gets a stale fragment must have its sum")]
fn with_credit_for_all_slots_such_a_rank_takes_a_slot_that_others_need() {
    let mut model = Model { rogue: Some(0), ..Model::new(3, 1, true, Egress::Checks) };
    model.ring.slots = 1;
    model.explore().unwrap();
}
