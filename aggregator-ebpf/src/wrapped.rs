//! Parses packets behind tags or extension headers, which data of netsum never has. These are
//! global functions because inlined they would exceed the stack, and few packets need them. They
//! classify a packet as far as possible.

use core::mem::offset_of;

use aya_ebpf::bindings::xdp_md;
use aya_ebpf::programs::XdpContext;
use netsum_common::abi::{Address, features};
use netsum_common::wire::{
    self, Bytes, ETHERTYPE_ARP, ETHERTYPE_IPV4, ETHERTYPE_IPV6, Frame, Header, IPPROTO_ICMPV6,
    IPPROTO_UDP, Ipv4Hdr, Ipv6Hdr, NEIGHBOUR_ADVERTISEMENT, ROCE_PORT, Reject, UdpHdr, UpperLayer,
    Wrapped, ipv4_mapped,
};

use crate::maps;
use crate::packet::Packet;

const NOT_ROCE: u64 = 0;
const HIDDEN: u64 = 1;
/// It carries an address of a rank behind another port.
const SPOOFED: u64 = 0xff;
/// RoCEv2 to a rank.
const TO_RANK: u64 = 2;

impl Wrapped for Packet {
    /// Packets pass if there are no ranks, and no jobs whose ranks are to show up.
    #[inline(always)]
    fn hidden(&self) -> Reject {
        if hidden_packet() == HIDDEN { Reject::Hidden } else { Reject::NotRoce }
    }

    /// [`Reject::VlanTags`] is RoCEv2 to an address of a rank.
    #[inline(always)]
    fn tagged(&self, _: &mut Frame) -> Reject {
        reject(tagged_packet(self.ctx), Reject::VlanTags)
    }

    /// [`Reject::Ipv6Extensions`] is RoCEv2 to an address of a rank.
    #[inline(always)]
    fn extended(&self, frame: &mut Frame) -> Reject {
        reject(extended_packet(self.ctx, frame.ip as u32), Reject::Ipv6Extensions)
    }
}

#[inline(always)]
fn reject(code: u64, to_rank: Reject) -> Reject {
    match code {
        NOT_ROCE => Reject::NotRoce,
        HIDDEN => Reject::Hidden,
        SPOOFED => Reject::Spoofed,
        _ => to_rank,
    }
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn hidden_packet() -> u64 {
    hidden_code()
}

#[inline(always)]
fn hidden_code() -> u64 {
    if maps::features() & (features::RANKS | features::FIRST_PACKETS) == 0 {
        NOT_ROCE
    } else {
        HIDDEN
    }
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn tagged_packet(ctx: *mut xdp_md) -> u64 {
    let ctx = XdpContext::new(ctx);
    let (p, port) = (Packet::new(&ctx), ctx.ingress_ifindex() as u32);
    let (ethertype, ip) = match wire::behind_tags(&p) {
        Ok(found) => found,
        Err(Reject::Hidden) => return hidden_code(),
        Err(_) => return NOT_ROCE,
    };
    let (udp, to) = match ethertype {
        ETHERTYPE_ARP => {
            let Some(sender) = p.load_far::<4>(ip + 14) else { return NOT_ROCE };
            return if is_elsewhere(ipv4_mapped(sender), port) { SPOOFED } else { NOT_ROCE };
        }
        ETHERTYPE_IPV4 => {
            let Some(h) = p.load_far(ip).map(Ipv4Hdr::of) else { return NOT_ROCE };
            if is_elsewhere(ipv4_mapped(h.src_addr), port) {
                return SPOOFED;
            }
            // A later fragment is useless without the first one, which has the ports.
            if h.proto != IPPROTO_UDP || h.frag_offset() != 0 {
                return NOT_ROCE;
            }
            (ip + h.ihl() as usize, ipv4_mapped(h.dst_addr))
        }
        ETHERTYPE_IPV6 => {
            let Some([next]) = p.load_far::<1>(ip + offset_of!(Ipv6Hdr, next_hdr)) else {
                return NOT_ROCE;
            };
            let Some(to) = p.load_far::<16>(ip + offset_of!(Ipv6Hdr, dst_addr)) else {
                return NOT_ROCE;
            };
            let Some(from) = p.load_far::<16>(ip + offset_of!(Ipv6Hdr, src_addr)) else {
                return NOT_ROCE;
            };
            if is_elsewhere(from, port) {
                return SPOOFED;
            }
            if next == IPPROTO_ICMPV6 {
                let Some(target) = p.load_far::<16>(ip + Ipv6Hdr::LEN + 8) else { return NOT_ROCE };
                let Some([kind]) = p.load_far::<1>(ip + Ipv6Hdr::LEN) else { return NOT_ROCE };
                let forged = kind == NEIGHBOUR_ADVERTISEMENT && is_elsewhere(target, port);
                return if forged { SPOOFED } else { NOT_ROCE };
            }
            // Both at once has no use.
            if wire::is_extension(next) {
                return hidden_code();
            }
            if next != IPPROTO_UDP {
                return NOT_ROCE;
            }
            (ip + Ipv6Hdr::LEN, to)
        }
        _ => return NOT_ROCE,
    };
    let Some(to_port) = p.load_far::<2>(udp + offset_of!(UdpHdr, dst)) else { return NOT_ROCE };
    let is_roce = u16::from_be_bytes(to_port) == ROCE_PORT;
    if is_roce && maps::owner(&Address::ip(to)).is_some() { TO_RANK } else { NOT_ROCE }
}

/// Whether an address is that of a rank behind another port than the one of this interface.
#[inline(always)]
fn is_elsewhere(ip: [u8; 16], port: u32) -> bool {
    maps::owner(&Address::ip(ip)).is_some_and(|owner| !maps::is_port(port, owner.ifindex))
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn extended_packet(ctx: *mut xdp_md, ip: u32) -> u64 {
    let ctx = XdpContext::new(ctx);
    let p = Packet::new(&ctx);
    // The mask tells the verifier.
    let ip = (ip & 31) as usize;
    let behind = wire::behind(&p, ip);
    if behind == UpperLayer::HIDDEN {
        return hidden_code();
    }
    if let Some(at) = behind.advertisement()
        && let Some(target) = p.load_far::<16>(at + 8)
        && is_elsewhere(target, ctx.ingress_ifindex() as u32)
    {
        return SPOOFED;
    }
    if behind.udp().is_some()
        && let Some(to) = p.load_far::<16>(ip + offset_of!(Ipv6Hdr, dst_addr))
        && maps::owner(&Address::ip(to)).is_some()
    {
        return TO_RANK;
    }
    NOT_ROCE
}
