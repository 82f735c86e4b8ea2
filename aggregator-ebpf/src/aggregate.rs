//! Handles a contribution on its ring's CPU, from the checks to the outcome of its packet.

use aya_ebpf::bindings::xdp_action::XDP_DROP;
use aya_ebpf::helpers::bpf_ktime_get_ns;
use aya_ebpf::programs::XdpContext;
use netsum_common::abi::{Flow, ring_flags};
use netsum_common::counters::Counter;
use netsum_common::serial;
use netsum_common::slot::{self, Fragment, PackedVerdict, Payload, Slot};
use netsum_common::timing::{self, Part};
use netsum_common::wire::{Bytes, EthHdr, Frame, TOTAL};

use crate::check::{Contribution, check};
use crate::classify::refused;
use crate::packet::Packet;
use crate::payload::{self, Op, SumAddress, UDP_CHECKSUM_LEN};
use crate::trace::{self, FlowRef};
use crate::{Dispatch, float, maps, output, saved};

/// Checks a contribution, runs the slot machine and carries out its verdict.
#[inline(always)]
pub fn contribution(
    ctx: &XdpContext,
    p: &Packet,
    frame: &Frame,
    flow: *mut Flow,
    dispatch: Dispatch,
) -> u32 {
    // SAFETY: a map value that user space writes as a whole; the learned MAC address and what was
    // last seen are written here, by the ring's CPU.
    let flow = unsafe { &mut *flow };
    let ring_id = flow.ring.0;
    let index = serial::sub(frame.bth.psn, flow.base_psn);
    let flow_ref = FlowRef { ring: ring_id, rank: flow.rank, index };
    let Some(ring) = maps::ring(ring_id) else { return internal(ctx, FlowRef::NONE) };
    flow.packets = flow.packets.wrapping_add(1);
    flow.last_psn = frame.bth.psn;
    match check(ctx, p, frame, flow, ring, dispatch) {
        Ok(len) => contribute(ctx, &Contribution { frame, ring, len, flow_ref }, flow)
            .unwrap_or_else(|| internal(ctx, flow_ref)),
        Err(counter) => {
            flow.refused = flow.refused.wrapping_add(1);
            flow.last_verdict = counter as u32;
            refused(ctx, ring_id, counter);
            trace::contribution(ctx, flow_ref, counter.bit());
            XDP_DROP
        }
    }
}

/// Carries out the verdict step by step. `None` if something is missing that must be there.
///
/// Packets are located again after calls: pointers kept across them would need more stack than
/// there is.
#[inline(always)]
fn contribute(ctx: &XdpContext, c: &Contribution, flow: &mut Flow) -> Option<u32> {
    let address = SumAddress {
        ring: c.flow_ref.ring,
        slot: c.flow_ref.index & (c.ring.slots - 1),
        bytes: c.ring.sum_bytes(),
    };
    if c.ring.flags & ring_flags::RELAXED != 0 {
        relaxed_advance(c.flow_ref.ring);
    }
    let FlowRef { ring, rank, index } = c.flow_ref;
    let total = c.ring.flags & (ring_flags::UPLINK | ring_flags::GROUPS) != 0
        && c.frame.bth.flags & TOTAL != 0;
    let packed =
        c.frame.bounds() << 16 | (c.frame.ce as u32) << 15 | (total as u32) << 14 | c.len as u32;
    let verdict = PackedVerdict(decide(ring, index, rank, packed));
    // SAFETY: a map value that only the ring's CPU writes, and it runs one program at a time.
    let slot = unsafe { &mut *maps::slot(address.ring, address.slot)? };
    if !verdict.counts(Counter::CreditViolation) && !verdict.counts(Counter::UnexpectedTotal) {
        // Only for accepted contributions: with a PSN from far away, all others would look moved.
        flow.next_psn = serial::add(c.frame.bth.psn, 1);
    }
    count(c, flow, verdict);
    // The packet is still unchanged here, and its slot already final.
    trace::contribution(ctx, c.flow_ref, verdict.counters(c.frame.ce));
    if verdict.save_header() {
        save(ctx, c, slot, &address)?;
    }
    time(c, verdict);
    sum(ctx, c, slot, verdict, &address)?;
    Some(output::send(ctx, c, slot, verdict))
}

