//! The slot machine with ranks that break all rules, compared with its rules without slots: the
//! contributors of each index.

use std::collections::{BTreeMap, BTreeSet};

use arbitrary::{Result, Unstructured};
use netsum_common::abi::{MAX_RANKS, RingConfig, ring_flags};
use netsum_common::counters::Counter;
use netsum_common::ring_box::RingBox;
use netsum_common::serial;
use netsum_common::slot::{Fragment, Output, Payload, Slot};

/// Runs a sequence of fragments.
pub fn run(input: &[u8]) {
    let _ = sequence(&mut Unstructured::new(input));
}

/// The state of an index whose slot is taken and not yet reused.
#[derive(Default)]
struct Index {
    len: u32,
    bounds: u32,
    ranks: BTreeSet<u32>,
    /// The sum of a lane; one lane is enough here.
    sum: u32,
    released: bool,
}

struct Naive {
    ring: RingConfig,
    relaxed: bool,
    start: u32,
    low: u32,
    stopped: bool,
    /// The slots' contents, by index.
    contents: BTreeMap<u32, Index>,
    /// All indices that were ever released.
    released: BTreeSet<u32>,
}

/// The result of a fragment by the rules.
#[derive(Debug, PartialEq, Eq)]
struct Expected {
    counter: Counter,
    payload: Payload,
    completed: bool,
    released: bool,
}

impl Naive {
    /// The index in the same slot, if there is one.
    fn neighbour(&self, index: u32) -> Option<u32> {
        self.contents.keys().copied().find(|i| (i ^ index) & (self.ring.slots - 1) == 0)
    }

    fn fragment(&mut self, f: &Fragment, value: u32) -> Expected {
        let only = |counter| Expected {
            counter,
            payload: Payload::Leave,
            completed: false,
            released: false,
        };
        if self.stopped {
            return only(Counter::RingStopped);
        }
        let ahead = serial::diff(f.index, self.low);
        if ahead >= self.ring.credit as i32 {
            return only(Counter::CreditViolation);
        }
        let neighbour = self.neighbour(f.index);
        if neighbour.is_some_and(|n| serial::before(f.index, n)) {
            return only(Counter::Stale);
        }
        let turn = self.relaxed || ahead == 0;
        if neighbour != Some(f.index) {
            if ahead < 0 || neighbour.is_some_and(|n| !self.contents[&n].released) {
                return only(Counter::CreditViolation);
            }
            neighbour.map(|n| self.contents.remove(&n));
            let (ranks, len) = (BTreeSet::from([f.rank]), f.len);
            self.contents.insert(
                f.index,
                Index { len, bounds: f.bounds, ranks, sum: value, released: false },
            );
            return Expected { payload: Payload::Copy, ..only(Counter::Fragments) };
        }
        let all = self.ring.ranks as usize;
        let slot = self.contents.get_mut(&f.index).expect("its own index");
        if slot.bounds != f.bounds {
            self.stopped = true;
            return only(Counter::LayoutMismatch);
        }
        if slot.len != f.len {
            return only(Counter::LengthMismatch);
        }
        if slot.released {
            // All ranks have the results of indices more than the credit behind the lowest that has
            // not been released.
            let far = -ahead > self.ring.credit as i32;
            return only(if far { Counter::Stale } else { Counter::Replays });
        }
        let new = slot.ranks.insert(f.rank);
        if new {
            slot.sum = slot.sum.wrapping_add(value);
        }
        let completed = new && slot.ranks.len() == all;
        let released = slot.ranks.len() == all && turn;
        if released {
            slot.released = true;
            assert!(self.released.insert(f.index), "released twice");
            if !self.relaxed {
                let before = serial::sub(f.index, 1);
                assert!(
                    f.index == self.start || self.released.contains(&before),
                    "released out of order"
                );
            }
            if ahead == 0 {
                self.low = serial::add(f.index, 1);
            }
        }
        let (counter, payload) = if new {
            (Counter::Fragments, Payload::Add)
        } else {
            (Counter::Duplicate, Payload::Leave)
        };
        Expected { counter, payload, completed, released }
    }

    /// Moves a relaxed ring's lowest index past released ones that are still stored.
    fn advance(&mut self) {
        while self.contents.get(&self.low).is_some_and(|i| i.released) {
            self.low = serial::add(self.low, 1);
        }
    }
}

