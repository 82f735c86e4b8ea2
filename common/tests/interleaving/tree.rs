//! Two leaves below a parent, and every order in which packets can arrive.
//!
//! Packets once sent on a link may arrive at any later time, any number of times, or never:
//! links lose, double, delay and reorder without bounds. A box sends at once what it decides to;
//! that its clones may leave later is looked at one box at a time.

use std::collections::HashSet;

use netsum_common::abi::{RingConfig, ring_flags};
use netsum_common::slot::{Fragment, Output, Slot};

use super::ring::Ring;

const LEAVES: usize = 2;

/// Packets in flight, each as the indices that have ever been sent there, bit by bit. The values
/// follow from these: whatever a box sends is looked at when it does.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct State {
    parent: Ring,
    leaves: [Ring; LEAVES],
    /// By leaf: partial sums that have gone up, and totals that have gone up again.
    up: [[u32; 2]; LEAVES],
    /// By leaf: totals that have come down.
    down: [u32; LEAVES],
    /// By rank: sums that have been sent to it, and those that it has taken.
    sums: Vec<u32>,
    taken: Vec<u32>,
}

struct Tree {
    parent: RingConfig,
    leaf: RingConfig,
    /// Below each leaf.
    ranks: u32,
    window: u32,
    fragments: u32,
    /// Fragments in all.
    total: u32,
}

/// A packet that arrives at a box or a rank.
#[derive(Clone, Copy, Debug)]
enum Arrival {
    /// A rank's own at its leaf.
    Data(u32, u32),
    /// At the parent, from a leaf: a partial sum, or a total once more.
    Up(usize, u32, bool),
    /// A total, at a leaf.
    Down(usize, u32),
    /// A sum, at a rank.
    Sum(u32, u32),
}

impl Tree {
    fn new(ranks: u32, window: u32, fragments: u32, total: u32, relaxed: bool) -> Self {
        let credit = window * fragments;
        let ring = |flag, ranks| RingConfig {
            flags: ring_flags::ACTIVE | flag | if relaxed { ring_flags::RELAXED } else { 0 },
            members: ranks,
            slots: (2 * credit).next_power_of_two(),
            credit,
            mtu: 256,
            ..RingConfig::default()
        };
        let (parent, leaf) =
            (ring(ring_flags::GROUPS, LEAVES as u32), ring(ring_flags::UPLINK, ranks + 1));
        Self { parent, leaf, ranks, window, fragments, total }
    }

    fn all_ranks(&self) -> u32 {
        self.ranks * LEAVES as u32
    }

    fn start(&self) -> State {
        let n = self.all_ranks() as usize;
        State {
            parent: Ring::new(&self.parent),
            leaves: std::array::from_fn(|_| Ring::new(&self.leaf)),
            up: Default::default(),
            down: Default::default(),
            sums: vec![0; n],
            taken: vec![0; n],
        }
    }

    fn value(rank: u32, index: u32) -> u32 {
        (index + 1) << (8 * rank)
    }

    fn partial(&self, leaf: usize, index: u32) -> u32 {
        let first = leaf as u32 * self.ranks;
        (first..first + self.ranks).map(|rank| Self::value(rank, index)).sum()
    }

    fn sum(&self, index: u32) -> u32 {
        (0..LEAVES).map(|leaf| self.partial(leaf, index)).sum()
    }

    /// Fragments that a rank may have sent: message m+W only with the sum of m.
    fn limit(&self, s: &State, rank: u32) -> u32 {
        let messages = s.taken[rank as usize].trailing_ones() / self.fragments;
        ((messages + self.window) * self.fragments).min(self.total)
    }

    fn is_done(&self, s: &State) -> bool {
        s.taken.iter().all(|taken| taken.trailing_ones() == self.total)
    }

