//! Turns bytes, from a fuzzer or a generator with a seed, into packets for programs and model.
//!
//! Most packets are valid ones of a registered flow near its window, because a random frame does
//! not get past the parser. The others are corrupted in one or a few places, with or without a
//! corrected ICRC.

use std::net::IpAddr;

use arbitrary::{Result, Unstructured};
use netsum_common::abi::ring_flags::{FLOAT, ICRC_IGNORE, IN_BAND, RELAXED};
use netsum_common::abi::{InBandJob, RingConfig, RingNumber};
use netsum_common::float::{LSB_DEFAULT, LSB_MIN};
use netsum_common::serial::{self, Psn, Qpn};
use netsum_common::wire::{self, InBandToken, JobHeader, Opcode};
use netsum_core::Rank;
use netsum_core::plane::{FlowSpec, RingSpec};

use crate::frames::{FrameSpec, floats, ipv4_checksum, lanes};
use crate::programs::host;

/// The port of all flows. To the programs it is a bond, and the loopback interface is its slave.
pub const BOND: u32 = 4712;

/// A permanent ring and its special properties.
#[derive(Clone, Debug)]
pub struct Setting {
    pub ring: RingSpec,
    pub flows: Vec<FlowSpec>,
    pub active: bool,
}

impl Setting {
    /// The job whose token is added if the ring's job is set up in band.
    pub fn in_band(&self) -> Option<(InBandToken, InBandJob)> {
        let RingSpec { id, config: RingConfig { members: ranks, flags, .. }, .. } = self.ring;
        let job = InBandJob { job: id, ranks, rings: 1, flags: flags & ICRC_IGNORE };
        (flags & IN_BAND != 0).then_some((InBandToken([id.0 as u8; 16]), job))
    }
}

/// Indices with which a sequence's rings begin: the usual one, one before the wrap, and one where
/// signs change.
pub const STARTS: [u32; 3] = [0, serial::MASK - 5, 0x7f_fffa];

/// Rings of all kinds.
pub fn settings() -> Vec<Setting> {
    let ring = |id, ranks, mtu, slots, window| RingSpec {
        id: RingNumber(id),
        cpu: 0,
        config: RingConfig { members: ranks, slots, credit: window, mtu, ..RingConfig::default() },
    };
    let with = |flags, RingSpec { id, cpu, config }| RingSpec {
        id,
        cpu,
        config: RingConfig { flags, ..config },
    };
    let of_floats = |lsb, RingSpec { id, cpu, config }| RingSpec {
        id,
        cpu,
        config: RingConfig { flags: config.flags | FLOAT, lsb, ..config },
    };
    /// Whether a rank's connection uses IPv6.
    type OverV6 = fn(u32) -> bool;
    let all: [(RingSpec, OverV6); 16] = [
        (ring(1, 2, 256, 4, 2), |_| false),
        (ring(2, 3, 1408, 16, 8), |_| false),
        (with(RELAXED, ring(3, 2, 512, 16, 7)), |_| true),
        (ring(4, 5, 2048, 8, 4), |_| true),
        (with(ICRC_IGNORE, ring(5, 3, 256, 8, 4)), |_| false),
        (with(ICRC_IGNORE | RELAXED, ring(6, 2, 3328, 64, 32)), |_| true),
        (ring(7, 64, 256, 2, 1), |_| false),
        (ring(8, 2, 256, 4, 2), |_| false),
        (ring(9, 2, 256, 16, 8), |_| false),
        (ring(10, 4, 512, 8, 3), |rank| rank % 2 == 1),
        (with(IN_BAND, ring(11, 2, 256, 16, 8)), |_| false),
        (with(IN_BAND | ICRC_IGNORE, ring(12, 3, 512, 8, 4)), |rank| rank == 1),
        (of_floats(LSB_DEFAULT, ring(13, 2, 1024, 8, 4)), |_| false),
        (of_floats(-30, with(RELAXED, ring(14, 3, 2048, 16, 8))), |_| true),
        (of_floats(-10, with(ICRC_IGNORE, ring(15, 5, 320, 4, 2))), |_| false),
        (of_floats(LSB_MIN, ring(16, 2, 1408, 8, 4)), |rank| rank == 1),
    ];
    all.into_iter()
        .map(|(ring, v6)| {
            let mut flows: Vec<FlowSpec> =
                (0..ring.config.members).map(|rank| flow(&ring, rank, v6(rank))).collect();
            match ring.id.0 {
                // Behind another port, with addresses of its own.
                9 => {
                    flows[0].ifindex = 4711;
                    flows[0].src = IpAddr::from([10, 0, 9, 1]);
                    flows[0].src_mac = Some([2, 0, 0, 0, 9, 1]);
                }
                10 => flows[1].src_mac = Some([2, 0, 0, 0, 0, host(1)]),
                _ => {}
            }
            Setting { active: ring.id != RingNumber(8), ring, flows }
        })
        .collect()
}

