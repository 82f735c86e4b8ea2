//! Programs for the lab's cables: they lose, duplicate, reorder and corrupt RoCEv2 packets, the same ones for the same seed.
//!
//! Other packets pass: what the loss of an ARP or TCP packet costs is the kernel's business and would only make tests slow.
//!
//! XDP cannot wait. A packet that is to come later is copied into the *stash*, and leaves with a later one: that one is
//! broadcast to a device map with the same device twice, and the device map's program makes the second clone what was
//! stashed. A mark in the EtherType tells it which packets are such pairs.
#![no_std]
#![no_main]

use aya_ebpf::bindings::xdp_action::{XDP_DROP, XDP_PASS};
use aya_ebpf::btf_maps::{Array, DevMap};
use aya_ebpf::helpers::{bpf_xdp_adjust_tail, bpf_xdp_get_buff_len, bpf_xdp_load_bytes, bpf_xdp_store_bytes};
use aya_ebpf::macros::{btf_map, xdp};
use aya_ebpf::programs::XdpContext;
use netsum_common::wire::Opcode;

/// RoCEv2's UDP port, as on the wire.
const PORT: [u8; 2] = 4791u16.to_be_bytes();
/// `BPF_F_BROADCAST`: to every device in the map.
const BROADCAST: u64 = 1 << 3;
/// Offset of the EtherType, and the bit of its first byte that marks a pair: 0x08 and 0x86 do not have it.
const ETHERTYPE: usize = 12;
const PAIR: u8 = 0x01;
/// Packets that the stash of one way holds, and their most bytes.
const STASH: u32 = 16;
const ROOM: usize = 2432;
/// The most packets by which one comes late.
const MAX_LAG: u64 = 8;

/// What can happen to a packet; index into `Settings::thresholds` and `Counts::done`.
const LOSE: usize = 0;
const DUPLICATE: usize = 1;
const REORDER: usize = 2;
const CORRUPT: usize = 3;
const NOTHING: usize = 4;

/// What a way through the cable is to do. `netsum_lab::faults` has the same structure.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Settings {
    /// A packet suffers the first fault whose threshold is above its number's hash: shares times 2^32, added up.
    thresholds: [u64; 4],
    /// Chooses other packets.
    seed: u64,
    /// Kinds of packets among which the n-th is sought, as bits.
    kinds: u64,
    /// Which of them, from 1.
    nth: u64,
    /// How many from there on.
    times: u64,
    /// What they suffer.
    what: u64,
}

/// What a way has done. `netsum_lab::faults` has the same structure.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Counts {
    /// RoCEv2 packets that came.
    seen: u64,
    /// Those of `Settings::kinds`.
    matched: u64,
    /// Those that suffered each fault.
    done: [u64; 4],
}

/// The stash of a way: a queue. Its packets are numbered from 0.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Queue {
    /// RoCEv2 packets that came, ever.
    clock: u64,
    /// The next to be stashed.
    next: u64,
    /// The next to be sent with another.
    oldest: u64,
    /// The next whose clone comes to the device map's program.
    leaving: u64,
    /// The first clone of a pair has come there, and the second has not.
    half: u64,
}

/// A stashed packet.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Stashed {
    /// Its time has come when the clock says so.
    due: u64,
    /// Bytes.
    len: u64,
    bytes: [u8; ROOM],
}

/// 0: from the host, 1: to the host; so all arrays.
#[btf_map]
static SETTINGS: Array<Settings, 2, 0> = Array::new();
#[btf_map]
static COUNTS: Array<Counts, 2, 0> = Array::new();
#[btf_map]
static QUEUES: Array<Queue, 2, 0> = Array::new();
#[btf_map]
static STASHES: Array<Stashed, { 2 * STASH as usize }, 0> = Array::new();
/// The cable's end at the box, twice.
#[btf_map]
static TO_BOX: DevMap<2> = DevMap::new();
/// The cable's end at the host, twice.
#[btf_map]
static TO_HOST: DevMap<2> = DevMap::new();

/// On the cable's end at the host.
#[xdp]
pub fn up(ctx: XdpContext) -> u32 {
    cable(&ctx, 0)
}

/// On the cable's end at the box.
#[xdp]
pub fn down(ctx: XdpContext) -> u32 {
    cable(&ctx, 1)
}

/// On the way out to the box.
#[xdp(map = "devmap")]
pub fn leave_up(ctx: XdpContext) -> u32 {
    leave(&ctx, 0).unwrap_or(XDP_DROP)
}

/// On the way out to the host.
#[xdp(map = "devmap")]
pub fn leave_down(ctx: XdpContext) -> u32 {
    leave(&ctx, 1).unwrap_or(XDP_DROP)
}

#[inline(always)]
fn cable(ctx: &XdpContext, way: u32) -> u32 {
    let Some(roce) = roce(ctx) else { return XDP_PASS };
    faulty(ctx, way, roce).unwrap_or(XDP_DROP)
}

