//! A box's side of one ring in memory: the slot machine, with headers and sums.
//!
//! A connection is named after the member that sends on it, and leads to the next one. Where there
//! is a parent, the way up is the last member: the connection of the member before it leads up, and
//! its own leads to the first member.

use netsum_common::counters::Counter;
use netsum_common::ring::{RingConfig, ring_flags};
use netsum_common::serial;
use netsum_common::slot::{
    Fragment, GAP_PSN_AHEAD, Output, Payload, RingState, STALE_PSN_BEHIND, Slot, Verdict,
    advance_low, on_fragment,
};
use netsum_common::wire::Bth;

use crate::numeric::reference::add_lanes;

pub(super) struct RingBox {
    pub config: RingConfig,
    state: RingState,
    pub slots: Vec<Slot>,
    /// By slot.
    pub sums: Vec<Vec<u8>>,
    /// By slot and member.
    headers: Vec<Vec<Option<Bth>>>,
    /// Where sums leave in order, the next to be released, and to be sent up.
    next: u32,
    next_up: u32,
}

impl RingBox {
    pub fn new(config: RingConfig) -> Self {
        let slots = config.slots as usize;
        Self {
            config,
            state: RingState::default(),
            slots: vec![Slot::default(); slots],
            sums: vec![Vec::new(); slots],
            headers: vec![vec![None; config.members as usize]; slots],
            next: 0,
            next_up: 0,
        }
    }

    /// Number of the slot for an index.
    pub fn slot_of(&self, index: u32) -> usize {
        (index & (self.config.slots - 1)) as usize
    }

    fn has(&self, flag: u32) -> bool {
        self.config.flags & flag != 0
    }

    /// Takes a fragment up.
    ///
    /// # Panics
    /// If a sum leaves out of its order.
    pub fn take(&mut self, f: Fragment, header: Bth, payload: &[u8]) -> Output {
        if self.has(ring_flags::RELAXED) {
            let slots = &self.slots;
            advance_low(&self.config, &mut self.state, |i| slots.get(i as usize).copied());
        }
        let s = self.slot_of(f.index);
        let verdict = on_fragment(&self.config, &mut self.state, &mut self.slots[s], f);
        match verdict.payload {
            Payload::Leave => {}
            Payload::Copy => {
                self.sums[s] = payload.to_owned();
                // Not where it is the total, which takes the place of a sum with its headers.
                if self.slots[s].contributors.count_ones() == 1 {
                    self.headers[s].fill(None);
                }
            }
            Payload::Add => add_lanes(&mut self.sums[s], payload),
        }
        if verdict.save_header {
            self.headers[s][f.rank as usize] = Some(header);
        }
        self.check_order(f.index, &verdict);
        verdict.output
    }

    fn check_order(&mut self, index: u32, verdict: &Verdict) {
        let relaxed = self.has(ring_flags::RELAXED);
        let (next, again) = match verdict.output {
            Output::Release => (&mut self.next, false),
            Output::Replay | Output::Stale => (&mut self.next, true),
            Output::Up => (&mut self.next_up, verdict.counter == Counter::PartialsResent),
            Output::Drop | Output::Gap => return,
        };
        let in_turn = if again { serial::before(index, *next) } else { index == *next };
        assert!(relaxed || in_turn, "{:?} of {index}, and the next is {next}", verdict.output);
        if !again {
            *next = serial::add(index, 1);
        }
    }

    /// The connections on which the sum leaves, with the headers saved of each.
    pub fn leaves_on(&self, f: &Fragment, output: Output) -> impl Iterator<Item = (u32, &Bth)> {
        let (rank, headers) = (f.rank, &self.headers[self.slot_of(f.index)]);
        let up = self.has(ring_flags::UPLINK).then(|| self.config.members - 2);
        let leaves = move |member: &u32| match output {
            Output::Release => Some(*member) != up,
            Output::Replay => *member == rank,
            Output::Up => Some(*member) == up,
            Output::Drop | Output::Stale | Output::Gap => false,
        };
        let header =
            |member: u32| headers[member as usize].as_ref().expect("a header of each member");
        (0..self.config.members).filter(leaves).map(move |member| (member, header(member)))
    }
}

/// The PSN with which a fragment passes, if it does.
pub(super) fn passes_with(output: Output, psn: u32) -> Option<u32> {
    match output {
        Output::Stale => Some(serial::sub(psn, STALE_PSN_BEHIND)),
        Output::Gap => Some(serial::add(psn, GAP_PSN_AHEAD)),
        Output::Drop | Output::Release | Output::Replay | Output::Up => None,
    }
}