fn flow(ring: &RingSpec, rank: u32, v6: bool) -> FlowSpec {
    let ip = |rank: u32| match v6 {
        true => IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, host(rank) as u16]),
        false => IpAddr::from([10, 0, 0, host(rank)]),
    };
    FlowSpec {
        ring: ring.id,
        member: Rank(rank),
        base_psn: Psn::default().minus(16 * rank + ring.id.0),
        ifindex: BOND,
        src: ip(rank),
        dst: ip((rank + 1) % ring.config.members),
        qpn: Qpn::new(ring.id.0 << 8 | rank),
        src_mac: None,
        group_mark: 0,
    }
}

/// The next event of a sequence.
#[derive(Clone, Debug)]
pub enum Step {
    /// A packet arrives by the port and is processed as its verdict says. The packet that it
    /// releases leaves with the batch, or at once.
    Packet {
        frame: Vec<u8>,
        /// This packet ends the batch.
        last_of_batch: bool,
    },
    /// The packet that arrived this many packets ago arrives again.
    Again(usize),
}

/// State that the generator needs.
pub struct Hint {
    /// The lowest index that has not been released.
    pub low: u32,
    /// The index behind each rank's last contiguous fragment.
    pub expected: Vec<u32>,
}

/// The next step of a sequence.
pub fn step(
    u: &mut Unstructured,
    settings: &[Setting],
    hint: impl Fn(RingNumber) -> Hint,
) -> Result<Step> {
    let kind = u.int_in_range(0..=15u8)?;
    if kind == 0 {
        return Ok(Step::Again(u.int_in_range(0..=40usize)?));
    }
    let last_of_batch = u.ratio(1u8, 2u8)?;
    if kind == 1 {
        let len = u.int_in_range(14..=200usize)?;
        let mut frame = u.bytes(len.min(u.len()))?.to_vec();
        frame.resize(len, 0);
        return Ok(Step::Packet { frame, last_of_batch });
    }
    let setting = u.choose(settings)?;
    let rank = u.int_in_range(0..=setting.ring.config.members - 1)?;
    let spec = contribution(u, setting, rank, &hint(setting.ring.id))?;
    let mut frame = spec.build();
    if kind <= 4 {
        corrupt(u, &spec, &mut frame)?;
    }
    Ok(Step::Packet { frame, last_of_batch })
}

/// A fragment that its rank could have sent.
fn contribution(
    u: &mut Unstructured,
    setting: &Setting,
    rank: u32,
    hint: &Hint,
) -> Result<FrameSpec> {
    let RingSpec {
        id, config: RingConfig { members: ranks, mtu, slots, credit: window, .. }, ..
    } = setting.ring;
    let flow = &setting.flows[rank as usize];
    let expected = hint.expected[rank as usize];
    let index = match u.int_in_range(0..=15u8)? {
        0..=5 => expected,
        8..=9 => hint.low,
        10 => serial::add(expected, u.int_in_range(1..=9)?),
        // The last index whose slot is still its own, and older ones.
        6..=7 => serial::sub(hint.low, slots),
        11 => serial::sub(hint.low, u.int_in_range(1..=2 * slots)?),
        12 => serial::add(serial::add(hint.low, window), u.int_in_range(0..=2)?),
        13 => serial::sub(serial::add(hint.low, window), 1),
        14 => serial::add(hint.low, u.int_in_range(0..=window)?),
        _ => u.arbitrary::<u32>()? & serial::MASK,
    };
    // Usually as long as other ranks' fragments of this index, and as the fragments of full
    // messages.
    let usual = [mtu, mtu, mtu, 4, mtu / 2 + 4, mtu - 4, 252, 260][(index % 8) as usize].min(mtu);
    let header = u.arbitrary::<u8>()?;
    let len = if header & 0x1f == 0 { u.int_in_range(0..=mtu / 4 + 1)? * 4 } else { usual };
    // A third of all sums are zeros, whose CRC reveals nothing.
    let seed = serial::add(index, id.0);
    let payload = if index.is_multiple_of(3) {
        vec![0; len as usize]
    } else if setting.ring.config.flags & FLOAT != 0 {
        floats(rank + seed, len as usize / 4, index.is_multiple_of(5))
    } else {
        lanes(rank + seed, len as usize / 4)
    };
    let mut spec = FrameSpec::send(
        host(rank),
        host((rank + 1) % ranks),
        flow.qpn.get(),
        flow.base_psn.plus(index).get(),
        payload,
    );
    if flow.src.is_ipv6() {
        spec = spec.v6();
    }
    spec.src = match flow.src {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    };
    if let Some(mac) = flow.src_mac {
        spec.macs.1 = mac;
    }
    if header & 0x20 != 0 {
        // A rank whose packet has another position in its message than the others' stops its ring.
        let any = u.int_in_range(0..=0x7f)?;
        let messages = [Opcode::SEND_ONLY, Opcode(0x05), Opcode(0x0a), Opcode(0x0b)];
        let opcode = if any <= 0x0b { Opcode(any) } else { messages[any as usize % 4] };
        // Usually all packets of a message but the last are as long as the path MTU.
        if opcode.is_last() || len == mtu || header & 0x80 != 0 {
            spec.bth.opcode = opcode;
        }
    }
    if header & 0x40 != 0 {
        let more = u.arbitrary::<u8>()?;
        spec.tos = more & 3;
        spec.vlan = (more & 4 != 0).then_some(42);
        spec.udp_checksum = if more & 8 != 0 { 0xabcd } else { 0 };
        spec.bth.ack_request = more & 16 != 0;
        spec.bth.solicited = more & 32 != 0;
        spec.bth.flags = more;
    }
    if let Some((token, job)) = setting.in_band() {
        begin_in_band(u, &mut spec, token, &job, rank, index)?;
    }
    Ok(spec)
}

