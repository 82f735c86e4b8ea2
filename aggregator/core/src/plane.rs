//! What the controller and the data plane say to each other.

use std::net::{IpAddr, Ipv6Addr};

use netsum_common::abi::{FlowKey, RingConfig, RingNumber};
use netsum_common::counters::Counter;
use netsum_common::serial::{Psn, Qpn};
use netsum_common::wire::JobHeader;
use serde::{Deserialize, Serialize};

use crate::rank::Rank;

/// A ring as the controller wants it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RingSpec {
    pub id: RingNumber,
    /// Index into the configured list of CPUs.
    pub cpu: u32,
    /// What its map is to hold; the data plane adds the CPU, and that it is active.
    pub config: RingConfig,
}

/// A flow as the controller wants it: rank `rank`'s connection to the next rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlowSpec {
    pub ring: RingNumber,
    /// Sending rank.
    pub rank: Rank,
    /// PSN of its first packet.
    pub base_psn: Psn,
    /// Interface that its packets come in on.
    pub ifindex: u32,
    /// Sender's address.
    pub src: IpAddr,
    /// Receiver's address.
    pub dst: IpAddr,
    /// Receiver's queue pair.
    pub qpn: Qpn,
    /// Sender's MAC address; learned from the first verified packet when `None`.
    pub src_mac: Option<[u8; 6]>,
    /// What its packets bear because they come by another box, above or below
    /// ([`netsum_common::wire::bears`]). 0 where they do not.
    #[serde(default)]
    pub bears: u8,
}

impl FlowSpec {
    /// The flow's key in the data plane.
    pub fn key(&self) -> FlowKey {
        FlowKey { dst_ip: mapped(self.dst), qpn: self.qpn.get() }
    }
}

/// A first packet of a connection that is not registered, with the token of a job that is set up in
/// band.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FirstPacket {
    /// The job's first ring.
    pub job: RingNumber,
    /// What it begins with.
    pub header: JobHeader,
    /// The interface that it came in on.
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
    /// It is its message's last packet, too.
    pub only: bool,
}

/// An address as flow keys hold it: IPv4 in mapped form.
pub fn mapped(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

/// An address from the form that flow keys hold.
pub fn unmapped(ip: [u8; 16]) -> IpAddr {
    IpAddr::from(Ipv6Addr::from(ip)).to_canonical()
}

/// A flow whose job has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EndedFlow {
    pub key: FlowKey,
    /// The interface that its packets came in on.
    pub ifindex: u32,
    /// Data packets that came on it, modulo 2^32.
    pub packets: u32,
}

/// What the data plane has seen of a flow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlowSeen {
    /// MAC address that it is bound to, given or learned.
    pub mac: Option<[u8; 6]>,
    /// Data packets that came, modulo 2^32.
    pub packets: u32,
    /// Those of them that were refused before the slot machine saw them.
    pub refused: u32,
    pub last_psn: u32,
    /// What became of the last one; `None` when none has come.
    pub last_outcome: Option<Counter>,
    /// PSN and payload length of the last packet that had another length than the first
    /// contribution to its slot.
    pub mismatch: Option<(u32, u32)>,
}
