//! Datagrams of the RC transport, as a UDP socket sends and receives them: from the BTH to the
//! ICRC.
//!
//! The ICRC also covers the IP and UDP headers, of which a socket shows only addresses and ports.
//! Other fields are known, except the IPv4 identification: Linux sends 0 on an unconnected socket
//! with "don't fragment", and 0, 1, 2, ... within one segmented send. The identification of a
//! received packet shows as a syndrome, because a CRC is linear; see [`Verifier`].

use std::net::{IpAddr, SocketAddr};

use netsum_common::icrc;
use netsum_common::wire::{
    AETH_LEN, Aeth, BTH_LEN, Bth, Header, ICRC_LEN, IMM_LEN, IPPROTO_UDP, Ipv4Hdr, Ipv6Hdr, Opcode,
    RETH_LEN, ROCE_PORT, Reth, UdpHdr,
};

use super::Qpn;

/// Length of a BTH and an ICRC around a payload.
pub const OVERHEAD: usize = BTH_LEN + ICRC_LEN;

/// ICRC state after the IP and UDP headers and the BTH of a datagram.
fn headers_state(
    src: SocketAddr,
    dst: IpAddr,
    id: u16,
    datagram_len: usize,
    bth: &[u8; BTH_LEN],
) -> u32 {
    let udp_len = (UdpHdr::LEN + datagram_len) as u16;
    let state = match (src.ip(), dst) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => {
            let ip = Ipv4Hdr {
                vihl: 0x45,
                tos: 0xff,
                tot_len: (Ipv4Hdr::LEN as u16 + udp_len).to_be_bytes(),
                id: id.to_be_bytes(),
                frags: [0x40, 0], // don't fragment
                ttl: 0xff,
                proto: IPPROTO_UDP,
                check: [0xff; 2],
                src_addr: src.octets(),
                dst_addr: dst.octets(),
            };
            icrc::update_array(icrc::SEED, &ip.bytes())
        }
        (src, dst) => {
            let octets = |ip: IpAddr| match ip {
                IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
                IpAddr::V6(ip) => ip.octets(),
            };
            let ip = Ipv6Hdr {
                vcf: [0x6f, 0xff, 0xff, 0xff], // traffic class and flow label are ones
                payload_len: udp_len.to_be_bytes(),
                next_hdr: IPPROTO_UDP,
                hop_limit: 0xff,
                src_addr: octets(src),
                dst_addr: octets(dst),
            };
            icrc::update_array(icrc::SEED, &ip.bytes())
        }
    };
    let udp = UdpHdr {
        src: src.port().to_be_bytes(),
        dst: ROCE_PORT.to_be_bytes(),
        len: udp_len.to_be_bytes(),
        check: [0xff; 2],
    };
    let mut bth = *bth;
    bth[4] = 0xff;
    icrc::update_array(icrc::update_array(state, &udp.bytes()), &bth)
}

/// The ICRC of a datagram without its last four bytes.
fn datagram_icrc(src: SocketAddr, dst: IpAddr, id: u16, body: &[u8]) -> Option<u32> {
    let (bth, rest) = body.split_first_chunk::<BTH_LEN>()?;
    let state = headers_state(src, dst, id, body.len() + ICRC_LEN, bth);
    let mut crc = crc32fast::Hasher::new_with_initial(!state);
    crc.update(rest);
    Some(crc.finalize())
}

/// Headers between BTH and payload.
#[derive(Clone, Copy, Debug, Default)]
pub struct Extended {
    /// RETH of a first WRITE packet.
    pub reth: Option<Reth>,
    /// Immediate data of a last packet.
    pub immediate: Option<u32>,
    /// AETH of an acknowledgement.
    pub aeth: Option<Aeth>,
}

/// Appends a datagram to a buffer, padded as its BTH requires. `id` is the IPv4 identification that
/// it will be sent with.
pub fn encode(
    buf: &mut Vec<u8>,
    src: SocketAddr,
    dst: IpAddr,
    id: u16,
    bth: &Bth,
    ext: &Extended,
    payload: &[u8],
) {
    let start = buf.len();
    buf.extend_from_slice(&bth.encode());
    if let Some(reth) = ext.reth {
        buf.extend_from_slice(&reth.encode());
    }
    if let Some(aeth) = ext.aeth {
        buf.extend_from_slice(&aeth.encode());
    }
    if let Some(immediate) = ext.immediate {
        buf.extend_from_slice(&immediate.to_be_bytes());
    }
    buf.extend_from_slice(payload);
    buf.resize(buf.len() + bth.pad as usize, 0);
    let icrc = datagram_icrc(src, dst, id, &buf[start..]).expect("a datagram has a BTH");
    buf.extend_from_slice(&icrc.to_le_bytes());
}