/// Begins a message as in a job that is set up in band. Sometimes its connection is not registered,
/// or its header is invalid.
fn begin_in_band(
    u: &mut Unstructured,
    spec: &mut FrameSpec,
    token: InBandToken,
    job: &InBandJob,
    rank: u32,
    index: u32,
) -> Result<()> {
    let kind = u.arbitrary::<u8>()?;
    let right = kind & 0x07 != 0;
    if kind & 0x30 == 0 {
        spec.bth.qpn ^= 0x80;
    }
    if kind & 0xc0 == 0 {
        // May be another connection of the same queue pair.
        spec.bth.psn = u.arbitrary::<u32>()? & serial::MASK;
    }
    let header = JobHeader {
        dtype: 1,
        token,
        ring: if right { 0 } else { u.int_in_range(0..=2)? },
        rank: if right { rank } else { u.int_in_range(0..=job.ranks + 1)? },
        ranks: job.ranks,
        message: if kind & 0x40 == 0 { 0 } else { u.int_in_range(0..=2)? },
        fragments: u.int_in_range(1..=3)?,
        index,
    };
    let mut bytes = header.encode();
    if !right {
        // Corrupts lanes 0 and 1, the token, or the index.
        let at = *u.choose(&[0usize, 4, 4, 8, 23, 44])?;
        bytes[at] ^= 1 << u.int_in_range(0..=7u8)?;
    }
    if let Some(beginning) = spec.payload.first_chunk_mut() {
        *beginning = bytes;
    }
    Ok(())
}

