//! Why AF_XDP cannot be used, and what to do.

use std::io;

use caps::{CapSet, Capability};

use crate::udp::BindError;

/// A missing capability, and its purpose.
const NEEDED: [Capability; 3] =
    [Capability::CAP_NET_RAW, Capability::CAP_NET_ADMIN, Capability::CAP_BPF];

/// Why an AF_XDP driver could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum XdpError {
    /// The UDP port cannot be opened: the machine does not have the address, or another program has
    /// the port.
    #[error(transparent)]
    Port(#[from] BindError),
    /// The process lacks capabilities.
    #[error(
        "transport xdp needs the capabilities CAP_NET_RAW, CAP_NET_ADMIN and CAP_BPF, but this \
         process lacks {0}; transport udp needs none"
    )]
    Capabilities(String),
    /// There is no interface to attach a program to.
    #[error("no Ethernet interface with a MAC address has the address")]
    NoInterface,
    /// Another program is attached.
    #[error(
        "interface {interface} already has an XDP program (`ip link show` names it), perhaps of \
         another rank over AF_XDP, and can have only one; transport udp works with it"
    )]
    Occupied {
        /// The interface.
        interface: String,
    },
    /// More receive queues than sockets can be opened for.
    #[error(
        "interface {interface} has {queues} receive queues, but at most {most} can have a socket \
         each: `ethtool -L {interface} combined 1` (or rx 1) leaves one"
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
    #[error("XDP program: {step}: {reason}")]
    Program {
        /// The step that failed.
        step: &'static str,
        /// The system's error.
        reason: String,
    },
    /// Not enough memory may be locked.
    #[error(
        "AF_XDP locks {mib} MiB of memory for each receive queue: this process needs CAP_IPC_LOCK \
         or a larger limit (`ulimit -l`)"
    )]
    Memory {
        /// MiB for each queue.
        mib: usize,
    },
    /// A socket could not be opened.
    #[error("AF_XDP socket on queue {queue}: {step}: {source}")]
    Socket {
        /// Number of the queue.
        queue: u32,
        /// The step that failed.
        step: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// There is no route to a rank.
    #[error("{0}")]
    NoRoute(String),
    /// Another error.
    #[error("{0}")]
    System(#[from] io::Error),
}

/// Finds the capabilities that the process lacks, before the kernel refuses something with a less
/// helpful error.
pub(super) fn check_capabilities() -> Result<(), XdpError> {
    let has = |capability| caps::has_cap(None, CapSet::Effective, capability).unwrap_or(false);
    // Before CAP_BPF, one capability covered everything; it is still enough.
    let instead = |capability| capability == Capability::CAP_BPF && has(Capability::CAP_SYS_ADMIN);
    let lacks = |capability: &&Capability| !has(**capability) && !instead(**capability);
    let missing: Vec<String> = NEEDED.iter().filter(lacks).map(Capability::to_string).collect();
    if missing.is_empty() { Ok(()) } else { Err(XdpError::Capabilities(missing.join(", "))) }
}
