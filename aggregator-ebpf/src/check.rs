//! Checks whether a contribution may be added.

use aya_ebpf::programs::XdpContext;
use netsum_common::abi::{Flow, MAX_MTU, RingConfig, ring_flags};
use netsum_common::counters::Counter;
use netsum_common::serial;
use netsum_common::slot;
use netsum_common::wire::{Bytes, Frame, ICRC_LEN, has_group_mark};

use crate::Dispatch;
use crate::classify::from_its_sender;
use crate::packet::Packet;
use crate::trace::FlowRef;
use crate::{in_band, maps, payload};

/// A checked contribution.
pub struct Contribution<'a> {
    /// Its packet's headers.
    pub frame: &'a Frame,
    pub ring: &'a RingConfig,
    /// Length of its payload.
    pub len: usize,
    /// Its sender and index.
    pub flow_ref: FlowRef,
}

/// Whether every receiver has long had the result of this packet, in an active ring; works on any
/// CPU. Never true in a ring that was set up in band: there the first packet of a new connection
/// may look like this.
#[inline(always)]
pub fn is_laps_behind(ring: &RingConfig, flow: &Flow, frame: &Frame) -> bool {
    let Some(state) = maps::state(flow.ring.0) else { return false };
    // SAFETY: an aligned word of a map value; the ring's CPU may be about to write a later one.
    let low = unsafe { (&raw const (*state).low).read_volatile() };
    ring.flags & (ring_flags::ACTIVE | ring_flags::IN_BAND) == ring_flags::ACTIVE
        && slot::is_laps_behind(ring, low, serial::sub(frame.bth.psn, flow.base_psn))
}

/// Checks that the packet comes from its flow and is complete; returns its payload length.
#[inline(always)]
pub fn check(
    ctx: &XdpContext,
    p: &Packet,
    frame: &Frame,
    flow: &mut Flow,
    ring: &RingConfig,
    dispatch: Dispatch,
) -> Result<usize, Counter> {
    if ring.flags & ring_flags::ACTIVE == 0 {
        return Err(Counter::InactiveRing);
    }
    // Slots have one writer: the softirq context of the ring's CPU. If a CPU goes offline, the CPU
    // map's thread runs elsewhere; when the CPU returns, `ingress` on it would be a second writer.
    // This check comes after ACTIVE: a ring that moves to another CPU becomes active only after the
    // move.
    if dispatch != Dispatch::Probe && !maps::is_current_cpu(ring.cpu) {
        return Err(Counter::WrongCpu);
    }
    from_its_sender(ctx, frame, flow)?;
    // Data of a single rank, of an incomplete group, or a partial sum instead of the total: some
    // box no longer adds.
    if flow.group_mark != 0 && !has_group_mark(frame.bth.flags, flow.group_mark) {
        return Err(Counter::UnexpectedTotal);
    }
    let len = match frame.data_len(p.len()) {
        Ok(len) => len,
        Err(reject) => {
            // This needs no ICRC: a corruption does not change both length fields alike.
            if frame.is_empty_message() {
                ring_stop(flow.ring.0, flow.rank);
                return Err(Counter::LayoutMismatch);
            }
            return Err(reject.counter());
        }
    };
    if len > ring.mtu as usize || len > MAX_MTU {
        return Err(Counter::Oversized);
    }
    let len = payload::bounded_len(len);
    // A requester fills all packets of a message except the last (IBTA 9.7.4.1.5, "Payload
    // length"). The first contribution sets the length of its slot, so one that is too short would
    // exclude the others.
    if len != ring.mtu as usize && !frame.bth.opcode.is_last() {
        return Err(Counter::ShortFragment);
    }
    if ring.flags & ring_flags::ICRC_IGNORE == 0 {
        let Some(state) = payload::frame_crc(ctx, frame, len) else {
            return Err(Counter::Truncated);
        };
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
