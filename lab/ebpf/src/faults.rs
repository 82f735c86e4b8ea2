//! Programs for the lab's links: they lose, duplicate, reorder, corrupt and mark RoCEv2 packets.
//! The same seed selects the same packets.
//!
//! Other packets pass: losing ARP or TCP packets would only test the kernel's recovery and make
//! tests slow. On a link with a rate, tests want loss for all traffic: every packet can be lost or
//! marked there, and otherwise enters the link's queue.
//!
//! A mark says that the packet has met congestion (RFC 3168). Only packets of senders that use ECN
//! can be marked. A link without a rate has no queue: the program counts the bytes that would wait
//! in a queue served at a given rate, and marks packets that exceed a given depth.
//!
//! XDP cannot wait. A packet to be sent later is copied into the *stash*, and leaves with a later
//! packet: that one is broadcast to a device map that holds the same device twice, and the device
//! map's program replaces the second clone by the stashed packet. A bit in the EtherType tells this
//! program which packets are such pairs.
#![no_std]
#![no_main]

mod layout;

use aya_ebpf::bindings::xdp_action::{XDP_DROP, XDP_PASS};
use aya_ebpf::btf_maps::{Array, DevMap};
use aya_ebpf::helpers::{
    bpf_ktime_get_ns, bpf_xdp_adjust_tail, bpf_xdp_get_buff_len, bpf_xdp_load_bytes,
    bpf_xdp_store_bytes,
};
use aya_ebpf::macros::{btf_map, xdp};
use aya_ebpf::programs::XdpContext;
use netsum_common::wire::Opcode;

use layout::{Counts, Settings};

/// RoCEv2's UDP port, as on the wire.
const PORT: [u8; 2] = 4791u16.to_be_bytes();
/// `BPF_F_BROADCAST`: to every device in the map.
const BROADCAST: u64 = 1 << 3;
/// Offset of the EtherType, and the bit of its first byte that marks a pair: it is 0 in 0x08, 0x86
/// and 0x81.
const ETHERTYPE: usize = 12;
const PAIR: u8 = 0x40;
/// Capacity of one direction's stash in packets, and the longest packet in bytes.
const STASH: u32 = 16;
const ROOM: usize = 2432;
/// The most packets by which a packet can be delayed.
const MAX_LAG: u64 = 8;

/// Faults; each is an index into `Settings::thresholds` and `Counts::done`.
const LOSE: usize = 0;
const DUPLICATE: usize = 1;
const REORDER: usize = 2;
const CORRUPT: usize = 3;
const MARK: usize = 4;
const NOTHING: usize = 5;

const SECOND: u64 = 1_000_000_000;

/// State of one direction's stash, a queue. Its packets are numbered from 0.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Queue {
    /// RoCEv2 packets that ever arrived.
    clock: u64,
    /// Number of the next packet to be stashed.
    next: u64,
    /// Number of the next stashed packet to be sent with another.
    oldest: u64,
    /// Number of the next stashed packet whose clone reaches the device map's program.
    leaving: u64,
    /// 1 if the first clone of a pair has reached the program, and the second has not.
    half: u64,
    /// Bytes that would wait in the bottleneck after the last packet arrived, and its arrival time
    /// in nanoseconds.
    backlog: u64,
    last: u64,
}

/// A stashed packet.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Stashed {
    /// The packet is sent when `Queue::clock` reaches this.
    due: u64,
    len: u64,
    bytes: [u8; ROOM],
}

/// Index 0: from the host; 1: to the host. The other arrays use the same indices.
#[btf_map]
static SETTINGS: Array<Settings, 2, 0> = Array::new();
#[btf_map]
static COUNTS: Array<Counts, 2, 0> = Array::new();
#[btf_map]
static QUEUES: Array<Queue, 2, 0> = Array::new();
#[btf_map]
static STASHES: Array<Stashed, { 2 * STASH as usize }, 0> = Array::new();
/// The link's end at the box, twice.
#[btf_map]
static TO_BOX: DevMap<2> = DevMap::new();
/// The link's end at the host, twice.
#[btf_map]
static TO_HOST: DevMap<2> = DevMap::new();

/// Runs on the link's end at the host.
#[xdp]
pub fn up(ctx: XdpContext) -> u32 {
    cable(&ctx, 0)
}

/// Runs on the link's end at the box.
#[xdp]
pub fn down(ctx: XdpContext) -> u32 {
    cable(&ctx, 1)
}

/// Runs on the end at the host of a link with a rate.
#[xdp]
pub fn queued_up(ctx: XdpContext) -> u32 {
    queued(&ctx, 0).unwrap_or(XDP_DROP)
}

