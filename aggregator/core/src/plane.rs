//! Types that the controller and the data plane exchange.

use std::net::{IpAddr, Ipv6Addr};

use netsum_common::abi::{FlowKey, RingConfig, RingNumber};
use netsum_common::counters::Counter;
use netsum_common::serial::{Psn, Qpn};
use netsum_common::wire::JobHeader;
use serde::{Deserialize, Serialize};

use crate::rank::Rank;

/// A ring, as the controller specifies it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RingSpec {
    pub id: RingNumber,
    /// Index into the configured list of CPUs.
    pub cpu: u32,
    /// The configuration for its map; the data plane adds the CPU and the active flag.
    pub config: RingConfig,
}

/// A flow, as the controller specifies it: a member's connection to the next member.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlowSpec {
    pub ring: RingNumber,
    /// The sender's place among the ring's members.
    pub member: Rank,
    /// PSN of its first packet.
    pub base_psn: Psn,
    /// Interface at which its packets arrive.
    pub ifindex: u32,
    /// Sender's address.
    pub src: IpAddr,
    /// Receiver's address.
    pub dst: IpAddr,
    /// Receiver's queue pair.
    pub qpn: Qpn,
    /// Sender's MAC address; `None`: learned from the first verified packet.
    pub src_mac: Option<[u8; 6]>,
    /// The mark that its packets carry if they come from another box, above or below
    /// ([`netsum_common::wire::has_group_mark`]); otherwise 0.
    pub group_mark: u8,
}

impl FlowSpec {
    /// The flow's key in the data plane.
    pub fn key(&self) -> FlowKey {
        FlowKey { dst_ip: mapped(self.dst), qpn: self.qpn.get() }
    }
}

/// One of two ends that no host can have: frames without IP and those that ask whether an address
/// is free have an unspecified one, so a rank that owned it would cut all other hosts off.
pub(crate) fn no_host(ends: [IpAddr; 2]) -> Option<IpAddr> {
    ends.map(|ip| ip.to_canonical()).into_iter().find(|ip| ip.is_unspecified() || ip.is_multicast())
}

/// The first packet of a connection that is not registered, with the token of a job that is set up
/// in band.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FirstPacket {
    /// The job's first ring.
    pub job: RingNumber,
    /// The header at its start.
    pub header: JobHeader,
    /// The interface at which it arrived.
    pub ifindex: u32,
    /// Its sender's address.
    pub src: IpAddr,
    /// Its sender's MAC address, or its router's.
    pub src_mac: [u8; 6],
    /// Its receiver's address.
    pub dst: IpAddr,
    /// Its receiver's queue pair.
    pub qpn: Qpn,
    pub psn: Psn,
    /// Length of its payload in bytes.
    pub len: u32,
    /// It is also its message's last packet.
    pub only: bool,
}

/// An address in the form of flow keys: IPv4 is mapped to IPv6.
pub fn mapped(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

/// An address from that form.
pub fn unmapped(ip: [u8; 16]) -> IpAddr {
    IpAddr::from(Ipv6Addr::from(ip)).to_canonical()
}

/// A flow whose job has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EndedFlow {
    pub key: FlowKey,
    /// The interface at which its packets arrived.
    pub ifindex: u32,
    /// Data packets that arrived on it, modulo 2^32.
    pub packets: u32,
}

/// The data plane's record of a flow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlowStats {
    /// The MAC address that it is bound to, given or learned.
    pub mac: Option<[u8; 6]>,
    /// Data packets that arrived, modulo 2^32.
    pub packets: u32,
    /// How many of them were refused before they reached the slot machine.
    pub refused: u32,
    pub last_psn: u32,
    /// Outcome of the last packet; `None` before the first.
    pub last_verdict: Option<Counter>,
    /// PSN and payload length of the last packet whose length differed from the first contribution
    /// to its slot.
    pub mismatch: Option<(u32, u32)>,
}
