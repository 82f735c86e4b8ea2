//! A RoCEv2 endpoint for reliable connections, without sockets and clocks: it takes datagrams and
//! times, and returns datagrams and events. IBTA volume 1, chapter 9, and annex A17.
//!
//! | module | what lives there |
//! | --- | --- |
//! | [`congestion`] | how many packets a queue pair may have in flight |
//! | [`segmenter`] | its messages, cut into packets |
//! | [`packet`] | datagrams and their ICRC |
//! | [`requester`] | the sending half of a queue pair |
//! | [`gaps`] | the list of missing packets in a receiver's NAKs |
//! | [`retransmit_queue`] | packets to send again to a selective receiver |
//! | [`responder`] | the receiving half |
//! | [`rtt`] | how long an acknowledgement may take |
//! | [`endpoint`] | the queue pairs of one address |

mod congestion;
pub mod endpoint;
mod gaps;
#[cfg(test)]
mod hostile;
pub mod packet;
pub mod requester;
pub mod responder;
mod retransmit_queue;
mod rtt;
mod segmenter;
#[cfg(test)]
mod tests;

use std::net::IpAddr;
use std::time::Duration;

pub use endpoint::{Endpoint, Stats};
pub use netsum_common::serial::{Psn, Qpn};
use netsum_common::wire::ROCE_PORT;

/// The operation that carries messages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Operation {
    /// SEND.
    Send,
    /// RDMA WRITE to an address; the receiver here handles it like a SEND.
    Write {
        /// Virtual address at the receiver.
        address: u64,
        /// Remote key.
        rkey: u32,
    },
}

/// Configuration of a queue pair.
#[derive(Clone, Debug)]
pub struct QpConfig {
    /// Its own number.
    pub local_qpn: Qpn,
    /// The UDP port that it sends from, which the ICRC covers.
    pub source_port: u16,
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
    /// Retransmission timeout: the time without an acknowledgement after which packets are sent
    /// again. It is longer if the measured round trips require it, and doubles with each try.
    pub ack_timeout: Duration,
    /// If set, the timeout follows only the measured round trips (RFC 6298), with this as its
    /// minimum. It doubles up to `ack_timeout`.
    pub min_ack_timeout: Option<Duration>,
    /// Acknowledgements may have to wait for other ranks' packets. Round trips are then measured
    /// only for packets that [`Endpoint::expect`] was called for. Packets that arrive on such a
    /// queue pair are sums: they show that the links work, and restart the endpoint's timeouts.
    pub waits_for_others: bool,
    /// Timeouts in a row after which the connection fails; never when `None`.
    pub retry_limit: Option<u32>,
    /// "Receiver not ready" in a row after which the connection fails; never when `None`.
    pub rnr_retry_limit: Option<u32>,
    /// Both sides are selective: the receiver keeps packets that arrive early, and the sender sends
    /// only missing ones again. Only for queue pairs of this library.
    pub selective: bool,
    /// An earlier connection may have used the same numbers, and may still be open at the other
    /// side. So the receiver keeps nothing that arrives before the first packet, and
    /// acknowledgements carry that packet's number instead of an MSN. It must differ from those of
    /// earlier connections. Only for queue pairs of this library.
    pub reused: bool,
    /// Most unacknowledged packets. If both sides are selective, and packets are not sums, the
    /// smaller number of both applies.
    pub max_inflight: u32,
    /// How far ahead of the expected packet a selective receiver keeps packets. If the other side
    /// has more in flight, it goes back for them.
    pub max_early: u32,
    /// Bytes of the longest message that the receiver accepts. It refuses a longer one, and the
    /// connection fails.
    pub max_message: usize,
}

impl QpConfig {
    /// A queue pair that sends from port 4791, with at most 128 unacknowledged or early packets, as
    /// in rdma_rxe, a timeout of 67 ms (code 14), 7 retries, and messages of up to 16 MiB.
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
            source_port: ROCE_PORT,
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

impl QpConfig {
    /// Both sides are this library, and packets are not sums. Then the receiver acknowledges
    /// messages that do not request it, a little later, and its ACKs tell how many packets it
    /// holds.
    fn is_selective_bypass(&self) -> bool {
        self.selective && !self.waits_for_others
    }
}

/// The code of ACKs that set no limit.
const NO_LIMIT: u8 = 0x1f;

/// The packets that a code of ACKs stands for, as the numbers of IBTA table 45.
fn packets(credits: u8) -> Option<u64> {
    let half = 1 << (credits / 2);
    let packets =
        if credits < 2 { u64::from(credits) } else { half + half / 2 * u64::from(credits % 2) };
    (credits != NO_LIMIT).then_some(packets)
}

/// The code for at most this many packets.
fn credits(most: u32) -> u8 {
    (0..NO_LIMIT).rfind(|code| packets(*code) <= Some(most.into())).unwrap_or(0)
}

/// Identifies a connection by its first packet, where numbers are [reused](QpConfig::reused); has
/// the length of an MSN.
fn connection_id(first: &[u8]) -> u32 {
    netsum_common::icrc::update(!0, first) & 0xff_ffff
}

/// Properties of an endpoint.
#[derive(Clone, Debug, Default)]
pub struct EndpointConfig {
    /// Accept any IPv4 identification, because kernel and hardware senders choose it. Leaves 16
    /// bits of the ICRC as a check.
    pub any_ip_id: bool,
    /// Notify senders of marked packets, each queue pair's at most this often (IBTA A17.9: the
    /// notification point of DCQCN, where 50 us are usual). Never when `None`.
    pub cnp_interval: Option<Duration>,
}

/// Identifies a queue pair of an endpoint.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct QpId(pub(crate) u32);

/// An event of an endpoint.
#[derive(Debug, PartialEq, Eq)]
pub enum Event {
    /// A message has been acknowledged.
    Sent {
        /// The queue pair.
        qp: QpId,
        /// Its identifier, as posted.
        id: u64,
        /// Its buffer.
        data: Vec<u8>,
    },
    /// A message has arrived, in a buffer that was posted.
    Received {
        /// The queue pair.
        qp: QpId,
        /// The message.
        data: Vec<u8>,
        /// Its immediate data.
        immediate: Option<u32>,
    },
    /// A connection has failed; it has no further events.
    Failed {
        /// The queue pair.
        qp: QpId,
        /// The reason.
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
    /// A message's packets arrived in an order that is not possible.
    #[error("the packets of a message are not in order")]
    InvalidRequest,
    /// The other side sent a message that is longer than [`QpConfig::max_message`].
    #[error("a message is longer than the limit of {0} bytes")]
    MessageTooLong(usize),
}

/// Why a queue pair cannot be created.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SetupError {
    /// The number is in use.
    #[error("queue pair {:#x} exists already", .0.get())]
    Exists(Qpn),
    /// Not a multiple of 4 from 256 to 4096. Between endpoints of this crate, the path MTU need not
    /// be one of IBTA's.
    #[error("path MTU {0}: must be a multiple of 4, 256 to 4096")]
    Mtu(usize),
    /// One address is IPv4, the other IPv6.
    #[error("{remote} is not of the address family of {local}")]
    Family {
        /// This endpoint's address.
        local: IpAddr,
        /// The other side's address.
        remote: IpAddr,
    },
}

/// Datagrams to be sent in one system call: all have `segment_size` bytes, except that the last may
/// be shorter.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Transmit {
    /// Source port.
    pub port: u16,
    /// Destination; port 4791.
    pub to: IpAddr,
    /// Length of each datagram when there is more than one.
    pub segment_size: Option<usize>,
    /// Bytes in the buffer.
    pub len: usize,
}
