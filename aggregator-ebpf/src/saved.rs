//! The headers that a slot keeps, for the result that the next rank gets.

use aya_ebpf::bindings::xdp_md;
use aya_ebpf::programs::XdpContext;
use netsum_common::abi::{HeaderWords, SavedHeader};
use netsum_common::wire::{Bytes, Frame, L3};

use crate::maps;
use crate::packet::Packet;

#[inline(always)]
pub fn save(ctx: &XdpContext, frame: &Frame, ring: u32, index: u32) -> Option<()> {
    let v6 = (frame.l3 == L3::V6) as u32;
    let place = v6 << 16 | (frame.ip as u32) << 8 | frame.payload() as u32;
    if header_save(ctx.ctx, place, ring, index) == 0 { Some(()) } else { None }
}

/// Saves the headers of a packet, in words; up to six bytes of the payload may be copied with them.
/// A global function.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn header_save(ctx: *mut xdp_md, place: u32, ring: u32, index: u32) -> u64 {
    let p = Packet::new(&XdpContext::new(ctx));
    let Some(saved) = maps::header(ring, index) else { return 1 };
    let len = (place & 0x7f) as usize;
    if let Some(all) = p.at::<{ size_of::<HeaderWords>() }>(0) {
        // Long enough for a copy without looking at the length.
        // SAFETY: 13 words from `all` on are inside the packet, and a map value has room for them.
        unrolled!(I in 0 1 2 3 4 5 6 7 8 9 10 11 12 => unsafe {
            (*saved).words[I] = (all as *const u64).add(I).read_unaligned()
        });
        return finish_header(saved, place);
    }
    let mut i = 0;
    while i < 13 {
        if i * 8 >= len {
            break;
        }
        let Some(word) = p.load::<8>(i * 8) else { return 1 };
        // SAFETY: a map value that only the ring's CPU writes; `i` is below the array's length.
        unsafe { (*saved).words[i] = u64::from_ne_bytes(word) };
        i += 1;
    }
    finish_header(saved, place)
}

#[inline(always)]
fn finish_header(saved: *mut SavedHeader, place: u32) -> u64 {
    // SAFETY: a map value that only the ring's CPU writes.
    unsafe {
        (*saved).len = (place & 0x7f) as u8;
        (*saved).ip = (place >> 8) as u8;
        (*saved).v6 = (place >> 16) as u8;
    }
    0
}
