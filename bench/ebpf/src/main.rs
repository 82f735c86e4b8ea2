//! Programs for the data plane's benchmark: parts of the box's programs, in a form that can be
//! repeated with one packet.
//!
//! If a packet changes its slot in a way that would send the next run down another path, the
//! program first resets the slot. `bench_reset` does only that, for its cost to be subtracted;
//! `bench_restore` also resets the packet, for paths that change it. Live frames are in `live`.
#![no_std]
#![no_main]
#![feature(asm_experimental_arch)]

mod live;
mod shared;

use aya_ebpf::bindings::xdp_action::XDP_DROP;
use aya_ebpf::macros::xdp;
use aya_ebpf::programs::XdpContext;
use netsum_aggregator_ebpf::packet::Packet;
use netsum_aggregator_ebpf::payload::{self, Op, SumAddress};
use netsum_aggregator_ebpf::{Dispatch, maps, on_cpu, on_port};
use netsum_common::abi::{MAX_MTU, ReleaseTag};
use netsum_common::slot::Slot;
use netsum_common::wire::{EthHdr, Ipv4Hdr, MAX_HEADERS, UdpHdr};

netsum_aggregator_ebpf::programs!();

/// The benchmark's ring; the slot of its usual packets' index, which is not timed; and the slot of
/// index 0, which is.
const RING: u32 = 1;
const SLOT: u32 = 1;
const TIMED: u32 = 0;
/// Offset of the payload of an untagged IPv4 SEND.
const PAYLOAD: usize = EthHdr::LEN + Ipv4Hdr::LEN + UdpHdr::LEN + netsum_common::wire::BTH_LEN;

/// Does nothing: the cost of a test run.
#[xdp]
pub fn bench_empty(_ctx: XdpContext) -> u32 {
    XDP_DROP
}

/// A packet of other traffic, or another path that leaves slots unchanged.
#[xdp]
pub fn bench_ingress(ctx: XdpContext) -> u32 {
    on_port(&ctx)
}

/// Copies the payload into a slot's cells.
#[xdp]
pub fn bench_copy(ctx: XdpContext) -> u32 {
    part(&ctx, Op::Store)
}

/// Adds the payload to a slot's cells.
#[xdp]
pub fn bench_sum(ctx: XdpContext) -> u32 {
    part(&ctx, Op::Add)
}

/// Computes the CRC of the payload.
#[xdp]
pub fn bench_crc(ctx: XdpContext) -> u32 {
    match payload::crc(&ctx, PAYLOAD, payload_len(&ctx), 0) {
        Some(crc) => crc & 1,
        None => 0,
    }
}

#[inline(always)]
fn payload_len(ctx: &XdpContext) -> usize {
    (ctx.data_end() - ctx.data()).wrapping_sub(PAYLOAD + 4) & payload::LEN_BITS
}

#[inline(always)]
fn part(ctx: &XdpContext, op: Op) -> u32 {
    let Some(ring) = maps::ring(RING) else { return 0 };
    match payload::apply(
        ctx,
        op,
        PAYLOAD,
        payload_len(ctx),
        &SumAddress { ring: RING, slot: SLOT, bytes: ring.sum_bytes() },
    ) {
        Some(()) => XDP_DROP,
        None => 0,
    }
}

/// The benchmark's payload, for restoring packets that a run has changed.
const KEPT: SumAddress = SumAddress { ring: shared::PAYLOADS, slot: 0, bytes: MAX_MTU as u32 };

/// A slot's flags for a message of one fragment.
const ONE: u32 = Slot::USED | Slot::FIRST | Slot::LAST;

/// Resets the slot. It assumes the slots' first lap, in which an index is its slot's number.
#[inline(always)]
fn reset(index: u32, flags: u32, contributors: u64) {
    let Some(slot) = maps::slot(RING, index) else { return };
    let Some(state) = maps::state(RING) else { return };
    // SAFETY: map values; the benchmark runs one program at a time.
    unsafe {
        (*slot).flags = flags;
        (*slot).contributors = contributors;
        (*state).low = if flags & Slot::RELEASED == 0 { index } else { index + 1 };
    }
}

