//! Copies, adds and checks payloads, one cell of 256 bytes at a time, the rest in smaller pieces.
//!
//! The verifier needs a constant bound for every loop, and for every cell its own comparison with
//! the packet's end. The loops are in *global functions*: the verifier processes such a function
//! once, for any argument, and not once for every path to a call (Linux 5.6, kernel/bpf/verifier.c,
//! `do_check_subprogs`). A global function takes only numbers and the context, so each one locates
//! its packet again.

use aya_ebpf::bindings::xdp_md;
use aya_ebpf::helpers::bpf_csum_diff;
use aya_ebpf::programs::XdpContext;
use netsum_common::abi::{CELL_LEN, MAX_MTU, MTU_STEP, sum_size};
use netsum_common::icrc::{self, Chorba, Lagged};
use netsum_common::serial;
use netsum_common::wire::{BTH_LEN, Bytes as _, Frame, ICRC_LEN, Ipv4Hdr, L3, MAX_HEADERS, UdpHdr};

use crate::maps;
use crate::packet::{Packet, opaque};

const MAX_CELLS: usize = MAX_MTU / CELL_LEN;
/// IPv4, UDP and base transport headers.
const HEADERS_V4: usize = Ipv4Hdr::LEN + UdpHdr::LEN + BTH_LEN;
const CELL_LANES: usize = CELL_LEN / 4;
/// What is left behind the last cell is processed in groups, then lane by lane. Path MTUs are
/// multiples of a group.
pub(crate) const GROUP_LEN: usize = MTU_STEP as usize;
pub(crate) const GROUP_LANES: usize = GROUP_LEN / 4;
/// From this length on [`Lagged`] is faster, by `cargo xtask bench dataplane`.
const LAGGED_LEN: usize = 3 * CELL_LEN;

/// Covers every payload offset; the verifier takes the bound from here.
pub(crate) const OFFSET_MASK: u32 = 127;
/// Covers every payload length.
pub(crate) const LEN_MASK: u32 = 4095;
/// The bits that a length in lanes can have; the verifier takes the bound from here.
pub const LEN_BITS: usize = 0xffc;
/// Covers both offsets of an IP header.
const IP_MASK: u32 = 31;
/// Covers the lengths of RETH and immediate data.
const EXTENDED_MASK: u32 = 31;
const _: () = assert!(MAX_HEADERS <= OFFSET_MASK as usize && MAX_MTU <= LEN_MASK as usize);

/// A number with the bound that the verifier needs. The compiler must not know it: it would put an
/// offset and a multiple of [`CELL_LEN`] together by OR, of which the verifier of Linux 6.1 does
/// not know the bounds (kernel/bpf/verifier.c, `adjust_scalar_min_max_vals`).
#[inline(always)]
pub(crate) fn bounded(number: u32, mask: u32) -> usize {
    opaque((number & mask) as usize)
}

/// The length of a payload that was found to be at most [`MAX_MTU`]. A value without bounds when
/// the verifier of Linux 6.1 spills it to the stack has none when it is restored, even if it was
/// compared in between.
#[inline(always)]
pub fn bounded_len(len: usize) -> usize {
    opaque(len) & LEN_MASK as usize
}

/// Reads word `i` at an address.
///
/// # Safety
/// `8 * i + 8` bytes from `p` on must be readable.
#[inline(always)]
unsafe fn word(p: usize, i: usize) -> u64 {
    // SAFETY: the caller's promise.
    unsafe { (p as *const u64).add(i).read_unaligned() }
}

/// ICRC state after a payload of `len` bytes at offset `at` of the packet.
#[inline(always)]
pub fn crc(ctx: &XdpContext, at: usize, len: usize, state: u32) -> Option<u32> {
    let crc = returned(payload_crc(ctx.ctx, at as u32, len as u32, state))?;
    // The long path starts from state 0, and the previous state would have to be shifted over the
    // payload.
    if state == 0 || len < LAGGED_LEN {
        Some(crc)
    } else {
        Some(crc ^ icrc::shift(state, len & LEN_BITS))
    }
}

/// The result of a global function. It fits 32 bits; the verifier does not know that, so the
/// compiler must not use it either.
#[inline(always)]
pub(crate) fn returned(state: u64) -> Option<u32> {
    let state = opaque(state as usize) as u64;
    if state == FAILED { None } else { Some(state as u32) }
}

