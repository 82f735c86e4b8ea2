//! RoCEv2 on the wire: Ethernet, one optional VLAN tag, IPv4 or IPv6, UDP, then the InfiniBand
//! transport headers.
//!
//! All multi-byte fields are big endian, except the ICRC (see [`crate::icrc`]).

mod extensions;
mod frame;
mod headers;
pub mod in_band;
mod transport;

pub use extensions::{UpperLayer, behind, is_extension};
pub use frame::{Bytes, Frame, L3, Reject, Wrapped, behind_tags, parse, parse_into};
pub use headers::*;
pub use in_band::{InBandToken, JobHeader};
pub use transport::{
    Aeth, Bth, GROUP_MARK, IN_ORDER, Nak, Opcode, PAST_GAP, Reth, Syndrome, TOTAL, group_mark,
    has_group_mark,
};

/// UDP destination port of RoCEv2 (IBTA annex A17).
pub const ROCE_PORT: u16 = 4791;
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
pub const MAX_HEADERS: usize =
    EthHdr::LEN + VlanHdr::LEN + Ipv6Hdr::LEN + UdpHdr::LEN + BTH_LEN + RETH_LEN + IMM_LEN;

/// ICMPv6 type of a neighbour advertisement (RFC 4861, 4.4).
pub const NEIGHBOUR_ADVERTISEMENT: u8 = 136;
/// The default partition key, the only one that netsum and rdma_rxe accept.
pub const DEFAULT_PKEY: u16 = 0xffff;

/// An IPv4 address in its IPv4-mapped IPv6 form (RFC 4291, 2.5.5.2), as flow keys hold it.
#[inline(always)]
pub const fn ipv4_mapped(ip: [u8; 4]) -> [u8; 16] {
    // In words, not bytes: in BPF each byte would become a variable of its own.
    let low = (0xffff_0000 | (u32::from_le_bytes(ip) as u64) << 32).to_le_bytes();
    ((u64::from_le_bytes(low) as u128) << 64).to_le_bytes()
}

/// Bytes around a datagram's payload on a link: Ethernet with preamble, check sum and gap, IPv4,
/// UDP.
pub const DATAGRAM_OVERHEAD: usize = 8 + EthHdr::LEN + 4 + 12 + Ipv4Hdr::LEN + UdpHdr::LEN;
/// Bytes around the payload of most data packets there.
pub const PACKET_OVERHEAD: usize = DATAGRAM_OVERHEAD + BTH_LEN + ICRC_LEN;
