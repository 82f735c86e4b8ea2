//! What can go wrong with a communicator.

use std::net::IpAddr;
use std::time::Duration;

use crate::numeric::element::Dtype;

/// An element of one of several tensors, both counted from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    /// Which tensor.
    pub tensor: usize,
    /// Which of its elements.
    pub element: usize,
}

fn stretch(first: &Position, last: &Position) -> String {
    if first.tensor == last.tensor {
        let Position { tensor, element } = first;
        return format!(
            "tensor {tensor}: elements {element}..{} hold an infinity or a NaN",
            last.element + 1
        );
    }
    format!(
        "tensors {} to {}, from element {} of the first to element {} of the last, hold an infinity or a NaN",
        first.tensor, last.tensor, first.element, last.element
    )
}

/// What is known of a neighbour that did not answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Unanswered {
    /// Nothing.
    Silent,
    /// The same, where a list has all ranks' addresses.
    SilentOnList,
    /// Packets arrive from it, but none of the path MTU, which is so many bytes.
    Large(u32),
    /// It sends over connections of an earlier session.
    Earlier,
    /// This rank sends here as if the ranks had other places in the list.
    OtherPlace(IpAddr),
}

impl std::fmt::Display for Unanswered {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Silent => f.write_str(": is it running, and does UDP port 4791 get through?"),
            Self::SilentOnList => f.write_str(
                ": is it running, does UDP port 4791 get through, and has NETSUM_PEERS the same order at all ranks?",
            ),
            Self::Large(mtu) => write!(
                f,
                " with packets of the job's path MTU, {mtu} bytes; small ones get through: a hop on the way has an MTU below {}. Raise it \
                 there (`ping -M do -s {} ADDRESS` shows whether it is enough), or make the job's smaller: `netsum job create --mtu`, or \
                 NETSUM_MTU at all ranks",
                mtu + 80,
                mtu + 52,
            ),
            Self::Earlier => f.write_str(": its process is still in an earlier session; end all ranks, and start them together"),
            Self::OtherPlace(ip) => write!(
                f,
                ": {ip} sends to this rank as if the ranks had other places; NETSUM_PEERS must have the same order at all ranks"
            ),
        }
    }
}

/// Why a call on a communicator failed. Except after [`Error::NonFinite`],
/// [`Error::NonFiniteTensors`], [`Error::Argument`], [`Error::InFlight`] and [`Error::Length`] the
/// communicator is of no more use: all further calls give the same error. So it is where one rank
/// alone refuses a call by [`Error::Argument`] or [`Error::Length`]: the others get
/// [`Error::Mismatch`].
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
    #[error("rank {rank} ({ip}) did not answer within {after:?}{why}")]
    Unreachable {
        /// The previous rank in the ring.
        rank: u32,
        /// Its address.
        ip: IpAddr,
        /// How long was waited.
        after: Duration,
        /// What is known of it.
        why: Unanswered,
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
    /// Elements that are infinite or NaN, at any rank. All results of the messages that have them
    /// are NaN at every rank, the others are sums. The communicator can still be used.
    #[error("elements {first}..{end} hold an infinity or a NaN at some rank")]
    NonFinite {
        /// First element of the first message concerned.
        first: usize,
        /// Behind the last element of that message.
        end: usize,
    },
    /// The same of an all-reduce of several tensors: from the first to the last element of the
    /// first message concerned.
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
    /// What was called for makes no sense here; the communicator can still be used, if all ranks
    /// refuse the same call.
    #[error("{0}")]
    Argument(String),
    /// The memory is that of an operation in flight. Other ranks may find theirs done already, so
    /// they are not told: wait for that one, and call again.
    #[error("{0}")]
    InFlight(String),
    /// This process was forked from the one that connected.
    #[error(
        "this process was forked from the one that connected, and has neither its threads nor its place in the job: connect after the fork, \
         or start processes anew (in Python by multiprocessing's \"spawn\" or \"forkserver\")"
    )]
    Forked,
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

impl Error {
    /// What the other ranks are told of an error that a rank has had: of its own troubles, that it
    /// is lost to them, and why.
    pub(crate) fn told_by(&self, rank: u32) -> Self {
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
            | Self::Length { .. } => Self::RankDied { rank, reason: self.to_string() },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_that_drops_large_packets_is_told_from_a_rank_that_is_not_there() {
        let text = |why| {
            let (ip, after) = ([10, 0, 0, 2].into(), Duration::from_secs(10));
            Error::Unreachable { rank: 1, ip, after, why }.to_string()
        };
        let silent = text(Unanswered::Silent);
        assert!(
            silent.ends_with("within 10s: is it running, and does UDP port 4791 get through?"),
            "{silent}"
        );
        let large = text(Unanswered::Large(1024));
        assert!(large.contains("path MTU, 1024 bytes") && large.contains("below 1104"), "{large}");
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
            "tensor 2: elements 5..10 hold an infinity or a NaN at some rank"
        );
        assert_eq!(
            text(0, 70, 3, 1),
            "tensors 0 to 3, from element 70 of the first to element 1 of the last, hold an infinity or a NaN at some rank"
        );
    }
}
