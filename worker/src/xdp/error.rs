//! Why AF_XDP cannot be used, and what would help.

use std::io;

use caps::{CapSet, Capability};

use crate::udp::BindError;

/// What is needed, and for what.
const NEEDED: [Capability; 3] =
    [Capability::CAP_NET_RAW, Capability::CAP_NET_ADMIN, Capability::CAP_BPF];

/// Why an AF_XDP driver could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum XdpError {
    /// The UDP port is not to be had: the address is not there, or somebody else has it.
    #[error(transparent)]
    Port(#[from] BindError),
    /// The process may not.
    #[error(
        "transport xdp needs the capabilities CAP_NET_RAW, CAP_NET_ADMIN and CAP_BPF, and this process lacks {0}; transport udp needs \
         none"
    )]
    Capabilities(String),
    /// There is nothing to attach a program to.
    #[error("no Ethernet interface with a MAC address has the address")]
    NoInterface,
    /// Something else is attached.
    #[error(
        "interface {interface} has an XDP program already: another program's (`ip link show` names it), or that of another rank over \
         AF_XDP, of which an interface has one only; transport udp goes on beside it"
    )]
    Occupied {
        /// The interface.
        interface: String,
    },
    /// More receive queues than sockets can be had for.
    #[error(
        "interface {interface} has {queues} receive queues, and at most {most} can have a socket each: `ethtool -L {interface} combined \
         1` (or rx 1) leaves one"
    )]
    Queues {
        /// The interface.
        interface: String,
        /// How many it has.
        queues: u32,
        /// How many there may be.
        most: u32,
    },
    /// Packets are longer than a frame.
    #[error("mtu {mtu}: an AF_XDP frame holds a path MTU of at most {most}")]
    Mtu {
        /// Path MTU.
        mtu: usize,
        /// The largest.
        most: usize,
    },
    /// The program could not be loaded or attached.
    #[error("the XDP program: {step}: {reason}")]
    Program {
        /// What was being done.
        step: &'static str,
        /// What the system said.
        reason: String,
    },
    /// There is not enough memory that may be locked.
    #[error(
        "AF_XDP locks {mib} MiB of memory for each receive queue: this process needs CAP_IPC_LOCK or a larger limit (`ulimit -l`)"
    )]
    Memory {
        /// How much.
        mib: usize,
    },
    /// A socket could not be opened.
    #[error("an AF_XDP socket on queue {queue}: {step}: {source}")]
    Socket {
        /// Number of the queue.
        queue: u32,
        /// What was being done.
        step: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// There is no way to a rank.
    #[error("{0}")]
    NoWay(String),
    /// Something else.
    #[error("{0}")]
    System(#[from] io::Error),
}

/// Finds out which capabilities the process lacks, before the kernel refuses something with a word
/// that says less.
pub(super) fn check_capabilities() -> Result<(), XdpError> {
    let has = |capability| caps::has_cap(None, CapSet::Effective, capability).unwrap_or(false);
    // Before CAP_BPF there was one for all of it, which still will do.
    let instead = |capability| capability == Capability::CAP_BPF && has(Capability::CAP_SYS_ADMIN);
    let lacks = |capability: &&Capability| !has(**capability) && !instead(**capability);
    let missing: Vec<String> = NEEDED.iter().filter(lacks).map(Capability::to_string).collect();
    if missing.is_empty() { Ok(()) } else { Err(XdpError::Capabilities(missing.join(", "))) }
}
