//! The floor under all-reduces in the box: contributions come in by ports and results leave by them, as in the box, but nothing is
//! summed, verified or kept. Of each index the last contribution goes to all hosts, the others are dropped where they come in.
//!
//! Ports are served by several CPUs at once, so contributions are counted with an atomic instruction. A host gets an index's result when
//! all have sent theirs, and can be ahead of nobody by more than its window, which is less than the slots.

use aya_ebpf::bindings::xdp_action::{XDP_DROP, XDP_PASS};
use aya_ebpf::btf_maps::Array;
use aya_ebpf::macros::{btf_map, xdp};
use aya_ebpf::programs::XdpContext;
use netsum_aggregator_ebpf::packet::Packet;
use netsum_common::floor::{FloorConfig, GROUP, SLOTS};
use netsum_common::wire::{Bytes, ETH_LEN, IPPROTO_UDP, IPV4_LEN, ROCE_PORT, UDP_LEN};

use crate::PAYLOAD;
use crate::bench_live::to_all;

#[btf_map]
static FLOOR_CONFIG: Array<FloorConfig, 1> = Array::new();
/// Contributions to each slot's indices.
#[btf_map]
static FLOOR_CAME: Array<u64, SLOTS> = Array::new();

/// Sender's MAC address of results; any will do that is the same in all.
const SOURCE_MAC: [u8; 6] = [2, 0, 0, 0, 0, 0xfe];

/// On every packet that comes in by a port.
#[xdp]
pub fn floor_port(ctx: XdpContext) -> u32 {
    let p = Packet::new(&ctx);
    let Some(config) = FLOOR_CONFIG.get(0) else { return XDP_PASS };
    match is_last(&p, config.ranks) {
        None => XDP_PASS,
        Some(false) => XDP_DROP,
        Some(true) => match make_result(&p, config) {
            Some(()) => to_all(),
            None => XDP_DROP,
        },
    }
}

/// Whether a packet is the last contribution to its index; `None` if it is no contribution.
#[inline(always)]
fn is_last(p: &Packet, ranks: u32) -> Option<bool> {
    let h = p.load::<IPV4_LEN>(ETH_LEN)?;
    let port = p.load::<2>(ETH_LEN + IPV4_LEN + 2)?;
    let to = [h[16], h[17], h[18], h[19]];
    if h[0] != 0x45 || h[9] != IPPROTO_UDP || to != GROUP || u16::from_be_bytes(port) != ROCE_PORT {
        return None;
    }
    let index = u32::from_be_bytes(p.load::<4>(PAYLOAD - 4)?);
    let came = FLOOR_CAME.get_ptr_mut(index % SLOTS as u32)?;
    let before = fetch_add(came);
    Some(before.wrapping_add(1).checked_rem(ranks as u64)? == 0)
}

/// Makes all results one flow, from the box, so that receiving kernels may coalesce them.
#[inline(always)]
fn make_result(p: &Packet, config: &FloorConfig) -> Option<()> {
    const UDP_CHECKSUM: usize = ETH_LEN + IPV4_LEN + UDP_LEN - 2;
    p.store(ETH_LEN - 8, SOURCE_MAC)?;
    let h = p.load::<16>(ETH_LEN)?;
    let (id, from) = ([h[4], h[5]], [h[12], h[13], h[14], h[15]]);
    p.store(ETH_LEN + 4, [0; 2])?;
    p.store(ETH_LEN + 12, config.source)?;
    let change = change(from, config.source);
    p.store(ETH_LEN + 10, patch([h[10], h[11]], change + word([!id[0], !id[1]])))?;
    let checksum = if config.checksums != 0 { patch(p.load::<2>(UDP_CHECKSUM)?, change) } else { [0; 2] };
    p.store(UDP_CHECKSUM, checksum)
}

#[inline(always)]
fn word(bytes: [u8; 2]) -> u32 {
    u16::from_be_bytes(bytes) as u32
}

/// What another address adds to the words under a checksum: ~m + m' of RFC 1624, eqn. 3.
#[inline(always)]
fn change(old: [u8; 4], new: [u8; 4]) -> u32 {
    word([!old[0], !old[1]]) + word([!old[2], !old[3]]) + word([new[0], new[1]]) + word([new[2], new[3]])
}

/// A checksum after a change.
#[inline(always)]
fn patch(checksum: [u8; 2], change: u32) -> [u8; 2] {
    let sum = word([!checksum[0], !checksum[1]]) + change;
    let sum = (sum & 0xffff) + (sum >> 16);
    let sum = (sum & 0xffff) + (sum >> 16);
    (!(sum as u16)).to_be_bytes()
}

/// Adds one to a map's word that several CPUs count in; what it was. Core's atomics lack this for BPF, which has the instruction.
#[inline(always)]
fn fetch_add(word: *mut u64) -> u64 {
    let mut value = 1u64;
    // SAFETY: an aligned word of a map value, which is accessed in no other way; nothing else is read or written.
    unsafe {
        core::arch::asm!(
            "{0} = atomic_fetch_add((u64 *)({1} + 0), {0})",
            inout(reg) value,
            in(reg) word,
            options(nostack, preserves_flags)
        )
    };
    value
}
