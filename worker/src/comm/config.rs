//! The configuration of a communicator.

use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use netsum_collective::numeric::block::Width;
use netsum_collective::queue_pairs::SourcePorts;
use netsum_collective::seal::Secret;
use netsum_common::unmanaged::static_source_ports;

/// How a communicator finds its job.
#[derive(Clone, Debug)]
pub struct CommConfig {
    /// This rank, from 0.
    pub rank: u32,
    /// Ranks of the job.
    pub ranks: u32,
    /// This rank's own address. Over UDP, other ranks of the same user may have it too.
    pub ip: IpAddr,
    /// The transport of this rank's packets. Ranks of a job may choose differently.
    pub transport: Transport,
    /// How an RDMA adapter retries.
    pub retry: AdapterRetry,
    /// Where the other ranks' addresses come from.
    pub bootstrap: Bootstrap,
    /// Connects some ranks of the job as a group of this name, `rank` and `ranks` being theirs.
    /// Needs a controller.
    pub group: Option<String>,
    /// The silence after which a rank counts as dead. Must be the same at all ranks.
    pub timeout: Duration,
    /// How long [`connect`](super::Communicator::connect) waits for the other ranks.
    pub connect_timeout: Duration,
    /// TLS to the controller; unencrypted when `None`.
    pub tls: Option<Tls>,
    /// See [`set_wire`](super::Communicator::set_wire). Must be the same at all ranks.
    pub wire: Option<Width>,
    /// Must be the same at all ranks.
    pub hierarchy: Hierarchy,
    /// [Seals](netsum_collective::seal) all sums and messages, so that box and network can neither
    /// read nor forge them. All ranks must have the same, and nobody else. Integers of 32 bits then
    /// take 64 on the wire.
    pub secret: Option<Secret>,
    /// Set in the communicators of a hierarchical one.
    #[doc(hidden)]
    pub inter_host_ring: Option<InterHostRing>,
}

/// When ranks of one host add their data before they send it. Then one copy of it leaves the host,
/// and results have the same bits, but for floats in 16 bits. Only sums and averages of over 4,096
/// floats, or integers of 16 or 32 bits, can be hierarchical. The ranks of a host must be processes
/// of one user in the same namespaces of network and processes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash)]
pub enum Hierarchy {
    /// For long sums, if two ranks have the same address.
    #[default]
    Auto,
    /// Wherever two ranks are on one host, and for all sums that can be; also if only one rank has
    /// this setting, where two ranks have the same address. Elsewhere it must be set at all ranks.
    On,
    /// Never, at any rank.
    Off,
}

impl FromStr for Hierarchy {
    type Err = String;

    /// Reads `auto`, `on` or `off`.
    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "auto" => Ok(Self::Auto),
            "on" => Ok(Self::On),
            "off" => Ok(Self::Off),
            _ => Err("must be auto, on or off".to_owned()),
        }
    }
}

/// One rank of each host.
#[doc(hidden)]
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct InterHostRing {
    pub number: u32,
    /// The application's numbers of its ranks.
    pub ranks: Vec<u32>,
    /// Ranks of all hosts.
    pub summands: u32,
}

/// The transport of a rank's packets.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash)]
pub enum Transport {
    /// The RDMA adapter that has the rank's address as a GID for RoCE v2, if there is one and the
    /// job has a controller; else UDP.
    #[default]
    Auto,
    /// netsum's RC endpoint over a UDP socket.
    Udp,
    /// The same endpoint over AF_XDP sockets, past the kernel's network stack. Needs the feature
    /// `xdp`, the capabilities CAP_NET_RAW, CAP_NET_ADMIN and CAP_BPF, and an interface without
    /// another XDP program, which no other rank uses this way.
    Xdp,
    /// An RDMA adapter, a hardware NIC or the kernel's Soft-RoCE, through libibverbs. Needs the
    /// feature `verbs`.
    Verbs,
}

impl FromStr for Transport {
    type Err = String;

    /// Reads `auto`, `udp`, `xdp` or `verbs`.
    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "auto" => Ok(Self::Auto),
            "udp" => Ok(Self::Udp),
            "xdp" => Ok(Self::Xdp),
            "verbs" => Ok(Self::Verbs),
            _ => Err("must be auto, udp, xdp or verbs".to_owned()),
        }
    }
}

