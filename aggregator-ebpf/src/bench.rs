//! Programs for the benchmark of the data plane: the parts, each in a form that can be repeated with one packet.
//!
//! Where a packet would change its slot so that the next run takes another way, the program first puts the slot back;
//! `bench_reset` does only that, so that its cost can be taken off.
#![no_std]
#![no_main]

use aya_ebpf::bindings::xdp_action::XDP_DROP;
use aya_ebpf::macros::xdp;
use aya_ebpf::programs::XdpContext;
use netsum_aggregator_ebpf::payload::{self, Op, Place};
use netsum_aggregator_ebpf::{maps, on_port, on_ring_cpu};
use netsum_common::slot::Slot;
use netsum_common::wire::{ETH_LEN, IPV4_LEN, MAX_HEADERS, UDP_LEN};

netsum_aggregator_ebpf::programs!();

/// The benchmark's ring, the slot of its usual packets' index, which is not timed, and that of index 0, which is.
const RING: u32 = 1;
const SLOT: u32 = 1;
const TIMED: u32 = 0;
/// Offset of the payload of an untagged IPv4 SEND.
const PAYLOAD: usize = ETH_LEN + IPV4_LEN + UDP_LEN + netsum_common::wire::BTH_LEN;

/// Nothing: the cost of a test run.
#[xdp]
pub fn bench_empty(_ctx: XdpContext) -> u32 {
    XDP_DROP
}

/// A packet that is not netsum's, or any other way that leaves slots alone.
#[xdp]
pub fn bench_ingress(ctx: XdpContext) -> u32 {
    on_port(&ctx)
}

/// The payload is copied into a slot's cells.
#[xdp]
pub fn bench_copy(ctx: XdpContext) -> u32 {
    part(&ctx, Op::Store)
}

/// The payload is added to a slot's cells.
#[xdp]
pub fn bench_sum(ctx: XdpContext) -> u32 {
    part(&ctx, Op::Add)
}

/// The CRC of the payload.
#[xdp]
pub fn bench_crc(ctx: XdpContext) -> u32 {
    match payload::crc(&ctx, PAYLOAD, payload_len(&ctx), 0) {
        Some(crc) => crc & 1,
        None => 0,
    }
}

#[inline(always)]
fn payload_len(ctx: &XdpContext) -> usize {
    (ctx.data_end() - ctx.data()).wrapping_sub(PAYLOAD + 4) & 0xffc
}

#[inline(always)]
fn part(ctx: &XdpContext, op: Op) -> u32 {
    let Some(ring) = maps::ring(RING) else { return 0 };
    match payload::apply(ctx, op, PAYLOAD, payload_len(ctx), &Place { ring: RING, slot: SLOT, mtu: ring.mtu })
    {
        Some(()) => XDP_DROP,
        None => 0,
    }
}

/// Puts the slot back to where the packet's rank (0) is the one that is missing, and any others are (`contributors`). In the
/// slots' first lap an index is its slot's number.
#[inline(always)]
fn reset(index: u32, contributors: u64) {
    let Some(slot) = maps::slot(RING, index) else { return };
    let Some(state) = maps::state(RING) else { return };
    // SAFETY: map values; the benchmark runs one program at a time.
    unsafe {
        (*slot).flags = Slot::USED;
        (*slot).contributors = contributors;
        (*state).low = index;
    }
}

/// Only puts the slot back.
#[xdp]
pub fn bench_reset(_ctx: XdpContext) -> u32 {
    reset(SLOT, 2);
    XDP_DROP
}

/// A contribution that is neither the first nor the last.
#[xdp]
pub fn bench_absorb(ctx: XdpContext) -> u32 {
    reset(SLOT, 2);
    on_ring_cpu(&ctx)
}

/// The same, of an index that is timed.
#[xdp]
pub fn bench_absorb_timed(ctx: XdpContext) -> u32 {
    reset(TIMED, 2);
    on_ring_cpu(&ctx)
}

/// The contribution that completes the slot.
#[xdp]
pub fn bench_complete(ctx: XdpContext) -> u32 {
    let Some(ring) = maps::ring(RING) else { return 0 };
    reset(SLOT, (u64::MAX >> (64 - (ring.ranks & 63))) & !1);
    on_ring_cpu(&ctx)
}

/// A retransmission of a released fragment.
#[xdp]
pub fn bench_replay(ctx: XdpContext) -> u32 {
    on_ring_cpu(&ctx)
}

/// A result's way out.
#[xdp]
pub fn bench_egress(ctx: XdpContext) -> u32 {
    netsum_aggregator_ebpf::egress::result(&ctx, 1)
}

const _: () = assert!(PAYLOAD < MAX_HEADERS);
