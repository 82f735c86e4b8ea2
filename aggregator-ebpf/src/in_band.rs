//! Jobs that are set up in band: the first packet of a connection tells the daemon whose it is.
//!
//! Nothing is decided here but that the packet has a job's token and is whole. It is noted and dropped, so that no message
//! reaches its receiver unsummed: the receiver NAKs what comes behind it, or the sender's timer ends, and it comes again,
//! until the daemon has registered the connections of all ranks.

use aya_ebpf::programs::XdpContext;
use netsum_common::abi::{Claim, ClaimKey, InBandJob, MAX_MTU, Token, ring_flags};
use netsum_common::counters::Counter;
use netsum_common::wire::in_band::{Beginning, JOB_HEADER_LEN, beginning};
use netsum_common::wire::{Bytes, Frame, ICRC_LEN};

use crate::classify::Found;
use crate::packet::Packet;
use crate::{maps, payload};

const WORDS: usize = JOB_HEADER_LEN / 8;
/// `BPF_ANY` and `BPF_NOEXIST`.
const ANY: u64 = 0;
const IF_NEW: u64 = 1;

/// Whether the packet, of no registered flow, is one by which a connection joins a job. Then it must be dropped. `found`
/// says what to count.
#[inline(always)]
pub fn is_claim(ctx: &XdpContext, p: &Packet, found: &mut Found) -> bool {
    let Ok(len) = found.frame.data_len(p.len()) else { return false };
    let job = match job_of(p, found.frame.payload(), len) {
        Ok(Some(job)) => job,
        Ok(None) => return false,
        Err(counter) => {
            found.counter = counter;
            return false;
        }
    };
    found.ring = job.job;
    found.counter = Counter::InBandFirst;
    if len > MAX_MTU {
        found.counter = Counter::Oversized;
        return true;
    }
    if job.flags & ring_flags::ICRC_IGNORE == 0 && !is_intact(ctx, p, &found.frame, len) {
        found.counter = Counter::BadIcrc;
        return true;
    }
    note(ctx, p, &found.frame, len, job);
    true
}

/// That a message of a registered flow begins with a header that says its index: the connection is the one that was
/// registered, and not another one of the same queue pair with other PSNs, which begins anew.
#[inline(always)]
pub fn follows(ctx: &XdpContext, p: &Packet, frame: &Frame, len: usize, index: u32) -> Result<(), Counter> {
    let at = frame.payload();
    if len < JOB_HEADER_LEN {
        return Err(Counter::InBandHeader);
    }
    let Some(words) = words_at(p, at) else { return Err(Counter::InBandHeader) };
    if let Beginning::Header = beginning(word(words, 0).to_le_bytes())
        && (word(words, WORDS - 1) >> 32) as u32 == index
    {
        return Ok(());
    }
    match job_of(p, at, len) {
        Ok(Some(job)) => {
            note(ctx, p, frame, len, job);
            Err(Counter::InBandFirst)
        }
        _ => Err(Counter::InBandHeader),
    }
}

/// The job whose token a payload begins with.
#[inline(always)]
fn job_of(p: &Packet, at: usize, len: usize) -> Result<Option<&'static InBandJob>, Counter> {
    if len < JOB_HEADER_LEN {
        return Ok(None);
    }
    let Some(words) = words_at(p, at) else { return Ok(None) };
    match beginning(word(words, 0).to_le_bytes()) {
        Beginning::Other => return Ok(None),
        Beginning::Version(_) => return Err(Counter::InBandVersion),
        Beginning::Header => {}
    }
    match maps::in_band_job(&Token::from_words([word(words, 1), word(words, 2)])) {
        Some(job) => Ok(Some(job)),
        None => Err(Counter::InBandToken),
    }
}

#[inline(always)]
fn is_intact(ctx: &XdpContext, p: &Packet, frame: &Frame, len: usize) -> bool {
    let Some(state) = payload::frame_crc(ctx, frame, len) else { return false };
    let Some(sent) = p.load::<ICRC_LEN>(frame.payload() + len) else { return false };
    u32::from_le_bytes(sent) == !state
}

/// Tells the daemon. What was noted of the same rank and port a moment ago, and has not been read, is the same packet once
/// more, or a later message's; the first message's is the one that counts.
#[inline(always)]
fn note(ctx: &XdpContext, p: &Packet, frame: &Frame, len: usize, job: &InBandJob) {
    let Some(words) = words_at(p, frame.payload()) else { return };
    let header = [
        word(words, 0),
        word(words, 1),
        word(words, 2),
        word(words, 3),
        word(words, 4),
        word(words, 5),
    ];
    let (ring, rank) = (header[3] as u32, (header[3] >> 32) as u32);
    let key = ClaimKey {
        job: job.job,
        ring: if ring < job.rings { ring } else { job.rings },
        rank: if rank < job.ranks { rank } else { job.ranks },
        ifindex: ctx.ingress_ifindex() as u32,
    };
    let message = (header[4] >> 32) as u32;
    let claim = Claim {
        header,
        src_ip: frame.src_ip,
        dst_ip: frame.dst_ip,
        qpn: frame.bth.qpn,
        psn: frame.bth.psn,
        len: len as u32,
        only: frame.bth.opcode.is_last() as u32,
        src_mac: frame.src_mac,
        reserved: [0; 2],
    };
    maps::note_claim(&key, &claim, if message == 0 { ANY } else { IF_NEW });
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
