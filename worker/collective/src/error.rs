//! Errors of a communicator.

use std::net::IpAddr;
use std::time::Duration;

use netsum_common::limits::MTU_OVERHEAD;

use crate::numeric::element::Dtype;

/// IPv4 and ICMP, around the data that `ping -s` counts.
const PING_HEADERS: u32 = 28;

/// An element of one of several tensors, both counted from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    /// Which tensor.
    pub tensor: usize,
    /// Its element.
    pub element: usize,
}

fn stretch(first: &Position, last: &Position) -> String {
    if first.tensor == last.tensor {
        let Position { tensor, element } = first;
        return format!(
            "tensor {tensor}: elements {element}..{} contain an infinity or a NaN",
            last.element + 1
        );
    }
    format!(
        "tensors {} to {}, from element {} of the first to element {} of the last, contain an \
         infinity or a NaN",
        first.tensor, last.tensor, first.element, last.element
    )
}

/// A likely reason why a neighbour did not answer.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum UnreachableReason {
    /// Nothing arrives from it.
    Silent,
    /// The same in a job with a list of peers, whose order may differ between ranks.
    SilentOrMisordered,
    /// Small packets arrive from it, but none of the path MTU, in bytes.
    PathMtuTooLarge(u32),
    /// It sends over connections of an earlier session.
    EarlierSession,
    /// A rank at this address sends here as if its list of peers had another order.
    MisorderedPeers(IpAddr),
    /// The controller has reported the cause, and what to do.
    Reported(String),
}

impl std::fmt::Display for UnreachableReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Silent => {
                f.write_str(": check that it runs, and that UDP port 4791 is not blocked")
            }
            Self::SilentOrMisordered => f.write_str(
                ": check that it runs, that UDP port 4791 is not blocked, and that NETSUM_PEERS \
                 has the same order at all ranks",
            ),
            Self::PathMtuTooLarge(mtu) => write!(
                f,
                " with packets of the job's path MTU, {mtu} bytes, but small ones arrive: a hop on \
                 the path has an MTU below {}. Raise it there (`ping -M do -s {} ADDRESS` shows \
                 whether it is enough), or give the job a smaller one: `netsum job create --mtu`, \
                 or NETSUM_MTU at all ranks",
                mtu + MTU_OVERHEAD,
                mtu + MTU_OVERHEAD - PING_HEADERS,
            ),
            Self::Reported(cause) => write!(f, ": {cause}"),
            Self::EarlierSession => f.write_str(
                ": its process is still in an earlier session: end all ranks, and start them \
                 together",
            ),
            Self::MisorderedPeers(ip) => write!(
                f,
                ": {ip} sends to this rank as if the ranks had another order: set NETSUM_PEERS to \
                 the same order at all ranks"
            ),
        }
    }
}

