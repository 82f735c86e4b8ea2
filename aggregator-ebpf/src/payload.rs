//! Moving, adding and checking payloads, a cell of 256 bytes at a time, the rest lane by lane.
//!
//! Every loop has a constant bound and every cell its own comparison with the packet's end, as the verifier wants it.
//! The loops are in *global functions*: the verifier goes through such a function once, for any argument, and not once
//! for every way that leads to a call (Linux 5.6, kernel/bpf/verifier.c, `do_check_subprogs`). That takes only numbers
//! and the context, so each function finds its packet anew.

use aya_ebpf::bindings::xdp_md;
use aya_ebpf::programs::XdpContext;
use netsum_common::abi::{CELL_LEN, MAX_MTU};
use netsum_common::icrc::{self, CELL_WORDS, Chorba};
use netsum_common::wire::{L3, MAX_HEADERS};

use crate::maps;
use crate::packet::{Packet, opaque};

const MAX_CELLS: usize = MAX_MTU / CELL_LEN;
const CELL_LANES: usize = CELL_LEN / 4;

/// Covers every payload offset; the verifier takes the bound from here.
const OFFSET_MASK: u32 = 127;
/// Covers every payload length.
const LEN_MASK: u32 = 4095;
/// Covers both offsets of an IP header.
const IP_MASK: u32 = 31;
/// Covers the lengths of RETH and immediate data.
const EXTENDED_MASK: u32 = 31;
const _: () = assert!(MAX_HEADERS <= OFFSET_MASK as usize && MAX_MTU <= LEN_MASK as usize);

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
    let state = payload_crc(ctx.ctx, at as u32, len as u32, state);
    returned(state)
}

/// What a global function returned. The compiler knows that it fits 32 bits, the verifier does not, so the compiler
/// must forget it.
#[inline(always)]
fn returned(state: u64) -> Option<u32> {
    let state = opaque(state as usize) as u64;
    if state == FAILED { None } else { Some(state as u32) }
}

/// Applies an operation to `len` bytes at offset `at` of the packet and the cells from `first` on.
#[inline(always)]
pub fn apply(ctx: &XdpContext, op: Op, at: usize, len: usize, ring: u32, first: u32) -> Option<()> {
    let place = (at as u32) << 16 | len as u32;
    let result = match op {
        Op::Store => payload_store(ctx.ctx, place, ring, first),
        Op::Add => payload_add(ctx.ctx, place, ring, first),
        Op::Load => payload_load(ctx.ctx, place, ring, first),
    };
    if result == 0 { Some(()) } else { None }
}

/// What the global functions return when a payload does not fit its packet or a map has no such value.
const FAILED: u64 = u64::MAX;

/// ICRC state after the headers that `frame` describes.
#[inline(always)]
pub fn headers_crc(ctx: &XdpContext, l3: L3, ip: usize, extended: usize) -> Option<u32> {
    let state = match l3 {
        L3::V4 => headers_crc_v4(ctx.ctx, ip as u32, extended as u32),
        L3::V6 => headers_crc_v6(ctx.ctx, ip as u32, extended as u32),
    };
    returned(state)
}

macro_rules! headers_global {
    ($name:ident, $l3:expr) => {
        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $name(ctx: *mut xdp_md, ip: u32, extended: u32) -> u64 {
            let p = Packet::new(&XdpContext::new(ctx));
            match icrc::headers(&p, $l3, (ip & IP_MASK) as usize, (extended & EXTENDED_MASK) as usize) {
                Some(state) => state as u64,
                None => FAILED,
            }
        }
    };
}
headers_global!(headers_crc_v4, L3::V4);
headers_global!(headers_crc_v6, L3::V6);

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn payload_crc(ctx: *mut xdp_md, at: u32, len: u32, state: u32) -> u64 {
    let p = Packet::new(&XdpContext::new(ctx));
    match crc_whole(&p, (at & OFFSET_MASK) as usize, (len & LEN_MASK) as usize, state) {
        Some(state) => state as u64,
        None => FAILED,
    }
}