#[inline(always)]
fn faulty(ctx: &XdpContext, way: u32, roce: Roce) -> Option<u32> {
    let (settings, counts) = (SETTINGS.get(way)?, COUNTS.get_ptr_mut(way)?);
    // SAFETY: map values. Nobody else writes them while packets come: a veth device has one receive queue unless told
    // otherwise, and user space writes counters only to start anew.
    let (counts, queue) = unsafe { (&mut *counts, &mut *QUEUES.get_ptr_mut(way)?) };
    counts.seen += 1;
    queue.clock += 1;
    let hash = mixed(counts.seen ^ settings.seed << 32);
    let mut fault = NOTHING;
    let mut i = CORRUPT + 1;
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

    let more = mixed(hash);
    let send = match fault {
        LOSE => false,
        // A duplicate may be the very next packet.
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
        _ => true,
    };
    if fault < NOTHING {
        counts.done[fault & 3] += 1;
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

/// Copies the packet into the stash, where it stays for `lag` packets; whether there was room.
#[inline(always)]
fn stash(ctx: &XdpContext, way: u32, queue: &mut Queue, lag: u64) -> bool {
    if queue.next - queue.leaving >= STASH as u64 {
        return false;
    }
    let Some(place) = STASHES.get_ptr_mut(way * STASH + queue.next as u32 % STASH) else { return false };
    // SAFETY: a map value that only this way's packets touch.
    let place = unsafe { &mut *place };
    // SAFETY: the context is valid.
    let len = unsafe { bpf_xdp_get_buff_len(ctx.ctx) };
    if len == 0 || len > ROOM as u64 {
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

/// Whether the oldest stashed packet's time has come.
#[inline(always)]
fn due(way: u32, queue: &Queue) -> bool {
    queue.oldest < queue.next
        && STASHES
            .get(way * STASH + queue.oldest as u32 % STASH)
            .is_some_and(|stashed| stashed.due <= queue.clock)
}

/// Makes the second clone of a pair what was stashed.
#[inline(always)]
fn leave(ctx: &XdpContext, way: u32) -> Option<u32> {
    let [first] = load::<1>(ctx, ETHERTYPE)?;
    if first & PAIR == 0 {
        return Some(XDP_PASS);
    }
    // SAFETY: a map value; packets leave on the CPU that they came to, before the next ones come.
    let queue = unsafe { &mut *QUEUES.get_ptr_mut(way)? };
    queue.half ^= 1;
    if queue.half == 1 {
        store(ctx, ETHERTYPE, first ^ PAIR)?;
        return Some(XDP_PASS);
    }
    // SAFETY: a map value that only this way's packets touch.
    let stashed = unsafe { &mut *STASHES.get_ptr_mut(way * STASH + queue.leaving as u32 % STASH)? };
    queue.leaving += 1;
    let len = stashed.len;
    if len == 0 || len > ROOM as u64 {
        return None;
    }
    // SAFETY: the context is valid; packet pointers are read anew below. The stash has `len` bytes, as just checked.
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

/// Flips a bit anywhere behind the Ethernet header, which has a check of its own on every real link.
#[inline(always)]
fn corrupt(ctx: &XdpContext, roce: &Roce, random: u64) -> Option<()> {
    if !roce.v6 {
        // As hardware sends it, so that the ICRC has to find it and not the receiver's kernel.
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
    /// Offset of the UDP header.
    udp: usize,
    /// A bit of `netsum_lab::faults::Kind`.
    kind: u32,
}

/// UDP to port 4791 over IPv4 without options or over IPv6.
#[inline(always)]
fn roce(ctx: &XdpContext) -> Option<Roce> {
    // Ethernet, IPv4 and UDP headers; no RoCEv2 packet is shorter.
    let start = load::<42>(ctx, 0)?;
    if start[12] == 0x08 && start[13] == 0x00 && start[23] == 17 {
        (load::<2>(ctx, 36)? == PORT).then(|| Roce { v6: false, udp: 34, kind: kind(ctx, 42) })
    } else if start[12] == 0x86 && start[13] == 0xdd && start[20] == 17 {
        (load::<2>(ctx, 56)? == PORT).then(|| Roce { v6: true, udp: 54, kind: kind(ctx, 62) })
    } else {
        None
    }
}

/// From the base transport header at an offset, and the syndrome behind it.
#[inline(always)]
fn kind(ctx: &XdpContext, bth: usize) -> u32 {
    const OTHER: u32 = 1 << 6;
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
        // IBTA 9.7.5.2.1: bits 6 and 5 are 0 for an ACK, 1 for "receiver not ready" and 3 for a NAK.
        match load::<1>(ctx, bth + 12) {
            Some([syndrome]) if syndrome & 0x60 == 0 => 1 << 4,
            Some([syndrome]) if syndrome & 0x60 == 0x60 => 1 << 5,
            _ => OTHER,
        }
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
