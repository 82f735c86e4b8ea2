//! A contribution arrives at its ring's CPU: its way from the checks to what becomes of its packet.

use aya_ebpf::bindings::xdp_action::XDP_DROP;
use aya_ebpf::helpers::bpf_ktime_get_ns;
use aya_ebpf::programs::XdpContext;
use netsum_common::abi::{Flow, ring_flags};
use netsum_common::counters::Counter;
use netsum_common::serial;
use netsum_common::slot::{self, Fragment, Output, Payload, RingState, Slot, Verdict};
use netsum_common::timing::{self, Part};
use netsum_common::wire::{Bytes, EthHdr, Frame};

use crate::check::{Contribution, check};
use crate::classify::refused;
use crate::packet::Packet;
use crate::payload::{self, Op, Place, UDP_CHECKSUM_LEN};
use crate::trace::{self, Party};
use crate::{Way, maps, output, saved};

/// Checks a contribution, lets the slot machine decide and carries out what it says.
#[inline(always)]
pub fn contribution(ctx: &XdpContext, p: &Packet, frame: &Frame, flow: *mut Flow, way: Way) -> u32 {
    // SAFETY: a map value that user space writes as a whole; the learned MAC address and what was last seen are written
    // here, by the ring's CPU.
    let flow = unsafe { &mut *flow };
    let ring_id = flow.ring.0;
    let index = serial::sub(frame.bth.psn, flow.base_psn);
    let party = Party { ring: ring_id, rank: flow.rank, index };
    let Some(ring) = maps::ring(ring_id) else { return internal(ctx, Party::NOBODY) };
    flow.packets = flow.packets.wrapping_add(1);
    flow.last_psn = frame.bth.psn;
    match check(ctx, p, frame, flow, ring, way) {
        Ok(len) => {
            flow.next_psn = serial::add(frame.bth.psn, 1);
            steps(ctx, &Contribution { frame, ring, len, party }, flow)
                .unwrap_or_else(|| internal(ctx, party))
        }
        Err(counter) => {
            flow.refused = flow.refused.wrapping_add(1);
            flow.last_outcome = counter as u32;
            refused(ctx, ring_id, counter);
            trace::contribution(ctx, party, counter.bit());
            XDP_DROP
        }
    }
}

/// From the verdict to what becomes of the packet, one after the other. `None` where something that must be there is not.
///
/// Packets are found anew behind calls: kept over them, they would take more stack than there is.
#[inline(always)]
fn steps(ctx: &XdpContext, c: &Contribution, flow: &mut Flow) -> Option<u32> {
    let place = Place { ring: c.party.ring, slot: c.party.index & (c.ring.slots - 1), mtu: c.ring.mtu };
    let (state, slot) = (maps::state(place.ring)?, maps::slot(place.ring, place.slot)?);
    // SAFETY: map values that only the ring's CPU writes, and it runs one program at a time.
    let (state, slot) = unsafe { (&mut *state, &mut *slot) };
    let verdict = decide(c, state, slot);
    count(c, flow, &verdict);
    // Here the packet is still as it came, and its slot as it will be.
    trace::contribution(ctx, c.party, verdict.counters(c.frame.ce));
    if verdict.save_header {
        save(ctx, c, slot, &place)?;
    }
    time(c, &verdict);
    sum(ctx, c, slot, &verdict, &place)?;
    Some(output::send(ctx, c, slot, &verdict))
}

#[inline(always)]
fn decide(c: &Contribution, state: &mut RingState, slot: &mut Slot) -> Verdict {
    if c.ring.flags & ring_flags::RELAXED != 0 {
        relaxed_advance(c.party.ring);
    }
    let Contribution { frame, len, .. } = *c;
    let (index, len) = (c.party.index, len as u32);
    // No ring has a parent yet.
    slot::decide::<false>(
        c.ring,
        state,
        slot,
        Fragment { rank: c.party.rank, index, len, ce: frame.ce, bounds: frame.bounds() },
    )
}