/// How an RDMA adapter retries packets without an acknowledgement; the same as `NCCL_IB_TIMEOUT`
/// and `NCCL_IB_RETRY_CNT`.
///
/// An adapter gives up after `count` + 1 timeouts in a row. Then the connection is restarted at the
/// message where it stopped, with twice the timeout (up to sixteen times) until an acknowledgement
/// arrives. So a rank may be slow for as long as it lives; keep-alives find dead ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AdapterRetry {
    /// Timeout: 4.096 us x 2^timeout; 1 to 31. The loss of a packet at the end of a message is
    /// noticed after this time, or up to four times as long with some adapters. If a sum takes
    /// longer, the adapter retransmits.
    pub timeout: u8,
    /// Retries, 0 to 7; for Soft-RoCE 7 means no limit.
    pub count: u8,
}

impl Default for AdapterRetry {
    /// 0.54 s and 7 retries. Soft-RoCE with a shorter timer (67 ms) has ended connections with an
    /// error under loss: see the book's `inside/soft-roce.md`.
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

/// Files for TLS to the controller, in PEM form.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tls {
    /// The authority of the controller's certificate, which must be for the host in the
    /// controller's address.
    pub ca: PathBuf,
    /// This worker's certificate and its key, if the controller requires one.
    pub identity: Option<(PathBuf, PathBuf)>,
}

impl CommConfig {
    /// The ports that other ranks with the same list of addresses expect this one to send from.
    pub(crate) fn listed_ports(&self) -> Option<SourcePorts> {
        let Bootstrap::Static { peers, .. } = &self.bootstrap else { return None };
        Some(self.ports_of(self.rank, peers))
    }

    /// The ports that a rank of the list sends from. Ranks of one host are in other rings.
    pub(crate) fn ports_of(&self, rank: u32, peers: &[IpAddr]) -> SourcePorts {
        let [next, previous] = match &self.inter_host_ring {
            None => static_source_ports(rank, peers),
            Some(ring) => {
                let port = 0xc000 | ((2 * (64 * (ring.number + 1) + rank)) as u16 & 0x3fff);
                [port, port + 1]
            }
        };
        SourcePorts { next, previous }
    }

    /// How far queue pair numbers of a list are from those of all ranks.
    pub(crate) fn queue_pair_offset(&self) -> u32 {
        self.inter_host_ring.as_ref().map_or(0, |ring| (ring.number + 1) << 16)
    }

    /// A configuration with defaults: an adapter where there is one, a rank is dead after 10 s, and
    /// `connect` waits for 60 s.
    pub fn new(rank: u32, ranks: u32, ip: IpAddr, bootstrap: Bootstrap) -> Self {
        let (timeout, connect_timeout) = (Duration::from_secs(10), Duration::from_secs(60));
        let (transport, retry) = (Transport::default(), AdapterRetry::default());
        Self {
            rank,
            ranks,
            ip,
            transport,
            retry,
            bootstrap,
            group: None,
            timeout,
            connect_timeout,
            tls: None,
            wire: None,
            hierarchy: Hierarchy::default(),
            secret: None,
            inter_host_ring: None,
        }
    }
}

/// The source of addresses and of the job's properties. `{:?}` does not print the token.
#[derive(Clone)]
pub enum Bootstrap {
    /// The controller: a box's daemon, or a fabric's manager.
    Controller {
        /// Host and port of the workers' API.
        address: String,
        /// Name of the job.
        job: String,
        /// The job's token.
        token: String,
    },
    /// No controller: all ranks have the same list, and queue pair numbers and PSNs follow from
    /// [`static_connection`](netsum_common::unmanaged::static_connection). A box sums only if an
    /// administrator adds these flows.
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

impl Bootstrap {
    /// The same for some of the ranks.
    pub(crate) fn of_members(&self, ranks: &[u32]) -> Self {
        let mut members = self.clone();
        if let Self::Static { peers, .. } = &mut members {
            *peers = ranks.iter().filter_map(|rank| peers.get(*rank as usize).copied()).collect();
        }
        members
    }
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
