//! Programs for the lab's VLAN, at an interface's tc hooks (Linux 6.6): frames on one side of the
//! interface carry the VLAN's tag, and frames on the other side do not. They emulate a host in a
//! VLAN, and a bridge that translates between tagged and untagged ports, on kernels that have
//! neither VLAN devices nor VLAN filtering.
#![no_std]
#![no_main]

use aya_ebpf::bindings::{TC_ACT_OK, TC_ACT_SHOT};
use aya_ebpf::helpers::{bpf_skb_vlan_pop, bpf_skb_vlan_push};
use aya_ebpf::macros::classifier;
use aya_ebpf::programs::TcContext;
use netsum_common::wire::ETHERTYPE_VLAN;

/// VLAN ID; `netsum_lab::lab` has the same number.
const VLAN: u16 = 5;

/// Adds the VLAN's tag to every frame.
#[classifier]
pub fn tag(ctx: TcContext) -> i32 {
    // SAFETY: the context is valid.
    match unsafe { bpf_skb_vlan_push(ctx.skb.skb, ETHERTYPE_VLAN.to_be(), VLAN) } {
        0 => TC_ACT_OK as i32,
        _ => TC_ACT_SHOT as i32,
    }
}

/// Removes the VLAN's tag from every frame, and drops frames without it.
#[classifier]
pub fn untag(ctx: TcContext) -> i32 {
    // SAFETY: the context is valid.
    let (present, tci) = unsafe { ((*ctx.skb.skb).vlan_present, (*ctx.skb.skb).vlan_tci) };
    if present == 0 || tci & 0xfff != u32::from(VLAN) {
        return TC_ACT_SHOT as i32;
    }
    // SAFETY: the context is valid.
    match unsafe { bpf_skb_vlan_pop(ctx.skb.skb) } {
        0 => TC_ACT_OK as i32,
        _ => TC_ACT_SHOT as i32,
    }
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    loop {}
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
