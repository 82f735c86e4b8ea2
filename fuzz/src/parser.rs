//! Frames: `common::wire` and `common::icrc` compared with a naive implementation of their rules.

use arbitrary::{Result, Unstructured};
use netsum_common::icrc;
use netsum_common::wire::in_band::JOB_HEADER_LEN;
use netsum_common::wire::{
    self, Aeth, BTH_LEN, Bth, Bytes, Frame, JobHeader, L3, Opcode, Reject, Reth, parse, parse_into,
};
use netsum_lab::frames::FrameSpec;

/// Checks an arbitrary frame, and one that is built from the same bytes.
pub fn run(input: &[u8]) {
    any(input);
    headers(input);
    let _ = built(&mut Unstructured::new(input));
}

fn any(b: &[u8]) {
    let mut frame = Frame::EMPTY;
    let into = parse_into(b, &mut frame);
    match (parse(b), into) {
        (Ok(a), Ok(())) => assert_eq!(a, frame),
        (Err((a, f)), Err(reject)) => {
            assert_eq!(a, reject);
            let has_frame = matches!(
                reject,
                Reject::IpOptions | Reject::IpFragment | Reject::VlanTags | Reject::Ipv6Extensions
            );
            assert_eq!(f, has_frame.then_some(frame));
        }
        (a, b) => panic!("parse {a:?}, parse_into {b:?}"),
    }
    let naive = naively(b);
    assert_eq!(into.err(), naive.as_ref().err().copied());
    let Ok(naive) = naive else { return };
    assert_eq!((frame.ip, frame.udp_payload), (naive.ip, naive.udp_payload));
    assert_eq!(frame.bth_offset(), naive.bth);
    assert_eq!(
        frame.bth.psn,
        u32::from_be_bytes([0, b[naive.bth + 9], b[naive.bth + 10], b[naive.bth + 11]])
    );
    let addresses =
        |ip: [u8; 16]| if ip[..12] == ipv4_prefix() { ip[12..].to_vec() } else { ip.to_vec() };
    assert_eq!(addresses(frame.src_ip), addresses(naive.src));
    assert_eq!(addresses(frame.dst_ip), addresses(naive.dst));
    assert!(frame.bth_offset() + BTH_LEN <= b.len());
    if !frame.bth.opcode.is_rc_data() {
        return;
    }
    let Ok(len) = frame.data_len(b.len()) else { return };
    let end = frame.payload() + len;
    assert!(len > 0 && len.is_multiple_of(4) && end + 4 <= b.len());
    assert_eq!(end + 4, frame.bth_offset() + frame.udp_payload);
    let bth_end = frame.bth_offset() + BTH_LEN;
    let right =
        icrc::of_frame(b, frame.l3, frame.ip, bth_end, end - bth_end).expect("the frame is whole");
    assert_eq!(right, naive_icrc(&b[frame.ip..end], frame.l3));
    let state =
        icrc::headers(b, frame.l3, frame.ip, frame.bth.opcode.extended_len()).expect("headers");
    if len <= icrc::MAX_SHIFT {
        assert_eq!(right, !(icrc::shift(state, len) ^ icrc::update(0, &b[frame.payload()..end])));
    }
}

fn ipv4_prefix() -> [u8; 12] {
    [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff]
}

struct Naive {
    ip: usize,
    bth: usize,
    src: [u8; 16],
    dst: [u8; 16],
    udp_payload: usize,
}

