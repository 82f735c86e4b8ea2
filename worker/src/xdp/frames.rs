//! Ethernet frames around RoCEv2 datagrams: writes headers, and finds the datagram in a received
//! frame.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use netsum_common::wire::{
    self, EthHdr, EtherType, Header, IPPROTO_UDP, Ipv4Hdr, Ipv6Hdr, L3, ROCE_PORT, UdpHdr,
};

/// ECN capable transport, code point 0 (RFC 3168, 5).
const ECT_0: u8 = 2;
/// Time to live, and hop limit.
const TTL: u8 = 64;
/// Flags and offset of a packet that must not be fragmented.
const DONT_FRAGMENT: u16 = 0x4000;

/// A MAC address.
pub(crate) type Mac = [u8; 6];

/// The addresses of a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Addresses {
    /// MAC address of the interface.
    pub src_mac: Mac,
    /// MAC address of the next hop.
    pub dst_mac: Mac,
    /// This rank's address.
    pub src: IpAddr,
    /// The UDP port that it sends from.
    pub port: u16,
    /// The other rank's address, of the same family.
    pub dst: IpAddr,
}

/// Length of all headers in front of a datagram.
pub(crate) const fn headers_len(ip: IpAddr) -> usize {
    EthHdr::LEN + if ip.is_ipv4() { Ipv4Hdr::LEN } else { Ipv6Hdr::LEN } + UdpHdr::LEN
}

/// Writes the headers of a datagram of `len` bytes to the start of a frame. `id` is the IPv4
/// identification, which the datagram's ICRC covers. The UDP checksum is 0, as in RoCEv2.
///
/// # Panics
/// If the frame is shorter than [`headers_len`].
pub(crate) fn write_headers(frame: &mut [u8], a: &Addresses, id: u16, len: usize) {
    let udp_len = (UdpHdr::LEN + len) as u16;
    let udp = match (a.src, a.dst) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => {
            let mut ip = Ipv4Hdr {
                vihl: 0x45,
                tos: ECT_0,
                tot_len: (Ipv4Hdr::LEN as u16 + udp_len).to_be_bytes(),
                id: id.to_be_bytes(),
                frags: DONT_FRAGMENT.to_be_bytes(),
                ttl: TTL,
                proto: IPPROTO_UDP,
                check: [0; 2],
                src_addr: src.octets(),
                dst_addr: dst.octets(),
            };
            ip.set_checksum(checksum(&ip.bytes()));
            put(frame, 0, EthHdr::new(a.dst_mac, a.src_mac, EtherType::Ipv4).bytes());
            put(frame, EthHdr::LEN, ip.bytes())
        }
        (src, dst) => {
            let octets = |ip: IpAddr| match ip {
                IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
                IpAddr::V6(ip) => ip.octets(),
            };
            let ip = Ipv6Hdr {
                // Version, traffic class, flow label.
                vcf: (6 << 28 | u32::from(ECT_0) << 20).to_be_bytes(),
                payload_len: udp_len.to_be_bytes(),
                next_hdr: IPPROTO_UDP,
                hop_limit: TTL,
                src_addr: octets(src),
                dst_addr: octets(dst),
            };
            put(frame, 0, EthHdr::new(a.dst_mac, a.src_mac, EtherType::Ipv6).bytes());
            put(frame, EthHdr::LEN, ip.bytes())
        }
    };
    let (src, dst) = (a.port.to_be_bytes(), ROCE_PORT.to_be_bytes());
    put(frame, udp, UdpHdr { src, dst, len: udp_len.to_be_bytes(), check: [0; 2] }.bytes());
}

/// Where the UDP header begins.
fn put<const N: usize>(frame: &mut [u8], at: usize, header: [u8; N]) -> usize {
    frame[at..at + N].copy_from_slice(&header);
    at + N
}

/// Checksum of an IPv4 header whose checksum field is 0 (RFC 1071).
fn checksum(header: &[u8; Ipv4Hdr::LEN]) -> u16 {
    let words = header.chunks_exact(2).map(|w| u32::from(u16::from_be_bytes([w[0], w[1]])));
    let sum: u32 = words.sum();
    let sum = (sum & 0xffff) + (sum >> 16);
    !((sum & 0xffff) + (sum >> 16)) as u16
}

/// A datagram in a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Received<'a> {
    /// Its sender.
    pub from: SocketAddr,
    /// It has a congestion mark.
    pub ce: bool,
    /// Identification of its IPv4 header.
    pub id: Option<u16>,
    /// The UDP payload.
    pub datagram: &'a [u8],
}

/// Finds the datagram in a frame, if that is an untagged, unfragmented RoCEv2 packet for `local`
/// with consistent lengths. The IP header's own checksum is not verified: the ICRC covers the
/// fields that matter here.
pub(crate) fn datagram(frame: &[u8], local: IpAddr) -> Option<Received<'_>> {
    let found = wire::parse(frame).ok()?;
    let ip = |octets: [u8; 16]| Ipv6Addr::from(octets).to_canonical();
    // A length of 0 stands for inconsistent lengths.
    if found.ip != EthHdr::LEN || found.udp_payload == 0 || ip(found.dst_ip) != local {
        return None;
    }
    let udp = UdpHdr::load(frame, found.udp())?;
    let datagram = frame.get(found.bth_offset()..found.bth_offset() + found.udp_payload)?;
    let id = match found.l3 {
        L3::V4 => Some(Ipv4Hdr::load(frame, found.ip)?.id()),
        L3::V6 => None,
    };
    Some(Received {
        from: SocketAddr::new(ip(found.src_ip), udp.src_port()),
        ce: found.ce,
        id,
        datagram,
    })
}