/// Restores rank 0's packet: the MAC addresses, which the tag overwrote, and the payload, which the
/// sum overwrote.
#[inline(always)]
fn restore(ctx: &XdpContext) -> Option<()> {
    let ring = maps::ring(RING)?;
    let header = maps::header(RING, SLOT * ring.members)?;
    // SAFETY: a map value; the benchmark runs one program at a time.
    let words = unsafe { [(*header).words[0], (*header).words[1]] };
    let p = Packet::new(ctx);
    p.store(0, words[0].to_ne_bytes())?;
    p.store(8, (words[1] as u32).to_ne_bytes())?;
    payload::apply(ctx, Op::Load, PAYLOAD, payload_len(ctx), &KEPT)
}

/// All ranks of the benchmark's ring except rank 0.
#[inline(always)]
fn others() -> u64 {
    all() & !1
}

#[inline(always)]
fn all() -> u64 {
    maps::ring(RING).map_or(0, |ring| u64::MAX >> (64 - (ring.members & 63)))
}

/// Handles a packet once, to fill slots.
#[xdp]
pub fn bench_fill(ctx: XdpContext) -> u32 {
    on_cpu(&ctx, Dispatch::Probe)
}

/// Keeps the packet's payload for programs that restore packets.
#[xdp]
pub fn bench_keep(ctx: XdpContext) -> u32 {
    match payload::apply(&ctx, Op::Store, PAYLOAD, payload_len(&ctx), &KEPT) {
        Some(()) => XDP_DROP,
        None => 0,
    }
}

/// Only resets the slot: rank 0 is missing, and all others except rank 1 have contributed.
#[xdp]
pub fn bench_reset(_ctx: XdpContext) -> u32 {
    reset(SLOT, ONE, 2);
    XDP_DROP
}

/// Only resets the slot and the packet.
#[xdp]
pub fn bench_restore(ctx: XdpContext) -> u32 {
    reset(SLOT, ONE, others());
    match restore(&ctx) {
        Some(()) => XDP_DROP,
        None => 0,
    }
}

/// The first contribution, which claims the slot.
#[xdp]
pub fn bench_claim(ctx: XdpContext) -> u32 {
    reset(SLOT, 0, 0);
    on_cpu(&ctx, Dispatch::Probe)
}

/// A contribution that is neither the first nor the last.
#[xdp]
pub fn bench_absorb(ctx: XdpContext) -> u32 {
    reset(SLOT, ONE, 2);
    on_cpu(&ctx, Dispatch::Probe)
}

/// The same, for an index that is timed.
#[xdp]
pub fn bench_absorb_timed(ctx: XdpContext) -> u32 {
    reset(TIMED, ONE, 2);
    on_cpu(&ctx, Dispatch::Probe)
}

/// The contribution that completes the slot.
#[xdp]
pub fn bench_complete(ctx: XdpContext) -> u32 {
    reset(SLOT, ONE, others());
    match restore(&ctx) {
        Some(()) => on_cpu(&ctx, Dispatch::Probe),
        None => 0,
    }
}

/// A retransmission of a released fragment.
#[xdp]
pub fn bench_replay(ctx: XdpContext) -> u32 {
    reset(SLOT, ONE | Slot::COMPLETE | Slot::RELEASED, all());
    match restore(&ctx) {
        Some(()) => on_cpu(&ctx, Dispatch::Probe),
        None => 0,
    }
}

/// Egress of a result, for the next rank each time.
#[xdp]
pub fn bench_egress(ctx: XdpContext) -> u32 {
    let tag =
        ReleaseTag { ring: RING, index: SLOT, rank: ReleaseTag::ALL, payload: PAYLOAD as u16 };
    // SAFETY: `ReleaseTag` is `repr(C)` without padding, 12 bytes as asserted in the ABI.
    let tag = unsafe { core::mem::transmute::<ReleaseTag, [u8; 12]>(tag) };
    match Packet::new(&ctx).store(0, tag) {
        Some(()) => netsum_aggregator_ebpf::egress::result(&ctx, 1),
        None => 0,
    }
}

const _: () = assert!(PAYLOAD < MAX_HEADERS);
