//! What becomes of a contribution's packet.

use aya_ebpf::bindings::xdp_action::{XDP_DROP, XDP_PASS};
use aya_ebpf::programs::XdpContext;
use netsum_common::abi::ReleaseTag;
use netsum_common::counters::Counter;
use netsum_common::icrc;
use netsum_common::slot::{GAP_PSN_AHEAD, Output, Slot, Verdict};
use netsum_common::wire::Frame;

use crate::AS_DUPLICATE;
use crate::check::Contribution;
use crate::packet::Packet;
use crate::payload::{self, LEN_BITS};
use crate::{maps, trace};

/// Drops, forwards or sends it, with the sum in it where there is to be one.
#[inline(always)]
pub fn send(ctx: &XdpContext, c: &Contribution, slot: &Slot, verdict: &Verdict) -> u32 {
    let Contribution { frame, ring, len, party } = *c;
    let sent = match verdict.output {
        // No ring has a parent yet.
        Output::Drop | Output::Up => return XDP_DROP,
        Output::Stale => {
            return if payload::move_psn(ctx, frame, len, AS_DUPLICATE) { XDP_PASS } else { XDP_DROP };
        }
        Output::Gap => {
            maps::count(party.ring, Counter::GapForwarded);
            return forward_past_gap(ctx, frame, len, if verdict.completed { Some(slot.crc) } else { None });
        }
        Output::Release => {
            maps::count(party.ring, Counter::Released);
            tag(ctx, c, ReleaseTag::ALL).and_then(|()| maps::to_all(party.ring))
        }
        Output::Replay => {
            let next = if party.rank + 1 >= ring.ranks { 0 } else { party.rank + 1 };
            tag(ctx, c, next as u16).and_then(|()| maps::to_rank(party.ring, next))
        }
    };
    match sent {
        Some(action) => action,
        None => {
            maps::count(party.ring, Counter::RedirectFailed);
            trace::contribution(ctx, party, Counter::RedirectFailed.bit());
            XDP_DROP
        }
    }
}

/// Tells `egress` whose result it is, at the packet's beginning.
#[inline(always)]
fn tag(ctx: &XdpContext, c: &Contribution, rank: u16) -> Option<()> {
    let payload = c.frame.payload() as u16;
    let tag = ReleaseTag { ring: c.party.ring, index: c.party.index, rank, payload };
    // SAFETY: `ReleaseTag` is `repr(C)` without padding, 12 bytes as asserted in the ABI.
    Packet::new(ctx).store(0, unsafe { core::mem::transmute::<ReleaseTag, [u8; 12]>(tag) })
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
