//! What a communicator is configured with, and what it tells about itself.

use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use crate::numeric::layout::{CHECK_BYTES, Layout};

/// How a communicator finds its job.
#[derive(Clone, Debug)]
pub struct CommConfig {
    /// This rank, from 0.
    pub rank: u32,
    /// Ranks of the job.
    pub ranks: u32,
    /// This rank's own address; ranks on one machine need different ones. Over UDP, port 4791 must be free there.
    pub ip: IpAddr,
    /// What carries this rank's packets. Ranks of a job may choose differently.
    pub transport: Transport,
    /// How an RDMA adapter tries again.
    pub retry: AdapterRetry,
    /// Where the other ranks' addresses come from.
    pub bootstrap: Bootstrap,
    /// A rank that is silent for so long is dead.
    pub timeout: Duration,
    /// How long [`connect`](super::Communicator::connect) waits for the other ranks.
    pub connect_timeout: Duration,
    /// TLS to the daemon; in clear when `None`.
    pub tls: Option<Tls>,
}

/// What carries a rank's packets.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash)]
pub enum Transport {
    /// The RDMA adapter that has the rank's address as a GID for RoCE v2, if there is one and a daemon to join by; else UDP.
    #[default]
    Auto,
    /// The RC endpoint of this crate over a UDP socket.
    Udp,
    /// The same endpoint over AF_XDP sockets, past the kernel's network stack. Needs the feature `xdp`, the capabilities CAP_NET_RAW,
    /// CAP_NET_ADMIN and CAP_BPF, and an interface without another XDP program, which no other rank may use so.
    Xdp,
    /// An RDMA adapter, a hardware NIC or the kernel's Soft-RoCE, through libibverbs. Needs the feature `verbs`.
    Verbs,
}

/// How an RDMA adapter tries again what is not acknowledged; the same as `NCCL_IB_TIMEOUT` and `NCCL_IB_RETRY_CNT`.
///
/// An adapter gives up after `count` + 1 time-outs in a row. Then the connection is started anew where it stood, with twice the
/// time-out (up to sixteen times) until something is acknowledged, so that a rank may be slow for as long as it lives. Who is
/// dead is found by keep-alives.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AdapterRetry {
    /// Time-out: 4.096 us x 2^timeout; 1 to 31. A packet that is lost at the end of a message is missed for so long, up to four
    /// times with some adapters. A sum that takes longer makes the adapter send what has not been acknowledged again.
    pub timeout: u8,
    /// Retries, 0 to 7; Soft-RoCE takes 7 for no limit.
    pub count: u8,
}

impl Default for AdapterRetry {
    /// 0.54 s and 7 retries. Soft-RoCE with a shorter timer (67 ms) has ended connections with an error under loss; CONTRIBUTING.md
    /// says how.
    fn default() -> Self {
        Self { timeout: 17, count: 7 }
    }
}

impl AdapterRetry {
    pub(crate) fn check(self) -> Result<(), String> {
        if !(1..=31).contains(&self.timeout) {
            return Err(format!("retry.timeout {}: 1 to 31", self.timeout));
        }
        if self.count > 7 {
            return Err(format!("retry.count {}: 0 to 7", self.count));
        }
        Ok(())
    }
}

/// Files for TLS to the daemon, in PEM form.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tls {
    /// Authority of the daemon's certificate, which must be for the host in the daemon's address.
    pub ca: PathBuf,
    /// This worker's certificate and its key, for a daemon that asks for one.
    pub identity: Option<(PathBuf, PathBuf)>,
}

impl CommConfig {
    /// The usual: an adapter where there is one, a rank is dead after 10 s, and `connect` waits for 60 s.
    pub fn new(rank: u32, ranks: u32, ip: IpAddr, bootstrap: Bootstrap) -> Self {
        let (timeout, connect_timeout) = (Duration::from_secs(10), Duration::from_secs(60));
        let (transport, retry) = (Transport::default(), AdapterRetry::default());
        Self { rank, ranks, ip, transport, retry, bootstrap, timeout, connect_timeout, tls: None }
    }
}

/// Where addresses and the job's properties come from. The token is not printed by `{:?}`.
#[derive(Clone)]
pub enum Bootstrap {
    /// A box's daemon.
    Controller {
        /// Host and port of the workers' API.
        address: String,
        /// Name of the job.
        job: String,
        /// The job's token.
        token: String,
    },
    /// No daemon: all ranks are given the same list, and queue pair numbers and PSNs follow from [`static_connection`].
    /// A box sums only if it has been given these flows by hand.
    Static {
        /// Address of each rank.
        peers: Vec<IpAddr>,
        /// Path MTU in bytes.
        mtu: u32,
        /// Bytes of a message.
        message_size: u32,
        /// Messages without a sum in each ring.
        window: u32,
        /// Rings.
        rings: u32,
    },
}

impl fmt::Debug for Bootstrap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Controller { address, job, token: _ } => f
                .debug_struct("Controller")
                .field("address", address)
                .field("job", job)
                .finish_non_exhaustive(),
            Self::Static { peers, mtu, message_size, window, rings } => f
                .debug_struct("Static")
                .field("peers", peers)
                .field("mtu", mtu)
                .field("message_size", message_size)
                .field("window", window)
                .field("rings", rings)
                .finish(),
        }
    }
}