/// Applies an operation to `len` bytes at offset `at` of the packet and a slot's sum.
#[inline(always)]
pub fn apply(ctx: &XdpContext, op: Op, at: usize, len: usize, sum: &SumAddress) -> Option<()> {
    let packed = packed(at, len, sum);
    let result = match op {
        Op::Store => payload_store(ctx.ctx, packed, sum.ring, sum.slot),
        Op::Add => payload_add(ctx.ctx, packed, sum.ring, sum.slot),
        Op::Load => payload_load(ctx.ctx, packed, sum.ring, sum.slot),
    };
    if result == 0 { Some(()) } else { None }
}

/// Size of the sum, offset and length of the payload in one number: a global function takes at most
/// five arguments.
#[inline(always)]
pub fn packed(at: usize, len: usize, sum: &SumAddress) -> u32 {
    (sum_size(sum.bytes) as u32) << 24 | (at as u32) << 16 | len as u32
}

/// Where a sum is.
pub struct SumAddress {
    /// Ring number.
    pub ring: u32,
    pub slot: u32,
    /// Bytes of the ring's largest sum.
    pub bytes: u32,
}

/// Result of the global functions if a payload does not fit its packet or a map lacks the value.
pub(crate) const FAILED: u64 = u64::MAX;

/// ICRC state after the headers that `frame` describes.
#[inline(always)]
pub fn headers_crc(ctx: &XdpContext, l3: L3, ip: usize, extended: usize) -> Option<u32> {
    let state = match l3 {
        L3::V4 => headers_crc_v4(ctx.ctx, ip as u32, extended as u32),
        L3::V6 => headers_crc_v6(ctx.ctx, ip as u32, extended as u32),
    };
    returned(state)
}

/// The headers' part of a UDP checksum, including the pseudo-header. The packet's own checksum must
/// be 0.
#[inline(always)]
pub fn headers_sum(ctx: &XdpContext, l3: L3, ip: usize, extended: usize) -> Option<u16> {
    let v6 = (l3 == L3::V6) as u32;
    returned(headers_checksum(ctx.ctx, ip as u32, v6, extended as u32)).map(|sum| sum as u16)
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn headers_checksum(ctx: *mut xdp_md, ip: u32, v6: u32, extended: u32) -> u64 {
    let p = Packet::new(&XdpContext::new(ctx));
    // Addresses, protocol and length are the pseudo-header (RFC 768, RFC 8200, section 8.1).
    let (from, len) =
        if v6 != 0 { (8, 32 + UdpHdr::LEN + BTH_LEN) } else { (12, 8 + UdpHdr::LEN + BTH_LEN) };
    let (start, words) =
        (bounded(ip, IP_MASK) + from, (len + (extended & EXTENDED_MASK) as usize) / 4);
    let udp = start + if v6 != 0 { 32 } else { 8 };
    let Some([high, low]) = p.load::<2>(udp + 4) else { return FAILED };
    let mut sum = u16::from_ne_bytes([high, low]) as u64 + (17u16.to_be()) as u64;
    let mut i = 0;
    while i < 20 {
        if i >= words {
            break;
        }
        let Some(word) = p.lane(start + i * 4) else { return FAILED };
        // SAFETY: four bytes from `word` on are inside the packet.
        sum += unsafe { word.read_unaligned() } as u64;
        i += 1;
    }
    fold(sum) as u64
}

/// Adds to the PSN of a data packet with `len` bytes of payload, for
/// [`netsum_common::slot::GAP_PSN_AHEAD`] and [`netsum_common::slot::STALE_PSN_BEHIND`]. A wrong
/// ICRC stays wrong. The UDP checksum becomes zero, which means none (RFC 768, RFC 6935): one that
/// was left to the hardware to fill in is lost when the packet goes to another CPU. The ICRC
/// protects the packet.
#[inline(always)]
pub fn shift_psn(ctx: &XdpContext, frame: &Frame, len: usize, by: u32) -> bool {
    let behind = frame.bth.opcode.extended_len() + len;
    psn_move(ctx.ctx, (frame.bth_offset() - UDP_CHECKSUM_LEN) as u32, behind as u32, by) == 0
}

/// Length of the UDP checksum, which is right before the BTH.
pub const UDP_CHECKSUM_LEN: usize = 2;

/// `at`: offset of the UDP checksum; `behind`: bytes between BTH and ICRC.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn psn_move(ctx: *mut xdp_md, at: u32, behind: u32, by: u32) -> u64 {
    let p = Packet::new(&XdpContext::new(ctx));
    let (at, behind) = (bounded(at, OFFSET_MASK), (behind & LEN_MASK) as usize);
    // The nearer one first: the compiler omits a comparison that follows from a farther one, and
    // the verifier cannot follow that.
    let Some(psn_at) =
        p.at::<{ UDP_CHECKSUM_LEN + BTH_LEN }>(at).map(|_| at + UDP_CHECKSUM_LEN + BTH_LEN - 4)
    else {
        return FAILED;
    };
    let Some(old) = p.load::<4>(psn_at) else { return FAILED };
    let icrc_at = psn_at + 4 + behind;
    let Some(icrc) = p.load::<ICRC_LEN>(icrc_at) else { return FAILED };
    let psn = serial::add(u32::from_be_bytes([0, old[1], old[2], old[3]]), by).to_be_bytes();
    let new = [old[0], psn[1], psn[2], psn[3]];
    let words = (u32::from_le_bytes(old), u32::from_le_bytes(new));
    let icrc = icrc::patch(u32::from_le_bytes(icrc), words.0, words.1, behind & LEN_BITS);
    let stored = p
        .store(at, [0; UDP_CHECKSUM_LEN])
        .and_then(|()| p.store(psn_at, new))
        .and_then(|()| p.store(icrc_at, icrc.to_le_bytes()));
    if stored.is_some() { 0 } else { FAILED }
}

