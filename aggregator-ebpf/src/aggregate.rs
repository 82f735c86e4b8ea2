//! A contribution arrives at its ring's CPU.

use aya_ebpf::bindings::xdp_action::{XDP_DROP, XDP_PASS};
use aya_ebpf::bindings::xdp_md;
use aya_ebpf::helpers::bpf_ktime_get_ns;
use aya_ebpf::programs::XdpContext;
use netsum_common::abi::{Flow, HeaderWords, MAX_MTU, ReleaseTag, RingConfig, SavedHeader, ring_flags};
use netsum_common::counters::Counter;
use netsum_common::slot::{self, Fragment, GAP_PSN_AHEAD, Output, Payload, Slot};
use netsum_common::timing::{self, Part};
use netsum_common::wire::{Bytes, ETH_LEN, Frame, ICRC_LEN, L3};
use netsum_common::{icrc, serial};

use crate::classify::{from_its_sender, reason, refused};
use crate::in_band;
use crate::maps;
use crate::packet::Packet;
use crate::payload::{self, LEN_BITS, Op, Place};
use crate::trace::{self, Party};
use crate::{AS_DUPLICATE, Way};

/// Checks a contribution, lets the slot machine decide and carries out what it says.
#[inline(always)]
pub fn contribution(ctx: &XdpContext, p: &Packet, frame: &Frame, flow: *mut Flow, way: Way) -> u32 {
    // SAFETY: a map value that user space writes as a whole; the learned MAC address and what was last seen are written
    // here, by the ring's CPU.
    let flow = unsafe { &mut *flow };
    let ring_id = flow.ring;
    let index = serial::sub(frame.bth.psn, flow.base_psn);
    let party = Party { ring: ring_id, rank: flow.rank, index };
    let Some(ring) = maps::ring(ring_id) else { return internal(ctx, Party::NOBODY) };
    flow.packets = flow.packets.wrapping_add(1);
    flow.last_psn = frame.bth.psn;
    match check(ctx, p, frame, flow, ring, way) {
        Ok(len) => {
            flow.next_psn = serial::add(frame.bth.psn, 1);
            decide(ctx, frame, flow, ring, len, party)
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

/// Whether the packet is one of a running ring whose result every receiver has had for long; asked on any CPU. Never in a ring
/// that was set up in band: there the first packet of a connection made anew may look so.
#[inline(always)]
pub fn is_laps_behind(ring: &RingConfig, flow: &Flow, frame: &Frame) -> bool {
    let Some(state) = maps::state(flow.ring) else { return false };
    // SAFETY: an aligned word of a map value; the ring's CPU may be about to write a later one.
    let low = unsafe { (&raw const (*state).low).read_volatile() };
    ring.flags & (ring_flags::ACTIVE | ring_flags::IN_BAND) == ring_flags::ACTIVE
        && slot::is_laps_behind(ring, low, serial::sub(frame.bth.psn, flow.base_psn))
}

/// Whether the packet is its flow's and whole; its payload length.
#[inline(always)]
fn check(
    ctx: &XdpContext,
    p: &Packet,
    frame: &Frame,
    flow: &mut Flow,
    ring: &RingConfig,
    way: Way,
) -> Result<usize, Counter> {
    if ring.flags & ring_flags::ACTIVE == 0 {
        return Err(Counter::InactiveRing);
    }
    // Slots have one writer: whoever runs on the ring's CPU with softirqs off. A CPU that goes offline leaves the CPU map's thread
    // without a home, and when it is back, `ingress` there would be the second. Asked behind ACTIVE: a ring that moves to another
    // CPU becomes active again only when it has it.
    if way != Way::Probe && !maps::is_here(ring.cpu) {
        return Err(Counter::WrongCpu);
    }
    from_its_sender(ctx, frame, flow)?;
    let len = match frame.data_len(p.len()) {
        Ok(len) => len,
        Err(reject) => {
            // No ICRC is asked for: chance does not change both length fields alike.
            if frame.is_empty_message() {
                ring_stop(flow.ring, flow.rank);
                return Err(Counter::LayoutMismatch);
            }
            return Err(reason(reject));
        }
    };
    if len > ring.mtu as usize || len > MAX_MTU {
        return Err(Counter::Oversized);
    }
    // A requester fills all packets of a message but the last (IBTA 9.7.4.1.5, "Payload length"). The first contribution says how
    // long its slot is, so one that is too short would keep the others out.
    if len != ring.mtu as usize && !frame.bth.opcode.is_last() {
        return Err(Counter::ShortFragment);
    }
    if ring.flags & ring_flags::ICRC_IGNORE == 0 {
        let Some(state) = payload::frame_crc(ctx, frame, len) else { return Err(Counter::Truncated) };
        let Some(sent) = Packet::new(ctx).load::<ICRC_LEN>(frame.payload() + len) else {
            return Err(Counter::Truncated);
        };
        if u32::from_le_bytes(sent) != !state {
            return Err(Counter::BadIcrc);
        }
    }
    if ring.flags & ring_flags::IN_BAND != 0 && frame.bth.opcode.is_first() {
        in_band::follows(ctx, p, frame, len, serial::sub(frame.bth.psn, flow.base_psn))?;
    }
    if flow.src_mac == [0; 6] {
        flow.src_mac = frame.src_mac;
    }
    Ok(len)
}

/// Packets are found anew behind calls: kept over them, they would take more stack than there is.
#[inline(always)]
fn decide(
    ctx: &XdpContext,
    frame: &Frame,
    flow: &mut Flow,
    ring: &RingConfig,
    len: usize,
    party: Party,
) -> u32 {
    let Party { ring: ring_id, index, .. } = party;
    let slot_no = index & (ring.slots - 1);
    let Some(state) = maps::state(ring_id) else { return internal(ctx, party) };
    let Some(slot) = maps::slot(ring_id, slot_no) else { return internal(ctx, party) };
    // SAFETY: map values that only the ring's CPU writes, and it runs one program at a time.
    let (state, slot) = unsafe { (&mut *state, &mut *slot) };
    if ring.flags & ring_flags::RELAXED != 0 {
        relaxed_advance(ring_id);
    }
    let fragment = Fragment { rank: flow.rank, index, len: len as u32, ce: frame.ce, bounds: frame.bounds() };
    let verdict = slot::on_fragment(ring, state, slot, fragment);

    flow.last_outcome = verdict.counter as u32;
    if verdict.counter == Counter::LengthMismatch {
        (flow.mismatch_psn, flow.mismatch_len) = (frame.bth.psn, len as u32);
    }
    maps::count(ring_id, verdict.counter);
    if verdict.gap {
        maps::count(ring_id, Counter::OutOfSequence);
    }
    if frame.ce {
        maps::count(ring_id, Counter::EcnMarked);
    }
    // Here the packet is still as it came, and its slot as it will be.
    trace::contribution(ctx, party, verdict.counters(frame.ce));
    if verdict.save_header {
        if save_header(ctx, frame, ring_id, slot_no * ring.ranks + flow.rank).is_none() {
            return internal(ctx, party);
        }
        if frame.ip != ETH_LEN {
            slot.flags |= Slot::TAGGED;
        }
    }
    if verdict.payload != Payload::Leave && timing::is_sampled(index) {
        note_time(
            ring_id,
            index,
            flow.rank,
            (verdict.payload == Payload::Add) as u32 + verdict.completed as u32,
        );
    }
    let place = Place { ring: ring_id, slot: slot_no, mtu: ring.mtu };
    let at = frame.payload();
    let moved = match verdict.payload {
        Payload::Leave => Some(()),
        Payload::Copy => payload::apply(ctx, Op::Store, at, len, &place),
        Payload::Add => payload::apply(ctx, Op::Add, at, len, &place),
    };
    if moved.is_none() {
        return internal(ctx, party);
    }
    let result_in_packet = verdict.completed || matches!(verdict.output, Output::Release | Output::Replay);
    if result_in_packet && payload::apply(ctx, Op::Load, at, len, &place).is_none() {
        return internal(ctx, party);
    }
    if verdict.completed {
        maps::count(ring_id, Counter::Completed);
        let Some(crc) = payload::crc(ctx, at, len, 0) else { return internal(ctx, party) };
        slot.crc = crc;
        if verdict.output != Output::Release {
            maps::count(ring_id, Counter::Held);
        }
    }
    let tag = |rank: u16| {
        let tag = ReleaseTag { ring: ring_id, index, rank, payload: at as u16 };
        // SAFETY: `ReleaseTag` is `repr(C)` without padding, 12 bytes as asserted in the ABI.
        Packet::new(ctx).store(0, unsafe { core::mem::transmute::<ReleaseTag, [u8; 12]>(tag) })
    };
    let sent = match verdict.output {
        Output::Drop => return XDP_DROP,
        Output::Stale => {
            return if payload::move_psn(ctx, frame, len, AS_DUPLICATE) { XDP_PASS } else { XDP_DROP };
        }
        Output::Gap => {
            maps::count(ring_id, Counter::GapForwarded);
            return forward_past_gap(ctx, frame, len, if verdict.completed { Some(slot.crc) } else { None });
        }
        Output::Release => {
            maps::count(ring_id, Counter::Released);
            tag(ReleaseTag::ALL).and_then(|()| maps::to_all(ring_id))
        }
        Output::Replay => {
            let next = if flow.rank + 1 >= ring.ranks { 0 } else { flow.rank + 1 };
            tag(next as u16).and_then(|()| maps::to_rank(ring_id, next))
        }
    };
    match sent {
        Some(action) => action,
        None => {
            maps::count(ring_id, Counter::RedirectFailed);
            trace::contribution(ctx, party, Counter::RedirectFailed.bit());
            XDP_DROP
        }
    }
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
fn save_header(ctx: &XdpContext, frame: &Frame, ring: u32, index: u32) -> Option<()> {
    let v6 = (frame.l3 == L3::V6) as u32;
    let place = v6 << 16 | (frame.ip as u32) << 8 | frame.payload() as u32;
    if header_save(ctx.ctx, place, ring, index) == 0 { Some(()) } else { None }
}

/// Stops a ring because of a rank. A global function, as in [`payload`]: few packets need it.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn ring_stop(ring_id: u32, rank: u32) -> u64 {
    if let Some(state) = maps::state(ring_id) {
        // SAFETY: a map value that only the ring's CPU writes.
        unsafe { (*state).stopped = rank + 1 };
    }
    0
}

/// Saves the headers of a packet, in words; up to six bytes of the payload may be copied with them. A global function.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn header_save(ctx: *mut xdp_md, place: u32, ring: u32, index: u32) -> u64 {
    let p = Packet::new(&XdpContext::new(ctx));
    let Some(saved) = maps::header(ring, index) else { return 1 };
    let len = (place & 0x7f) as usize;
    if let Some(all) = p.at::<{ size_of::<HeaderWords>() }>(0) {
        // Long enough for a copy without looking at the length.
        // SAFETY: 13 words from `all` on are inside the packet, and a map value has room for them.
        unrolled!(I in 0 1 2 3 4 5 6 7 8 9 10 11 12 => unsafe {
            (*saved).words[I] = (all as *const u64).add(I).read_unaligned()
        });
        return finish_header(saved, place);
    }
    let mut i = 0;
    while i < 13 {
        if i * 8 >= len {
            break;
        }
        let Some(word) = p.load::<8>(i * 8) else { return 1 };
        // SAFETY: a map value that only the ring's CPU writes; `i` is below the array's length.
        unsafe { (*saved).words[i] = u64::from_ne_bytes(word) };
        i += 1;
    }
    finish_header(saved, place)
}

#[inline(always)]
fn finish_header(saved: *mut SavedHeader, place: u32) -> u64 {
    // SAFETY: a map value that only the ring's CPU writes.
    unsafe {
        (*saved).len = (place & 0x7f) as u8;
        (*saved).ip = (place >> 8) as u8;
        (*saved).v6 = (place >> 16) as u8;
    }
    0
}

/// Passes a packet on with a PSN from far ahead, so that its receiver NAKs; see [`GAP_PSN_AHEAD`]. `payload_crc` is that
/// of the sum, when the sum has taken the payload's place already; the receiver discards either.
#[inline(always)]
fn forward_past_gap(ctx: &XdpContext, frame: &Frame, len: usize, payload_crc: Option<u32>) -> u32 {
    if !payload::move_psn(ctx, frame, len, GAP_PSN_AHEAD) {
        return XDP_DROP;
    }
    let Some(crc) = payload_crc else { return XDP_PASS };
    let Some(state) = payload::headers_crc(ctx, frame.l3, frame.ip, frame.bth.opcode.extended_len()) else {
        return XDP_DROP;
    };
    let icrc = !(icrc::shift(state, len & LEN_BITS) ^ crc);
    match Packet::new(ctx).store(frame.payload() + len, icrc.to_le_bytes()) {
        Some(()) => XDP_PASS,
        None => XDP_DROP,
    }
}

#[inline(always)]
fn internal(ctx: &XdpContext, party: Party) -> u32 {
    maps::count(party.ring, Counter::Internal);
    trace::contribution(ctx, party, Counter::Internal.bit());
    XDP_DROP
}