/// One rank's numbers for one ring, as [`Bootstrap::Static`] chooses them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StaticConnection {
    /// Queue pair that receives from the previous rank: what a flow of the previous rank is registered with.
    pub receive_qpn: u32,
    /// Queue pair that sends to the next rank.
    pub send_qpn: u32,
    /// First PSN that it sends.
    pub first_psn: u32,
}

/// Queue pair numbers and first PSN of `rank` in `ring` under [`Bootstrap::Static`]; `None` stands for the plain
/// connection, which no box may know.
///
/// PSNs wrap early, within a message: what comes only after 16 million packets otherwise is part of every run.
pub fn static_connection(rank: u32, ring: Option<u32>) -> StaticConnection {
    let connection = rank * 1024 + ring.map_or(0, |r| (r + 1) * 2);
    StaticConnection {
        receive_qpn: 0x10_0000 + connection,
        send_qpn: 0x10_0001 + connection,
        first_psn: 0xff_ffd8 - 64 * ring.map_or(0, |r| r + 1) - rank,
    }
}

/// Who sums.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Mode {
    /// The box.
    Box,
    /// The ranks themselves, by an ordinary ring all-reduce.
    Ring,
}

impl Mode {
    /// `box` or `ring`, as in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Box => "box",
            Self::Ring => "ring",
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What an operation came to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Report {
    /// Who did the sum; [`Mode::Ring`] if the ranks did any part of it.
    pub mode: Mode,
    /// Sums (of messages) whose check lanes were verified.
    pub verified: u64,
    /// From the call to the last sum.
    pub elapsed: Duration,
    /// Packets that this rank sent again meanwhile; `None` where that is an adapter's business.
    pub retransmissions: Option<u64>,
}

/// What a communicator has done since it was connected.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Statistics {
    /// Operations that gave a sum, barriers among them.
    pub all_reduces: u64,
    /// Sums (of messages) whose check lanes were verified.
    pub verified: u64,
    /// Messages received that no box had summed.
    pub unsummed: u64,
    /// Messages received that were neither a sum nor one rank's data.
    pub wrong: u64,
    /// How often the ranks changed from the box to a ring of their own; at most once over the same connections.
    pub fall_backs: u64,
    /// Payload bytes of messages sent to be summed by the box.
    pub box_bytes: u64,
    /// Payload bytes sent by the ranks' own ring.
    pub ring_bytes: u64,
    /// How often an adapter has given a connection up, which was then started anew; see [`AdapterRetry`].
    pub restarts: u64,
    /// How often the ranks have connected anew.
    pub renewals: u64,
    /// Packets; `None` over an adapter, which counts for itself: see `rdma statistic`.
    pub traffic: Option<Traffic>,
}

impl Statistics {
    /// What was done before, and since then.
    pub(crate) fn plus(self, o: Self) -> Self {
        Self {
            all_reduces: self.all_reduces + o.all_reduces,
            verified: self.verified + o.verified,
            unsummed: self.unsummed + o.unsummed,
            wrong: self.wrong + o.wrong,
            fall_backs: self.fall_backs + o.fall_backs,
            box_bytes: self.box_bytes + o.box_bytes,
            ring_bytes: self.ring_bytes + o.ring_bytes,
            restarts: self.restarts + o.restarts,
            renewals: self.renewals + o.renewals,
            traffic: match (self.traffic, o.traffic) {
                (Some(a), Some(b)) => Some(a.plus(b)),
                (a, b) => a.or(b),
            },
        }
    }
}

/// Packets since the connection.
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
    /// Packets received that had met congestion on their way.
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

/// The largest window that there can be.
pub(crate) const MAX_WINDOW: u32 = 1024;

/// Bytes of the least message that there can be: check lanes and an element.
const LEAST_MESSAGE: u32 = CHECK_BYTES as u32 + 4;

/// Job properties that all ranks must agree on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct JobShape {
    pub ranks: u32,
    pub mtu: u32,
    pub layout: Layout,
}

impl JobShape {
    /// Finds properties that cannot work, whoever gave them.
    pub fn check(&self) -> Result<(), String> {
        let Layout { message_size, window, rings } = self.layout;
        if !(1..=64).contains(&self.ranks) {
            return Err(format!("ranks {}: 1 to 64", self.ranks));
        }
        if ![256, 512, 1024, 2048, 4096].contains(&self.mtu) {
            return Err(format!("mtu {}: 256, 512, 1024, 2048 or 4096", self.mtu));
        }
        if message_size % 4 != 0 || !(LEAST_MESSAGE..=1 << 24).contains(&message_size) {
            return Err(format!(
                "message_size {message_size}: a multiple of 4 from {LEAST_MESSAGE} to 16777216"
            ));
        }
        if !(1..=MAX_WINDOW).contains(&window) {
            return Err(format!("window {window}: 1 to {MAX_WINDOW}"));
        }
        if !(1..=255).contains(&rings) {
            return Err(format!("rings {rings}: 1 to 255"));
        }
        Ok(())
    }
}