/// Runs the slot machine; returns a [`PackedVerdict`] verdict. A global function, as in
/// [`payload`]: inlined, it would need more stack than there is, and the verifier would follow
/// everything behind it once for each of its paths.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn decide(ring_id: u32, index: u32, rank: u32, packed: u32) -> u64 {
    let Some(ring) = maps::ring(ring_id) else { return PackedVerdict::INTERNAL.0 };
    let Some(state) = maps::state(ring_id) else { return PackedVerdict::INTERNAL.0 };
    let Some(slot) = maps::slot(ring_id, index & ring.slots.wrapping_sub(1)) else {
        return PackedVerdict::INTERNAL.0;
    };
    let [ce, total] = [15, 14].map(|bit| packed >> bit & 1 != 0);
    let fragment = Fragment { rank, index, len: packed & 0x3fff, ce, bounds: packed >> 16, total };
    // SAFETY: map values that only the ring's CPU writes, and it runs one program at a time.
    unsafe { slot::on_fragment(ring, &mut *state, &mut *slot, fragment) }.packed().0
}

#[inline(always)]
fn count(c: &Contribution, flow: &mut Flow, verdict: PackedVerdict) {
    let ring = c.flow_ref.ring;
    flow.last_verdict = verdict.counter();
    if verdict.counts(Counter::LengthMismatch) {
        (flow.mismatch_psn, flow.mismatch_len) = (c.frame.bth.psn, c.len as u32);
    }
    maps::count_number(ring, verdict.counter());
    verdict.secondary_counters(c.frame.ce, |counter| maps::count(ring, counter));
}

#[inline(always)]
fn save(ctx: &XdpContext, c: &Contribution, slot: &mut Slot, address: &SumAddress) -> Option<()> {
    saved::save(ctx, c.frame, address.ring, address.slot * c.ring.members + c.flow_ref.rank)?;
    if c.frame.ip != EthHdr::LEN {
        slot.flags |= Slot::TAGGED;
    }
    Some(())
}

#[inline(always)]
fn time(c: &Contribution, verdict: PackedVerdict) {
    let FlowRef { ring, index, .. } = c.flow_ref;
    // The parent's total is not the ranks' partial sum, and a single rank waits for nobody.
    let alone = verdict.payload_is(Payload::Copy) && verdict.completed();
    let of_rank = !verdict.payload_is(Payload::Leave) && !alone;
    if of_rank && timing::is_sampled(index) {
        let part = verdict.payload_is(Payload::Add) as u32 + verdict.completed() as u32;
        record_time(ring, index, c.flow_ref.rank, part);
    }
}

/// Adds the payload to the slot, or puts a sum that is to be sent into the packet.
#[inline(always)]
fn sum(
    ctx: &XdpContext,
    c: &Contribution,
    slot: &mut Slot,
    verdict: PackedVerdict,
    address: &SumAddress,
) -> Option<()> {
    let (at, len) = (c.frame.payload(), c.len);
    if c.ring.flags & ring_flags::FLOAT != 0 {
        float::apply(ctx, verdict, at, len, slot, address)?;
    } else {
        if verdict.payload_is(Payload::Copy) {
            payload::apply(ctx, Op::Store, at, len, address)?;
        }
        if verdict.payload_is(Payload::Add) {
            payload::apply(ctx, Op::Add, at, len, address)?;
        }
        if verdict.completed() || verdict.leaves() {
            payload::apply(ctx, Op::Load, at, len, address)?;
        }
    }
    if verdict.completed() {
        slot.crc = payload::crc(ctx, at, len, 0)?;
        let own =
            Packet::new(ctx).load::<UDP_CHECKSUM_LEN>(c.frame.bth_offset() - UDP_CHECKSUM_LEN)?;
        // Also if it is 0: a total replaces a partial sum, which may have had one.
        slot.checksum =
            if own == [0; UDP_CHECKSUM_LEN] { 0 } else { payload::checksum(ctx, at, len)? };
    }
    Some(())
}

/// Advances a relaxed ring's lowest unreleased index. A global function, as in [`payload`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn relaxed_advance(ring_id: u32) -> u64 {
    let Some(ring) = maps::ring(ring_id) else { return 0 };
    let Some(state) = maps::state(ring_id) else { return 0 };
    // SAFETY: map values that only the ring's CPU writes.
    unsafe { slot::advance_low(ring, &mut *state, |i| maps::slot(ring_id, i).map(|s| *s)) };
    0
}

/// Notes the time of a contribution to a timed index; `part` is a [`Part`]. A global function, as
/// in [`payload`]: few packets need it.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn record_time(ring_id: u32, index: u32, rank: u32, part: u32) -> u64 {
    let Some(timing) = maps::timing(ring_id) else { return 0 };
    let part = match part {
        0 => Part::First,
        1 => Part::Middle,
        _ => Part::Last,
    };
    // SAFETY: a helper without preconditions; a map value that only the ring's CPU writes.
    unsafe { (*timing).record(index, rank, part, bpf_ktime_get_ns()) };
    0
}

#[inline(always)]
fn internal(ctx: &XdpContext, flow_ref: FlowRef) -> u32 {
    maps::count(flow_ref.ring, Counter::InternalError);
    trace::contribution(ctx, flow_ref, Counter::InternalError.bit());
    XDP_DROP
}