#[inline(always)]
fn count(c: &Contribution, flow: &mut Flow, verdict: &Verdict) {
    let ring = c.party.ring;
    flow.last_outcome = verdict.counter as u32;
    if verdict.counter == Counter::LengthMismatch {
        (flow.mismatch_psn, flow.mismatch_len) = (c.frame.bth.psn, c.len as u32);
    }
    maps::count(ring, verdict.counter);
    if verdict.gap {
        maps::count(ring, Counter::OutOfSequence);
    }
    if c.frame.ce {
        maps::count(ring, Counter::EcnMarked);
    }
}

#[inline(always)]
fn save(ctx: &XdpContext, c: &Contribution, slot: &mut Slot, place: &Place) -> Option<()> {
    saved::save(ctx, c.frame, place.ring, place.slot * c.ring.ranks + c.party.rank)?;
    if c.frame.ip != EthHdr::LEN {
        slot.flags |= Slot::TAGGED;
    }
    Some(())
}

#[inline(always)]
fn time(c: &Contribution, verdict: &Verdict) {
    let Party { ring, index, .. } = c.party;
    if verdict.payload != Payload::Leave && timing::is_sampled(index) {
        let part = (verdict.payload == Payload::Add) as u32 + verdict.completed as u32;
        note_time(ring, index, c.party.rank, part);
    }
}

/// Takes the payload into the slot, and a sum that is to be sent into the packet.
#[inline(always)]
fn sum(ctx: &XdpContext, c: &Contribution, slot: &mut Slot, verdict: &Verdict, place: &Place) -> Option<()> {
    let (at, len) = (c.frame.payload(), c.len);
    match verdict.payload {
        Payload::Leave => Some(()),
        Payload::Copy => payload::apply(ctx, Op::Store, at, len, place),
        Payload::Add => payload::apply(ctx, Op::Add, at, len, place),
    }?;
    if verdict.completed || matches!(verdict.output, Output::Release | Output::Replay) {
        payload::apply(ctx, Op::Load, at, len, place)?;
    }
    if verdict.completed {
        maps::count(place.ring, Counter::Completed);
        slot.crc = payload::crc(ctx, at, len, 0)?;
        let own = Packet::new(ctx).load::<UDP_CHECKSUM_LEN>(c.frame.bth_offset() - UDP_CHECKSUM_LEN)?;
        if own != [0; UDP_CHECKSUM_LEN] {
            slot.checksum = payload::checksum(ctx, at, len)?;
        }
        if verdict.output != Output::Release {
            maps::count(place.ring, Counter::Held);
        }
    }
    Some(())
}

/// Moves a relaxed ring's lowest unreleased index on. A global function, as in [`payload`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn relaxed_advance(ring_id: u32) -> u64 {
    let Some(ring) = maps::ring(ring_id) else { return 0 };
    let Some(state) = maps::state(ring_id) else { return 0 };
    // SAFETY: map values that only the ring's CPU writes.
    unsafe { slot::advance_low(ring, &mut *state, |i| maps::slot(ring_id, i).map(|s| *s)) };
    0
}

/// Notes when a timed index had a contribution; `part` is a [`Part`]. A global function, as in [`payload`]: few packets need it.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn note_time(ring_id: u32, index: u32, rank: u32, part: u32) -> u64 {
    let Some(timing) = maps::timing(ring_id) else { return 0 };
    let part = match part {
        0 => Part::First,
        1 => Part::Middle,
        _ => Part::Last,
    };
    // SAFETY: a helper without preconditions; a map value that only the ring's CPU writes.
    unsafe { (*timing).note(index, rank, part, bpf_ktime_get_ns()) };
    0
}

#[inline(always)]
fn internal(ctx: &XdpContext, party: Party) -> u32 {
    maps::count(party.ring, Counter::Internal);
    trace::contribution(ctx, party, Counter::Internal.bit());
    XDP_DROP
}