/// Why a call on a communicator failed. The communicator can still be used after
/// [`Error::NonFinite`], [`Error::NonFiniteTensors`], [`Error::Argument`], [`Error::InFlight`] and
/// [`Error::MessageSize`]; after other errors all further calls return the same error. If only some
/// ranks get [`Error::Argument`] or [`Error::MessageSize`] for a call, the others get
/// [`Error::Mismatch`], and no rank can use the communicator afterwards.
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
        /// Its answer, or why the connection failed.
        reason: String,
    },
    /// The socket failed.
    #[error("socket {ip}: {reason}")]
    Socket {
        /// The local address.
        ip: IpAddr,
        /// The system's error.
        reason: String,
    },
    /// The RDMA adapter cannot be used, or has failed.
    #[error("adapter {device}: {reason}")]
    Adapter {
        /// Its name.
        device: String,
        /// The error.
        reason: String,
    },
    /// A neighbour did not answer when the connections were opened.
    #[error("rank {rank} ({ip}) did not answer within {after:?}{reason}")]
    Unreachable {
        /// The previous rank in the ring.
        rank: u32,
        /// Its address.
        ip: IpAddr,
        /// How long this rank waited.
        after: Duration,
        /// A likely reason.
        reason: UnreachableReason,
    },
    /// A rank has died, or cannot be reached.
    #[error("rank {rank} died: {reason}")]
    RankDied {
        /// The rank.
        rank: u32,
        /// How another rank detected it.
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
    /// Elements that are infinite or NaN at any rank, in an operation of over 4,096 floats. The
    /// results of blocks with such elements are NaN at every rank; other results are sums. The
    /// communicator can still be used.
    #[error("elements {first}..{end} contain an infinity or a NaN at some rank")]
    NonFinite {
        /// First element of the first block concerned.
        first: usize,
        /// One after the last element of that block.
        end: usize,
    },
    /// The same of an all-reduce of several tensors: from the first to the last element of the
    /// first block concerned.
    #[error("{} at some rank", stretch(.first, .last))]
    NonFiniteTensors {
        /// First element.
        first: Position,
        /// Last element.
        last: Position,
    },
    /// The communicator was dropped before the operation was complete.
    #[error("the communicator was closed before this operation was complete")]
    Closed,
    /// An argument is not valid. The communicator can still be used, if all ranks refuse the same
    /// call.
    #[error("{0}")]
    Argument(String),
    /// An operation in flight uses the same memory. This is not announced to other ranks, where
    /// that operation may be complete already: wait for it, and call again.
    #[error("{0}")]
    InFlight(String),
    /// This process was forked from the one that connected.
    #[error(
        "this process was forked from the one that connected, and has neither its threads nor its \
         place in the job: connect after the fork, or start processes without fork (in Python by \
         multiprocessing's \"spawn\" or \"forkserver\")"
    )]
    Forked,
    /// The message size of the job has no room for this type.
    #[error("{dtype}: {reason}")]
    MessageSize {
        /// Data type of the slice.
        dtype: Dtype,
        /// The sizes that have room.
        reason: String,
    },
    /// The controller has reported that the job has failed.
    #[error("the job has failed: {reason}")]
    JobFailed {
        /// The controller's reason.
        reason: String,
    },
    /// The ranks contradict each other, because of a defect of netsum or packets of foreign hosts.
    #[error("protocol error: {0}")]
    Protocol(String),
}

impl Error {
    /// The error that the other ranks get for this error of rank `rank`. A local error becomes
    /// [`Error::RankDied`].
    #[must_use]
    pub fn for_others(&self, rank: u32) -> Self {
        match self {
            Self::RankDied { .. }
            | Self::RankLeft { .. }
            | Self::Mismatch(_)
            | Self::JobFailed { .. }
            | Self::Protocol(_) => self.clone(),
            Self::Config(_)
            | Self::Controller { .. }
            | Self::Socket { .. }
            | Self::Adapter { .. }
            | Self::Unreachable { .. }
            | Self::NonFinite { .. }
            | Self::NonFiniteTensors { .. }
            | Self::Closed
            | Self::Argument(_)
            | Self::InFlight(_)
            | Self::Forked
            | Self::MessageSize { .. } => Self::RankDied { rank, reason: self.to_string() },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_path_mtu_and_a_silent_rank_have_different_texts() {
        let text = |reason| {
            let (ip, after) = ([10, 0, 0, 2].into(), Duration::from_secs(10));
            Error::Unreachable { rank: 1, ip, after, reason }.to_string()
        };
        let silent = text(UnreachableReason::Silent);
        assert!(
            silent.ends_with("10s: check that it runs, and that UDP port 4791 is not blocked"),
            "{silent}"
        );
        let large = text(UnreachableReason::PathMtuTooLarge(1024));
        assert!(large.contains("path MTU, 1024 bytes") && large.contains("below 1108"), "{large}");
    }

    #[test]
    fn elements_of_tensors_are_named() {
        let text = |a, b, c, d| {
            let (first, last) =
                (Position { tensor: a, element: b }, Position { tensor: c, element: d });
            Error::NonFiniteTensors { first, last }.to_string()
        };
        assert_eq!(
            text(2, 5, 2, 9),
            "tensor 2: elements 5..10 contain an infinity or a NaN at some rank"
        );
        assert_eq!(
            text(0, 70, 3, 1),
            "tensors 0 to 3, from element 70 of the first to element 1 of the last, contain an \
             infinity or a NaN at some rank"
        );
    }
}