/// Appends a congestion notification packet for a queue pair (IBTA A17.9.3).
pub fn encode_cnp(buf: &mut Vec<u8>, src: SocketAddr, dst: IpAddr, qpn: Qpn) {
    const BECN: u8 = 0x40;
    let bth = Bth { flags: BECN, ..Bth::new(Opcode::CNP, qpn.get(), 0) };
    encode(buf, src, dst, 0, &bth, &Extended::default(), &[0; 16]);
}

/// A received datagram.
#[derive(Debug)]
pub struct Packet<'a> {
    /// Base transport header.
    pub bth: Bth,
    /// Immediate data, if the opcode has it.
    pub immediate: Option<u32>,
    /// AETH, if the opcode has it.
    pub aeth: Option<Aeth>,
    /// Payload without padding.
    pub payload: &'a [u8],
}

/// Why a datagram is not valid.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Malformed {
    /// Too short for its headers, or a wrong version, partition or pad count.
    Header,
    /// The ICRC is wrong.
    Icrc,
}

/// Reads datagrams.
#[derive(Debug)]
pub struct Verifier {
    local: IpAddr,
    any_id: bool,
    syndromes: Vec<Syndromes>,
}

/// The effect of each bit of the identification on the ICRC, in echelon form, for datagrams of one
/// length.
#[derive(Debug)]
struct Syndromes {
    len: usize,
    /// Vectors with distinct leading bits, and the bits of the identification that make them.
    rows: [(u32, u16); 16],
}

/// How many lengths have their syndromes kept.
const KEPT_SYNDROMES: usize = 8;
/// Largest identification within one segmented send that is accepted without
/// [`any_ip_id`](super::EndpointConfig). As eight of its bits are known to be zero, 25 bits of
/// check remain.
const SEGMENT_IDS: u16 = 127;

impl Verifier {
    /// For datagrams to `local`; with `any_id`, from senders whose identification counts up.
    pub fn new(local: IpAddr, any_id: bool) -> Self {
        Self { local, any_id, syndromes: Vec::new() }
    }

    /// Reads and verifies a datagram with an unknown identification.
    pub fn decode<'a>(
        &mut self,
        from: SocketAddr,
        datagram: &'a [u8],
    ) -> Result<Packet<'a>, Malformed> {
        self.decode_identified(from, None, datagram)
    }

    /// Reads and verifies a datagram. If the IPv4 identification is known, all 32 bits of the ICRC
    /// are checked.
    pub fn decode_identified<'a>(
        &mut self,
        from: SocketAddr,
        id: Option<u16>,
        datagram: &'a [u8],
    ) -> Result<Packet<'a>, Malformed> {
        let (body, icrc) = datagram.split_last_chunk::<ICRC_LEN>().ok_or(Malformed::Header)?;
        let (head, mut rest) = body.split_first_chunk::<BTH_LEN>().ok_or(Malformed::Header)?;
        let bth = Bth::decode(head);
        if bth.version != 0 || bth.pkey != netsum_common::wire::DEFAULT_PKEY {
            return Err(Malformed::Header);
        }
        let correct =
            datagram_icrc(from, self.local, id.unwrap_or(0), body).ok_or(Malformed::Header)?;
        let syndrome = correct ^ u32::from_le_bytes(*icrc);
        let any_id = id.is_none() && from.is_ipv4();
        if syndrome != 0 && !(any_id && self.explains(datagram.len(), syndrome)) {
            return Err(Malformed::Icrc);
        }
        let mut take = |n: usize| -> Result<&'a [u8], Malformed> {
            let (a, b) = rest.split_at_checked(n).ok_or(Malformed::Header)?;
            rest = b;
            Ok(a)
        };
        if bth.opcode.has_reth() {
            take(RETH_LEN)?;
        }
        let word = |b: &[u8]| -> [u8; 4] { b.try_into().expect("four bytes") };
        let aeth = if bth.opcode == Opcode::ACK {
            Some(Aeth::decode(&word(take(AETH_LEN)?)))
        } else {
            None
        };
        let immediate = if bth.opcode.has_immediate() {
            Some(u32::from_be_bytes(word(take(IMM_LEN)?)))
        } else {
            None
        };
        let len = rest.len().checked_sub(bth.pad as usize).ok_or(Malformed::Header)?;
        Ok(Packet { bth, immediate, aeth, payload: &rest[..len] })
    }

    /// Whether another identification explains a wrong ICRC.
    fn explains(&mut self, len: usize, syndrome: u32) -> bool {
        let i = match self.syndromes.iter().position(|s| s.len == len) {
            Some(i) => i,
            None => {
                if self.syndromes.len() == KEPT_SYNDROMES {
                    self.syndromes.remove(0);
                }
                self.syndromes.push(Syndromes::new(len));
                self.syndromes.len() - 1
            }
        };
        match self.syndromes[i].solve(syndrome) {
            Some(id) => self.any_id || id <= SEGMENT_IDS,
            None => false,
        }
    }
}

