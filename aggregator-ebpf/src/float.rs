//! Adds payloads of floats, 16 lanes at a time; see [`netsum_common::float`].
//!
//! The loops are in global functions, for the reasons that [`crate::payload`] gives. Those that
//! every packet needs treat a lane that is infinite or NaN as zero, and report that there is one.
//! Then [`add_special`] notes it in the lane's accumulator. From there on, until the slot gets
//! another index, only the slower functions process it.

use aya_ebpf::bindings::xdp_md;
use aya_ebpf::programs::XdpContext;
use netsum_common::abi::MAX_FLOAT_MTU;
use netsum_common::float::{self, Table};
use netsum_common::limits::{float_sum_bytes, sum_size};
use netsum_common::slot::{PackedVerdict, Payload, Slot};

use crate::maps;
use crate::packet::{Packet, opaque};
use crate::payload::{
    FAILED, GROUP_LANES, GROUP_LEN, LEN_MASK, OFFSET_MASK, Op, SumAddress, bounded, packed,
    returned,
};

const MAX_GROUPS: usize = MAX_FLOAT_MTU as usize / GROUP_LEN;
/// Where a sum of 2048 bytes is in the `packed` argument.
const SMALL_SUM: u32 = sum_size(2048) as u32;
const _: () = assert!(float_sum_bytes(1024) == 2048 && float_sum_bytes(MAX_FLOAT_MTU) == 4096);

/// Adds the payload to the slot as the verdict says, and puts a sum that is to be sent into the
/// packet.
#[inline(always)]
pub fn apply(
    ctx: &XdpContext,
    verdict: PackedVerdict,
    at: usize,
    len: usize,
    slot: &mut Slot,
    sum: &SumAddress,
) -> Option<()> {
    let packed = packed(at, len, sum);
    let (ctx, ring, index) = (ctx.ctx, sum.ring, sum.slot);
    if verdict.payload_is(Payload::Copy) && returned(float_store(ctx, packed, ring, index))? != 0 {
        slot.flags |= Slot::NOT_FINITE;
        returned(float_mark(ctx, packed, ring, index))?;
    }
    if verdict.payload_is(Payload::Add) {
        if slot.is(Slot::NOT_FINITE) {
            returned(float_add_special(ctx, packed, ring, index))?;
        } else if returned(float_add(ctx, packed, ring, index))? != 0 {
            slot.flags |= Slot::NOT_FINITE;
            returned(float_mark(ctx, packed, ring, index))?;
        }
    }
    if verdict.completed() || verdict.leaves() {
        returned(if slot.is(Slot::NOT_FINITE) {
            float_load_special(ctx, packed, ring, index)
        } else {
            float_load(ctx, packed, ring, index)
        })?;
    }
    Some(())
}

/// Calls a function with the accumulators of a slot, and the number of groups that they hold. Rings
/// of floats have sums of these two sizes ([`float_sum_bytes`]).
macro_rules! with_sum {
    ($packed:ident, $ring:ident, $slot:ident, $f:ident::<$op:ident>($($arg:expr),*)) => {
        if $packed >> 24 == SMALL_SUM {
            maps::sum_2048($ring, $slot).and_then(|s| $f::<$op, 16>($($arg,)* s.cast()))
        } else {
            maps::sum_4096($ring, $slot).and_then(|s| $f::<$op, 32>($($arg,)* s.cast()))
        }
    };
}

/// The global functions that every packet needs. They return 1 if a lane is special, else 0.
macro_rules! global {
    ($name:ident, $op:ident) => {
        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $name(ctx: *mut xdp_md, packed: u32, ring: u32, slot: u32) -> u64 {
            const OP: u8 = Op::$op as u8;
            let p = Packet::new(&XdpContext::new(ctx));
            let (at, len) = (bounded(packed >> 16, OFFSET_MASK), (packed & LEN_MASK) as usize);
            let Some(table) = maps::float_table(ring) else { return FAILED };
            let parts = with_sum!(packed, ring, slot, lanes::<OP>(&p, at, len, table));
            parts.map_or(FAILED, |parts| float::has_special(parts) as u64)
        }
    };
}
global!(float_store, Store);
global!(float_add, Add);
global!(float_load, Load);

/// Processes the lanes of a payload; returns their parts, ORed together.
#[inline(always)]
fn lanes<const OP: u8, const GROUPS: usize>(
    p: &Packet,
    offset: usize,
    len: usize,
    table: *const Table,
    sum: *mut i64,
) -> Option<u64> {
    let op = const { Op::from_number(OP) };
    let groups = len / GROUP_LEN;
    let (mut parts, mut i) = (0, 0);
    while i < GROUPS {
        if i >= groups {
            break;
        }
        let at = p.at::<GROUP_LEN>(offset + i * GROUP_LEN)?;
        unrolled!(L in 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 => {
            // SAFETY: the packet has a whole group from `at` on, and group `i` is one of the sum's.
            parts |= unsafe { lane(op, table, sum.add(i * GROUP_LANES + L), (at as *mut u32).add(L)) }
        });
        i = opaque(i + 1);
    }
    if len % GROUP_LEN == 0 {
        return Some(parts);
    }
    // The verifier takes the bound from here, and not from the length in bytes.
    let groups = opaque(groups);
    if groups >= GROUPS {
        return None;
    }
    // The compiler must not know that it is less than a group: without the loop's own bound, the
    // verifier of Linux 6.1 would follow one lane too many.
    let (offset, rest) = (offset + groups * GROUP_LEN, opaque(len % GROUP_LEN / 4));
    let mut i = 0;
    while i < GROUP_LANES {
        if i >= rest {
            break;
        }
        let at = p.lane(offset + i * 4)?;
        // SAFETY: group `groups` is one of the sum's, and four bytes from `at` on are inside the
        // packet.
        parts |= unsafe { lane(op, table, sum.add(groups * GROUP_LANES + i), at) };
        i += 1;
    }
    Some(parts)
}

