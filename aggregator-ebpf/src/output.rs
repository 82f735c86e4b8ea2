//! Outcome of a contribution's packet.

use aya_ebpf::bindings::xdp_action::{XDP_DROP, XDP_PASS};
use aya_ebpf::programs::XdpContext;
use netsum_common::abi::{ReleaseTag, ring_flags};
use netsum_common::counters::Counter;
use netsum_common::icrc;
use netsum_common::slot::{GAP_PSN_AHEAD, Output, PackedVerdict, Slot};
use netsum_common::wire::Frame;

use crate::AS_DUPLICATE;
use crate::check::Contribution;
use crate::packet::Packet;
use crate::payload::{self, LEN_BITS};
use crate::{maps, trace};

/// Drops, forwards or sends it, with the sum if it carries one.
#[inline(always)]
pub fn send(ctx: &XdpContext, c: &Contribution, slot: &Slot, verdict: PackedVerdict) -> u32 {
    let Contribution { frame, ring, len, flow_ref } = *c;
    if verdict.output_is(Output::Gap) {
        return forward_past_gap(
            ctx,
            frame,
            len,
            if verdict.completed() { Some(slot.crc) } else { None },
        );
    }
    if verdict.output_is(Output::Stale) && payload::shift_psn(ctx, frame, len, AS_DUPLICATE) {
        return XDP_PASS;
    }
    if !verdict.leaves() {
        return XDP_DROP;
    }
    // The uplink is the last member, and receives no totals.
    let last = ring.members - 1;
    let receiver = if verdict.output_is(Output::Release) {
        ReleaseTag::ALL as u32
    } else if verdict.output_is(Output::Up) {
        last | if slot.is(Slot::COMPLETE) { ReleaseTag::TOTAL as u32 } else { 0 }
    } else {
        let end = if ring.flags & ring_flags::UPLINK == 0 { ring.members } else { last };
        if flow_ref.rank + 1 >= end { 0 } else { flow_ref.rank + 1 }
    };
    let sent = tag(ctx, c, receiver as u16).and_then(|()| {
        if verdict.output_is(Output::Release) {
            maps::to_all(flow_ref.ring)
        } else if verdict.output_is(Output::Up) {
            maps::to_parent(flow_ref.ring)
        } else {
            maps::to_rank(flow_ref.ring, receiver)
        }
    });
    match sent {
        Some(action) => action,
        None => {
            maps::count(flow_ref.ring, Counter::RedirectFailed);
            trace::contribution(ctx, flow_ref, Counter::RedirectFailed.bit());
            XDP_DROP
        }
    }
}

/// Writes the tag for `egress` at the packet's beginning.
#[inline(always)]
fn tag(ctx: &XdpContext, c: &Contribution, rank: u16) -> Option<()> {
    let payload = c.frame.payload() as u16;
    let tag = ReleaseTag { ring: c.flow_ref.ring, index: c.flow_ref.index, rank, payload };
    // SAFETY: `ReleaseTag` is `repr(C)` without padding, 12 bytes as asserted in the ABI.
    Packet::new(ctx).store(0, unsafe { core::mem::transmute::<ReleaseTag, [u8; 12]>(tag) })
}

/// Forwards a packet with a PSN from far ahead, which makes its receiver NAK; see
/// [`GAP_PSN_AHEAD`]. `payload_crc` is that of the sum, if the sum has already replaced the
/// payload; the receiver discards either.
#[inline(always)]
fn forward_past_gap(ctx: &XdpContext, frame: &Frame, len: usize, payload_crc: Option<u32>) -> u32 {
    if !payload::shift_psn(ctx, frame, len, GAP_PSN_AHEAD) {
        return XDP_DROP;
    }
    let Some(crc) = payload_crc else { return XDP_PASS };
    let Some(state) =
        payload::headers_crc(ctx, frame.l3, frame.ip, frame.bth.opcode.extended_len())
    else {
        return XDP_DROP;
    };
    let icrc = !(icrc::shift(state, len & LEN_BITS) ^ crc);
    match Packet::new(ctx).store(frame.payload() + len, icrc.to_le_bytes()) {
        Some(()) => XDP_PASS,
        None => XDP_DROP,
    }
}