    /// Lets a packet arrive. Returns the packets sent because of it, which may arrive from now on;
    /// or what is wrong.
    fn arrive(&self, s: &mut State, arrival: Arrival) -> Result<Vec<Arrival>, String> {
        let fragment =
            |rank, index, total| Fragment { rank, index, len: 4, ce: false, total, bounds: 0 };
        match arrival {
            Arrival::Data(rank, index) => {
                let (leaf, member) = ((rank / self.ranks) as usize, rank % self.ranks);
                self.at_leaf(s, leaf, fragment(member, index, false), Self::value(rank, index))
            }
            Arrival::Down(leaf, index) => {
                self.at_leaf(s, leaf, fragment(self.ranks, index, true), self.sum(index))
            }
            Arrival::Up(leaf, index, total) => {
                let value = if total { self.sum(index) } else { self.partial(leaf, index) };
                self.at_parent(s, fragment(leaf as u32, index, total), value)
            }
            Arrival::Sum(rank, index) => {
                let taken = &mut s.taken[rank as usize];
                if self.leaf.flags & ring_flags::RELAXED != 0 || index == taken.trailing_ones() {
                    *taken |= 1 << index;
                }
                Ok(Vec::new())
            }
        }
    }

    fn at_leaf(
        &self,
        s: &mut State,
        leaf: usize,
        f: Fragment,
        value: u32,
    ) -> Result<Vec<Arrival>, String> {
        let v = s.leaves[leaf].take(&self.leaf, f, value);
        s.leaves[leaf].forget_gaps();
        let (slot, sum) = s.leaves[leaf].at(f.index);
        let (first, last) = (leaf as u32 * self.ranks, self.ranks - 1);
        // The member whose connection ends at a rank.
        let source = |rank: u32| if rank == first { self.ranks } else { rank - first - 1 };
        let receiver = |member: u32| if member == self.ranks { first } else { first + member + 1 };
        let has = |member| s.leaves[leaf].header(f.index, member) == Some(f.index);
        let ranks = match v.output {
            Output::Release => first..first + self.ranks,
            Output::Replay if f.rank != last => receiver(f.rank)..receiver(f.rank) + 1,
            Output::Replay => {
                return Err(format!("only the parent can replay {} up there", f.index));
            }
            Output::Up => {
                let total = slot.is(Slot::COMPLETE);
                if sum != if total { self.sum(f.index) } else { self.partial(leaf, f.index) }
                    || !has(last)
                {
                    return Err(format!("leaf {leaf} sends {sum} up for {}", f.index));
                }
                s.up[leaf][usize::from(total)] |= 1 << f.index;
                return Ok(vec![Arrival::Up(leaf, f.index, total)]);
            }
            Output::Stale => {
                self.may_be_stale(s, receiver(f.rank) % self.all_ranks(), f.index)?;
                0..0
            }
            Output::Drop | Output::Gap => 0..0,
        };
        let mut sent = Vec::new();
        for rank in ranks {
            if sum != self.sum(f.index) || !has(source(rank)) {
                return Err(format!("rank {rank} gets {sum} for {}", f.index));
            }
            s.sums[rank as usize] |= 1 << f.index;
            sent.push(Arrival::Sum(rank, f.index));
        }
        Ok(sent)
    }

    fn at_parent(&self, s: &mut State, f: Fragment, value: u32) -> Result<Vec<Arrival>, String> {
        let v = s.parent.take(&self.parent, f, value);
        s.parent.forget_gaps();
        let (_, sum) = s.parent.at(f.index);
        let next = (f.rank as usize + 1) % LEAVES;
        let leaves = match v.output {
            Output::Release => 0..LEAVES,
            Output::Replay => next..next + 1,
            Output::Stale => {
                self.may_be_stale(s, next as u32 * self.ranks, f.index)?;
                0..0
            }
            Output::Drop | Output::Gap | Output::Up => 0..0,
        };
        let mut sent = Vec::new();
        for leaf in leaves {
            let source = (leaf + LEAVES - 1) % LEAVES;
            if sum != self.sum(f.index) || s.parent.header(f.index, source as u32) != Some(f.index)
            {
                return Err(format!("leaf {leaf} gets {sum} for {}", f.index));
            }
            s.down[leaf] |= 1 << f.index;
            sent.push(Arrival::Down(leaf, f.index));
        }
        Ok(sent)
    }