impl Syndromes {
    fn new(len: usize) -> Self {
        // After the word with the identification: the rest of the IP header, UDP, and the datagram
        // up to the ICRC.
        let after = 12 + UdpHdr::LEN + len - ICRC_LEN;
        let mut rows = [(0u32, 0u16); 16];
        for bit in 0..16 {
            let id = 1u16 << bit;
            let word = u32::from_le_bytes([id.to_be_bytes()[0], id.to_be_bytes()[1], 0, 0]);
            let state = icrc::step4(0, word);
            let mut row = (shift_any(state, after), id);
            for r in &rows[..bit] {
                if row.0 ^ r.0 < row.0 {
                    row = (row.0 ^ r.0, row.1 ^ r.1);
                }
            }
            rows[bit] = row;
            // Highest leading bit first, for reduction in one pass.
            rows[..=bit].sort_unstable_by_key(|row| std::cmp::Reverse(row.0));
        }
        Self { len, rows }
    }

    fn solve(&self, mut syndrome: u32) -> Option<u16> {
        let mut id = 0;
        for &(vector, bits) in &self.rows {
            if syndrome ^ vector < syndrome {
                syndrome ^= vector;
                id ^= bits;
            }
        }
        (syndrome == 0).then_some(id)
    }
}

/// [`icrc::shift`] for any length.
fn shift_any(mut state: u32, mut len: usize) -> u32 {
    while len > icrc::MAX_SHIFT {
        state = icrc::shift(state, 2048);
        len -= 2048;
    }
    state = icrc::shift(state, len & !3);
    for _ in 0..len % 4 {
        state = icrc::step1(state, 0);
    }
    state
}

#[cfg(test)]
mod tests {
    use super::*;
    use netsum_common::wire::{self, Nak, Syndrome};

    const GOLDEN: &str = include_str!("../../../common/tests/roce_frames.txt");

    /// Frames of a kernel's rdma_rxe: source, destination, and UDP payload.
    fn golden() -> Vec<(SocketAddr, IpAddr, Vec<u8>)> {
        let mut frames = Vec::new();
        for word in GOLDEN.split_whitespace().filter(|w| w.len() > 100) {
            let bytes: Vec<u8> = (0..word.len() / 2)
                .map(|i| u8::from_str_radix(&word[2 * i..2 * i + 2], 16).unwrap())
                .collect();
            let f = wire::parse(bytes.as_slice()).unwrap();
            let ip = |b: [u8; 16]| std::net::Ipv6Addr::from(b).to_canonical();
            let port = u16::from_be_bytes([bytes[f.udp()], bytes[f.udp() + 1]]);
            let src = SocketAddr::new(ip(f.src_ip), port);
            frames.push((src, ip(f.dst_ip), bytes[f.bth_offset()..].to_vec()));
        }
        frames
    }

    #[test]
    fn frames_of_a_kernel_are_accepted_without_their_identification() {
        let frames = golden();
        assert!(frames.len() >= 13);
        for (src, dst, datagram) in frames {
            let any = Verifier::new(dst, true).decode(src, &datagram);
            assert!(any.is_ok(), "any identification");
            if src.is_ipv4() {
                let strict = Verifier::new(dst, false).decode(src, &datagram);
                assert_eq!(strict.unwrap_err(), Malformed::Icrc);
            }
            let other_port = SocketAddr::new(src.ip(), src.port() ^ 1);
            let other_port = Verifier::new(dst, false).decode(other_port, &datagram);
            assert_eq!(other_port.unwrap_err(), Malformed::Icrc, "the source port is covered");
        }
    }

