//! Programs for the lab's cables: they lose RoCEv2 packets, the same ones for the same seed.
//!
//! Other packets pass: what the loss of an ARP or TCP packet costs is the kernel's business and would only make tests slow.
#![no_std]
#![no_main]

use aya_ebpf::bindings::xdp_action::{XDP_DROP, XDP_PASS};
use aya_ebpf::btf_maps::Array;
use aya_ebpf::macros::{btf_map, xdp};
use aya_ebpf::programs::XdpContext;

/// RoCEv2's UDP port, as on the wire.
const PORT: [u8; 2] = 4791u16.to_be_bytes();

/// A way through the cable. `netsum_lab::faults` has the same structure.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Way {
    /// A packet is lost if its number's hash is below: share of the lost times 2^32.
    threshold: u64,
    /// Chooses other packets.
    seed: u64,
    /// RoCEv2 packets that came.
    seen: u64,
    /// Those of them that were lost.
    lost: u64,
}

/// 0: from the host, 1: to the host.
#[btf_map]
static WAYS: Array<Way, 2, 0> = Array::new();

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

#[inline(always)]
fn cable(ctx: &XdpContext, way: u32) -> u32 {
    if !is_roce(ctx) {
        return XDP_PASS;
    }
    let Some(way) = WAYS.get_ptr_mut(way) else { return XDP_PASS };
    // SAFETY: a map value. Nobody else writes it: a veth device has one receive queue unless told otherwise.
    let way = unsafe { &mut *way };
    way.seen += 1;
    // From MurmurHash3's finalizer, which spreads consecutive numbers evenly.
    let mut hash = (way.seen ^ way.seed << 32).wrapping_mul(0xff51_afd7_ed55_8ccd);
    hash ^= hash >> 33;
    hash = hash.wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    if hash >> 32 < way.threshold {
        way.lost += 1;
        return XDP_DROP;
    }
    XDP_PASS
}

/// UDP to port 4791 over IPv4 without options or over IPv6.
#[inline(always)]
fn is_roce(ctx: &XdpContext) -> bool {
    // Ethernet, IPv4 and UDP headers; no RoCEv2 packet is shorter.
    let Some(start) = load::<42>(ctx, 0) else { return false };
    if start[12] == 0x08 && start[13] == 0x00 {
        return start[23] == 17 && load::<2>(ctx, 14 + 20 + 2) == Some(PORT);
    }
    start[12] == 0x86 && start[13] == 0xdd && start[20] == 17 && load::<2>(ctx, 14 + 40 + 2) == Some(PORT)
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

#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    loop {}
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