/// Runs on the end at the box of a link with a rate.
#[xdp]
pub fn queued_down(ctx: XdpContext) -> u32 {
    queued(&ctx, 1).unwrap_or(XDP_DROP)
}

/// Runs on packets that leave towards the box.
#[xdp(map = "devmap")]
pub fn leave_up(ctx: XdpContext) -> u32 {
    leave(&ctx, 0).unwrap_or(XDP_DROP)
}

/// Runs on packets that leave towards the host.
#[xdp(map = "devmap")]
pub fn leave_down(ctx: XdpContext) -> u32 {
    leave(&ctx, 1).unwrap_or(XDP_DROP)
}

#[inline(always)]
fn cable(ctx: &XdpContext, way: u32) -> u32 {
    let Some(roce) = roce(ctx) else { return XDP_PASS };
    faulty(ctx, way, roce).unwrap_or(XDP_DROP)
}

/// Drops, marks or passes any packet to the link's queue.
#[inline(always)]
fn queued(ctx: &XdpContext, way: u32) -> Option<u32> {
    let (settings, counts) = (SETTINGS.get(way)?, COUNTS.get_ptr_mut(way)?);
    // SAFETY: as in `faulty`.
    let (counts, queue) = unsafe { (&mut *counts, &mut *QUEUES.get_ptr_mut(way)?) };
    counts.seen += 1;
    let share = mixed(counts.seen ^ settings.seed << 32) >> 32;
    if share < settings.thresholds[LOSE] {
        counts.done[LOSE] += 1;
        return Some(XDP_DROP);
    }
    if share < settings.thresholds[MARK] || settings.rate > 0 && waits(ctx, settings, queue) {
        let v6 = match load::<2>(ctx, ETHERTYPE)? {
            [0x08, 0x00] => false,
            [0x86, 0xdd] => true,
            _ => return Some(XDP_PASS),
        };
        if mark(ctx, 14, v6)? {
            counts.done[MARK] += 1;
        } else {
            counts.spared += 1;
        }
    }
    Some(XDP_PASS)
}

#[inline(always)]
fn faulty(ctx: &XdpContext, way: u32, roce: Roce) -> Option<u32> {
    let (settings, counts) = (SETTINGS.get(way)?, COUNTS.get_ptr_mut(way)?);
    // SAFETY: map values. Nothing else writes them while packets arrive: a veth device has one
    // receive queue by default, and user space writes counters only to reset them.
    let (counts, queue) = unsafe { (&mut *counts, &mut *QUEUES.get_ptr_mut(way)?) };
    counts.seen += 1;
    queue.clock += 1;
    let hash = mixed(counts.seen ^ settings.seed << 32);
    let mut fault = NOTHING;
    let mut i = MARK + 1;
    while i > 0 {
        i -= 1;
        if hash >> 32 < settings.thresholds[i] {
            fault = i;
        }
    }
    if settings.kinds & roce.kind as u64 != 0 {
        counts.matched += 1;
        if counts.matched >= settings.nth && counts.matched < settings.nth + settings.times {
            fault = settings.what as usize;
        }
    }
    if settings.rate > 0 && waits(ctx, settings, queue) && fault == NOTHING {
        fault = MARK;
    }

    let more = mixed(hash);
    let send = match fault {
        LOSE => false,
        // A duplicate may follow its original directly.
        DUPLICATE => {
            if !stash(ctx, way, queue, more % (MAX_LAG + 1)) {
                fault = NOTHING;
            }
            true
        }
        REORDER => {
            let stashed = stash(ctx, way, queue, 1 + more % MAX_LAG);
            if !stashed {
                fault = NOTHING;
            }
            !stashed
        }
        CORRUPT => {
            corrupt(ctx, &roce, more)?;
            true
        }
        MARK => {
            if !mark(ctx, roce.ip, roce.v6)? {
                counts.spared += 1;
                fault = NOTHING;
            }
            true
        }
        _ => true,
    };
    if fault < NOTHING {
        counts.done[fault] += 1;
    }
    if !send {
        return Some(XDP_DROP);
    }
    let pair = due(way, queue);
    if pair {
        queue.oldest += 1;
        let [first] = load::<1>(ctx, ETHERTYPE)?;
        store(ctx, ETHERTYPE, first ^ PAIR)?;
    }
    let flags = if pair { BROADCAST } else { 0 };
    if way == 0 { TO_BOX.redirect(0, flags) } else { TO_HOST.redirect(0, flags) }.ok()
}