    #[test]
    fn segments_of_one_send_are_accepted_and_flipped_bits_are_not() {
        let (src, dst) = ("10.0.0.1".parse().unwrap(), "10.0.0.2".parse().unwrap());
        let from = SocketAddr::new(src, ROCE_PORT);
        let payload: Vec<u8> = (0..1024u32).map(|i| i as u8).collect();
        let bth = Bth::new(Opcode::SEND_MIDDLE, 77, 0xff_ffff);
        let mut v = Verifier::new(dst, false);
        for id in [0, 1, 2, 63, 127] {
            let mut buf = Vec::new();
            encode(&mut buf, from, dst, id, &bth, &Extended::default(), &payload);
            assert_eq!(v.decode(from, &buf).unwrap().payload, payload);
            for bit in (0..buf.len() * 8).step_by(37).filter(|b| b / 8 != 4) {
                buf[bit / 8] ^= 1 << (bit % 8);
                assert!(v.decode(from, &buf).is_err(), "bit {bit}");
                buf[bit / 8] ^= 1 << (bit % 8);
            }
        }
    }

    #[test]
    fn a_known_identification_must_be_right() {
        let (src, dst): (IpAddr, IpAddr) =
            ("10.0.0.1".parse().unwrap(), "10.0.0.2".parse().unwrap());
        let from = SocketAddr::new(src, ROCE_PORT);
        let mut buf = Vec::new();
        let bth = Bth::new(Opcode::SEND_MIDDLE, 77, 5);
        encode(&mut buf, from, dst, 7, &bth, &Extended::default(), &[3; 64]);
        let mut v = Verifier::new(dst, true);
        assert_eq!(v.decode_identified(from, Some(7), &buf).unwrap().payload, [3; 64]);
        assert_eq!(v.decode_identified(from, Some(6), &buf).unwrap_err(), Malformed::Icrc);
        assert!(
            v.decode_identified(from, None, &buf).is_ok(),
            "any identification, if it is not known"
        );
    }

    #[test]
    fn acknowledgements_survive_a_round_trip() {
        let (src, dst) = ("fd00::1".parse().unwrap(), "fd00::2".parse().unwrap());
        let aeth = Aeth { syndrome: Syndrome::Nak(Nak::SequenceError), msn: 5 };
        let mut buf = Vec::new();
        let ext = Extended { aeth: Some(aeth), ..Extended::default() };
        let from = SocketAddr::new(src, ROCE_PORT);
        encode(&mut buf, from, dst, 0, &Bth::new(Opcode::ACK, 1, 2), &ext, &[]);
        assert_eq!(Verifier::new(dst, false).decode(from, &buf).unwrap().aeth, Some(aeth));
    }
    #[test]
    fn payloads_of_any_length_are_padded_to_whole_words() {
        let (src, dst) = ("10.0.0.1".parse().unwrap(), "10.0.0.2".parse().unwrap());
        let from = SocketAddr::new(src, ROCE_PORT);
        for len in 0..9 {
            let payload = vec![0xab; len];
            let bth =
                Bth { pad: (len.wrapping_neg() & 3) as u8, ..Bth::new(Opcode::SEND_ONLY, 7, 9) };
            let mut buf = Vec::new();
            encode(&mut buf, from, dst, 0, &bth, &Extended::default(), &payload);
            assert_eq!(buf.len() % 4, 0);
            let mut v = Verifier::new(dst, false);
            assert_eq!(v.decode(from, &buf).unwrap().payload, payload);
        }
    }

    #[test]
    fn a_congestion_notification_has_the_standards_bytes() {
        let (src, dst) = ("10.0.0.1".parse().unwrap(), "10.0.0.2".parse().unwrap());
        let from = SocketAddr::new(src, ROCE_PORT);
        let mut buf = Vec::new();
        encode_cnp(&mut buf, from, dst, Qpn::new(0x1_2345));
        assert_eq!(buf[..28], [&[0x81, 0, 0xff, 0xff, 0x40, 1, 0x23, 0x45][..], &[0; 20]].concat());
        assert!(Verifier::new(dst, false).decode(from, &buf).is_ok());
    }
}