/// The parser's rules, one after the other.
fn naively(b: &[u8]) -> Result<Naive, Reject> {
    let word = |at: usize| {
        b.get(at..at + 2).map(|w| u16::from_be_bytes([w[0], w[1]])).ok_or(Reject::NotRoce)
    };
    let (mut ethertype, mut ip, mut tags) = (word(12)?, 14, Vec::new());
    while [0x8100, 0x88a8, 0x9100].contains(&ethertype) {
        if tags.len() == 2 {
            return Err(Reject::Hidden);
        }
        tags.push(ethertype);
        ip += 4;
        ethertype = word(ip - 2)?;
    }
    let odd = (!matches!(tags[..], [] | [0x8100])).then_some(Reject::VlanTags);
    let mapped = |ip: &[u8]| -> [u8; 16] {
        [&ipv4_prefix()[..16 - ip.len().max(4)], ip].concat().try_into().expect("an address")
    };
    let (udp, ip_payload, src, dst, reject) = match ethertype {
        0x0800 => {
            let h = b.get(ip..ip + 20).ok_or(Reject::NotRoce)?;
            let fragment = word(ip + 6)?;
            let len = (h[0] & 15) as usize * 4;
            if h[0] >> 4 != 4 || len < 20 || h[9] != 17 || fragment & 0x1fff != 0 {
                return Err(Reject::NotRoce);
            }
            let shown = word(ip + 2)? as i64 - len as i64;
            if fragment & 0x2000 != 0 && (0..20).contains(&shown) {
                return Err(Reject::Hidden);
            }
            let reject = if len > 20 {
                Some(Reject::IpOptions)
            } else if fragment & 0x2000 != 0 {
                Some(Reject::IpFragment)
            } else {
                odd
            };
            (
                ip + len,
                word(ip + 2)? as i64 - len as i64,
                mapped(&h[12..16]),
                mapped(&h[16..20]),
                reject,
            )
        }
        0x86dd => {
            let h = b.get(ip..ip + 40).ok_or(Reject::NotRoce)?;
            if h[0] >> 4 != 6 {
                return Err(Reject::NotRoce);
            }
            let (udp, reject) = match h[6] {
                17 => (ip + 40, odd),
                _ => (behind_extensions(b, ip)?, Some(Reject::Ipv6Extensions)),
            };
            (udp, word(ip + 4)? as i64, mapped(&h[8..24]), mapped(&h[24..40]), reject)
        }
        _ => return Err(Reject::NotRoce),
    };
    b.get(udp..udp + 8).ok_or(Reject::NotRoce)?;
    if word(udp + 2)? != 4791 {
        return Err(Reject::NotRoce);
    }
    b.get(udp + 8..udp + 20).ok_or(Reject::TruncatedHeaders)?;
    if let Some(reject) = reject {
        return Err(reject);
    }
    let udp_len = word(udp + 4)? as i64;
    let udp_payload = if udp_len >= 20 && udp_len == ip_payload { udp_len as usize - 8 } else { 0 };
    Ok(Naive { ip, bth: udp + 8, src, dst, udp_payload })
}

/// The offset of UDP behind extension headers.
fn behind_extensions(b: &[u8], ip: usize) -> Result<usize, Reject> {
    let end = ip + 40 + u16::from_be_bytes([b[ip + 4], b[ip + 5]]) as usize;
    let (mut next, mut at, mut fragmented, mut count) = (b[ip + 6], ip + 40, false, 0);
    while let 0 | 43 | 44 | 60 = next {
        if count == 6 {
            return Err(Reject::Hidden);
        }
        count += 1;
        if at + 8 > end {
            return Err(if fragmented { Reject::Hidden } else { Reject::NotRoce });
        }
        let h = b.get(at..at + 8).ok_or(Reject::NotRoce)?;
        let len = if next == 44 { 8 } else { (h[1] as usize + 1) * 8 };
        if next == 44 {
            if h[2] != 0 || h[3] > 7 {
                return Err(Reject::NotRoce);
            }
            fragmented |= h[3] % 2 == 1;
        }
        (next, at) = (h[0], at + len);
    }
    let fits = |len: usize| at + len <= end || !fragmented;
    match next {
        58 if !fits(8) => Err(Reject::Hidden),
        17 if !fits(8) => Err(Reject::Hidden),
        17 => match b.get(at..at + 8).map(|udp| udp[2..4] == [0x12, 0xb7]) {
            Some(true) if !fits(20) => Err(Reject::Hidden),
            Some(true) => Ok(at),
            _ => Err(Reject::NotRoce),
        },
        _ => Err(Reject::NotRoce),
    }
}

