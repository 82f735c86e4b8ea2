//! Jobs that are set up in band: the first packet of a connection identifies it to the daemon.
//!
//! These programs only check that the packet carries a job's token and is complete. They record it
//! and drop it, with all packets of its connection, because no message may reach its receiver
//! unsummed. The sender times out and retransmits until the daemon has registered the connections
//! of all ranks. (If the other packets were forwarded, some receivers would NAK each of them, and
//! the sender would repeat its window for as long as ranks are missing.)

use core::mem::offset_of;

use aya_ebpf::bindings::xdp_md;
use aya_ebpf::programs::XdpContext;
use netsum_common::abi::{Claim, ClaimKey, ConnectionKey, MAX_MTU, Token, ring_flags};
use netsum_common::counters::Counter;
use netsum_common::wire::in_band::{HeaderKind, JOB_HEADER_LEN, beginning};
use netsum_common::wire::{
    BTH_LEN, Bytes, EthHdr, Frame, ICRC_LEN, Ipv4Hdr, Ipv6Hdr, L3, UdpHdr, ipv4_mapped,
};

use crate::classify::Classified;
use crate::packet::Packet;
use crate::{maps, payload};

const WORDS: usize = JOB_HEADER_LEN / 8;
/// `BPF_ANY` and `BPF_NOEXIST`.
const ANY: u64 = 0;
const IF_NEW: u64 = 1;
/// Flag of a length: the packet is also its message's last.
const ONLY: u32 = 1 << 31;
/// Instead of a length: the packet is invalid, and its connection does not wait.
const BROKEN: u32 = u32::MAX;

/// Whether this packet, of no registered flow, lets a connection join a job, by its token. `found`
/// then has the ring; otherwise the counter.
#[inline(always)]
pub fn is_of_job(ctx: &XdpContext, p: &Packet, found: &mut Classified) -> bool {
    let Ok(len) = found.frame.data_len(p.len()) else { return false };
    let inspected = inspect(ctx, &found.frame, len);
    let counter = inspected & 0xff;
    if counter == Counter::InBandWrongToken as u64 {
        found.counter = Counter::InBandWrongToken;
    } else if counter == Counter::InBandVersion as u64 {
        found.counter = Counter::InBandVersion;
    } else if counter == Counter::InBandFirst as u64 {
        found.ring = (inspected >> JOB_SHIFT) as u32;
        return true;
    }
    false
}

/// The same on the ring's CPU, with all remaining checks. If true, the packet must be dropped; it
/// is recorded if it is valid.
#[inline(always)]
pub fn is_claim(ctx: &XdpContext, p: &Packet, found: &mut Classified) -> bool {
    let Ok(len) = found.frame.data_len(p.len()) else { return false };
    let inspected = inspect(ctx, &found.frame, len);
    if inspected & 0xff != Counter::InBandFirst as u64 {
        return false;
    }
    found.ring = (inspected >> JOB_SHIFT) as u32;
    if len > MAX_MTU {
        found.counter = Counter::Oversized;
    } else if inspected & VERIFY != 0 && !is_intact(ctx, p, &found.frame, len) {
        found.counter = Counter::BadIcrc;
        // The connection that it names may be another one.
        record_claim(ctx.ctx, offsets(&found.frame), BROKEN);
    } else {
        found.counter = Counter::InBandFirst;
        record(ctx, &found.frame, len);
    }
    true
}

/// Checks that a message of a registered flow begins with a header that has its index. Otherwise
/// the connection is not the registered one, but a new one with the same queue pair and other PSNs.
#[inline(always)]
pub fn follows(
    ctx: &XdpContext,
    p: &Packet,
    frame: &Frame,
    len: usize,
    index: u32,
) -> Result<(), Counter> {
    if len < JOB_HEADER_LEN {
        return Err(Counter::InBandHeader);
    }
    let Some(words) = words_at(p, frame.payload()) else { return Err(Counter::InBandHeader) };
    if let HeaderKind::Header = beginning(word(words, 0).to_le_bytes())
        && (word(words, WORDS - 1) >> 32) as u32 == index
    {
        return Ok(());
    }
    if inspect(ctx, frame, len) & 0xff != Counter::InBandFirst as u64 {
        return Err(Counter::InBandHeader);
    }
    record(ctx, frame, len);
    Err(Counter::InBandFirst)
}

/// Flag in the result of [`first_look`]: verify the ICRC; then the position of the job's number.
const VERIFY: u64 = 1 << 8;
const JOB_SHIFT: u32 = 32;
/// Result: no header.
const NOTHING: u64 = 0xff;

/// The kind of a payload's beginning: [`Counter::InBandFirst`], with the job's number and whether
/// its ICRC is verified; or the counter of an invalid header; or [`NOTHING`].
#[inline(always)]
fn inspect(ctx: &XdpContext, frame: &Frame, len: usize) -> u64 {
    if len < JOB_HEADER_LEN { NOTHING } else { first_look(ctx.ctx, frame.payload() as u32) }
}

