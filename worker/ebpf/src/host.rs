//! The program on the interface of a host whose rank takes its packets from AF_XDP sockets;
//! `netsum_worker` loads it.
//!
//! RoCEv2 to the rank's address goes to the socket of its receive queue. The kernel gets all else:
//! ARP, TCP, other addresses' RoCEv2, and packets of queues without a socket.
#![no_std]
#![no_main]

use core::mem::offset_of;

use aya_ebpf::bindings::xdp_action::XDP_PASS;
use aya_ebpf::btf_maps::{Array, XskMap};
use aya_ebpf::macros::{btf_map, xdp};
use aya_ebpf::programs::XdpContext;
use netsum_aggregator_ebpf::packet::Packet;
use netsum_common::wire::{
    Bytes, ETHERTYPE_IPV4, ETHERTYPE_IPV6, EthHdr, Header, IPPROTO_UDP, Ipv4Hdr, Ipv6Hdr,
    ROCE_PORT, UdpHdr, ipv4_mapped,
};

/// The rank's address, IPv4 in mapped form. Zeros until it is known, which no packet is for.
#[btf_map]
static LOCAL: Array<[u8; 16], 1> = Array::new();
/// The socket of each receive queue; `netsum_worker` has the same limit.
#[btf_map]
static SOCKETS: XskMap<64> = XskMap::new();

/// On every packet that comes to the host.
#[xdp]
pub fn host(ctx: XdpContext) -> u32 {
    let Some(local) = LOCAL.get(0) else { return XDP_PASS };
    let Some(to) = roce_to(&Packet::new(&ctx)) else { return XDP_PASS };
    if to != *local {
        return XDP_PASS;
    }
    match SOCKETS.redirect(ctx.rx_queue_index(), XDP_PASS as u64) {
        Ok(action) | Err(action) => action,
    }
}

/// Whom a packet is for, in mapped form, if it is RoCEv2 by its port: untagged, because an address
/// in a VLAN belongs to another interface, and without fragments and options. All offsets are
/// constants, which `netsum_common::wire::parse` cannot have: otherwise the verifier would ask for
/// CAP_PERFMON.
#[inline(always)]
fn roce_to(p: &Packet) -> Option<[u8; 16]> {
    // Each arm reads the port itself: an offset that depends on the arm is not a constant.
    const PORT: usize = offset_of!(UdpHdr, dst);
    let (to, port) = match u16::from_be_bytes(p.load::<2>(offset_of!(EthHdr, ether_type))?) {
        ETHERTYPE_IPV4 => {
            let h = Ipv4Hdr::load(p, EthHdr::LEN)?;
            // "Don't fragment" is the only one of these bits that may be set.
            if h.vihl != 0x45 || h.proto != IPPROTO_UDP || h.frags[0] & 0x3f != 0 || h.frags[1] != 0
            {
                return None;
            }
            (ipv4_mapped(h.dst_addr), p.load::<2>(EthHdr::LEN + Ipv4Hdr::LEN + PORT)?)
        }
        ETHERTYPE_IPV6 => {
            let [next_header] = p.load::<1>(EthHdr::LEN + offset_of!(Ipv6Hdr, next_hdr))?;
            if next_header != IPPROTO_UDP {
                return None;
            }
            let to = p.load::<16>(EthHdr::LEN + offset_of!(Ipv6Hdr, dst_addr))?;
            (to, p.load::<2>(EthHdr::LEN + Ipv6Hdr::LEN + PORT)?)
        }
        _ => return None,
    };
    if u16::from_be_bytes(port) == ROCE_PORT { Some(to) } else { None }
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    loop {}
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
