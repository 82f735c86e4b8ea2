//! The headers below InfiniBand's: `network-types` has their fields, and here they are taken from
//! bytes and put into bytes.

pub use network_types::eth::{EthHdr, EtherType};
pub use network_types::ip::{IpProto, Ipv4Hdr, Ipv6Hdr};
pub use network_types::udp::UdpHdr;
pub use network_types::vlan::VlanHdr;

use super::Bytes;

/// A header as it is on the wire.
pub trait Header: Copy {
    /// Its bytes, which may lie anywhere.
    type Bytes;
    /// Takes its bytes for the header.
    fn of(bytes: Self::Bytes) -> Self;
    fn bytes(self) -> Self::Bytes;
    /// The header at an offset, or `None` where the frame ends before.
    fn load<B: Bytes + ?Sized>(b: &B, offset: usize) -> Option<Self>;
}

macro_rules! headers {
    ($($header:ident)+) => { $(
        impl Header for $header {
            type Bytes = [u8; $header::LEN];
            #[inline(always)]
            fn of(bytes: Self::Bytes) -> Self {
                // SAFETY: `repr(C)`, of integers without a gap between them: any bytes are one.
                unsafe { core::mem::transmute(bytes) }
            }
            #[inline(always)]
            fn bytes(self) -> Self::Bytes {
                // SAFETY: as above; the type has no padding.
                unsafe { core::mem::transmute(self) }
            }
            #[inline(always)]
            fn load<B: Bytes + ?Sized>(b: &B, offset: usize) -> Option<Self> {
                b.load(offset).map(Self::of)
            }
        }
    )+ };
}
headers!(EthHdr VlanHdr Ipv4Hdr Ipv6Hdr UdpHdr);

// Numbers for patterns. `ether_type()` of `network-types` compares with all that it knows, which
// costs a program 40 to 145 instructions.

pub const ETHERTYPE_IPV4: u16 = u16::from_be(EtherType::Ipv4 as u16);
pub const ETHERTYPE_IPV6: u16 = u16::from_be(EtherType::Ipv6 as u16);
/// EtherType of an 802.1Q tag.
pub const ETHERTYPE_VLAN: u16 = u16::from_be(EtherType::Ieee8021q as u16);
/// EtherType of a service tag of 802.1ad.
pub const ETHERTYPE_VLAN_AD: u16 = u16::from_be(EtherType::Ieee8021ad as u16);
/// EtherType of outer tags before 802.1ad, which some switches still use.
pub const ETHERTYPE_VLAN_OLD: u16 = u16::from_be(EtherType::Ieee8021QinQ1 as u16);
pub const ETHERTYPE_ARP: u16 = u16::from_be(EtherType::Arp as u16);
/// IP protocol number of ICMPv6.
pub const IPPROTO_ICMPV6: u8 = IpProto::Ipv6Icmp as u8;
/// IP protocol number of UDP.
pub const IPPROTO_UDP: u8 = IpProto::Udp as u8;
