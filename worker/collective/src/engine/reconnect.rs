//! The ranks agree on the operation after which they reconnect.
//!
//! Rank 0 sends [`Frame::Reconnect`] around the ring of bypass connections before it starts an
//! operation. Each rank raises the frame's number to that of the latest operation that it has
//! started itself, and starts no other until the second frame arrives. When the first frame is
//! back, rank 0 knows the latest operation that any rank has started, or its own next one if that
//! is later. A second frame announces it to all: it is the last operation over these connections.
//! With one operation at a time it is rank 0's next one, because no rank can be further ahead.
//!
//! A rank that has completed the last operation joins again at once, in a thread that also drives
//! the old connections: other ranks may still fall back, and need this rank. A join succeeds only
//! when all ranks join. So a rank that has joined knows that all have completed the last operation,
//! and that nobody needs the old connections: only then does it leave them. If a rank cannot join,
//! it keeps its connections. Later operations start over the new connections, and none is open in
//! between.
//!
//! It does not matter whether the box sums: ranks that have given it up return to it this way.

use super::{Engine, MAX_OPEN};
use crate::channels::Channels;
use crate::error::Error;
use crate::frame::Frame;

/// The state of a coming reconnect.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Reconnect {
    /// The last operation over these connections. No later one may be started until all agree.
    after: u64,
    /// `after` is final.
    agreed: bool,
}

impl Engine {
    /// Proposes to all ranks to reconnect after the operation that this one, rank 0, starts next,
    /// or a later one that another rank has started.
    pub fn propose_reconnect(&mut self, channels: &mut dyn Channels) {
        if self.reconnect.is_some() || self.failure.is_some() || self.left != 0 {
            return;
        }
        let after = self.own().started + 1;
        self.reconnect = Some(Reconnect { after, agreed: false });
        self.send_frame(channels, &Frame::Reconnect { after, decided: false });
    }

    /// Whether a reconnect has been proposed or agreed.
    pub fn reconnects(&self) -> bool {
        self.reconnect.is_some()
    }

    /// Whether no operation may be started, because the ranks have not agreed yet. This ends at the
    /// latest when a rank is found dead or leaves.
    pub fn waits_for_consent(&self) -> bool {
        self.failure.is_none() && self.left == 0 && self.reconnect.is_some_and(|r| !r.agreed)
    }

    /// Whether an operation must wait: for the ranks to agree, for the reconnect, for the oldest
    /// open operation, or behind refused ones. After a failure this is false, and starting an
    /// operation returns the error.
    pub fn is_full(&self) -> bool {
        self.failure.is_none() && self.left == 0 && (self.refused > 0 || !self.has_room())
    }

    pub(super) fn has_room(&self) -> bool {
        let started = self.progress[self.member.rank as usize].started;
        let last = self.reconnect.is_some_and(|r| !r.agreed || started >= r.after);
        !last && self.operations.len() < MAX_OPEN
    }

    pub(super) fn on_reconnect(&mut self, channels: &mut dyn Channels, after: u64, decided: bool) {
        let (first, own) = (self.member.rank == 0, *self.own());
        let reconnect = match self.reconnect {
            // The first frame is back: it has the latest operation of all ranks.
            Some(r) if first && !r.agreed && !decided && after >= r.after => {
                Reconnect { after, agreed: true }
            }
            // The second frame is back.
            Some(r) if first && r.agreed && decided && after == r.after => return,
            // This rank could not join, and has stayed, before the second frame came back.
            _ if first && decided && after <= own.completed => return,
            // A first frame; perhaps the others have stayed, and this rank is about to.
            r if !first && !decided && r.is_none_or(|r| r.agreed) && after > own.completed => {
                Reconnect { after: after.max(own.started), agreed: false }
            }
            Some(r) if !first && !r.agreed && decided && after >= r.after => {
                Reconnect { after, agreed: true }
            }
            _ => {
                let previous = self.rank_of(self.previous());
                let text =
                    format!("rank {previous} sent an impossible reconnect after operation {after}");
                self.fail(channels, Error::Protocol(text));
                return;
            }
        };
        self.reconnect = Some(reconnect);
        self.send_frame(
            channels,
            &Frame::Reconnect { after: reconnect.after, decided: reconnect.agreed },
        );
    }

    /// Whether this rank has completed the last operation over these connections.
    pub fn must_reconnect(&self) -> bool {
        let completed = self.progress[self.member.rank as usize].completed;
        self.failure.is_none() && self.reconnect.is_some_and(|r| r.agreed && r.after == completed)
    }

    /// Keeps the present connections, when this rank could not join again.
    pub fn keep_connections(&mut self) {
        // The others may have agreed to try again.
        if self.must_reconnect() {
            self.reconnect = None;
        }
    }
}