/// Processes a lane; returns its part.
///
/// # Safety
/// `table` and `sum` must be in map values, and four bytes from `at` on in the packet.
#[inline(always)]
unsafe fn lane(op: Op, table: *const Table, sum: *mut i64, at: *mut u32) -> u64 {
    // SAFETY: the caller's promise; indices have as many bits as the tables need.
    unsafe {
        if op == Op::Load {
            at.write_unaligned(float::rounded(*sum, |i| byte(table, i), |i| leading(table, i)));
            return 0;
        }
        let bits = at.read_unaligned();
        let part = part(table, bits);
        let term = float::fixed(bits, part);
        *sum = if op == Op::Add { (*sum).wrapping_add(term) } else { term };
        part
    }
}

/// # Safety
/// `table` must be a map value.
#[inline(always)]
unsafe fn part(table: *const Table, bits: u32) -> u64 {
    // SAFETY: the caller's promise; a part has 9 bits.
    unsafe { *(&raw const (*table).parts).cast::<u64>().add(float::part_of(bits)) }
}

/// # Safety
/// `table` must be a map value, and `i` below 256.
#[inline(always)]
unsafe fn byte(table: *const Table, i: usize) -> u64 {
    // SAFETY: the caller's promise.
    unsafe { *(&raw const (*table).bytes).cast::<u64>().add(i) }
}

/// # Safety
/// `table` must be a map value, and `i` below 256.
#[inline(always)]
unsafe fn leading(table: *const Table, i: usize) -> u64 {
    // SAFETY: the caller's promise.
    unsafe { *(&raw const (*table).leading).cast::<u64>().add(i) }
}

/// An operation on sums that are not finite.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Special {
    /// Special lanes of the packet added to a sum that holds all others.
    Mark,
    /// All lanes of the packet added.
    Add,
    /// Sum to packet.
    Load,
}

/// The global functions for sums that are not finite: they call another one for each group, which
/// the verifier processes once, with all paths through its lanes.
macro_rules! special {
    ($name:ident, $group:ident, $op:ident) => {
        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $name(ctx: *mut xdp_md, packed: u32, ring: u32, slot: u32) -> u64 {
            let groups = ((packed & LEN_MASK) as usize).div_ceil(GROUP_LEN);
            let mut i = 0;
            while i < MAX_GROUPS {
                if i >= groups {
                    break;
                }
                if $group(ctx, packed, ring, slot, i as u32) != 0 {
                    return FAILED;
                }
                i = opaque(i + 1);
            }
            0
        }

        #[unsafe(no_mangle)]
        #[inline(never)]
        extern "C" fn $group(
            ctx: *mut xdp_md,
            packed: u32,
            ring: u32,
            slot: u32,
            group: u32,
        ) -> u64 {
            const OP: u8 = Special::$op as u8;
            let p = Packet::new(&XdpContext::new(ctx));
            let (at, len) = (bounded(packed >> 16, OFFSET_MASK), (packed & LEN_MASK) as usize);
            let group = bounded(group, MAX_GROUPS as u32 - 1);
            let Some(table) = maps::float_table(ring) else { return FAILED };
            let done =
                with_sum!(packed, ring, slot, special_lanes::<OP>(&p, at, len, group, table));
            if done.is_some() { 0 } else { FAILED }
        }
    };
}
special!(float_mark, float_mark_group, Mark);
special!(float_add_special, float_add_special_group, Add);
special!(float_load_special, float_load_special_group, Load);

/// Processes the lanes of one group.
#[inline(always)]
fn special_lanes<const OP: u8, const GROUPS: usize>(
    p: &Packet,
    offset: usize,
    len: usize,
    group: usize,
    table: *const Table,
    sum: *mut i64,
) -> Option<()> {
    if group >= GROUPS {
        return None;
    }
    let lanes = (len - group * GROUP_LEN) / 4;
    let mut i = 0;
    while i < GROUP_LANES {
        if i >= lanes {
            break;
        }
        let at = p.lane(offset + group * GROUP_LEN + i * 4)?;
        // SAFETY: group `group` is one of the sum's; four bytes from `at` on are inside the packet;
        // indices have as many bits as the tables need.
        unsafe {
            let sum = sum.add(group * GROUP_LANES + i);
            if OP == Special::Load as u8 {
                let rounded =
                    float::rounded_special(*sum, |i| byte(table, i), |i| leading(table, i));
                at.write_unaligned(rounded);
            } else {
                let bits = at.read_unaligned();
                let part = part(table, bits);
                if OP == Special::Add as u8 || float::has_special(part) {
                    *sum = float::add_special(*sum, bits, part);
                }
            }
        }
        i += 1;
    }
    Some(())
}
