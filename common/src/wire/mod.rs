//! RoCEv2 on the wire: Ethernet, one optional VLAN tag, IPv4 or IPv6, UDP, then the InfiniBand transport headers.
//!
//! All multi-byte fields are big endian, except the ICRC (see [`crate::icrc`]).

mod extensions;
mod frame;
pub mod in_band;
mod transport;

pub use extensions::{Behind, behind, is_extension};
pub use frame::{Bytes, Frame, L3, Reject, Wrapped, behind_tags, parse, parse_into};
pub use in_band::{InBandToken, JobHeader};
pub use transport::{Aeth, Bth, Nak, Opcode, Reth, Syndrome};

/// UDP destination port of RoCEv2 (IBTA annex A17).
pub const ROCE_PORT: u16 = 4791;
/// Length of an Ethernet header without tags.
pub const ETH_LEN: usize = 14;
/// Length of one IEEE 802.1Q tag.
pub const VLAN_LEN: usize = 4;
/// Length of an IPv4 header without options.
pub const IPV4_LEN: usize = 20;
/// Length of an IPv6 header without extension headers.
pub const IPV6_LEN: usize = 40;
/// Length of a UDP header.
pub const UDP_LEN: usize = 8;
/// Length of the base transport header.
pub const BTH_LEN: usize = 12;
/// Length of the RDMA extended transport header.
pub const RETH_LEN: usize = 16;
/// Length of the ACK extended transport header.
pub const AETH_LEN: usize = 4;
/// Length of immediate data.
pub const IMM_LEN: usize = 4;
/// Length of the invariant CRC at a packet's end.
pub const ICRC_LEN: usize = 4;
/// The longest headers before a data payload: tagged IPv6 WRITE ONLY with immediate.
pub const MAX_HEADERS: usize = ETH_LEN + VLAN_LEN + IPV6_LEN + UDP_LEN + BTH_LEN + RETH_LEN + IMM_LEN;

/// EtherType of IPv4.
pub const ETHERTYPE_IPV4: u16 = 0x0800;
/// EtherType of IPv6.
pub const ETHERTYPE_IPV6: u16 = 0x86dd;
/// EtherType of an 802.1Q tag.
pub const ETHERTYPE_VLAN: u16 = 0x8100;
/// EtherType of a service tag of 802.1ad.
pub const ETHERTYPE_VLAN_AD: u16 = 0x88a8;
/// EtherType of outer tags before 802.1ad, which some switches still use.
pub const ETHERTYPE_VLAN_OLD: u16 = 0x9100;
/// EtherType of ARP.
pub const ETHERTYPE_ARP: u16 = 0x0806;
/// IP protocol number of ICMPv6.
pub const IPPROTO_ICMPV6: u8 = 58;
/// ICMPv6 type of a neighbour advertisement (RFC 4861, 4.4).
pub const NEIGHBOUR_ADVERTISEMENT: u8 = 136;
/// IP protocol number of UDP.
pub const IPPROTO_UDP: u8 = 17;
/// The default partition key, the only one that netsum and rdma_rxe accept.
pub const DEFAULT_PKEY: u16 = 0xffff;

/// An IPv4 address in its IPv4-mapped IPv6 form (RFC 4291, 2.5.5.2), as flow keys hold it.
#[inline(always)]
pub const fn ipv4_mapped(ip: [u8; 4]) -> [u8; 16] {
    // In words, not bytes: in BPF each byte would become a variable of its own.
    let low = (0xffff_0000 | (u32::from_le_bytes(ip) as u64) << 32).to_le_bytes();
    ((u64::from_le_bytes(low) as u128) << 64).to_le_bytes()
}
