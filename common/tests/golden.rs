//! Frames of a kernel's rdma_rxe, with the ICRC that it computed.

use netsum_common::icrc;
use netsum_common::wire::{self, Aeth, L3, Nak, Opcode, Reject, Syndrome};
use proptest::prelude::*;

struct Golden {
    opcode: u8,
    bytes: Vec<u8>,
}

/// The file's frames: a heading with opcode and length, then the bytes in hex; one line names a NAK
/// and has both.
fn golden() -> Vec<Golden> {
    let mut frames = Vec::new();
    let mut opcode = None;
    for line in include_str!("roce_frames.txt").lines() {
        for word in line.split_whitespace() {
            if let Some(op) = word.strip_prefix("op=") {
                opcode = Some(u8::from_str_radix(op, 16).unwrap());
            } else if word.len() > 100 {
                let byte = |i: usize| u8::from_str_radix(&word[2 * i..2 * i + 2], 16).unwrap();
                let bytes = (0..word.len() / 2).map(byte).collect();
                frames.push(Golden { opcode: opcode.take().unwrap_or(0x11), bytes });
            }
        }
    }
    frames
}

/// Whether a frame's last four bytes are its ICRC.
fn icrc_is_right(f: &[u8]) -> bool {
    let Ok(frame) = wire::parse(f) else { return false };
    let end = f.len() - 4;
    icrc::of_frame(f, frame.l3, frame.ip, end, 0)
        == Some(u32::from_le_bytes(f[end..].try_into().unwrap()))
}

#[test]
fn golden_frames_decode_and_their_icrcs_match() {
    let frames = golden();
    assert_eq!(frames.len(), 13);
    for g in &frames {
        let frame = wire::parse(g.bytes.as_slice()).unwrap();
        assert_eq!(frame.bth.opcode, Opcode(g.opcode));
        assert_eq!((frame.bth.version, frame.bth.pkey), (0, 0xffff));
        assert_eq!(frame.bth_offset() + frame.udp_payload, g.bytes.len());
        assert!(icrc_is_right(&g.bytes));
        if frame.bth.opcode == Opcode::ACK {
            let at = frame.bth_offset() + wire::BTH_LEN;
            let aeth = Aeth::decode(g.bytes[at..at + 4].try_into().unwrap());
            assert!(matches!(
                aeth.syndrome,
                Syndrome::Ack(0x1f) | Syndrome::Nak(Nak::SequenceError)
            ));
        }
    }
    let v6 =
        frames.iter().filter(|g| wire::parse(g.bytes.as_slice()).unwrap().l3 == L3::V6).count();
    assert_eq!(v6, 4);
}

#[test]
fn a_nak_names_the_psn_that_is_missing() {
    let nak = golden().pop().unwrap();
    let frame = wire::parse(nak.bytes.as_slice()).unwrap();
    let at = frame.bth_offset() + wire::BTH_LEN;
    assert_eq!(nak.bytes[at], 0x60);
    assert_eq!(frame.bth.psn, 0x38d53e);
}

#[test]
fn a_write_has_a_reth_and_its_payload_behind_it() {
    let write = golden().into_iter().find(|g| g.opcode == 0x0a).unwrap();
    let frame = wire::parse(write.bytes.as_slice()).unwrap();
    let at = frame.bth_offset() + wire::BTH_LEN;
    let reth = wire::Reth::decode(write.bytes[at..at + 16].try_into().unwrap());
    assert_eq!((reth.length, frame.data_len(write.bytes.len())), (16, Ok(16)));
    assert_eq!(frame.payload() + 16 + 4, write.bytes.len());
}

#[test]
fn masked_fields_do_not_matter_and_all_others_do() {
    for g in golden() {
        let frame = wire::parse(g.bytes.as_slice()).unwrap();
        let ip = frame.ip;
        let masked: Vec<(usize, u8)> = match frame.l3 {
            L3::V4 => vec![(ip + 1, 0xff), (ip + 8, 0xff), (ip + 10, 0xff), (ip + 11, 0xff)],
            L3::V6 => {
                vec![(ip, 0x0f), (ip + 1, 0xff), (ip + 2, 0xff), (ip + 3, 0xff), (ip + 7, 0xff)]
            }
        };
        let udp = frame.udp();
        let masked =
            [masked, vec![(udp + 6, 0xff), (udp + 7, 0xff), (frame.bth_offset() + 4, 0xff)]]
                .concat();
        let icrc = |f: &[u8]| icrc::of_frame(f, frame.l3, ip, f.len() - 4, 0).unwrap();
        let right = icrc(&g.bytes);
        for at in ip..g.bytes.len() - 4 {
            for bit in 0..8 {
                let mut f = g.bytes.clone();
                f[at] ^= 1 << bit;
                let is_masked = masked.iter().any(|&(m, bits)| m == at && bits & 1 << bit != 0);
                assert_eq!(icrc(&f) == right, is_masked, "byte {at}, bit {bit}");
            }
        }
    }
}

