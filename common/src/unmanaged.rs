//! Connections of netsum's own ranks without a daemon: all numbers follow from the rank's, which
//! lets an administrator register them.

use crate::serial::{Psn, Qpn};
use crate::wire::ROCE_PORT;

/// One rank's numbers for one ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StaticConnection {
    /// Queue pair that receives from the previous rank: what a flow of the previous rank is
    /// registered with.
    pub receive_qpn: Qpn,
    /// Queue pair that sends to the next rank.
    pub send_qpn: Qpn,
    /// First PSN that it sends.
    pub first_psn: Psn,
}

/// Queue pair numbers and first PSN of `rank` in `ring`; `None` stands for the bypass connection,
/// which must not be registered at a box.
///
/// PSNs wrap early, within a message: every session covers a case that otherwise comes only after
/// 16 million packets.
pub fn static_connection(rank: u32, ring: Option<u32>) -> StaticConnection {
    let connection = rank * 1024 + ring.map_or(0, |r| (r + 1) * 2);
    StaticConnection {
        receive_qpn: Qpn::new(0x10_0000 + connection),
        send_qpn: Qpn::new(0x10_0001 + connection),
        first_psn: Psn::new(0xff_ffd8 - 64 * ring.map_or(0, |r| r + 1) - rank),
    }
}

/// The UDP ports that `rank` sends from to the next and to the previous rank: 4791, or if any ranks
/// share an address, two of those that RoCEv2 senders use (IBTA A17.9.2).
pub fn static_source_ports<A: PartialEq>(rank: u32, addresses: &[A]) -> [u16; 2] {
    let is_shared = (1..addresses.len()).any(|n| addresses[..n].contains(&addresses[n]));
    let port = 0xc000 | ((2 * rank as u16) & 0x3fff);
    if is_shared { [port, port + 1] } else { [ROCE_PORT; 2] }
}
