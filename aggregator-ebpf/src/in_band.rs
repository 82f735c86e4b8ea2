//! Jobs that are set up in band: the first packet of a connection tells the daemon whose it is.
//!
//! Nothing is decided here but that the packet has a job's token and is whole. It is noted and
//! dropped, and so is all that comes on its connection, so that no message reaches its receiver
//! unsummed. The sender's timer ends, and it comes again, until the daemon has registered the
//! connections of all ranks. (Were the rest passed on, some receivers would NAK it each time that
//! it comes, and the sender would send its window again and again for as long as ranks are
//! missing.)

use core::mem::offset_of;

use aya_ebpf::bindings::xdp_md;
use aya_ebpf::programs::XdpContext;
use netsum_common::abi::{Claim, ClaimKey, MAX_MTU, StrangerKey, Token, ring_flags};
use netsum_common::counters::Counter;
use netsum_common::wire::in_band::{Beginning, JOB_HEADER_LEN, beginning};
use netsum_common::wire::{
    BTH_LEN, Bytes, EthHdr, Frame, ICRC_LEN, Ipv4Hdr, Ipv6Hdr, L3, UdpHdr, ipv4_mapped,
};

use crate::classify::Found;
use crate::packet::Packet;
use crate::{maps, payload};

const WORDS: usize = JOB_HEADER_LEN / 8;
/// `BPF_ANY` and `BPF_NOEXIST`.
const ANY: u64 = 0;
const IF_NEW: u64 = 1;
/// In a length: the packet is its message's last, too.
const ONLY: u32 = 1 << 31;
/// In place of a length: the packet is broken, and its connection does not wait.
const BROKEN: u32 = u32::MAX;

/// Whether the packet, of no registered flow, is one by which a connection joins a job: by its
/// token, which `found` then says the ring of. Otherwise, what to count.
#[inline(always)]
pub fn is_of_job(ctx: &XdpContext, p: &Packet, found: &mut Found) -> bool {
    let Ok(len) = found.frame.data_len(p.len()) else { return false };
    let looked = look(ctx, &found.frame, len);
    let counter = looked & 0xff;
    if counter == Counter::InBandToken as u64 {
        found.counter = Counter::InBandToken;
    } else if counter == Counter::InBandVersion as u64 {
        found.counter = Counter::InBandVersion;
    } else if counter == Counter::InBandFirst as u64 {
        found.ring = (looked >> JOB_SHIFT) as u32;
        return true;
    }
    false
}

/// The same on the ring's CPU, with all that was left to be checked. If so, the packet must be
/// dropped; it is noted if it is in order.
#[inline(always)]
pub fn is_claim(ctx: &XdpContext, p: &Packet, found: &mut Found) -> bool {
    let Ok(len) = found.frame.data_len(p.len()) else { return false };
    let looked = look(ctx, &found.frame, len);
    if looked & 0xff != Counter::InBandFirst as u64 {
        return false;
    }
    found.ring = (looked >> JOB_SHIFT) as u32;
    if len > MAX_MTU {
        found.counter = Counter::Oversized;
    } else if looked & VERIFY != 0 && !is_intact(ctx, p, &found.frame, len) {
        found.counter = Counter::BadIcrc;
        // What it names as its connection may be another one.
        claim_note(ctx.ctx, place(&found.frame), BROKEN);
    } else {
        found.counter = Counter::InBandFirst;
        note(ctx, &found.frame, len);
    }
    true
}

/// That a message of a registered flow begins with a header that says its index: the connection is
/// the one that was registered, and not another one of the same queue pair with other PSNs, which
/// begins anew.
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
    if let Beginning::Header = beginning(word(words, 0).to_le_bytes())
        && (word(words, WORDS - 1) >> 32) as u32 == index
    {
        return Ok(());
    }
    if look(ctx, frame, len) & 0xff != Counter::InBandFirst as u64 {
        return Err(Counter::InBandHeader);
    }
    note(ctx, frame, len);
    Err(Counter::InBandFirst)
}