/// A global function, as in [`payload`]: it takes its stack usage away from the programs.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn first_look(ctx: *mut xdp_md, at: u32) -> u64 {
    let p = Packet::new(&XdpContext::new(ctx));
    let Some(words) = words_at(&p, (at & 127) as usize) else { return NOTHING };
    match beginning(word(words, 0).to_le_bytes()) {
        HeaderKind::Other => return NOTHING,
        HeaderKind::Version(_) => return Counter::InBandVersion as u64,
        HeaderKind::Header => {}
    }
    match maps::in_band_job(&Token::from_words([word(words, 1), word(words, 2)])) {
        Some(job) => {
            let verify = if job.flags & ring_flags::ICRC_IGNORE == 0 { VERIFY } else { 0 };
            (job.job.0 as u64) << JOB_SHIFT | verify | Counter::InBandFirst as u64
        }
        None => Counter::InBandWrongToken as u64,
    }
}

#[inline(always)]
fn is_intact(ctx: &XdpContext, p: &Packet, frame: &Frame, len: usize) -> bool {
    let len = payload::bounded_len(len);
    let Some(state) = payload::frame_crc(ctx, frame, len) else { return false };
    let Some(sent) = p.load::<ICRC_LEN>(frame.payload() + len) else { return false };
    u32::from_le_bytes(sent) == !state
}

/// Records a packet for the daemon.
#[inline(always)]
fn record(ctx: &XdpContext, frame: &Frame, len: usize) {
    let only = frame.bth.opcode.is_last() as u32;
    record_claim(ctx.ctx, offsets(frame), only << 31 | len as u32);
}

/// Offsets of IP header and payload of a packet, and its IP version.
#[inline(always)]
fn offsets(frame: &Frame) -> u32 {
    ((frame.l3 == L3::V6) as u32) << 16 | (frame.ip as u32) << 8 | frame.payload() as u32
}

/// Records the first packet whose IP header, IP version and payload are at `offsets`, and whose
/// payload's length is in `len`. A global function, as in [`payload`], and because a claim takes a
/// third of a BPF program's stack.
///
/// An unread record of the same rank and port is of the same packet, or of a later message's; the
/// first message's is kept.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn record_claim(ctx: *mut xdp_md, offsets: u32, len: u32) -> u64 {
    let ctx = XdpContext::new(ctx);
    claim(&ctx, offsets, len).is_none() as u64
}

#[inline(always)]
fn claim(ctx: &XdpContext, offsets: u32, len: u32) -> Option<()> {
    let p = Packet::new(ctx);
    // The verifier takes the bounds from here.
    let (at, ip) = ((offsets & 127) as usize, (offsets >> 8 & 31) as usize);
    // The nearer one first: the compiler omits a comparison that follows from a farther one, and
    // the verifier cannot follow that.
    let src_mac = p.load::<6>(offset_of!(EthHdr, src_addr))?;
    let (src_ip, dst_ip, bth) = if offsets >> 16 != 0 {
        let src = p.load::<16>(ip + offset_of!(Ipv6Hdr, src_addr))?;
        let dst = p.load::<16>(ip + offset_of!(Ipv6Hdr, dst_addr))?;
        (src, dst, p.load::<BTH_LEN>(ip + Ipv6Hdr::LEN + UdpHdr::LEN)?)
    } else {
        let src = p.load::<4>(ip + offset_of!(Ipv4Hdr, src_addr))?;
        let dst = p.load::<4>(ip + offset_of!(Ipv4Hdr, dst_addr))?;
        (ipv4_mapped(src), ipv4_mapped(dst), p.load::<BTH_LEN>(ip + Ipv4Hdr::LEN + UdpHdr::LEN)?)
    };
    let words = words_at(&p, at)?;
    let header = [
        word(words, 0),
        word(words, 1),
        word(words, 2),
        word(words, 3),
        word(words, 4),
        word(words, 5),
    ];
    let job = maps::in_band_job(&Token::from_words([header[1], header[2]]))?;
    let (ring, rank) = (header[3] as u32, (header[3] >> 32) as u32);
    let ifindex = maps::port_of(ctx.ingress_ifindex() as u32);
    let key = ClaimKey {
        job: job.job,
        ring: if ring < job.rings { ring } else { job.rings },
        rank: if rank < job.ranks { rank } else { job.ranks },
        ifindex,
    };
    let message = (header[4] >> 32) as u32;
    let qpn = u32::from_be_bytes([0, bth[5], bth[6], bth[7]]);
    let claim = Claim {
        header,
        connection: ConnectionKey { src_ip, dst_ip, qpn, ifindex },
        psn: u32::from_be_bytes([0, bth[9], bth[10], bth[11]]),
        len: len & !ONLY,
        src_mac,
        only: (len >> 31) as u8,
        reserved: 0,
    };
    if len == BROKEN {
        maps::remove_pending(&claim.connection);
        return Some(());
    }
    maps::note_claim(&key, &claim, if message == 0 { ANY } else { IF_NEW });
    Some(())
}

/// Address of the header's words, if they are inside the packet.
#[inline(always)]
fn words_at(p: &Packet, at: usize) -> Option<usize> {
    p.at::<JOB_HEADER_LEN>(at)
}

/// A word of the header that [`words_at`] found.
#[inline(always)]
fn word(words: usize, i: usize) -> u64 {
    // SAFETY: `words_at` has found all words inside the packet.
    unsafe { (words as *const u64).add(i).read_unaligned() }
}