macro_rules! headers_global {
    ($name:ident, $l3:expr) => {
        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $name(ctx: *mut xdp_md, ip: u32, extended: u32) -> u64 {
            let p = Packet::new(&XdpContext::new(ctx));
            match icrc::headers(&p, $l3, bounded(ip, IP_MASK), (extended & EXTENDED_MASK) as usize)
            {
                Some(state) => state as u64,
                None => FAILED,
            }
        }
    };
}
headers_global!(headers_crc_v4, L3::V4);
headers_global!(headers_crc_v6, L3::V6);

/// ICRC state after headers and payload of a packet, in one pass if possible.
#[inline(always)]
pub fn frame_crc(ctx: &XdpContext, frame: &Frame, len: usize) -> Option<u32> {
    let extended = frame.bth.opcode.extended_len();
    if frame.l3 == L3::V4 && extended == 0 && len >= CELL_LEN {
        return returned(frame_crc_v4(ctx.ctx, frame.ip as u32, len as u32));
    }
    let state = headers_crc(ctx, frame.l3, frame.ip, extended)?;
    crc(ctx, frame.payload(), len, state)
}

/// Five words of headers, of an IPv4 packet without extended transport headers, processed like the
/// payload.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn frame_crc_v4(ctx: *mut xdp_md, ip: u32, len: u32) -> u64 {
    let p = Packet::new(&XdpContext::new(ctx));
    let (ip, len) = (bounded(ip, IP_MASK), (len & LEN_MASK) as usize);
    let Some(at) = p.at::<HEADERS_V4>(ip) else { return FAILED };
    // SAFETY: five words from `at` on are inside the packet.
    let header = |i: usize| unsafe { word(at, i) } | icrc::HEADER_MASK_V4[i];
    if len >= LAGGED_LEN {
        return crc_lagged(&p, ip + HEADERS_V4, len, icrc::SEED, header);
    }
    let mut chorba = Chorba::new(icrc::SEED);
    (0..icrc::HEADER_MASK_V4.len()).for_each(|i| chorba.word(header(i)));
    match crc_cells(&p, ip + HEADERS_V4, len, chorba) {
        Some(state) => state as u64,
        None => FAILED,
    }
}

/// With `state` 0 or a short payload; see [`crc`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn payload_crc(ctx: *mut xdp_md, at: u32, len: u32, state: u32) -> u64 {
    let p = Packet::new(&XdpContext::new(ctx));
    let (at, len) = (bounded(at, OFFSET_MASK), (len & LEN_MASK) as usize);
    if len >= LAGGED_LEN {
        return crc_lagged(&p, at, len, 0, |_| 0);
    }
    match crc_whole(&p, at, len, state) {
        Some(state) => state as u64,
        None => FAILED,
    }
}

