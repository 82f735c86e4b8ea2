//! Live frames for the benchmark: a sender that plays all ranks, and programs that do less than
//! `aggregate` on a ring's CPU.
//!
//! The kernel gives each run a frame of a pool that it recycles, with the bytes that an earlier
//! run, the ring's CPU or a port has written. The sender therefore writes headers, payload and ICRC
//! each time. It stops when it is as far ahead of the ring as its credit allows: then no queue
//! overflows, and every sum completes.

use aya_ebpf::bindings::xdp_action::XDP_DROP;
use aya_ebpf::btf_maps::{Array, DevMap};
use aya_ebpf::macros::{btf_map, xdp};
use aya_ebpf::programs::XdpContext;
use netsum_aggregator_ebpf::packet::Packet;
use netsum_aggregator_ebpf::payload::{self, Op, SumAddress};
use netsum_aggregator_ebpf::{maps, on_port};
use netsum_common::abi::MAX_RANKS;
use netsum_common::{icrc, serial};

use crate::shared::{LiveFrame, LiveReceiver, LiveSender, PAYLOADS};
use crate::{PAYLOAD, payload_len};

#[btf_map]
static LIVE_FRAMES: Array<LiveFrame, MAX_RANKS> = Array::new();
#[btf_map]
static LIVE_SENDER: Array<LiveSender, 1> = Array::new();
#[btf_map]
static LIVE_RECEIVER: Array<LiveReceiver, 1> = Array::new();
#[btf_map]
static LIVE_PORTS: DevMap<MAX_RANKS> = DevMap::new();

/// Ring whose contributions are sent.
const RING: u32 = 1;
/// `BPF_F_BROADCAST`.
const BROADCAST: u64 = 1 << 3;
/// The last word of the headers: a byte of flags and the PSN.
const PSN_WORD: usize = PAYLOAD - 4;

/// Writes the next contribution into the packet. `None` while there is no credit.
#[inline(always)]
fn next(ctx: &XdpContext) -> Option<()> {
    let sender = LIVE_SENDER.get_ptr_mut(0)?;
    // SAFETY: a map value that one thread's test runs write.
    let sender = unsafe { &mut *sender };
    let ring = maps::ring(RING)?;
    if serial::diff(sender.index, sender.low) >= sender.credit as i32 {
        let state = maps::state(RING)?;
        // SAFETY: an aligned word of a map value, which the ring's CPU writes.
        sender.low = unsafe { (&raw const (*state).low).read_volatile() };
        if serial::diff(sender.index, sender.low) >= sender.credit as i32 {
            sender.waited += 1;
            return None;
        }
    }
    let frame = LIVE_FRAMES.get(sender.rank)?;
    let len = payload_len(ctx);
    payload::apply(
        ctx,
        Op::Load,
        PAYLOAD,
        len,
        &SumAddress { ring: PAYLOADS, slot: 0, bytes: ring.sum_bytes() },
    )?;
    let p = Packet::new(ctx);
    p.store(0, frame.words[0].to_ne_bytes())?;
    p.store(8, frame.words[1].to_ne_bytes())?;
    p.store(16, frame.words[2].to_ne_bytes())?;
    p.store(24, frame.words[3].to_ne_bytes())?;
    p.store(32, frame.words[4].to_ne_bytes())?;
    p.store(40, frame.words[5].to_ne_bytes())?;
    // Bytes 48 to 53: two of the headers, flags and PSN.
    let rest = frame.words[6].to_ne_bytes();
    p.store(48, [rest[0], rest[1]])?;
    let psn = sender.index.to_be_bytes();
    let (old, new) = ([rest[2], rest[3], rest[4], rest[5]], [rest[2], psn[1], psn[2], psn[3]]);
    p.store(PSN_WORD, new)?;
    let sum = icrc::patch(
        frame.icrc,
        u32::from_le_bytes(old),
        u32::from_le_bytes(new),
        len & payload::LEN_BITS,
    );
    p.store(PAYLOAD + len, sum.to_le_bytes())?;
    sender.sent += 1;
    sender.rank += 1;
    if sender.rank >= ring.members {
        sender.rank = 0;
        sender.index = serial::add(sender.index, 1);
    }
    Some(())
}

/// Records a contribution that is not summed; returns whether it was the index's last.
#[inline(always)]
fn received() -> Option<bool> {
    let receiver = LIVE_RECEIVER.get_ptr_mut(0)?;
    // SAFETY: a map value that one CPU writes.
    let receiver = unsafe { &mut *receiver };
    receiver.rank += 1;
    if receiver.rank < maps::ring(RING)?.members {
        return Some(false);
    }
    receiver.rank = 0;
    receiver.completed += 1;
    let state = maps::state(RING)?;
    // SAFETY: an aligned word of a map value; the sender waits for it.
    unsafe { (&raw mut (*state).low).write_volatile(serial::add((*state).low, 1)) };
    Some(true)
}

/// The next contribution comes in by a port.
#[xdp]
pub fn live_ingress(ctx: XdpContext) -> u32 {
    match next(&ctx) {
        Some(()) => on_port(&ctx),
        None => XDP_DROP,
    }
}

/// Makes the next contribution and drops it at once: the cost of the sender.
#[xdp]
pub fn live_ingress_drop(ctx: XdpContext) -> u32 {
    if next(&ctx).is_some() {
        received();
    }
    XDP_DROP
}

/// Makes the next contribution; the last one of an index is broadcast unchanged, on the same CPU.
#[xdp]
pub fn live_ingress_broadcast(ctx: XdpContext) -> u32 {
    match next(&ctx).and_then(|()| received()) {
        Some(true) => to_all(),
        _ => XDP_DROP,
    }
}

/// In place of `aggregate`: drops everything.
#[xdp(map = "cpumap")]
pub fn live_drop(_ctx: XdpContext) -> u32 {
    received();
    XDP_DROP
}

/// In place of `aggregate`: broadcasts the last contribution of an index unchanged, and drops the
/// others.
#[xdp(map = "cpumap")]
pub fn live_broadcast(_ctx: XdpContext) -> u32 {
    match received() {
        Some(true) => to_all(),
        _ => XDP_DROP,
    }
}

/// Sends a clone to each rank's port.
#[inline(always)]
pub fn to_all() -> u32 {
    LIVE_PORTS.redirect(0, BROADCAST).unwrap_or(XDP_DROP)
}
