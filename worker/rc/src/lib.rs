//! A RoCEv2 endpoint for reliable connections, without sockets and clocks: datagrams and times go
//! in, datagrams and events come out. IBTA volume 1, chapter 9, and annex A17.
//!
//! | module | what lives there |
//! | --- | --- |
//! | [`congestion`] | how many packets a queue pair may have in flight |
//! | [`outbox`] | its messages, cut into packets |
//! | [`packet`] | datagrams and their ICRC |
//! | [`requester`] | the sending half of a queue pair |
//! | [`gaps`] | the list of what a receiver lacks, in its NAKs |
//! | [`repeats`] | what it sends again to a selective receiver |
//! | [`responder`] | the receiving half |
//! | [`path`] | how long an acknowledgement may take |
//! | [`endpoint`] | the queue pairs of one address |

mod congestion;
pub mod endpoint;
mod gaps;
#[cfg(test)]
mod hostile;
mod outbox;
pub mod packet;
mod path;
mod repeats;
pub mod requester;
pub mod responder;
#[cfg(test)]
mod tests;

use std::net::IpAddr;
use std::time::Duration;

pub use endpoint::{Endpoint, Stats};
pub use netsum_common::serial::{Psn, Qpn};

/// Which operation carries messages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Operation {
    /// SEND.
    Send,
    /// RDMA WRITE to an address; the receiver here takes it like a SEND.
    Write {
        /// Virtual address at the receiver.
        address: u64,
        /// Remote key.
        rkey: u32,
    },
}

/// A queue pair to be made.
#[derive(Clone, Debug)]
pub struct QpConfig {
    /// Its own number.
    pub local_qpn: Qpn,
    /// The other side's address.
    pub remote: IpAddr,
    /// The other side's queue pair number.
    pub remote_qpn: Qpn,
    /// First PSN that it sends.
    pub send_psn: Psn,
    /// First PSN that it expects.
    pub recv_psn: Psn,
    /// Path MTU in bytes.
    pub mtu: usize,
    /// SEND or WRITE.
    pub opcode: Operation,
    /// Time without an acknowledgement after which packets are sent again, or as long as the round
    /// trips that have been measured ask for, if that is longer; doubles with each try.
    pub ack_timeout: Duration,
    /// With it, the time-out follows the measured round trips alone (RFC 6298), and is no shorter
    /// than this. It doubles up to `ack_timeout`.
    pub min_ack_timeout: Option<Duration>,
    /// Acknowledgements may wait for what others send. The measured round trips then only count for
    /// packets that [`Endpoint::expect`] was called for. What arrives on such a queue pair is a
    /// sum: it tells that the links are at work, and time-outs of the endpoint run from then on.
    pub waits_for_others: bool,
    /// Time-outs in a row after which the connection fails; never when `None`.
    pub retry_limit: Option<u32>,
    /// "Receiver not ready" in a row after which the connection fails; never when `None`.
    pub rnr_retry_limit: Option<u32>,
    /// Both sides are selective: what comes early is kept, and only what is missing is sent again.
    /// Of queue pairs of this library alone.
    pub selective: bool,
    /// An earlier connection may have had the same numbers, and may not be over at the other
    /// address. So nothing is kept that comes before the first packet, and acknowledgements name
    /// that packet, in place of an MSN. It must be unlike those of earlier connections. Of queue
    /// pairs of this library alone.
    pub reused: bool,
    /// Most unacknowledged packets.
    pub max_inflight: u32,
    /// How far ahead of the expected packet a selective receiver keeps one. Where the other side
    /// may have more in flight, it goes back for them.
    pub max_early: u32,
    /// Bytes of the longest message that it takes. A sender of a longer one is refused, and the
    /// connection fails.
    pub max_message: usize,
}

