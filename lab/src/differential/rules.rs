//! What a ring without a parent does with a fragment: a reading of the rules of its own, which
//! shares no code with the slot machine.

use netsum_common::abi::{RingConfig, ring_flags};
use netsum_common::counters::Counter;
use netsum_common::serial;
use netsum_common::slot::{Fragment, Output, Payload, RingState, Slot, Verdict};

/// Decides about a fragment, and updates the ring.
pub fn decide(
    config: &RingConfig,
    state: &mut RingState,
    slots: &mut [Slot],
    f: Fragment,
) -> Verdict {
    let relaxed = config.flags & ring_flags::RELAXED != 0;
    let at = |index: u32| (index % config.slots) as usize;
    let without_effect = |output, counter| Verdict {
        payload: Payload::Leave,
        save_header: false,
        completed: false,
        output,
        counter,
        gap: false,
    };
    let refused = |counter| without_effect(Output::Drop, counter);

    // Sums of a relaxed ring leave in any order: its lowest unreleased index follows from the
    // slots.
    if relaxed {
        let is_released =
            |index| slots[at(index)].index == index && slots[at(index)].is(Slot::RELEASED);
        while is_released(state.low) {
            state.low = serial::add(state.low, 1);
        }
    }
    if state.stopped > 0 {
        return refused(Counter::RingStopped);
    }
    if serial::diff(f.index, state.low) >= config.credit as i32 {
        return refused(Counter::CreditViolation);
    }
    let is_used = slots[at(f.index)].is(Slot::USED);
    if is_used && serial::before(f.index, slots[at(f.index)].index) {
        return without_effect(Output::Stale, Counter::Stale);
    }

    // The rank's first fragment that the box has not seen; all have sent what was released.
    let expected = &mut state.expected[f.rank as usize];
    if serial::before(*expected, state.low) {
        *expected = state.low;
    }
    let missing = serial::diff(f.index, *expected).max(0) as u32;
    if f.index == *expected || relaxed && missing > 0 {
        *expected = serial::add(f.index, 1);
    }
    let naks = if relaxed { missing > 0 } else { missing.is_power_of_two() };
    let held = if naks { Output::Gap } else { Output::Drop };

    let slot = &mut slots[at(f.index)];
    if !is_used || slot.index != f.index {
        if serial::before(f.index, state.low) || is_used && !slot.is(Slot::RELEASED) {
            return refused(Counter::CreditViolation);
        }
        *slot = Slot { index: f.index, len: f.len as u16, ..Slot::default() };
        slot.contributors = 1 << f.rank;
        slot.flags = Slot::USED | f.bounds | if f.ce { Slot::CE } else { 0 };
        return Verdict {
            payload: Payload::Copy,
            save_header: true,
            completed: false,
            output: held,
            counter: Counter::Contributions,
            gap: missing > 0,
        };
    }
    if slot.flags & (Slot::FIRST | Slot::LAST) != f.bounds {
        state.stopped = f.rank + 1;
        return refused(Counter::LayoutMismatch);
    }
    if u32::from(slot.len) != f.len {
        return refused(Counter::LengthMismatch);
    }
    if slot.is(Slot::RELEASED) {
        // Every rank has the sums of a window and more ago.
        if serial::before(serial::add(f.index, config.credit), state.low) {
            return without_effect(Output::Stale, Counter::Stale);
        }
        return Verdict { save_header: true, ..without_effect(Output::Replay, Counter::Replays) };
    }
    let is_new = slot.contributors >> f.rank & 1 == 0;
    if is_new {
        slot.contributors |= 1 << f.rank;
        slot.flags |= if f.ce { Slot::CE } else { 0 };
    }
    let is_complete = slot.contributors.count_ones() == config.members;
    let is_next = f.index == state.low;
    let leaves = is_complete && (relaxed || is_next);
    slot.flags |= if is_complete { Slot::COMPLETE } else { 0 };
    if leaves {
        slot.flags |= Slot::RELEASED;
        if relaxed && missing > 0 {
            slot.flags |= Slot::PAST_GAP | f.rank << Slot::GAP_RANK_SHIFT;
        }
        if is_next {
            state.low = serial::add(state.low, 1);
            slot.flags |= if relaxed { Slot::IN_ORDER } else { 0 };
        }
    }
    Verdict {
        payload: if is_new { Payload::Add } else { Payload::Leave },
        save_header: true,
        completed: is_new && is_complete,
        output: if leaves { Output::Release } else { held },
        counter: if is_new { Counter::Contributions } else { Counter::DuplicateRequest },
        gap: missing > 0,
    }
}