macro_rules! global {
    ($name:ident, $op:ident) => {
        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $name(ctx: *mut xdp_md, place: u32, ring: u32, first: u32) -> u64 {
            let p = Packet::new(&XdpContext::new(ctx));
            let (at, len) = (place >> 16 & OFFSET_MASK, place & LEN_MASK);
            match apply_whole::<{ Op::$op as u8 }>(&p, at as usize, len as usize, ring, first) {
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
    let cells = len / CELL_LEN;
    let mut state = state;
    let mut chorba = Chorba::new(state);
    let mut i = 0;
    while i < MAX_CELLS {
        if i >= cells {
            break;
        }
        let at = p.at::<CELL_LEN>(offset + i * CELL_LEN)?;
        // SAFETY: a whole cell from `at` on is inside the packet.
        let read = |w: usize| unsafe { word(at, w) };
        i += 1;
        if i == cells {
            state = chorba.last_cell(read);
        } else {
            chorba.cell(read);
        }
    }
    crc_tail(p, offset + (len & !(CELL_LEN - 1)), len % CELL_LEN / 4, state)
}

#[inline(always)]
fn crc_tail(p: &Packet, offset: usize, lanes: usize, mut state: u32) -> Option<u32> {
    let mut i = 0;
    while i < CELL_LANES {
        if i >= lanes {
            break;
        }
        let at = p.lane(offset + i * 4)?;
        // SAFETY: four bytes from `at` on are inside the packet.
        state = icrc::step4(state, unsafe { at.read_unaligned() });
        i += 1;
    }
    Some(state)
}

/// What to do with a payload and a slot's cells.
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
    const fn from_number(op: u8) -> Self {
        match op {
            0 => Self::Store,
            1 => Self::Add,
            _ => Self::Load,
        }
    }
}

#[inline(always)]
fn apply_whole<const OP: u8>(p: &Packet, offset: usize, len: usize, ring: u32, first: u32) -> Option<()> {
    let op = const { Op::from_number(OP) };
    let cells = len / CELL_LEN;
    let mut i = 0;
    while i < MAX_CELLS {
        if i >= cells {
            break;
        }
        let at = p.at::<CELL_LEN>(offset + i * CELL_LEN)?;
        let cell = maps::cell(ring, first + i as u32)?;
        // SAFETY: `at` has a whole cell inside the packet, `cell` is one of the map's values, and the ring's CPU is
        // the only one to touch them.
        unsafe {
            match op {
                Op::Store => copy_cell(cell as usize, at),
                Op::Load => copy_cell(at, cell as usize),
                Op::Add => add_cell(cell as usize, at),
            }
        }
        i += 1;
    }
    let lanes = len % CELL_LEN / 4;
    if lanes == 0 {
        return Some(());
    }
    let offset = offset + (len & !(CELL_LEN - 1));
    let cell = maps::cell(ring, first + cells as u32)? as *mut u32;
    let mut i = 0;
    while i < CELL_LANES {
        if i >= lanes {
            break;
        }
        let at = p.lane(offset + i * 4)?;
        // SAFETY: lane `i` is below the cell's 64 lanes, and four bytes from `at` on are inside the packet.
        unsafe {
            let lane = cell.add(i);
            match op {
                Op::Store => lane.write(at.read_unaligned()),
                Op::Load => at.write_unaligned(lane.read()),
                Op::Add => lane.write(lane.read().wrapping_add(at.read_unaligned())),
            }
        }
        i += 1;
    }
    Some(())
}

/// # Safety
/// A cell must be readable at `from` and writable at `to`.
#[inline(always)]
unsafe fn copy_cell(to: usize, from: usize) {
    let mut i = 0;
    while i < CELL_WORDS {
        // SAFETY: the caller's promise.
        unsafe { (to as *mut u64).add(i).write_unaligned(word(from, i)) };
        i += 1;
    }
}

/// Adds 64 lanes, four at a time: the loads of a group do not wait for the stores of the one before, which is twice as
/// fast as one lane after the other.
///
/// # Safety
/// A cell must be readable at `from` and writable at `to`.
#[inline(always)]
unsafe fn add_cell(to: usize, from: usize) {
    let (to, from) = (to as *mut u32, from as *const u32);
    let mut i = 0;
    while i < CELL_LANES {
        // SAFETY: the caller's promise.
        unsafe {
            let a: [u32; 4] =
                [to.add(i).read(), to.add(i + 1).read(), to.add(i + 2).read(), to.add(i + 3).read()];
            let b: [u32; 4] = [
                from.add(i).read_unaligned(),
                from.add(i + 1).read_unaligned(),
                from.add(i + 2).read_unaligned(),
                from.add(i + 3).read_unaligned(),
            ];
            to.add(i).write(a[0].wrapping_add(b[0]));
            to.add(i + 1).write(a[1].wrapping_add(b[1]));
            to.add(i + 2).write(a[2].wrapping_add(b[2]));
            to.add(i + 3).write(a[3].wrapping_add(b[3]));
        }
        i += 4;
    }
}