#[cfg(test)]
mod tests {
    use netsum_common::wire::{Bth, Opcode};

    use super::*;
    use netsum_rc::packet::{Extended, Verifier, encode};

    fn addresses(src: &str, dst: &str) -> Addresses {
        let (src, dst) = (src.parse().unwrap(), dst.parse().unwrap());
        Addresses {
            src_mac: [2, 0, 0, 0, 0, 1],
            dst_mac: [2, 0, 0, 0, 0, 2],
            src,
            port: ROCE_PORT,
            dst,
        }
    }

    const FAMILIES: [(&str, &str); 2] = [("10.0.0.1", "10.0.0.2"), ("fd00::1", "fd00::2")];

    /// A frame of this module, with a datagram of the endpoint.
    fn frame(a: &Addresses, id: u16, payload: usize) -> Vec<u8> {
        let mut datagram = Vec::new();
        let bth = Bth::new(Opcode::SEND_MIDDLE, 77, 5);
        encode(
            &mut datagram,
            (a.src, ROCE_PORT).into(),
            a.dst,
            id,
            &bth,
            &Extended::default(),
            &vec![3; payload],
        );
        let mut frame = vec![0xee; headers_len(a.dst)];
        write_headers(&mut frame, a, id, datagram.len());
        frame.extend(datagram);
        frame
    }

    #[test]
    fn frames_survive_a_round_trip_with_a_right_icrc() {
        for (src, dst) in FAMILIES {
            let a = addresses(src, dst);
            for (id, payload) in [(0, 4), (1, 256), (31, 1024), (0xffff, 2048)] {
                let frame = frame(&a, id, payload);
                let got = datagram(&frame, a.dst).unwrap();
                assert_eq!(got.from, SocketAddr::new(a.src, ROCE_PORT));
                assert_eq!((got.ce, got.id), (false, a.src.is_ipv4().then_some(id)));
                assert_eq!(got.datagram, &frame[headers_len(a.dst)..]);
                let packet = Verifier::new(a.dst, false);
                let packet =
                    { packet }.decode_identified(got.from, got.id, got.datagram).unwrap().bth;
                assert_eq!((packet.qpn, packet.psn), (77, 5));
                // The ICRC covers the whole header: compute it from the frame, as the box does.
                assert_eq!(frame[..6], a.dst_mac);
                assert_eq!(frame[6..12], a.src_mac);
            }
        }
    }

    #[test]
    fn an_ipv4_header_has_the_checksum_that_the_kernel_expects() {
        let frame = frame(&addresses("10.0.0.1", "10.0.0.2"), 0x1234, 100);
        let mut header: [u8; Ipv4Hdr::LEN] =
            frame[EthHdr::LEN..EthHdr::LEN + Ipv4Hdr::LEN].try_into().unwrap();
        // With its checksum filled in, a valid header sums to ones, whose complement is 0.
        assert_eq!(checksum(&header), 0);
        assert_eq!(header[1] & 3, ECT_0);
        assert_eq!(header[6..8], [0x40, 0]);
        header[8] -= 1;
        assert_ne!(checksum(&header), 0);
    }

    #[test]
    fn congestion_is_seen() {
        for (src, dst) in FAMILIES {
            let a = addresses(src, dst);
            let mut frame = frame(&a, 0, 64);
            match a.src {
                IpAddr::V4(_) => frame[EthHdr::LEN + 1] |= 3,
                IpAddr::V6(_) => frame[EthHdr::LEN + 1] |= 3 << 4,
            }
            assert!(datagram(&frame, a.dst).unwrap().ce);
        }
    }

    #[test]
    fn ethernets_padding_is_not_taken_for_data() {
        let a = addresses("10.0.0.1", "10.0.0.2");
        let whole = frame(&a, 0, 0);
        let padded = [&whole[..], &[0; 20]].concat();
        assert_eq!(datagram(&padded, a.dst), datagram(&whole, a.dst));
    }

    #[test]
    fn frames_that_are_not_for_this_rank_are_left_alone() {
        for (src, dst) in FAMILIES {
            let a = addresses(src, dst);
            let whole = frame(&a, 0, 64);
            assert_eq!(datagram(&whole, a.src), None, "another address");
            for len in 0..whole.len() {
                assert_eq!(datagram(&whole[..len], a.dst), None, "{len} bytes of it");
            }
            let tagged = [&whole[..12], &[0x81, 0, 0, 5], &whole[12..]].concat();
            assert_eq!(datagram(&tagged, a.dst), None, "a VLAN's");
            let mut other = whole.clone();
            other[headers_len(a.dst) - 5] ^= 1;
            assert_eq!(datagram(&other, a.dst), None, "another port");
            let mut other = whole.clone();
            other[headers_len(a.dst) - 3] ^= 4;
            assert_eq!(datagram(&other, a.dst), None, "another length");
        }
        let a = addresses("10.0.0.1", "10.0.0.2");
        let mut fragment = frame(&a, 0, 64);
        fragment[EthHdr::LEN + 6] = 0x20;
        assert_eq!(datagram(&fragment, a.dst), None, "a fragment");
    }
}