/// Copies the packet into the stash, to be sent `lag` packets later. Returns false if the stash is
/// full.
#[inline(always)]
fn stash(ctx: &XdpContext, way: u32, queue: &mut Queue, lag: u64) -> bool {
    if queue.next - queue.leaving >= STASH as u64 {
        return false;
    }
    let Some(place) = STASHES.get_ptr_mut(way * STASH + queue.next as u32 % STASH) else {
        return false;
    };
    // SAFETY: a map value that only this way's packets touch.
    let place = unsafe { &mut *place };
    // SAFETY: the context is valid.
    let len = unsafe { bpf_xdp_get_buff_len(ctx.ctx) };
    // Every frame is at least as long as its header. The verifier of Linux 6.1 does not see that a
    // length that is not 0 is at least 1.
    let len = len.max(14);
    if len > ROOM as u64 {
        return false;
    }
    // SAFETY: the buffer has room for `len` bytes, as just checked.
    if unsafe { bpf_xdp_load_bytes(ctx.ctx, 0, (&raw mut place.bytes).cast(), len as u32) } != 0 {
        return false;
    }
    place.len = len;
    place.due = queue.clock + lag;
    queue.next += 1;
    true
}

/// Whether the oldest stashed packet must be sent now.
#[inline(always)]
fn due(way: u32, queue: &Queue) -> bool {
    queue.oldest < queue.next
        && STASHES
            .get(way * STASH + queue.oldest as u32 % STASH)
            .is_some_and(|stashed| stashed.due <= queue.clock)
}

/// Replaces the second clone of a pair by the stashed packet.
#[inline(always)]
fn leave(ctx: &XdpContext, way: u32) -> Option<u32> {
    let [first] = load::<1>(ctx, ETHERTYPE)?;
    if first & PAIR == 0 {
        return Some(XDP_PASS);
    }
    // SAFETY: a map value; a packet leaves on the CPU where it arrived, before the next one
    // arrives.
    let queue = unsafe { &mut *QUEUES.get_ptr_mut(way)? };
    queue.half ^= 1;
    if queue.half == 1 {
        store(ctx, ETHERTYPE, first ^ PAIR)?;
        return Some(XDP_PASS);
    }
    // SAFETY: a map value that only this way's packets touch.
    let stashed = unsafe { &mut *STASHES.get_ptr_mut(way * STASH + queue.leaving as u32 % STASH)? };
    queue.leaving += 1;
    let len = stashed.len.max(14);
    if len > ROOM as u64 {
        return None;
    }
    // SAFETY: the context is valid; packet pointers are read again below. The stash has `len`
    // bytes, as just checked.
    unsafe {
        let delta = len as i32 - bpf_xdp_get_buff_len(ctx.ctx) as i32;
        if bpf_xdp_adjust_tail(ctx.ctx, delta) != 0
            || bpf_xdp_store_bytes(ctx.ctx, 0, (&raw mut stashed.bytes).cast(), len as u32) != 0
        {
            return None;
        }
    }
    Some(XDP_PASS)
}

/// Adds a packet to the bottleneck's queue. Returns whether the queue now exceeds its depth.
#[inline(always)]
fn waits(ctx: &XdpContext, settings: &Settings, queue: &mut Queue) -> bool {
    // SAFETY: helpers without preconditions; the context is valid.
    let (now, len) = unsafe { (bpf_ktime_get_ns(), bpf_xdp_get_buff_len(ctx.ctx)) };
    let idle = now - queue.last;
    // More than a second empties any queue, and would overflow the product.
    let sent = if idle < SECOND { idle * settings.rate / SECOND } else { u64::MAX };
    queue.last = now;
    queue.backlog = queue.backlog.saturating_sub(sent) + len;
    queue.backlog > settings.depth
}

/// Marks the packet: congestion experienced. Returns false if its sender does not use ECN.
#[inline(always)]
fn mark(ctx: &XdpContext, ip: usize, v6: bool) -> Option<bool> {
    let [first, second] = load::<2>(ctx, ip)?;
    if v6 {
        if second & 0x30 == 0 {
            return Some(false);
        }
        store(ctx, ip + 1, second | 0x30)?;
        return Some(true);
    }
    if second & 3 == 0 {
        return Some(false);
    }
    // RFC 1624, eqn. 3: HC' = ~(~HC + ~m + m').
    let [high, low] = load::<2>(ctx, ip + 10)?;
    let old = u16::from_be_bytes([first, second]);
    let mut sum = !u16::from_be_bytes([high, low]) as u32 + !old as u32 + (old | 3) as u32;
    sum = (sum & 0xffff) + (sum >> 16);
    sum = (sum & 0xffff) + (sum >> 16);
    let [high, low] = (!(sum as u16)).to_be_bytes();
    store(ctx, ip + 1, second | 3)?;
    store(ctx, ip + 10, high)?;
    store(ctx, ip + 11, low)?;
    Some(true)
}