fn sequence(u: &mut Unstructured) -> Result<()> {
    let relaxed = u.arbitrary()?;
    let ranks = *u.choose(&[2, 2, 3, 4, 63, 64])?;
    let slots = 1u32 << u.int_in_range(1..=6)?;
    let credit = u.int_in_range(1..=slots / 2)?;
    let flags = ring_flags::ACTIVE | if relaxed { ring_flags::RELAXED } else { 0 };
    let ring = RingConfig { flags, ranks, slots, credit, mtu: 256, cpu: 0 };
    let start = *u.choose(&[0, serial::MASK - 3, 0x7f_fff0])?;
    let mut tested = RingBox::<(), u32>::new(ring, start);
    let (contents, released) = (BTreeMap::new(), BTreeSet::new());
    let mut naive = Naive { ring, relaxed, start, low: start, stopped: false, contents, released };

    while !u.is_empty() {
        let rank = u.int_in_range(0..=ranks - 1)?;
        let how = u.arbitrary::<u8>()?;
        let index = match how & 7 {
            0..=2 => tested.state.expected[rank as usize],
            3 => tested.state.low,
            4 => serial::add(tested.state.low, u.int_in_range(0..=credit + 1)?),
            5 => serial::sub(tested.state.low, u.int_in_range(0..=2 * slots)?),
            6 => serial::sub(tested.state.low, slots),
            _ => u.arbitrary::<u32>()? & serial::MASK,
        };
        let bounds = if how == 0xff { Slot::FIRST } else { 0 };
        let f = Fragment {
            rank,
            index,
            len: if how & 0xf0 == 0 { 8 } else { 4 },
            ce: how & 8 != 0,
            total: false,
            bounds,
        };
        let value = u.arbitrary::<u16>()? as u32;
        if relaxed {
            naive.advance();
        }
        let before = (tested.slots.clone(), tested.sums.clone());
        let expected_before = tested.state.expected;
        let v = tested.take(f, (), &value, |sum, value| *sum = sum.wrapping_add(*value));
        let expected = naive.fragment(&f, value);
        let released = v.output == Output::Release;
        let (counter, payload, completed) = (v.counter, v.payload, v.completed);
        assert_eq!(
            Expected { counter, payload, completed, released },
            expected,
            "{f:?}, low {}",
            naive.low
        );
        assert_eq!(tested.state.low, naive.low);
        match v.output {
            Output::Release | Output::Replay => {
                assert_eq!(
                    tested.sums[tested.slot_of(index)],
                    naive.contents[&index].sum,
                    "a wrong sum"
                );
            }
            Output::Stale => {
                assert!(
                    serial::before(index, tested.state.low),
                    "some rank may still need the slot's result"
                )
            }
            Output::Gap => assert!(v.gap && !naive.released.contains(&index)),
            Output::Drop => {}
            Output::Up => unreachable!("the ring has no parent"),
        }
        assert_eq!(v.output == Output::Replay, v.counter == Counter::Replays);
        assert_eq!(v.output == Output::Stale, v.counter == Counter::Stale);
        // Only the fragment's own slot changes, and a refused fragment changes none.
        if matches!(
            v.counter,
            Counter::CreditViolation
                | Counter::Stale
                | Counter::LayoutMismatch
                | Counter::RingStopped
                | Counter::LengthMismatch
        ) {
            assert_eq!(before, (tested.slots.clone(), tested.sums.clone()));
            assert!(!v.save_header && v.payload == Payload::Leave);
        }
        let moved = (0..MAX_RANKS)
            .filter(|r| expected_before[*r] != tested.state.expected[*r])
            .collect::<Vec<_>>();
        assert!(moved.is_empty() || moved == [rank as usize], "another rank's position changed");
        for (i, slot) in tested.slots.iter().enumerate().filter(|(_, slot)| slot.is(Slot::USED)) {
            assert_eq!(slot.index & (slots - 1), i as u32);
            let naive = &naive.contents[&slot.index];
            assert_eq!(
                slot.contributors,
                naive.ranks.iter().fold(0, |bits, rank| bits | 1 << rank)
            );
            assert_eq!(slot.is(Slot::COMPLETE), naive.ranks.len() == ranks as usize);
            assert_eq!((slot.is(Slot::RELEASED), u32::from(slot.len)), (naive.released, naive.len));
        }
    }
    Ok(())
}