impl QpConfig {
    /// A queue pair with 128 unacknowledged or early packets at the most, as rdma_rxe has it, a
    /// time-out of 67 ms (code 14), 7 retries, and messages of up to 16 MiB.
    pub fn new(
        local_qpn: Qpn,
        remote: IpAddr,
        remote_qpn: Qpn,
        send_psn: Psn,
        recv_psn: Psn,
        mtu: usize,
    ) -> Self {
        Self {
            local_qpn,
            remote,
            remote_qpn,
            send_psn,
            recv_psn,
            mtu,
            opcode: Operation::Send,
            ack_timeout: Duration::from_micros(67_109),
            min_ack_timeout: None,
            waits_for_others: false,
            retry_limit: Some(7),
            rnr_retry_limit: None,
            selective: false,
            reused: false,
            max_inflight: 128,
            max_early: 128,
            max_message: 1 << 24,
        }
    }
}

/// What a connection's first packet is named by, where numbers are [reused](QpConfig::reused): as
/// long as an MSN.
fn name(first: &[u8]) -> u32 {
    netsum_common::icrc::update(!0, first) & 0xff_ffff
}

/// Properties of an endpoint.
#[derive(Clone, Debug, Default)]
pub struct EndpointConfig {
    /// Accept any IPv4 identification, as kernel and hardware senders choose it. Leaves 16 bits of
    /// the ICRC as a check.
    pub any_ip_id: bool,
    /// Notify senders of marked packets, each queue pair's at most this often (IBTA A17.9: the
    /// notification point of DCQCN, where 50 us are usual). Never when `None`.
    pub cnp_interval: Option<Duration>,
}

/// Names a queue pair of an endpoint.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct QpId(pub(crate) u32);

/// What an endpoint has to tell.
#[derive(Debug, PartialEq, Eq)]
pub enum Event {
    /// A message has been acknowledged.
    Sent {
        /// Where it was posted.
        qp: QpId,
        /// Its identifier, as posted.
        id: u64,
        /// Its buffer.
        data: Vec<u8>,
    },
    /// A message has arrived, in a buffer that was posted.
    Received {
        /// Where.
        qp: QpId,
        /// The message.
        data: Vec<u8>,
        /// Its immediate data.
        immediate: Option<u32>,
    },
    /// A connection has failed; nothing more happens on it.
    Failed {
        /// Which.
        qp: QpId,
        /// Why.
        error: QpError,
    },
}

/// Why a connection failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum QpError {
    /// The other side does not acknowledge.
    #[error("no acknowledgement after all retries")]
    RetryExceeded,
    /// The other side never had a buffer.
    #[error("the receiver was not ready after all retries")]
    RnrRetryExceeded,
    /// The other side refused a packet.
    #[error("the receiver refused: {0:?}")]
    Refused(netsum_common::wire::Nak),
    /// Packets of a message came in an order that cannot be.
    #[error("a message's packets do not follow each other")]
    InvalidRequest,
    /// The other side sent a message that is longer than [`QpConfig::max_message`].
    #[error("a message is longer than the {0} bytes that are taken")]
    MessageTooLong(usize),
}

/// Why a queue pair cannot be made.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SetupError {
    /// The number is taken.
    #[error("queue pair {:#x} exists already", .0.get())]
    Exists(Qpn),
    /// Not between 256 and 4096, or no power of two.
    #[error("path MTU {0}: 256, 512, 1024, 2048 or 4096 is possible")]
    Mtu(usize),
    /// IPv4 here and IPv6 there.
    #[error("{remote} is not of the address family of {local}")]
    Family {
        /// This endpoint's address.
        local: IpAddr,
        /// The other side's.
        remote: IpAddr,
    },
}

/// Datagrams to be sent at once: all of `segment_size` bytes but the last, which may be shorter.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Transmit {
    /// Where to; port 4791.
    pub to: IpAddr,
    /// Length of each datagram when there is more than one.
    pub segment_size: Option<usize>,
    /// Bytes in the buffer.
    pub len: usize,
}