/// Flips a bit behind the Ethernet header. A real link protects that header by a check of its own.
#[inline(always)]
fn corrupt(ctx: &XdpContext, roce: &Roce, random: u64) -> Option<()> {
    if !roce.v6 {
        // As a network card sends it; otherwise the receiver's kernel would find the error before
        // the ICRC does.
        store(ctx, roce.udp + 6, 0)?;
        store(ctx, roce.udp + 7, 0)?;
    }
    // SAFETY: the context is valid.
    let len = unsafe { bpf_xdp_get_buff_len(ctx.ctx) };
    let at = 14 + (random >> 3) % len.checked_sub(14).filter(|rest| *rest > 0)?;
    let mut byte = 0u8;
    // SAFETY: a byte inside the packet.
    unsafe {
        if bpf_xdp_load_bytes(ctx.ctx, at as u32, (&raw mut byte).cast(), 1) != 0 {
            return None;
        }
        byte ^= 1 << (random & 7);
        (bpf_xdp_store_bytes(ctx.ctx, at as u32, (&raw mut byte).cast(), 1) == 0).then_some(())
    }
}

/// A RoCEv2 packet.
#[derive(Clone, Copy)]
struct Roce {
    v6: bool,
    /// Offsets of the IP and UDP headers.
    ip: usize,
    udp: usize,
    /// A bit of `netsum_lab::faults::Kind`.
    kind: u32,
}

/// Finds UDP to port 4791 over IPv4 without options or over IPv6, behind at most one VLAN tag.
#[inline(always)]
fn roce(ctx: &XdpContext) -> Option<Roce> {
    match load::<2>(ctx, ETHERTYPE)? {
        [0x81, 0x00] => ip_packet(ctx, 18),
        _ => ip_packet(ctx, 14),
    }
}

#[inline(always)]
fn ip_packet(ctx: &XdpContext, ip: usize) -> Option<Roce> {
    // IPv4 and UDP headers behind the EtherType; no RoCEv2 packet is shorter.
    let start = load::<30>(ctx, ip - 2)?;
    let (v6, udp) = match (start[0], start[1]) {
        (0x08, 0x00) if start[2 + 9] == 17 => (false, ip + 20),
        (0x86, 0xdd) if start[2 + 6] == 17 => (true, ip + 40),
        _ => return None,
    };
    (load::<2>(ctx, udp + 2)? == PORT).then(|| Roce { v6, ip, udp, kind: kind(ctx, udp + 8) })
}

/// The packet's kind, from the base transport header at an offset and the syndrome behind it.
#[inline(always)]
fn kind(ctx: &XdpContext, bth: usize) -> u32 {
    const OTHER: u32 = 1 << 7;
    let Some([opcode]) = load::<1>(ctx, bth) else { return OTHER };
    let opcode = Opcode(opcode);
    if opcode.is_rc_data() {
        match (opcode.is_first(), opcode.is_last()) {
            (true, false) => 1 << 0,
            (false, false) => 1 << 1,
            (false, true) => 1 << 2,
            (true, true) => 1 << 3,
        }
    } else if opcode.0 == Opcode::ACK.0 {
        // IBTA 9.7.5.2.1: bits 6 and 5 are 0 for an ACK, 1 for "receiver not ready" and 3 for a
        // NAK.
        match load::<1>(ctx, bth + 12) {
            Some([syndrome]) if syndrome & 0x60 == 0 => 1 << 4,
            Some([syndrome]) if syndrome & 0x60 == 0x60 => 1 << 5,
            _ => OTHER,
        }
    } else if opcode.0 == Opcode::CNP.0 {
        1 << 6
    } else {
        OTHER
    }
}

/// MurmurHash3's finalizer, which spreads consecutive numbers evenly.
#[inline(always)]
fn mixed(mut x: u64) -> u64 {
    x = x.wrapping_mul(0xff51_afd7_ed55_8ccd);
    x ^= x >> 33;
    x = x.wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    x ^ x >> 33
}

#[inline(always)]
fn load<const N: usize>(ctx: &XdpContext, offset: usize) -> Option<[u8; N]> {
    let at = ctx.data() + offset;
    if at + N > ctx.data_end() {
        return None;
    }
    // SAFETY: N bytes from there on are inside the packet, as just checked.
    Some(unsafe { (at as *const [u8; N]).read_unaligned() })
}

#[inline(always)]
fn store(ctx: &XdpContext, offset: usize, byte: u8) -> Option<()> {
    let at = ctx.data() + offset;
    if at + 1 > ctx.data_end() {
        return None;
    }
    // SAFETY: the byte is inside the packet, as just checked.
    unsafe { *(at as *mut u8) = byte };
    Some(())
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    loop {}
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
