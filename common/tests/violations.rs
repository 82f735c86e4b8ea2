//! Faults that a model checker found elsewhere, as packets that arrive here: none may spoil a sum
//! or keep a slot.
//!
//! VeriNC (Bai et al., Finding Design Risks of In-Network Computing Systems, ICNP 2026) names a
//! violation of SwitchML and one of ATP, and has a model of NetReduce. Each test says which one it
//! is.

use netsum_common::abi::{RingConfig, ring_flags};
use netsum_common::counters::Counter;
use netsum_common::ring_box::RingBox;
use netsum_common::slot::{Fragment, Output, Slot};

/// A box that looks at every sum that it sends.
struct Watched {
    ring: RingBox<u32, u32>,
    /// Members send packets that carry the mark of a total.
    total: bool,
}

fn value(member: u32, index: u32) -> u32 {
    (index + 1) << (8 * member)
}

impl Watched {
    /// As many slots as its credit twice.
    fn new(members: u32, credit: u32, flag: u32) -> Self {
        let flags = ring_flags::ACTIVE | flag;
        let config =
            RingConfig { flags, ranks: members, slots: 2 * credit, credit, mtu: 256, cpu: 0 };
        Self { ring: RingBox::new(config, 0), total: false }
    }

    fn arrives(&mut self, member: u32, index: u32) -> (Output, Counter) {
        self.is_in_its_place(member, index, 0)
    }

    fn is_in_its_place(&mut self, member: u32, index: u32, bounds: u32) -> (Output, Counter) {
        let members = self.ring.config.ranks;
        let has_parent = self.ring.config.flags & ring_flags::UPLINK != 0;
        let is_total = has_parent && member == members - 1;
        let f = Fragment {
            rank: member,
            index,
            len: 4,
            ce: false,
            total: is_total || self.total,
            bounds,
        };
        let partial =
            |index| (0..members - u32::from(has_parent)).map(|m| value(m, index)).sum::<u32>();
        // The packet from the parent stands for the sum of all.
        let sum = |index| partial(index) + if has_parent { value(members - 1, index) } else { 0 };
        let sends = if is_total { sum(index) } else { value(member, index) };
        let v = self.ring.take(f, index, &sends, |sum, value| *sum += value);
        let slot = self.ring.slot_of(index);
        for (_, header) in self.ring.leaves_on(&f, v.output) {
            let goes_up_first = v.output == Output::Up && !self.ring.slots[slot].is(Slot::COMPLETE);
            let right = if goes_up_first { partial(index) } else { sum(index) };
            assert_eq!((*header, self.ring.sums[slot]), (index, right), "{v:?}");
        }
        (v.output, v.counter)
    }

    /// All members contribute; the last one brings the sum out.
    fn all_send(&mut self, index: u32) {
        let members = self.ring.config.ranks;
        for member in 0..members {
            let (output, _) = self.arrives(member, index);
            assert_eq!(output == Output::Release, member + 1 == members, "{member} {index}");
        }
    }

    /// Slots that are taken and not given back.
    fn open(&self) -> usize {
        self.ring.slots.iter().filter(|s| s.is(Slot::USED) && !s.is(Slot::RELEASED)).count()
    }
}

const STALE: (Output, Counter) = (Output::Stale, Counter::Stale);
const TAKEN: (Output, Counter) = (Output::Drop, Counter::Fragments);

/// SwitchML, out of order: a late copy of a request that is complete comes when its slot serves
/// another, and is added there in the place of its worker's own.
#[test]
fn a_late_copy_is_not_counted_in_the_next_use_of_its_slot() {
    for before_others in [false, true] {
        let mut b = Watched::new(3, 1, 0);
        b.all_send(0);
        b.all_send(1);
        if before_others {
            // Its slot has been given back, and nobody has it yet.
            assert_eq!(b.arrives(0, 0), STALE);
        }
        assert_eq!(b.arrives(1, 2), TAKEN);
        assert_eq!(b.arrives(0, 0), STALE);
        assert_eq!(b.arrives(2, 2), TAKEN);
        assert_eq!(b.arrives(0, 2).0, Output::Release);
    }
}

/// ATP, out of order: a request that comes when its sum is done takes an aggregator again, for
/// ever.
#[test]
fn what_comes_after_its_sum_takes_no_slot() {
    let mut b = Watched::new(2, 2, 0);
    for index in 0..6 {
        b.all_send(index);
        for late in 0..=index {
            let (output, counter) = b.arrives(0, late);
            assert!(
                matches!(output, Output::Replay | Output::Stale),
                "{late} after {index}: {counter:?}"
            );
            assert_eq!(b.open(), 0, "{late} after {index}");
        }
    }
    // Nobody has ever had what these slots would be for.
    let mut anew = Watched::new(2, 2, 0);
    anew.ring.state.low = 6;
    assert_eq!(anew.arrives(0, 3), (Output::Drop, Counter::CreditViolation));
    assert_eq!(anew.open(), 0);
}