#[test]
fn a_vlan_tag_changes_no_icrc() {
    for g in golden() {
        let mut tagged = g.bytes.clone();
        tagged.splice(12..12, [0x81, 0x00, 0x20, 0x2a]);
        let frame = wire::parse(tagged.as_slice()).unwrap();
        assert_eq!((frame.ip, frame.bth.opcode), (18, Opcode(g.opcode)));
        assert!(icrc_is_right(&tagged));
        tagged.splice(12..12, [0x81, 0x00, 0x00, 0x01]);
        // More than egress could write: looked through, and no data.
        let (reject, twice) = wire::parse(tagged.as_slice()).unwrap_err();
        assert_eq!(
            (reject, twice.map(|f| (f.ip, f.bth))),
            (Reject::VlanTags, Some((22, frame.bth)))
        );
        tagged.splice(12..12, [0x88, 0xa8, 0x00, 0x01]);
        assert_eq!(wire::parse(tagged.as_slice()).unwrap_err(), (Reject::Hidden, None));
    }
}

#[test]
fn patches_are_recomputations() {
    for g in golden() {
        let frame = wire::parse(g.bytes.as_slice()).unwrap();
        let word = |f: &[u8], at: usize| u32::from_le_bytes(f[at..at + 4].try_into().unwrap());
        let end = g.bytes.len() - 4;
        // The word with the PSN, and that with the IPv4 identification.
        let psn = frame.bth_offset() + 8;
        for at in [psn, frame.ip + 4].into_iter().take(if frame.l3 == L3::V4 { 2 } else { 1 }) {
            let mut f = g.bytes.clone();
            f[at + 1] ^= 0x5a;
            let patched =
                icrc::patch(word(&f, end), word(&g.bytes, at), word(&f, at), end - at - 4);
            f[end..].copy_from_slice(&patched.to_le_bytes());
            assert!(icrc_is_right(&f));
        }
    }
}

#[test]
fn cut_frames_are_never_read_beyond_their_end() {
    for g in golden() {
        for len in 0..g.bytes.len() {
            match wire::parse(&g.bytes[..len]) {
                Ok(frame) => {
                    assert!(frame.bth_offset() + wire::BTH_LEN <= len);
                    if frame.bth.opcode.is_rc_data() {
                        assert_eq!(frame.data_len(len), Err(Reject::Truncated));
                    }
                }
                Err((reject, _)) => {
                    assert!(matches!(reject, Reject::NotRoce | Reject::TruncatedHeaders))
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(4000) })]

    #[test]
    fn any_bytes_are_read_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        if let Ok(frame) = wire::parse(bytes.as_slice())
            && let Ok(len) = frame.data_len(bytes.len())
        {
            prop_assert!(frame.payload() + len + wire::ICRC_LEN <= bytes.len());
        }
    }

    #[test]
    fn changed_golden_frames_are_read_without_panic(
        which in 0usize..13,
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in any::<prop::sample::Index>(),
    ) {
        let mut f = golden().swap_remove(which).bytes;
        for (at, value) in changes {
            let at = at.index(f.len());
            f[at] = value;
        }
        let keep = if cut.index(4) == 0 { cut.index(f.len()) } else { f.len() };
        f.truncate(keep);
        let frame = match wire::parse(f.as_slice()) {
            Ok(frame) | Err((_, Some(frame))) => frame,
            Err(_) => return Ok(()),
        };
        if let Ok(len) = frame.data_len(f.len()) {
            prop_assert!(len > 0 && len % 4 == 0);
            prop_assert!(frame.payload() + len + wire::ICRC_LEN <= f.len());
        }
    }
}
