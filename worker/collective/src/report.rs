//! Results of operations, and a rank's statistics.

use std::fmt;
use std::time::Duration;

use crate::numeric::quant::Underflow;

/// Whether the box or the hosts' ring sums.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Mode {
    /// The box.
    Box,
    /// The hosts' ring: the ranks among themselves, without the box.
    HostRing,
}

impl Mode {
    /// `box` or `ring` (the hosts'), as in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Box => "box",
            Self::HostRing => "ring",
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The result of an operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Report {
    /// [`Mode::HostRing`] if the hosts' ring summed any part.
    pub mode: Mode,
    /// Sums (of messages) whose check lanes were verified with all their data. Over the hosts' ring
    /// a rank does not get, nor count, all sums of others' parts: see [`crate::engine`].
    pub verified: u64,
    /// Time from the call to the last sum.
    pub elapsed: Duration,
    /// Packets that this rank sent again meanwhile; `None` over an adapter.
    pub retransmissions: Option<u64>,
    /// This rank's floats that became 0, because their block has far larger ones; not in 16 bits,
    /// where they are kept on the average.
    pub underflow: Underflow,
    /// Whether the ranks of each host added their data before they sent it. Then `underflow` and
    /// `retransmissions` are those of the part that this rank sent, and its host's ranks.
    pub hierarchical: bool,
}

/// Counters of a communicator since it connected.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Statistics {
    /// Operations that gave a sum, barriers among them.
    pub all_reduces: u64,
    /// Those that were hierarchical: see [`Report::hierarchical`]. Other counts include the rings
    /// between hosts.
    pub hierarchical: u64,
    /// Sums (of messages) whose check lanes were verified with all their data.
    pub verified: u64,
    /// Messages received that no box had summed.
    pub unsummed: u64,
    /// Messages received that were neither a sum nor one rank's data.
    pub wrong: u64,
    /// How often the ranks fell back from the box to the hosts' ring; at most once in a session.
    pub fallbacks: u64,
    /// Payload bytes of messages sent to be summed by the box.
    pub box_bytes: u64,
    /// Payload bytes sent by the hosts' ring.
    pub ring_bytes: u64,
    /// How often an adapter has given a connection up, which was then restarted; see the adapter's
    /// retries.
    pub restarts: u64,
    /// How often the ranks have reconnected.
    pub reconnects: u64,
    /// This rank's nonzero floats that became 0; see [`Report::underflow`].
    pub underflows: u64,
    /// Packets; `None` over an adapter, which has its own counters: see `rdma statistic`.
    pub traffic: Option<Traffic>,
}

impl Statistics {
    /// The sum of two statistics.
    pub fn plus(self, o: Self) -> Self {
        Self {
            all_reduces: self.all_reduces + o.all_reduces,
            hierarchical: self.hierarchical + o.hierarchical,
            verified: self.verified + o.verified,
            unsummed: self.unsummed + o.unsummed,
            wrong: self.wrong + o.wrong,
            fallbacks: self.fallbacks + o.fallbacks,
            box_bytes: self.box_bytes + o.box_bytes,
            ring_bytes: self.ring_bytes + o.ring_bytes,
            restarts: self.restarts + o.restarts,
            reconnects: self.reconnects + o.reconnects,
            underflows: self.underflows + o.underflows,
            traffic: match (self.traffic, o.traffic) {
                (Some(a), Some(b)) => Some(a.plus(b)),
                (a, b) => a.or(b),
            },
        }
    }
}

/// Packets since the rank connected.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Traffic {
    /// Bytes of all packets sent, without IP and UDP headers.
    pub bytes_sent: u64,
    /// Bytes of all packets received, without IP and UDP headers.
    pub bytes_received: u64,
    /// Data packets sent.
    pub packets_sent: u64,
    /// Packets received.
    pub packets_received: u64,
    /// Packets sent again.
    pub retransmissions: u64,
    /// Packets received with a congestion mark.
    pub congestion_marks: u64,
}

impl Traffic {
    fn plus(self, o: Self) -> Self {
        Self {
            bytes_sent: self.bytes_sent + o.bytes_sent,
            bytes_received: self.bytes_received + o.bytes_received,
            packets_sent: self.packets_sent + o.packets_sent,
            packets_received: self.packets_received + o.packets_received,
            retransmissions: self.retransmissions + o.retransmissions,
            congestion_marks: self.congestion_marks + o.congestion_marks,
        }
    }
}
