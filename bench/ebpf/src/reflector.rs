//! Plays the box and rank 1 of a job of two ranks, at the other end of rank 0's link.
//!
//! Rank 1 does all that rank 0 does, at the same time, with zeros for data. So whatever rank 0
//! sends comes back as what rank 1 would send:
//!
//! - A contribution with index k is also sum k, except for its first three check lanes.
//! - An acknowledgement of sum k becomes rank 1's acknowledgement of contribution k.
//! - A frame on the bypass connection becomes rank 1's; in the first one, the rank is replaced.
//!
//! Everything else passes to the kernel. The numbers of all connections are those of ranks without
//! a daemon. The check lanes follow from the session's number, which a frame on the bypass
//! connection has.
#![no_std]
#![no_main]
#![feature(asm_experimental_arch)]

mod reflected;

use core::mem::offset_of;

use aya_ebpf::bindings::xdp_action::{XDP_DROP, XDP_PASS};
use aya_ebpf::btf_maps::Array;
use aya_ebpf::helpers::generated::bpf_redirect;
use aya_ebpf::macros::{btf_map, xdp};
use aya_ebpf::programs::XdpContext;
use netsum_aggregator_ebpf::packet::Packet;
use netsum_aggregator_ebpf::payload::{self, LEN_BITS, UDP_CHECKSUM_LEN};
use netsum_common::lanes::MessageId;
use netsum_common::unmanaged::static_connection;
use netsum_common::wire::{
    BTH_LEN, Bth, Bytes as _, ETHERTYPE_IPV4, EthHdr, Header as _, ICRC_LEN, IPPROTO_UDP, Ipv4Hdr,
    L3, Opcode, ROCE_PORT, UdpHdr,
};
use netsum_common::{icrc, serial};

use reflected::Reflected;

#[btf_map]
static REFLECTED: Array<Reflected, 1> = Array::new();

const IP: usize = EthHdr::LEN;
const UDP: usize = IP + Ipv4Hdr::LEN;
const BTH: usize = UDP + UdpHdr::LEN;
const PAYLOAD: usize = BTH + BTH_LEN;
/// What may change in a payload: the check lanes `count`, `sequence` and `rank`, or the first words
/// of a frame.
const BEGINNING: usize = 12;
/// Kinds of `netsum_collective::frame::Frame`: `Hello` and `Session`. Their first words are the
/// kind; the version and the rank, or the session.
const HELLO: u32 = 1;
const SESSION: u32 = 9;

/// Destination and PSN of a packet that comes back.
struct Turn {
    qpn: u32,
    psn: u32,
}

#[xdp]
pub fn reflector(ctx: XdpContext) -> u32 {
    let Some(state) = REFLECTED.get_ptr_mut(0) else { return XDP_PASS };
    // SAFETY: a map value that this program alone writes, on one CPU.
    let state = unsafe { &mut *state };
    let p = Packet::new(&ctx);
    let Some(bth) = base_header(&p) else { return XDP_PASS };
    let (turn, is_ring) = match (turn(&bth, Some(0)), turn(&bth, None)) {
        (Some(turn), _) => (turn, true),
        (None, Some(turn)) => (turn, false),
        (None, None) => return XDP_PASS,
    };
    if turn_round(&ctx, &bth, &turn, is_ring, state).is_none() {
        state.dropped += 1;
        return XDP_DROP;
    }
    state.returned += 1;
    // XDP_TX would not wake the other end of a veth unless that has a program, too (Linux 6.18,
    // drivers/net/veth.c, `veth_xdp_flush`).
    // SAFETY: the helper takes any number.
    unsafe { bpf_redirect(ctx.ingress_ifindex() as u32, 0) as u32 }
}

/// Where the packets of a connection come back to: data on the connection from rank 1 to rank 0,
/// acknowledgements on the other. `ring`: as for [`static_connection`].
#[inline(always)]
fn turn(bth: &Bth, ring: Option<u32>) -> Option<Turn> {
    let (first, second) = (static_connection(0, ring), static_connection(1, ring));
    let ahead = serial::sub(second.first_psn.get(), first.first_psn.get());
    if bth.opcode.is_rc_data() && bth.qpn == second.receive_qpn.get() {
        Some(Turn { qpn: first.receive_qpn.get(), psn: serial::add(bth.psn, ahead) })
    } else if bth.opcode == Opcode::ACK && bth.qpn == second.send_qpn.get() {
        Some(Turn { qpn: first.send_qpn.get(), psn: serial::sub(bth.psn, ahead) })
    } else {
        None
    }
}

/// The base transport header of a RoCEv2 packet over IPv4 without options or tags.
#[inline(always)]
fn base_header(p: &Packet) -> Option<Bth> {
    let bth = Bth::decode(&p.load::<BTH_LEN>(BTH)?);
    let [high, low] = p.load::<2>(12)?;
    let (ip, udp) = (Ipv4Hdr::load(p, IP)?, UdpHdr::load(p, UDP)?);
    let is_roce = u16::from_be_bytes([high, low]) == ETHERTYPE_IPV4
        && ip.vihl == 0x45
        && ip.proto == IPPROTO_UDP
        && u16::from_be_bytes(udp.dst) == ROCE_PORT;
    if is_roce { Some(bth) } else { None }
}

