//! Parses the extension headers of an IPv6 packet (RFC 8200, section 4): hosts process them, so
//! data must not hide behind them.

use super::headers::*;
use super::{BTH_LEN, Bytes, NEIGHBOUR_ADVERTISEMENT, ROCE_PORT, Reject};

/// Most extension headers that are followed.
pub const MAX_EXTENSIONS: usize = 6;

const HOP_BY_HOP: u8 = IpProto::HopOpt as u8;
const ROUTING: u8 = IpProto::Ipv6Route as u8;
const FRAGMENT: u8 = IpProto::Ipv6Frag as u8;
const DESTINATION: u8 = IpProto::Ipv6Opts as u8;

/// Whether a header of this number is one that a host without configuration processes before the
/// next header. Authentication also has a next header, but Linux drops it if no key is configured.
#[inline(always)]
pub const fn is_extension(number: u8) -> bool {
    matches!(number, HOP_BY_HOP | ROUTING | FRAGMENT | DESTINATION)
}

/// The contents behind the extension headers, in one word, as a BPF function returns it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(transparent)]
pub struct UpperLayer(pub u64);

impl UpperLayer {
    /// Neither of the others.
    pub const OTHER: Self = Self(0);
    /// Unreadable: in a later fragment, or behind more headers than are followed.
    pub const HIDDEN: Self = Self(1);
    const UDP: u64 = 2;
    const ADVERTISEMENT: u64 = 3;
    /// RoCEv2 by its port, but the frame ends before the BTH does.
    const CUT: Self = Self(4);

    const fn at(kind: u64, offset: usize) -> Self {
        Self(kind | (offset as u64) << 8)
    }

    #[inline(always)]
    const fn offset_of(self, kind: u64) -> Option<usize> {
        if self.0 & 0xff == kind { Some((self.0 >> 8) as usize) } else { None }
    }

    /// Offset of a UDP header.
    #[inline(always)]
    pub const fn udp(self) -> Option<usize> {
        self.offset_of(Self::UDP)
    }

    /// The reason not to take the packet for RoCEv2.
    #[inline(always)]
    pub const fn reject(self) -> Reject {
        match self.0 & 0xff {
            Self::UDP => Reject::Ipv6Extensions,
            1 => Reject::Hidden,
            4 => Reject::TruncatedHeaders,
            _ => Reject::NotRoce,
        }
    }

    /// Offset of an ICMPv6 neighbour advertisement.
    #[inline(always)]
    pub const fn advertisement(self) -> Option<usize> {
        self.offset_of(Self::ADVERTISEMENT)
    }
}

/// Follows the extension headers of the IPv6 packet at `ip`.
///
/// A later fragment is [`UpperLayer::OTHER`]: it is useless without its first one, which shows all
/// headers or is [`UpperLayer::HIDDEN`]. Bytes behind the payload's end by the IPv6 header are
/// ignored: reassembly would remove them.
#[inline(always)]
pub fn behind<B: Bytes + ?Sized>(b: &B, ip: usize) -> UpperLayer {
    let Some(h) = b.load::<8>(ip) else { return UpperLayer::OTHER };
    let end = ip + Ipv6Hdr::LEN + u16::from_be_bytes([h[4], h[5]]) as usize;
    let (mut next, mut at, mut fragmented) = (h[6], ip + Ipv6Hdr::LEN, false);
    let mut i = 0;
    while i < MAX_EXTENSIONS {
        if !is_extension(next) {
            break;
        }
        // Cut off: by fragmentation, or broken.
        if at + 8 > end {
            return if fragmented { UpperLayer::HIDDEN } else { UpperLayer::OTHER };
        }
        let Some(e) = b.load_far::<8>(at) else { return UpperLayer::OTHER };
        if next == FRAGMENT {
            if u16::from_be_bytes([e[2], e[3]]) & !7 != 0 {
                return UpperLayer::OTHER;
            }
            fragmented |= e[3] & 1 != 0;
            at += 8;
        } else {
            at += (e[1] as usize + 1) * 8;
        }
        next = e[0];
        i += 1;
    }
    match next {
        IPPROTO_UDP => {
            if fragmented && at + UdpHdr::LEN > end {
                return UpperLayer::HIDDEN;
            }
            let Some(udp) = b.load_far(at).map(UdpHdr::of) else { return UpperLayer::OTHER };
            if udp.dst_port() != ROCE_PORT {
                return UpperLayer::OTHER;
            }
            if fragmented && at + UdpHdr::LEN + BTH_LEN > end {
                return UpperLayer::HIDDEN;
            }
            if b.load_far::<BTH_LEN>(at + UdpHdr::LEN).is_none() {
                return UpperLayer::CUT;
            }
            UpperLayer::at(UpperLayer::UDP, at)
        }
        IPPROTO_ICMPV6 if at + 8 > end && fragmented => UpperLayer::HIDDEN,
        IPPROTO_ICMPV6 => match b.load_far::<1>(at) {
            Some([NEIGHBOUR_ADVERTISEMENT]) => UpperLayer::at(UpperLayer::ADVERTISEMENT, at),
            _ => UpperLayer::OTHER,
        },
        next if is_extension(next) => UpperLayer::HIDDEN,
        _ => UpperLayer::OTHER,
    }
}
