//! The transport of the engine's connections: netsum's own sockets, or an adapter.
//!
//! The other ranks must know the queue pair numbers before there are connections, and an adapter
//! chooses its numbers itself. So a network is opened, returns its numbers, and connects once those
//! of all ranks are known.

use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use netsum_collective::channels::Channels;
use netsum_collective::error::Error;
use netsum_collective::queue_pairs::{QpInfo, RankQpInfo, SourcePorts};
use netsum_collective::report::Traffic;
use netsum_collective::shape::JobShape;

/// A network without connections.
pub(crate) trait Network: Send {
    /// Creates the queue pairs of a rank. Returns its numbers for each ring, and for the bypass
    /// connections.
    fn numbers(&mut self, shape: &JobShape) -> Result<(Vec<QpInfo>, QpInfo), Error>;
    /// Connects the queue pairs with the neighbours of `rank`.
    fn connect(
        self: Box<Self>,
        shape: &JobShape,
        rank: u32,
        ranks: &[RankQpInfo],
    ) -> Result<Box<dyn Connections>, Error>;
    /// Whether packets have IPv4 identifications that a socket cannot predict.
    fn any_ip_id(&self) -> bool;
    /// Whether it does selective retransmission.
    fn selective(&self) -> bool;
    /// The UDP ports that packets are sent from.
    fn ports(&self) -> SourcePorts;
}

/// Connections that somebody has to drive.
pub(crate) trait Connections: Channels + Send {
    /// Opens the connections, once there are buffers to receive into. Nothing is sent before.
    fn start(&mut self) -> Result<(), Error>;
    /// Receives what has arrived and sends what may be sent. If that was nothing, waits for
    /// something to do, at most until `until`. Returns whether anything was received or sent.
    fn drive(&mut self, until: Instant) -> Result<bool, Error>;
    /// How long to let packets gather before the next drive. A drive before receives nothing.
    fn batch_delay(&self) -> Option<Duration> {
        None
    }
    /// Acknowledges at the next drive all that has been received.
    fn acknowledge_all(&mut self) {}
    /// When to drive at the latest, if nothing arrives.
    fn next_timeout(&self) -> Option<Instant>;
    /// Readable when something has arrived.
    fn fd(&self) -> BorrowedFd<'_>;
    /// Packets and bytes, where this program counts them and not an adapter.
    fn traffic(&self) -> Option<Traffic>;
    /// How often an adapter has given a connection up, which was then restarted.
    fn restarts(&self) -> u64;
    /// Whether the previous rank is still in an earlier session, as far as its packets tell.
    fn previous_is_in_earlier(&self) -> bool {
        false
    }
    /// An address that has sent packets which belong to no connection here.
    fn stray(&self) -> Option<IpAddr> {
        None
    }
    /// The name of the transport, for people.
    fn transport_name(&self) -> String;
}

/// When a rank's address is bound, which only one socket can have at a time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Bind {
    /// At once.
    Now,
    /// When the network connects: other connections still use the address.
    Later,
}