/// IBTA annex A17.3.3, byte by byte, from the IP header to the end of the payload.
fn naive_icrc(packet: &[u8], l3: L3) -> u32 {
    let mut b = [&[0xff; 8][..], packet].concat();
    let ones: &[usize] = match l3 {
        L3::V4 => &[1, 8, 10, 11, 26, 27, 32],
        L3::V6 => &[1, 2, 3, 7, 46, 47, 52],
    };
    ones.iter().for_each(|i| b[8 + i] = 0xff);
    if l3 == L3::V6 {
        b[8] |= 0x0f;
    }
    crc32fast::hash(&b)
}

/// Headers survive a round trip, except for reserved bits.
fn headers(b: &[u8]) {
    if let Some(mut bth) = b.load::<12>(0) {
        let decoded = Bth::decode(&bth);
        bth[8] &= 0x80;
        assert_eq!(decoded.encode(), bth);
        let op = decoded.opcode;
        assert!(!op.is_rc_data() || op.is_known());
        assert!(op.is_rc_data() || !op.has_reth() && !op.has_immediate() && op.extended_len() == 0);
    }
    if let Some(reth) = b.load::<16>(0) {
        assert_eq!(Reth::decode(&reth).encode(), reth);
    }
    if let Some(aeth) = b.load::<4>(0) {
        assert_eq!(Aeth::decode(&aeth).encode(), aeth);
    }
    if let Some(mut header) = b.load::<JOB_HEADER_LEN>(0) {
        header[..5].copy_from_slice(&JobHeader::EMPTY.encode()[..5]);
        let decoded = JobHeader::decode(&header).expect("magic and version are right");
        assert_eq!(decoded.encode(), header);
    }
}

/// A frame that was built is parsed to the values that it was built from.
fn built(u: &mut Unstructured) -> Result<()> {
    let mut spec =
        FrameSpec::send(u.arbitrary()?, u.arbitrary()?, u.arbitrary()?, u.arbitrary()?, Vec::new());
    spec.bth.qpn &= 0xff_ffff;
    spec.bth.psn &= 0xff_ffff;
    spec.bth.opcode = Opcode(u.int_in_range(0..=0x0b)?);
    spec.vlan = u.arbitrary()?;
    (spec.tos, spec.id, spec.udp_checksum) = (u.arbitrary()?, u.arbitrary()?, u.arbitrary()?);
    (spec.bth.solicited, spec.bth.ack_request, spec.bth.flags) =
        (u.arbitrary()?, u.arbitrary()?, u.arbitrary()?);
    if u.arbitrary()? {
        spec = spec.v6();
    }
    let lanes = u.int_in_range(1..=64usize)?;
    spec.payload = u.bytes((lanes * 4).min(u.len() & !3))?.to_vec();
    let bytes = spec.build();
    let frame = parse(bytes.as_slice()).expect("a frame of ours");
    assert_eq!((frame.bth, frame.ip), (spec.bth, spec.ip_offset()));
    assert_eq!(frame.payload(), spec.payload_offset());
    assert_eq!(frame.ce, spec.tos & 3 == 3);
    match frame.data_len(bytes.len()) {
        Ok(len) => {
            assert_eq!(&bytes[frame.payload()..][..len], spec.payload);
            let icrc = u32::from_le_bytes(bytes[bytes.len() - 4..].try_into().expect("four bytes"));
            assert_eq!(icrc, naive_icrc(&bytes[frame.ip..bytes.len() - 4], frame.l3));
        }
        Err(reject) => assert!(reject == wire::Reject::PayloadLength && spec.payload.is_empty()),
    }
    any(&bytes);
    Ok(())
}