/// In what [`first_look`] returns: the ICRC is to be verified; and where the job's number is.
const VERIFY: u64 = 1 << 8;
const JOB_SHIFT: u32 = 32;
/// Or this: no header.
const NOTHING: u64 = 0xff;

/// What a payload begins with: [`Counter::InBandFirst`], with the job's number and whether its ICRC
/// is verified; or the counter of a header of no use; or [`NOTHING`].
#[inline(always)]
fn look(ctx: &XdpContext, frame: &Frame, len: usize) -> u64 {
    if len < JOB_HEADER_LEN { NOTHING } else { first_look(ctx.ctx, frame.payload() as u32) }
}

/// A global function, as in [`payload`]; what it has on its stack are the programs rid of.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn first_look(ctx: *mut xdp_md, at: u32) -> u64 {
    let p = Packet::new(&XdpContext::new(ctx));
    let Some(words) = words_at(&p, (at & 127) as usize) else { return NOTHING };
    match beginning(word(words, 0).to_le_bytes()) {
        Beginning::Other => return NOTHING,
        Beginning::Version(_) => return Counter::InBandVersion as u64,
        Beginning::Header => {}
    }
    match maps::in_band_job(&Token::from_words([word(words, 1), word(words, 2)])) {
        Some(job) => {
            let verify = if job.flags & ring_flags::ICRC_IGNORE == 0 { VERIFY } else { 0 };
            (job.job.0 as u64) << JOB_SHIFT | verify | Counter::InBandFirst as u64
        }
        None => Counter::InBandToken as u64,
    }
}

#[inline(always)]
fn is_intact(ctx: &XdpContext, p: &Packet, frame: &Frame, len: usize) -> bool {
    let len = payload::bounded_len(len);
    let Some(state) = payload::frame_crc(ctx, frame, len) else { return false };
    let Some(sent) = p.load::<ICRC_LEN>(frame.payload() + len) else { return false };
    u32::from_le_bytes(sent) == !state
}

/// Tells the daemon.
#[inline(always)]
fn note(ctx: &XdpContext, frame: &Frame, len: usize) {
    let only = frame.bth.opcode.is_last() as u32;
    claim_note(ctx.ctx, place(frame), only << 31 | len as u32);
}

/// Where IP header and payload of a packet are, and its IP version.
#[inline(always)]
fn place(frame: &Frame) -> u32 {
    ((frame.l3 == L3::V6) as u32) << 16 | (frame.ip as u32) << 8 | frame.payload() as u32
}

/// Notes the first packet whose IP header, IP version and payload are at `place`, and whose
/// payload's length is in `len`. A global function, as in [`payload`], and because a claim takes a
/// third of a BPF program's stack.
///
/// What was noted of the same rank and port a moment ago, and has not been read, is the same packet
/// once more, or a later message's; the first message's is the one that counts.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn claim_note(ctx: *mut xdp_md, place: u32, len: u32) -> u64 {
    let ctx = XdpContext::new(ctx);
    claim(&ctx, place, len).is_none() as u64
}

#[inline(always)]
fn claim(ctx: &XdpContext, place: u32, len: u32) -> Option<()> {
    let p = Packet::new(ctx);
    // The verifier takes the bounds from here.
    let (at, ip) = ((place & 127) as usize, (place >> 8 & 31) as usize);
    // The nearer first: the compiler leaves out a comparison that follows from a farther one, and
    // the verifier does not follow.
    let src_mac = p.load::<6>(offset_of!(EthHdr, src_addr))?;
    let (src_ip, dst_ip, bth) = if place >> 16 != 0 {
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
    let ifindex = ctx.ingress_ifindex() as u32;
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
        connection: StrangerKey { src_ip, dst_ip, qpn, ifindex },
        psn: u32::from_be_bytes([0, bth[9], bth[10], bth[11]]),
        len: len & !ONLY,
        src_mac,
        only: (len >> 31) as u8,
        reserved: 0,
    };
    if len == BROKEN {
        maps::wait_no_longer(&claim.connection);
        return Some(());
    }
    maps::note_claim(&key, &claim, if message == 0 { ANY } else { IF_NEW });
    Some(())
}

/// Where the header's words are, if they are inside the packet.
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