/// For a long payload, behind five words of headers.
#[inline(always)]
fn crc_lagged(
    p: &Packet,
    offset: usize,
    len: usize,
    state: u32,
    header: impl Fn(usize) -> u64,
) -> u64 {
    let Some(lagged) = maps::lagged() else { return FAILED };
    let cells = len / CELL_LEN;
    // SAFETY: a per-CPU value, and XDP programs of one CPU do not interrupt each other.
    unsafe { Lagged::headers(lagged, state, header) };
    // The last cells must be whole.
    let groups_len = bounded(len as u32, (CELL_LEN - GROUP_LEN) as u32);
    let mut i = 0;
    while i < CELL_LEN / GROUP_LEN - 1 {
        if i * GROUP_LEN >= groups_len {
            break;
        }
        let Some(at) = p.at::<GROUP_LEN>(offset + i * GROUP_LEN) else { return FAILED };
        // SAFETY: as above; a whole group from `at` on is inside the packet.
        unsafe { Lagged::group(lagged, i * GROUP_LEN, |w| word(at, w)) };
        i = opaque(i + 1);
    }
    let offset = offset + groups_len;
    let mut i = 0;
    while i < MAX_CELLS - 2 {
        if i + 2 >= cells {
            break;
        }
        let Some(at) = p.at::<CELL_LEN>(offset + i * CELL_LEN) else { return FAILED };
        // SAFETY: as above; a whole cell from `at` on is inside the packet.
        unsafe { Lagged::cell(lagged, groups_len + i * CELL_LEN, |w| word(at, w)) };
        i = opaque(i + 1);
    }
    let Some(at) = p.at::<{ 2 * CELL_LEN }>(offset + i * CELL_LEN) else { return FAILED };
    // The loop's own number, which the verifier knows exactly.
    // SAFETY: as above; two cells from `at` on are inside the packet.
    let state = unsafe { Lagged::last(lagged, groups_len + i * CELL_LEN, |w| word(at, w)) };
    let tail = len % GROUP_LEN / 4;
    match crc_tail(p, offset + (len & !(CELL_LEN - 1)), tail, state) {
        Some(state) => state as u64,
        None => FAILED,
    }
}

