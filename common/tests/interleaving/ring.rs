//! A box's ring around the real slot machine, as a value that can be compared with those that have
//! been seen.

use netsum_common::abi::{MAX_RANKS, RingConfig, ring_flags};
use netsum_common::slot::{Fragment, Payload, RingState, Slot, Verdict, advance_low, on_fragment};

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Ring {
    low: u32,
    up: u32,
    expected: Vec<u32>,
    /// Index, flags, contributors and CRC.
    slots: Vec<(u32, u32, u64, u32)>,
    sums: Vec<u32>,
    /// Index of the header saved for a slot and member.
    headers: Vec<Option<u32>>,
}

impl Ring {
    pub fn new(config: &RingConfig) -> Self {
        let (members, slots) = (config.members as usize, config.slots as usize);
        Self {
            low: 0,
            up: 0,
            expected: vec![0; members],
            slots: vec![(0, 0, 0, 0); slots],
            sums: vec![0; slots],
            headers: vec![None; slots * members],
        }
    }

    /// Takes a fragment up.
    pub fn take(&mut self, config: &RingConfig, f: Fragment, value: u32) -> Verdict {
        let members = self.expected.len();
        let mut state = RingState { low: self.low, up: self.up, ..RingState::default() };
        state.expected[..members].copy_from_slice(&self.expected);
        if config.flags & ring_flags::RELAXED != 0 {
            advance_low(config, &mut state, |i| Some(slot_of(self.slots[i as usize])));
        }
        let at = f.index as usize % self.slots.len();
        let mut slot = slot_of(self.slots[at]);
        let v = on_fragment(config, &mut state, &mut slot, f);
        match v.payload {
            Payload::Leave => {}
            Payload::Copy => {
                self.sums[at] = value;
                // Not where it is the total, which takes the place of a sum with its headers.
                if slot.contributors.count_ones() == 1 {
                    self.headers[at * members..][..members].fill(None);
                }
            }
            Payload::Add => self.sums[at] += value,
        }
        if v.save_header {
            self.headers[at * members + f.rank as usize] = Some(f.index);
        }
        if v.completed {
            slot.crc = self.sums[at];
        }
        assert!(state.stopped == 0 && state.expected[members..MAX_RANKS].iter().all(|e| *e == 0));
        self.slots[at] = (slot.index, slot.flags, slot.contributors, slot.crc);
        (self.low, self.up) = (state.low, state.up);
        self.expected.copy_from_slice(&state.expected[..members]);
        v
    }

    /// Observed gaps only decide who is asked to send again, and when.
    pub fn forget_gaps(&mut self) {
        self.expected.fill(0);
        let of_gaps = Slot::PAST_GAP | !0 << Slot::GAP_RANK_SHIFT;
        self.slots.iter_mut().for_each(|(_, flags, ..)| *flags &= !of_gaps);
    }

    /// The lowest index that has not been released.
    pub fn low(&self) -> u32 {
        self.low
    }

    /// The slot for an index, and its sum.
    pub fn at(&self, index: u32) -> (Slot, u32) {
        let at = index as usize % self.slots.len();
        (slot_of(self.slots[at]), self.sums[at])
    }

    /// Index of the header that is saved for a member where this index would be.
    pub fn header(&self, index: u32, member: u32) -> Option<u32> {
        self.headers[index as usize % self.slots.len() * self.expected.len() + member as usize]
    }

    /// Whether a slot is taken and has not been released.
    pub fn has_open(&self) -> bool {
        self.slots.iter().any(|&s| slot_of(s).is(Slot::USED) && !slot_of(s).is(Slot::RELEASED))
    }
}

fn slot_of((index, flags, contributors, crc): (u32, u32, u64, u32)) -> Slot {
    Slot { index, flags, contributors, len: 4, checksum: 0, crc }
}
