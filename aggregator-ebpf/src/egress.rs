//! Handles a clone of a result at its port: writes the headers that the rank behind the port
//! expects.

use core::mem::offset_of;

use aya_ebpf::bindings::xdp_action::{XDP_DROP, XDP_PASS};
use aya_ebpf::helpers::bpf_xdp_adjust_head;
use aya_ebpf::programs::XdpContext;
use netsum_common::abi::{
    EgressKey, HopKey, MAX_MTU, MAX_RANKS, ReleaseTag, RingNumber, SavedHeader, ring_flags,
};
use netsum_common::counters::Counter;
use netsum_common::icrc;
use netsum_common::slot::Slot;
use netsum_common::wire::{
    Bytes, ETHERTYPE_VLAN, EthHdr, GROUP_MARK, Header, Ipv4Hdr, L3, MAX_HEADERS, TOTAL, UdpHdr,
    VlanHdr,
};

use crate::packet::{Packet, opaque};
use crate::payload::UDP_CHECKSUM_LEN;
use crate::trace::{self, FlowRef};
use crate::{maps, payload};

/// Writes headers and ICRC; returns the verdict.
#[inline(always)]
pub fn result(ctx: &XdpContext, ifindex: u32) -> u32 {
    match write(ctx, ifindex) {
        Some(flow_ref) => {
            maps::count(flow_ref.ring, Counter::Results);
            trace::result(ctx, ifindex, flow_ref, Counter::Results);
            XDP_PASS
        }
        None => {
            maps::count(0, Counter::EgressNoRoute);
            trace::result(ctx, ifindex, FlowRef::NONE, Counter::EgressNoRoute);
            XDP_DROP
        }
    }
}

#[inline(always)]
fn write(ctx: &XdpContext, ifindex: u32) -> Option<FlowRef> {
    let tag = Packet::new(ctx).load::<12>(0)?;
    // SAFETY: `ReleaseTag` is `repr(C)`, 12 bytes without padding, and every bit pattern is one.
    let tag: ReleaseTag = unsafe { core::mem::transmute(tag) };
    let ring = maps::ring(tag.ring)?;
    let rank = match tag.rank {
        ReleaseTag::ALL => next_rank_of_port(tag.ring, ifindex)?,
        rank => (rank & !ReleaseTag::TOTAL) as u32,
    };
    let source = if rank == 0 { ring.members.wrapping_sub(1) } else { rank - 1 };
    if source >= MAX_RANKS as u32 {
        return None;
    }
    let slot_no = tag.index & ring.slots.wrapping_sub(1);
    let slot = maps::slot(tag.ring, slot_no)?;
    // SAFETY: map values that the ring's CPU wrote, which is this one.
    let (slot, header) =
        unsafe { (&*slot, &*maps::header(tag.ring, slot_no * ring.members + source)?) };
    // A late replay may be queued behind the packet that reuses its slot. It would carry that
    // packet's PSN with the old sum.
    let goes_up = ring.flags & ring_flags::UPLINK != 0 && rank == ring.members - 1;
    if slot.index != tag.index || !slot.is(if goes_up { Slot::SENT } else { Slot::RELEASED }) {
        return None;
    }
    // A partial sum that is sent up again may be queued behind the total, and would get its ICRC.
    if goes_up && slot.is(Slot::COMPLETE) != (tag.rank & ReleaseTag::TOTAL != 0) {
        return None;
    }
    let header_len = header.len as usize;
    if header_len == 0 || header_len > MAX_HEADERS {
        return None;
    }
    if header_len != tag.payload as usize {
        // Ranks may differ in VLAN tags, IP version and operation.
        // SAFETY: the context is valid; packet pointers are read again below.
        if unsafe { bpf_xdp_adjust_head(ctx.ctx, tag.payload as i32 - header_len as i32) } != 0 {
            return None;
        }
    }
    let p = Packet::new(ctx);
    write_headers(&p, header, header_len)?;
    let (ip, l3) =
        (if header.ip == 18 { 18 } else { 14 }, if header.v6 != 0 { L3::V6 } else { L3::V4 });
    let udp = ip + l3.header_len();
    // Receiving kernels coalesce only packets with a checksum (Linux 6.18, net/ipv4/udp_offload.c,
    // `udp_gro_receive_segment`).
    let with_checksum =
        slot.checksum != 0 && p.load::<UDP_CHECKSUM_LEN>(udp + CHECKSUM)? != [0; UDP_CHECKSUM_LEN];
    amend(&p, ip, l3, slot.is(Slot::CE))?;
    if ring.flags & ring_flags::ROUTED != 0 {
        route(&p, &HopKey { ring: RingNumber(tag.ring), member: rank }, ip, l3)?;
    }
    if ring.flags & (ring_flags::RELAXED | ring_flags::UPLINK | ring_flags::GROUPS) != 0 {
        // Marks of other boxes are in the flags of the ring.
        let mark = (ring.flags >> ring_flags::GROUP_MARK_SHIFT) as u8 & GROUP_MARK;
        let tells = if goes_up { mark } else { slot.receiver_marks(source) };
        let total =
            if goes_up { slot.is(Slot::COMPLETE) } else { ring.flags & ring_flags::GROUPS != 0 };
        let [before] = p.load::<1>(udp + UdpHdr::LEN + BTH_ECN)?;
        let congestion = before & 0xc0;
        p.store(udp + UdpHdr::LEN + BTH_ECN, [congestion | tells | if total { TOTAL } else { 0 }])?;
    }

    let len = slot.len as usize;
    if len > MAX_MTU {
        return None;
    }
    let len = payload::bounded_len(len);
    let extended = header_len.wrapping_sub(udp + UdpHdr::LEN + netsum_common::wire::BTH_LEN);
    let state = payload::headers_crc(ctx, l3, ip, extended)?;
    let icrc = !(icrc::shift(state, len & payload::LEN_BITS) ^ slot.crc);
    p.store(header_len + len, icrc.to_le_bytes())?;
    if with_checksum {
        let sum = payload::headers_sum(ctx, l3, ip, extended)? as u64
            + slot.checksum as u64
            + icrc as u64;
        // Zero would mean that there is no checksum (RFC 768).
        let checksum = match !payload::fold(sum) {
            0 => 0xffff,
            c => c,
        };
        p.store(udp + CHECKSUM, checksum.to_ne_bytes())?;
    }
    // Packets to the parent stay in the VLAN of the last member.
    if slot.is(Slot::TAGGED) && !goes_up {
        retag(ctx, maps::header(tag.ring, slot_no * ring.members + rank)?)?;
    }
    Some(FlowRef { ring: tag.ring, rank, index: tag.index })
}