/// Corrupts a frame in a few places.
fn corrupt(u: &mut Unstructured, spec: &FrameSpec, frame: &mut Vec<u8>) -> Result<()> {
    let headers = spec.payload_offset();
    for _ in 0..u.int_in_range(1..=3u8)? {
        match u.int_in_range(0..=13u8)? {
            // Changes any byte of the headers or of the frame: one bit, or all.
            0..=2 => {
                let at = u.int_in_range(0..=headers.min(frame.len()) - 1)?;
                frame[at] ^= 1 << u.int_in_range(0..=7u8)?;
            }
            3 => {
                let at = u.int_in_range(0..=headers.min(frame.len()) - 1)?;
                frame[at] = u.arbitrary()?;
            }
            4 => {
                let at = u.int_in_range(0..=frame.len() - 1)?;
                frame[at] ^= 1 << u.int_in_range(0..=7u8)?;
            }
            5 => frame.truncate(u.int_in_range(wire::EthHdr::LEN..=frame.len())?),
            6 => frame.extend(std::iter::repeat_n(0xee, u.int_in_range(1..=64)?)),
            // Adds options to an IPv4 header, four bytes at a time.
            7 if spec.src.len() == 4 && frame.len() > spec.ip_offset() + 20 => {
                let (ip, words) = (spec.ip_offset(), u.int_in_range(1..=10u8)?);
                frame[ip] = 0x45 + words;
                let at = ip + 20;
                frame.splice(at..at, vec![1; words as usize * 4]);
            }
            // Changes the length fields of UDP and IP, both equally or one.
            8 => {
                let by = u.int_in_range(-12..=12i16)?;
                let ip = spec.ip_offset();
                let (ip_len, udp_len) =
                    if spec.src.len() == 4 { (ip + 2, ip + 24) } else { (ip + 4, ip + 44) };
                let which = u.int_in_range(1..=3u8)?;
                for (bit, at) in [(1, ip_len), (2, udp_len)] {
                    if which & bit != 0 && frame.len() >= at + 2 {
                        let len =
                            u16::from_be_bytes([frame[at], frame[at + 1]]).wrapping_add_signed(by);
                        frame[at..at + 2].copy_from_slice(&len.to_be_bytes());
                    }
                }
            }
            // Adds one tag, or three.
            9..=10 => {
                let tags = if u.ratio(3u8, 4u8)? { 1 } else { 3 };
                for _ in 0..tags {
                    let kind = *u.choose(&[0x8100u16, 0x88a8, 0x9100, 0x8100])?;
                    frame.splice(
                        12..12,
                        [kind.to_be_bytes(), [0, u.int_in_range(0..=1u8)?]].concat(),
                    );
                }
            }
            // Adds extension headers or a fragment header.
            11 if spec.src.len() == 16 && frame.len() > spec.ip_offset() + 48 => {
                let (ip, next) = (spec.ip_offset(), frame[spec.ip_offset() + 6]);
                let extensions: Vec<u8> = (0..u.int_in_range(1..=7u8)?)
                    .map(|_| Ok(*u.choose(&[0u8, 43, 60, 60, 44])?))
                    .collect::<Result<_>>()?;
                let mut behind = if u.ratio(1u8, 4u8)? { wire::IPPROTO_ICMPV6 } else { next };
                if behind == wire::IPPROTO_ICMPV6 {
                    frame[ip + 40] = wire::NEIGHBOUR_ADVERTISEMENT;
                }
                for &number in extensions.iter().rev() {
                    let fragment = if number == 44 { u.int_in_range(0..=9u8)? } else { 0 };
                    frame.splice(ip + 40..ip + 40, [behind, 0, 0, fragment, 0, 0, 0, 0]);
                    behind = number;
                }
                frame[ip + 6] = behind;
                // The packet's real length, or that of its first fragment.
                let len = frame.len() - ip - 40;
                let len =
                    if u.arbitrary()? { len } else { u.int_in_range(0..=len.min(80))? } as u16;
                frame[ip + 4..ip + 6].copy_from_slice(&len.to_be_bytes());
            }
            12 if spec.src.len() == 4 && frame.len() > spec.ip_offset() + 20 => {
                let ip = spec.ip_offset();
                frame[ip + 6] = 0x20;
                frame[ip + 7] = u8::from(u.ratio(1u8, 4u8)?);
                if u.arbitrary()? {
                    let len = 20 + 8 * u.int_in_range(0..=4u16)?;
                    frame[ip + 2..ip + 4].copy_from_slice(&len.to_be_bytes());
                }
            }
            _ => {
                // Changes the opcode; or version and pad count, or the partition key.
                let field = if u.ratio(3u8, 4u8)? { 0 } else { u.int_in_range(1..=3usize)? };
                let at = headers - wire::BTH_LEN - spec.bth.opcode.extended_len() + field;
                if frame.len() > at {
                    frame[at] = u.arbitrary()?;
                }
            }
        }
    }
    if u.arbitrary()? {
        resign(frame);
    }
    Ok(())
}

/// Corrects checksum and ICRC, if the frame can still be parsed.
fn resign(frame: &mut [u8]) {
    let Ok(parsed) = wire::parse(&*frame) else { return };
    if parsed.l3 == wire::L3::V4 {
        let header = parsed.ip..parsed.ip + wire::Ipv4Hdr::LEN;
        frame[header.start + 10..header.start + 12].fill(0);
        let checksum = ipv4_checksum(&frame[header.clone()]);
        frame[header.start + 10..header.start + 12].copy_from_slice(&checksum.to_be_bytes());
    }
    let end = parsed.bth_offset() + parsed.udp_payload;
    let bth_end = parsed.bth_offset() + wire::BTH_LEN;
    if parsed.udp_payload < wire::BTH_LEN + wire::ICRC_LEN || end > frame.len() {
        return;
    }
    let len = end - wire::ICRC_LEN - bth_end;
    if let Some(icrc) = netsum_common::icrc::of_frame(frame, parsed.l3, parsed.ip, bth_end, len) {
        frame[end - wire::ICRC_LEN..end].copy_from_slice(&icrc.to_le_bytes());
    }
}
