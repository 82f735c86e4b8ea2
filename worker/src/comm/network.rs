//! What the engine's connections run over: sockets of ours, or an adapter.
//!
//! Queue pair numbers go to the other ranks before there are connections. An adapter chooses them
//! itself. So a network is opened, tells its numbers, and is connected once those of all ranks are
//! known.

use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::time::Instant;

use netsum_collective::channels::Channels;
use netsum_collective::error::Error;
use netsum_collective::queue_pairs::{Numbers, RankNumbers};
use netsum_collective::report::Traffic;
use netsum_collective::shape::JobShape;

/// A network without connections.
pub(crate) trait Network: Send {
    /// Makes the queue pairs of a rank; its numbers for each ring, and for the plain connections.
    fn numbers(&mut self, shape: &JobShape) -> Result<(Vec<Numbers>, Numbers), Error>;
    /// Connects them with the neighbours of `rank`.
    fn connect(
        self: Box<Self>,
        shape: &JobShape,
        rank: u32,
        ranks: &[RankNumbers],
    ) -> Result<Box<dyn Connections>, Error>;
    /// Whether packets leave with IPv4 identifications that a socket cannot guess.
    fn any_ip_id(&self) -> bool;
    /// Whether it does selective retransmission.
    fn selective(&self) -> bool;
}

/// Connections that somebody has to drive.
pub(crate) trait Connections: Channels + Send {
    /// Opens them, once buffers are there to receive into. Before that nothing is sent.
    fn start(&mut self) -> Result<(), Error>;
    /// Receives what has arrived and sends what may be sent. Where that was nothing, waits for
    /// something to do, at most until `until`. Whether there was anything.
    fn drive(&mut self, until: Instant) -> Result<bool, Error>;
    /// When to drive at the latest, if nothing arrives.
    fn next_timeout(&self) -> Option<Instant>;
    /// Readable when something has arrived.
    fn fd(&self) -> BorrowedFd<'_>;
    /// What has been counted, where it is this program that counts.
    fn traffic(&self) -> Option<Traffic>;
    /// How often an adapter has given a connection up, which was then started anew.
    fn restarts(&self) -> u64;
    /// Whether the previous rank is still in an earlier session, as far as its packets tell.
    fn previous_is_in_earlier(&self) -> bool {
        false
    }
    /// Who sent something here that is of none of these connections.
    fn stray(&self) -> Option<IpAddr> {
        None
    }
    /// What they run over, for people.
    fn title(&self) -> String;
}

/// When a rank's address, which one socket can have at a time, is bound.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Bind {
    /// At once.
    Now,
    /// When the network is connected: other connections have the address still.
    Later,
}