/// Acts as a router, if the packet was sent to the box as a router. The ICRC and UDP's checksum
/// cover none of these fields.
#[inline(always)]
fn route(p: &Packet, key: &HopKey, ip: usize, l3: L3) -> Option<()> {
    let Some(hop) = maps::hop(key) else { return Some(()) };
    // SAFETY: a map value, which user space replaces as a whole: the old one stays readable while
    // this program runs.
    let hop = unsafe { &*hop };
    if p.load::<6>(0)? != hop.own {
        return Some(());
    }
    if hop.dst == [0; 6] {
        return None;
    }
    p.store(0, hop.dst)?;
    p.store(6, hop.src)?;
    let at = ip + if l3 == L3::V4 { offset_of!(Ipv4Hdr, ttl) } else { HOP_LIMIT };
    let [left] = p.load::<1>(at)?;
    if left <= 1 {
        return None;
    }
    p.store(at, [left - 1])?;
    if l3 == L3::V4 {
        // RFC 1624, eqn. 3, where the sum is 0x0100 more than before.
        let check =
            u16::from_be_bytes(p.load::<2>(ip + offset_of!(Ipv4Hdr, check))?) as u32 + 0x100;
        let check = check + (check >= 0xffff) as u32;
        p.store(ip + offset_of!(Ipv4Hdr, check), (check as u16).to_be_bytes())?;
    }
    Some(())
}

