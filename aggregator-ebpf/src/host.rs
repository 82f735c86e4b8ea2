//! The program on the interface of a host whose rank takes its packets from AF_XDP sockets; `netsum_worker` loads it.
//!
//! RoCEv2 to the rank's address goes to the socket of the receive queue that it came by. All else is the kernel's: ARP, TCP, other
//! addresses' RoCEv2, and what comes by a queue without a socket.
#![no_std]
#![no_main]

use aya_ebpf::bindings::xdp_action::XDP_PASS;
use aya_ebpf::btf_maps::{Array, XskMap};
use aya_ebpf::macros::{btf_map, xdp};
use aya_ebpf::programs::XdpContext;
use netsum_aggregator_ebpf::packet::Packet;
use netsum_common::wire::{ETH_LEN, Frame, parse_into};

/// The rank's address, IPv4 in mapped form. Zeros until it is known, which no packet is for.
#[btf_map]
static LOCAL: Array<[u8; 16], 1> = Array::new();
/// The socket of each receive queue; `netsum_worker` has the same limit.
#[btf_map]
static SOCKETS: XskMap<64> = XskMap::new();

/// On every packet that comes to the host.
#[xdp]
pub fn host(ctx: XdpContext) -> u32 {
    let mut frame = Frame::EMPTY;
    // What is RoCEv2 only almost, the kernel may have; nobody reads it there.
    if parse_into(&Packet::new(&ctx), &mut frame).is_err() {
        return XDP_PASS;
    }
    // An address in a VLAN belongs to another interface.
    if frame.ip != ETH_LEN {
        return XDP_PASS;
    }
    let Some(local) = LOCAL.get(0) else { return XDP_PASS };
    if frame.dst_ip != *local {
        return XDP_PASS;
    }
    match SOCKETS.redirect(ctx.rx_queue_index(), XDP_PASS as u64) {
        Ok(action) | Err(action) => action,
    }
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    loop {}
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