/// The part of a UDP checksum that a payload of `len` bytes at offset `at` is, not complemented and
/// in the order of its bytes.
#[inline(always)]
pub fn checksum(ctx: &XdpContext, at: usize, len: usize) -> Option<u16> {
    returned(payload_checksum(ctx.ctx, at as u32, len as u32)).map(|sum| sum as u16)
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn payload_checksum(ctx: *mut xdp_md, at: u32, len: u32) -> u64 {
    let p = Packet::new(&XdpContext::new(ctx));
    let (at, len) = (bounded(at, OFFSET_MASK), (len & LEN_MASK) as usize);
    let cells = len / CELL_LEN;
    let mut sum = 0;
    let mut i = 0;
    while i < MAX_CELLS {
        if i >= cells {
            break;
        }
        let Some(cell) = p.at::<CELL_LEN>(at + i * CELL_LEN) else { return FAILED };
        // SAFETY: a whole cell from `cell` on is inside the packet.
        let s = unsafe {
            bpf_csum_diff(core::ptr::null_mut(), 0, cell as *mut u32, CELL_LEN as u32, 0)
        };
        sum += s as u32 as u64;
        i = opaque(i + 1);
    }
    let (at, lanes) = (at + (len & !(CELL_LEN - 1)), len % CELL_LEN / 4);
    let mut i = 0;
    while i < CELL_LANES / 2 {
        if i >= lanes / 2 {
            break;
        }
        let Some(at) = p.word::<8>(at + i * 8) else { return FAILED };
        // SAFETY: eight bytes from `at` on are inside the packet.
        let word = unsafe { word(at, 0) };
        sum += (word & 0xffff_ffff) + (word >> 32);
        i += 1;
    }
    if lanes % 2 != 0 {
        let Some(lane) = p.lane(at + i * 8) else { return FAILED };
        // SAFETY: four bytes from `lane` on are inside the packet.
        sum += unsafe { lane.read_unaligned() } as u64;
    }
    fold(sum) as u64
}

/// Adds the halves of a sum until 16 bits are left (RFC 1071).
#[inline(always)]
pub fn fold(sum: u64) -> u16 {
    let sum = (sum & 0xffff_ffff) + (sum >> 32);
    let sum = (sum & 0xffff) + (sum >> 16);
    let sum = (sum & 0xffff) + (sum >> 16);
    ((sum & 0xffff) + (sum >> 16)) as u16
}

macro_rules! global {
    ($name:ident, $op:ident) => {
        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $name(ctx: *mut xdp_md, packed: u32, ring: u32, slot: u32) -> u64 {
            const OP: u8 = Op::$op as u8;
            let p = Packet::new(&XdpContext::new(ctx));
            let (at, len) = (bounded(packed >> 16, OFFSET_MASK), (packed & LEN_MASK) as usize);
            // Separate maps by size: a slot takes little more memory than its payload, in one
            // look-up.
            let done = match packed >> 24 {
                0 => {
                    maps::sum_512(ring, slot).and_then(|s| apply_to::<OP, 2>(&p, at, len, s.cast()))
                }
                1 => maps::sum_1024(ring, slot)
                    .and_then(|s| apply_to::<OP, 4>(&p, at, len, s.cast())),
                2 => maps::sum_1536(ring, slot)
                    .and_then(|s| apply_to::<OP, 6>(&p, at, len, s.cast())),
                3 => maps::sum_2048(ring, slot)
                    .and_then(|s| apply_to::<OP, 8>(&p, at, len, s.cast())),
                _ => maps::sum_3328(ring, slot)
                    .and_then(|s| apply_to::<OP, 13>(&p, at, len, s.cast())),
            };
            match done {
                Some(()) => 0,
                None => FAILED,
            }
        }
    };
}
global!(payload_store, Store);
global!(payload_add, Add);
global!(payload_load, Load);

#[inline(always)]
fn crc_whole(p: &Packet, offset: usize, len: usize, state: u32) -> Option<u32> {
    if len < CELL_LEN {
        return crc_tail(p, offset, len / 4, state);
    }
    crc_cells(p, offset, len, Chorba::new(state))
}

/// For a payload of one cell at least.
#[inline(always)]
fn crc_cells(p: &Packet, offset: usize, len: usize, mut chorba: Chorba) -> Option<u32> {
    let cells = len / CELL_LEN;
    let mut i = 0;
    while i < MAX_CELLS {
        if i >= cells {
            break;
        }
        let at = p.at::<CELL_LEN>(offset + i * CELL_LEN)?;
        // SAFETY: a whole cell from `at` on is inside the packet.
        chorba.cell(|w| unsafe { word(at, w) });
        i = opaque(i + 1);
    }
    crc_tail(p, offset + (len & !(CELL_LEN - 1)), len % CELL_LEN / 4, chorba.state())
}

#[inline(always)]
fn crc_tail(p: &Packet, offset: usize, lanes: usize, mut state: u32) -> Option<u32> {
    let words = lanes / 2;
    let mut i = 0;
    while i < CELL_LANES / 2 {
        if i >= words {
            break;
        }
        let at = p.word::<8>(offset + i * 8)?;
        // SAFETY: eight bytes from `at` on are inside the packet.
        state = icrc::step8(state, unsafe { word(at, 0) });
        i += 1;
    }
    if lanes % 2 == 0 {
        return Some(state);
    }
    let at = p.lane(offset + i * 8)?;
    // SAFETY: four bytes from `at` on are inside the packet.
    Some(icrc::step4(state, unsafe { at.read_unaligned() }))
}

/// An operation on a payload and a slot's cells.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Op {
    /// Packet to cells.
    Store,
    /// Packet added to cells.
    Add,
    /// Cells to packet.
    Load,
}

impl Op {
    pub(crate) const fn from_number(op: u8) -> Self {
        match op {
            0 => Self::Store,
            1 => Self::Add,
            _ => Self::Load,
        }
    }
}