/// Sets the VLAN of a result to that of its receiver's own packets, like a bridge that translates
/// between tagged and untagged ports; the saved headers have the sender's. The priority stays the
/// sender's, if it has one. The ICRC does not cover tags.
#[inline(always)]
fn retag(ctx: &XdpContext, own: *const SavedHeader) -> Option<()> {
    let mut p = Packet::new(ctx);
    let sent = p.load::<4>(MACS)?;
    let tagged = [sent[0], sent[1]] == ETHERTYPE_VLAN.to_be_bytes();
    // SAFETY: a map value that the ring's CPU wrote, which is this one.
    let (own_tagged, word) =
        unsafe { ((*own).ip != EthHdr::LEN as u8, (*own).words[1].to_ne_bytes()) };
    let own_tag = [word[4], word[5], word[6], word[7]];
    if tagged && own_tagged {
        return p.store(EthHdr::LEN, [sent[2] & 0xf0 | own_tag[2] & 0x0f, own_tag[3]]);
    }
    if tagged {
        let macs = p.load::<MACS>(0)?;
        p.store(VlanHdr::LEN, macs)?;
        // SAFETY: the context is valid; no packet pointer is used afterwards.
        return if unsafe { bpf_xdp_adjust_head(ctx.ctx, VlanHdr::LEN as i32) } == 0 {
            Some(())
        } else {
            None
        };
    }
    if own_tagged {
        // SAFETY: the context is valid; packet pointers are read again.
        if unsafe { bpf_xdp_adjust_head(ctx.ctx, -(VlanHdr::LEN as i32)) } != 0 {
            return None;
        }
        p = Packet::new(ctx);
        let macs = p.load::<MACS>(VlanHdr::LEN)?;
        p.store(0, macs)?;
        p.store(MACS, own_tag)?;
    }
    Some(())
}

/// Offset of [`netsum_common::wire::Bth::flags`] in a BTH.
const BTH_ECN: usize = 4;
/// Offset of the checksum in a UDP header.
const CHECKSUM: usize = offset_of!(UdpHdr, check);
/// Offset of the hop limit in an IPv6 header.
const HOP_LIMIT: usize = 7;
/// Length of both Ethernet addresses.
const MACS: usize = 12;

/// The rank that gets the next clone at this port.
#[inline(always)]
fn next_rank_of_port(ring: u32, ifindex: u32) -> Option<u32> {
    let port = maps::egress_port(&EgressKey { ring: RingNumber(ring), ifindex })?;
    // SAFETY: a map value; a ring's clones leave on the ring's CPU, so it has one writer.
    unsafe {
        let cursor = (*port).cursor;
        let rank = (*port).ranks[cursor as usize % MAX_RANKS];
        let next = cursor + 1;
        (*port).cursor = if next >= (*port).count { 0 } else { next };
        Some(rank as u32)
    }
}

/// Copies saved headers as whole words, then the remaining two or six bytes: the payload stays
/// unchanged.
#[inline(always)]
fn write_headers(p: &Packet, header: &SavedHeader, len: usize) -> Option<()> {
    let words = len / 8;
    let mut i = 0;
    while i < 12 {
        if i >= words {
            break;
        }
        p.store(i * 8, header.words[i].to_ne_bytes())?;
        i += 1;
    }
    let rest = header.words[opaque(words).min(12)].to_ne_bytes();
    let at = words * 8;
    p.store(at, [rest[0], rest[1]])?;
    if len % 8 == 6 {
        p.store(at + 2, [rest[2], rest[3], rest[4], rest[5]])?;
    }
    Some(())
}

/// Sets fields that differ from the saved headers: IPv4 id 0 (a receiver on a UDP socket cannot see
/// another), no UDP checksum yet, and the congestion mark of any contribution, if the sender takes
/// part in ECN.
#[inline(always)]
fn amend(p: &Packet, ip: usize, l3: L3, ce: bool) -> Option<()> {
    p.store(ip + l3.header_len() + CHECKSUM, [0; UDP_CHECKSUM_LEN])?;
    match l3 {
        L3::V4 => {
            let h = Ipv4Hdr::load(p, ip)?;
            let tos = if ce && h.ecn() != 0 { h.tos | 3 } else { h.tos };
            // RFC 1624, eqn. 3: HC' = ~(~HC + ~m + m').
            let mut sum = (!h.checksum()) as u32 + (!h.id()) as u32;
            sum += (!u16::from_be_bytes([h.vihl, h.tos])) as u32
                + u16::from_be_bytes([h.vihl, tos]) as u32;
            sum = (sum & 0xffff) + (sum >> 16);
            sum = (sum & 0xffff) + (sum >> 16);
            p.store(ip + offset_of!(Ipv4Hdr, tos), [tos])?;
            p.store(ip + offset_of!(Ipv4Hdr, id), [0; 2])?;
            p.store(ip + offset_of!(Ipv4Hdr, check), (!(sum as u16)).to_be_bytes())
        }
        L3::V6 => {
            let h = p.load::<2>(ip)?;
            if ce && h[1] & 0x30 != 0 {
                p.store(ip + 1, [h[1] | 0x30])?;
            }
            Some(())
        }
    }
}