/// Makes the packet one for rank 0.
#[inline(always)]
fn turn_round(
    ctx: &XdpContext,
    bth: &Bth,
    turn: &Turn,
    is_ring: bool,
    known: &mut Reflected,
) -> Option<()> {
    let p = Packet::new(ctx);
    let macs = p.load::<12>(0)?;
    let [to, from] = [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]];
    p.store(0, from.map(|i: usize| macs[i]))?;
    p.store(6, to.map(|i: usize| macs[i]))?;

    // As the box does, which a receiver on a UDP socket relies on: identification 0.
    let ip = Ipv4Hdr::load(&p, IP)?;
    let check = payload::fold((!ip.checksum()) as u64 + (!ip.id()) as u64);
    p.store(IP + offset_of!(Ipv4Hdr, id), [0; 2])?;
    p.store(IP + offset_of!(Ipv4Hdr, check), (!check).to_be_bytes())?;
    p.store(IP + offset_of!(Ipv4Hdr, src_addr), ip.dst_addr)?;
    p.store(IP + offset_of!(Ipv4Hdr, dst_addr), ip.src_addr)?;
    let checksum = p.load::<UDP_CHECKSUM_LEN>(UDP + offset_of!(UdpHdr, check))?;

    let [q, n] = [turn.qpn, turn.psn].map(u32::to_be_bytes);
    let numbers = p.load::<8>(BTH + 4)?;
    let turned = [numbers[0], q[1], q[2], q[3], numbers[4], n[1], n[2], n[3]];
    p.store(BTH + 4, turned)?;

    // The CRC is linear: that of all changes, with zeros for what stays or is not covered.
    let addresses = u32::from_ne_bytes(ip.src_addr) ^ u32::from_ne_bytes(ip.dst_addr);
    let mut state = icrc::step4(0, u32::from_le_bytes([ip.id[0], ip.id[1], 0, 0]));
    state = icrc::step8(state, (addresses as u64) << 32);
    state = icrc::step8(state, addresses as u64);
    state = icrc::step8(state, 0);
    state = icrc::step8(state, u64::from_le_bytes(numbers) ^ u64::from_le_bytes(turned));
    let len = ((ctx.data_end() - ctx.data()).wrapping_sub(PAYLOAD + ICRC_LEN)) & LEN_BITS;
    let mut behind = len;
    if bth.opcode.is_rc_data() && bth.opcode.is_first() {
        let b = p.load::<BEGINNING>(PAYLOAD)?;
        let old = [
            u32::from_le_bytes([b[0], b[1], b[2], b[3]]),
            u32::from_le_bytes([b[4], b[5], b[6], b[7]]),
            u32::from_le_bytes([b[8], b[9], b[10], b[11]]),
        ];
        let new = if is_ring { sum(old, known)? } else { frame(old, known) };
        p.store(PAYLOAD, new[0].to_le_bytes())?;
        p.store(PAYLOAD + 4, new[1].to_le_bytes())?;
        p.store(PAYLOAD + 8, new[2].to_le_bytes())?;
        state = icrc::step4(state, old[0] ^ new[0]);
        state = icrc::step4(state, old[1] ^ new[1]);
        state = icrc::step4(state, old[2] ^ new[2]);
        behind = len.wrapping_sub(BEGINNING) & LEN_BITS;
    }
    let old = p.load_far::<ICRC_LEN>(PAYLOAD + len)?;
    let new = u32::from_le_bytes(old) ^ icrc::shift(state, behind);
    p.store(PAYLOAD + len, new.to_le_bytes())?;
    if checksum != [0; UDP_CHECKSUM_LEN] {
        // The one in the packet may be only the pseudo-header's, for a card to complete.
        p.store(UDP + offset_of!(UdpHdr, check), [0; UDP_CHECKSUM_LEN])?;
        let sum = payload::headers_sum(ctx, L3::V4, IP, 0)? as u64
            + payload::checksum(ctx, PAYLOAD, len)? as u64
            + new as u64;
        let sum = match !payload::fold(sum) {
            0 => 0xffff,
            sum => sum,
        };
        p.store(UDP + offset_of!(UdpHdr, check), sum.to_ne_bytes())?;
    }
    Some(())
}

/// Rank 0's first check lanes with those of rank 1 added: of the same message, so the same but for
/// the part of `rank` that names the rank. `None` before the session is known.
#[inline(always)]
fn sum([count, sequence, rank]: [u32; 3], known: &Reflected) -> Option<[u32; 3]> {
    if known.session == 0 {
        return None;
    }
    let rank = rank.wrapping_mul(2).wrapping_add(known.member);
    Some([count.wrapping_mul(2), sequence.wrapping_mul(2), rank])
}

/// The first words of a frame as rank 1 sends it. Notes the session.
#[inline(always)]
fn frame([kind, second, third]: [u32; 3], known: &mut Reflected) -> [u32; 3] {
    if kind == SESSION {
        let run = (third as u64) << 32 | second as u64;
        let id = MessageId { run, ring: 0, number: 0, tag: 0 };
        known.member = id.of(1).rank.wrapping_sub(id.of(0).rank);
        known.session = 1;
    }
    [kind, second, if kind == HELLO { 1 } else { third }]
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    loop {}
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