/// The operation on a sum of `CELLS` cells.
#[inline(always)]
fn apply_to<const OP: u8, const CELLS: usize>(
    p: &Packet,
    offset: usize,
    len: usize,
    sum: *mut u64,
) -> Option<()> {
    let op = const { Op::from_number(OP) };
    let cells = len / CELL_LEN;
    let mut i = 0;
    while i < CELLS {
        if i >= cells {
            break;
        }
        let from = p.at::<CELL_LEN>(offset + i * CELL_LEN)?;
        // SAFETY: the packet has a whole cell from `from` on, and cell `i` is one of the sum's.
        unsafe { apply_cell(op, sum as usize + i * CELL_LEN, from) };
        // Kept as a loop: unrolled for every size it would not fit the processor's cache of decoded
        // instructions.
        i = opaque(i + 1);
    }
    if len % CELL_LEN == 0 {
        return Some(());
    }
    // The verifier takes the bound from here, and not from the length in bytes.
    let cells = opaque(cells);
    if cells >= CELLS {
        return None;
    }
    let offset = offset + (len & !(CELL_LEN - 1));
    let cell = sum as usize + cells * CELL_LEN;
    let groups = len % CELL_LEN / GROUP_LEN;
    let mut i = 0;
    while i < CELL_LEN / GROUP_LEN - 1 {
        if i >= groups {
            break;
        }
        let from = p.at::<GROUP_LEN>(offset + i * GROUP_LEN)?;
        // SAFETY: cell `cells` is one of the sum's, and the packet has a whole group from `from`
        // on.
        unsafe { apply_group(op, cell + i * GROUP_LEN, from) };
        i += 1;
    }
    let lanes = len % CELL_LEN / 4;
    // The compiler must not put it together with the cell's offset, of which the verifier knows the
    // bound.
    let mut i = opaque(groups * GROUP_LANES) & (CELL_LANES - 1);
    let mut count = 0;
    while count < GROUP_LANES {
        if i >= lanes {
            break;
        }
        let at = p.lane(offset + i * 4)?;
        // SAFETY: lane `i` is below the cell's 64 lanes, and four bytes from `at` on are inside the
        // packet.
        unsafe {
            let lane = (cell as *mut u32).add(i);
            match op {
                Op::Store => lane.write(at.read_unaligned()),
                Op::Load => at.write_unaligned(lane.read()),
                Op::Add => lane.write(lane.read().wrapping_add(at.read_unaligned())),
            }
        }
        i += 1;
        count += 1;
    }
    Some(())
}

/// # Safety
/// `cell` must be a map value's cell, and a cell of the packet must start at `at`.
#[inline(always)]
unsafe fn apply_cell(op: Op, cell: usize, at: usize) {
    unrolled!(G in 0 1 2 3 => {
        // SAFETY: the caller's promise.
        unsafe { apply_group(op, cell + G * GROUP_LEN, at + G * GROUP_LEN) }
    });
}

/// # Safety
/// `group` must be a map value's group, and a group of the packet must start at `at`.
#[inline(always)]
unsafe fn apply_group(op: Op, group: usize, at: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        match op {
            Op::Store => copy_group(group, at),
            Op::Load => copy_group(at, group),
            Op::Add => add_group(group, at),
        }
    }
}

/// # Safety
/// A group must be readable at `from` and writable at `to`.
#[inline(always)]
unsafe fn copy_group(to: usize, from: usize) {
    unrolled!(I in 0 1 2 3 4 5 6 7 => {
        // SAFETY: the caller's promise.
        unsafe { (to as *mut u64).add(I).write_unaligned(word(from, I)) }
    });
}

/// A lane that need not be aligned.
#[derive(Clone, Copy)]
#[repr(C, packed)]
struct Lane(u32);

/// Adds 16 lanes, four at a time: the loads of four do not wait for the stores of those before.
/// Volatile, because the compiler's own order is a fifth slower.
///
/// # Safety
/// A group must be readable at `from` and writable at `to`, which is a map value and so aligned.
#[inline(always)]
unsafe fn add_group(to: usize, from: usize) {
    let (to, from) = (to as *mut u32, from as *const Lane);
    unrolled!(I in 0 4 8 12 => {
        // SAFETY: the caller's promise.
        unsafe {
            let a0 = to.add(I).read_volatile();
            let a1 = to.add(I + 1).read_volatile();
            let a2 = to.add(I + 2).read_volatile();
            let a3 = to.add(I + 3).read_volatile();
            let b0 = from.add(I).read_volatile().0;
            let b1 = from.add(I + 1).read_volatile().0;
            let b2 = from.add(I + 2).read_volatile().0;
            let b3 = from.add(I + 3).read_volatile().0;
            to.add(I).write_volatile(a0.wrapping_add(b0));
            to.add(I + 1).write_volatile(a1.wrapping_add(b1));
            to.add(I + 2).write_volatile(a2.wrapping_add(b2));
            to.add(I + 3).write_volatile(a3.wrapping_add(b3));
        }
    });
}
