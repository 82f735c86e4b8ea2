//! What can go wrong with a communicator.

use std::net::IpAddr;
use std::time::Duration;

use crate::numeric::element::Dtype;

/// Why a call on a communicator failed. Except after [`Error::NonFinite`] and [`Error::Length`] the communicator is of
/// no more use: all further calls give the same error.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The configuration contradicts itself or the job.
    #[error("{0}")]
    Config(String),
    /// The controller refused, could not be reached, or not all ranks joined in time.
    #[error("controller {address}: {reason}")]
    Controller {
        /// Host and port.
        address: String,
        /// What it said, or what happened to the connection.
        reason: String,
    },
    /// The socket failed.
    #[error("socket {ip}: {reason}")]
    Socket {
        /// The local address.
        ip: IpAddr,
        /// What the system said.
        reason: String,
    },
    /// The RDMA adapter cannot be used, or has failed.
    #[error("adapter {device}: {reason}")]
    Adapter {
        /// Its name.
        device: String,
        /// What is wrong.
        reason: String,
    },
    /// A neighbour did not answer when the connections were opened.
    #[error(
        "rank {rank} ({ip}) did not answer within {after:?}: is it running, and does UDP port 4791 get through?"
    )]
    Unreachable {
        /// The previous rank in the ring.
        rank: u32,
        /// Its address.
        ip: IpAddr,
        /// How long was waited.
        after: Duration,
    },
    /// A rank has died, or the network to it has.
    #[error("rank {rank} died: {reason}")]
    RankDied {
        /// The rank.
        rank: u32,
        /// How that was noticed.
        reason: String,
    },
    /// A rank has left in good order, but is still needed.
    #[error("rank {rank} has left the job, but this operation needs it")]
    RankLeft {
        /// The rank.
        rank: u32,
    },
    /// The ranks called for different operations.
    #[error("{0}")]
    Mismatch(String),
    /// Elements that are infinite or no numbers, at any rank. The slice keeps its own elements there. The communicator
    /// can still be used.
    #[error("elements {first}..{end} hold an infinity or a NaN at some rank")]
    NonFinite {
        /// First element of the first message concerned.
        first: usize,
        /// Behind the last element of that message.
        end: usize,
    },
    /// The message size of the job has no room for this type.
    #[error("{dtype}: {reason}")]
    Length {
        /// Data type of the slice.
        dtype: Dtype,
        /// What would be right.
        reason: String,
    },
    /// The controller says that the job has failed.
    #[error("the job has failed: {reason}")]
    JobFailed {
        /// The controller's words.
        reason: String,
    },
    /// The ranks contradict each other: a defect of netsum, or foreign packets.
    #[error("protocol error: {0}")]
    Protocol(String),
}