    /// The receiver of a stale fragment must have its sum, for it can only acknowledge.
    fn may_be_stale(&self, s: &State, rank: u32, index: u32) -> Result<(), String> {
        let has = s.taken[rank as usize] & 1 << index != 0;
        if has { Ok(()) } else { Err(format!("{index} is stale, and rank {rank} lacks its sum")) }
    }

    /// All that may arrive.
    fn possible(&self, s: &State) -> Vec<Arrival> {
        let bits = |set: u32| (0..self.total).filter(move |i| set & 1 << i != 0);
        let mut all = Vec::new();
        for rank in 0..self.all_ranks() {
            all.extend((0..self.limit(s, rank)).map(|index| Arrival::Data(rank, index)));
            // A receiver that has it takes the fragment for a duplicate.
            let sums = s.sums[rank as usize] & !s.taken[rank as usize];
            all.extend(bits(sums).map(|index| Arrival::Sum(rank, index)));
        }
        for leaf in 0..LEAVES {
            for total in [false, true] {
                all.extend(
                    bits(s.up[leaf][usize::from(total)]).map(|i| Arrival::Up(leaf, i, total)),
                );
            }
            all.extend(bits(s.down[leaf]).map(|index| Arrival::Down(leaf, index)));
        }
        all
    }

    /// From here on nothing is lost, and ranks send again what the next one lacks: all must come to
    /// an end. `known` are states from which that is so.
    fn ends(&self, s: &State, known: &mut HashSet<State>) -> Result<(), String> {
        let (mut now, mut way) = (s.clone(), Vec::new());
        while !self.is_done(&now) && !known.contains(&now) {
            let before = now.clone();
            for rank in 0..self.all_ranks() {
                let next = (rank + 1) % self.all_ranks();
                for index in now.taken[next as usize].trailing_ones()..self.limit(&now, rank) {
                    let mut wire = vec![Arrival::Data(rank, index)];
                    while let Some(arrival) = wire.pop() {
                        wire.extend(self.arrive(&mut now, arrival)?);
                    }
                }
            }
            if now == before {
                return Err(format!("no step is possible: {s:?}"));
            }
            way.push(now.clone());
        }
        known.extend(way);
        Ok(())
    }

    /// Visits all states. How many there are, or the first thing that is wrong.
    fn explore(&self) -> Result<usize, String> {
        let (mut seen, mut todo) = (HashSet::from([self.start()]), vec![self.start()]);
        let mut known = HashSet::new();
        while let Some(state) = todo.pop() {
            self.ends(&state, &mut known)?;
            if self.is_done(&state)
                && (state.parent.has_open() || state.leaves.iter().any(Ring::has_open))
            {
                return Err(format!("a slot is taken for ever: {state:?}"));
            }
            for arrival in self.possible(&state) {
                let mut next = state.clone();
                self.arrive(&mut next, arrival)
                    .map_err(|why| format!("{why}: {arrival:?} at {state:?}"))?;
                if !seen.contains(&next) {
                    seen.insert(next.clone());
                    todo.push(next);
                }
            }
        }
        Ok(seen.len())
    }
}

#[test]
fn every_total_is_right_and_every_slot_is_released_in_two_levels() {
    // Ranks of each leaf, window, fragments of a message, fragments in all, order, states. Slots
    // are used again in all but the last.
    for (ranks, window, fragments, total, relaxed, states) in [
        (1, 1, 1, 5, false, 12953),
        (1, 1, 1, 5, true, 12953),
        (2, 1, 1, 4, false, 14385),
        (2, 1, 1, 4, true, 14385),
        (1, 1, 2, 5, false, 36341),
        (1, 1, 2, 3, true, 41473),
    ] {
        let tree = Tree::new(ranks, window, fragments, total, relaxed);
        assert_eq!(
            tree.explore(),
            Ok(states),
            "{ranks} ranks, {window} x {fragments}, {total}, relaxed {relaxed}"
        );
    }
}