/// NetReduce, as VeriNC models it: what is sent again of a message that is complete clears the slot
/// one window on, and the contributions that it has.
#[test]
fn a_replay_takes_nothing_out_of_another_slot() {
    let mut b = Watched::new(2, 1, 0);
    b.all_send(0);
    assert_eq!(b.arrives(0, 1), TAKEN);
    // Rank 1 has not got its sum.
    assert_eq!(b.arrives(0, 0), (Output::Replay, Counter::Replays));
    assert_eq!(b.arrives(1, 1).0, Output::Release);
}

/// The same: it goes to everybody again, and not to the one who lacks it.
#[test]
fn a_replay_goes_to_one() {
    let mut b = Watched::new(3, 1, 0);
    b.all_send(0);
    let f = Fragment { rank: 1, index: 0, len: 4, ce: false, total: false, bounds: 0 };
    assert_eq!(b.arrives(1, 0).0, Output::Replay);
    assert_eq!(
        b.ring.leaves_on(&f, Output::Replay).map(|(member, _)| member).collect::<Vec<_>>(),
        [1]
    );
}

/// The same: a packet's place follows from the last first packet that came of its sender. One that
/// overtakes it, or an old one that comes late, puts it elsewhere.
#[test]
fn a_packets_place_follows_from_its_own_number() {
    let (first, last) = (Slot::FIRST, Slot::LAST);
    let mut b = Watched::new(2, 4, 0);
    for (index, bounds) in [(0, first), (1, last), (2, first), (3, last)] {
        assert_eq!(b.is_in_its_place(1, index, bounds), TAKEN);
    }
    assert_eq!(b.is_in_its_place(0, 0, first).0, Output::Release);
    // The second message's last overtakes its first, and the first message's first comes again in
    // between.
    assert_eq!(b.is_in_its_place(0, 3, last).1, Counter::Fragments);
    assert_eq!(b.is_in_its_place(0, 0, first), (Output::Replay, Counter::Replays));
    assert_eq!(b.is_in_its_place(0, 1, last).0, Output::Release);
    assert_eq!(b.is_in_its_place(0, 2, first).0, Output::Release);
    assert_eq!(b.is_in_its_place(0, 3, last).0, Output::Release, "held until its turn");
}

/// SwitchML and ATP keep a bit for each worker against it.
#[test]
fn a_duplicate_counts_once() {
    let mut b = Watched::new(2, 1, 0);
    assert_eq!(b.arrives(0, 0), TAKEN);
    assert_eq!(b.arrives(0, 0), (Output::Drop, Counter::Duplicate));
    assert_eq!(b.arrives(1, 0).0, Output::Release);
}

/// SwitchML's reason to keep two slots for each place: a result is lost, and its slot must not be
/// used again before all have it.
#[test]
fn a_lost_result_is_there_until_its_receiver_has_it() {
    let mut b = Watched::new(2, 1, 0);
    b.all_send(0);
    // Rank 1 lacks the sum of 0. Rank 0 continues, beyond its credit.
    assert_eq!(b.arrives(0, 1), TAKEN);
    assert_eq!(b.arrives(0, 2), (Output::Drop, Counter::CreditViolation));
    assert_eq!(b.arrives(0, 0), (Output::Replay, Counter::Replays));
    assert_eq!(b.arrives(1, 1).0, Output::Release);
}

/// The violations above, in a box with a parent: what comes down late, doubled or before its time.
#[test]
fn a_late_total_is_not_the_one_of_the_next_use_of_its_slot() {
    let mut b = Watched::new(3, 1, ring_flags::UPLINK);
    let up = |b: &mut Watched, index| {
        assert_eq!((b.arrives(0, index), b.arrives(1, index).0), (TAKEN, Output::Up));
    };
    for index in [0, 1] {
        up(&mut b, index);
        assert_eq!(b.arrives(2, index), (Output::Release, Counter::Totals));
    }
    assert_eq!(b.arrives(2, 1), (Output::Replay, Counter::Replays), "doubled");
    assert_eq!(b.arrives(0, 2), TAKEN);
    assert_eq!(b.arrives(2, 2), (Output::Drop, Counter::TotalUnexpected), "nothing has gone up");
    assert_eq!(b.arrives(1, 2).0, Output::Up);
    assert_eq!(b.arrives(2, 0), STALE);
    // The last member has not got a total of its group's: only the parent may replay.
    assert_eq!(b.arrives(1, 2), (Output::Up, Counter::SentUpAgain));
    assert_eq!(b.arrives(2, 2), (Output::Release, Counter::Totals));
    assert_eq!(b.open(), 0);
}

/// The same in the parent: a partial sum that comes late, doubled, or after its total and marked as
/// one.
#[test]
fn a_late_partial_sum_is_not_counted_in_the_next_use_of_its_slot() {
    let mut b = Watched::new(2, 1, ring_flags::GROUPS);
    b.all_send(0);
    b.all_send(1);
    assert_eq!(b.arrives(1, 2), TAKEN);
    assert_eq!(b.arrives(1, 2), (Output::Drop, Counter::Duplicate));
    for total in [false, true] {
        b.total = total;
        assert_eq!(b.arrives(0, 0), STALE);
    }
    assert_eq!(b.arrives(0, 2), (Output::Drop, Counter::TotalUnexpected));
    b.total = false;
    assert_eq!(b.arrives(0, 2).0, Output::Release);
    assert_eq!(b.open(), 0);
}
