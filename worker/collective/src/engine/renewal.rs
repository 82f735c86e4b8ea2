//! Connecting anew: after which operation, agreed by all ranks.
//!
//! Rank 0 sends [`Frame::Renew`] around the plain ring before it starts an operation. Each rank
//! raises the number in it to that of the latest operation that it has started itself, and starts
//! no other until it hears more. When the frame is back, rank 0 knows the latest operation that
//! anybody has started, or its own next one if that is later, and a second frame tells all: that is
//! the last one over these connections. With one operation at a time it is rank 0's next one, as
//! nobody can be ahead of it by more.
//!
//! Whoever has completed the last one joins again at once, in a thread that goes on driving these
//! connections meanwhile: others may still find that the box is gone, and need this rank. It takes
//! all to join. So who has joined knows that all have completed the last one, and that nobody needs
//! these connections any more: only then does it leave them. Where the ranks cannot join they stay,
//! each when it has found out. Later operations are started over the new connections, and there is
//! none open in between.
//!
//! It makes no difference who sums: ranks that have given the box up get to it again.

use super::{Engine, MAX_OPEN};
use crate::channels::Channels;
use crate::error::Error;
use crate::frame::Frame;

/// What this rank knows about it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Renewal {
    /// The last operation over these connections; before that is agreed, none that is later may be
    /// started.
    after: u64,
    /// It is decided.
    agreed: bool,
}

impl Engine {
    /// Asks all ranks to connect anew, after the operation that this one, rank 0, starts next if
    /// nobody is further.
    pub fn ask_to_renew(&mut self, channels: &mut dyn Channels) {
        if self.renewal.is_some() || self.failure.is_some() || self.left != 0 {
            return;
        }
        let after = self.own().started + 1;
        self.renewal = Some(Renewal { after, agreed: false });
        self.tell(channels, &Frame::Renew { after, decided: false });
    }

    /// Whether the ranks have agreed to connect anew, or have still to.
    pub fn renews(&self) -> bool {
        self.renewal.is_some()
    }

    /// Whether the ranks have still to agree after which operation they connect anew: none may be
    /// started. Not for ever: who is silent is dead, and who has left lets no operation start.
    pub fn waits_for_consent(&self) -> bool {
        self.failure.is_none() && self.left == 0 && self.renewal.is_some_and(|r| !r.agreed)
    }

    /// Whether an operation must wait: for consent, for connections anew, for the oldest one that
    /// is open, or behind refused ones. Where none can be
    /// started any more, starting it says so.
    pub fn is_full(&self) -> bool {
        self.failure.is_none() && self.left == 0 && (self.refused > 0 || !self.has_room())
    }

    pub(super) fn has_room(&self) -> bool {
        let started = self.progress[self.member.rank as usize].started;
        let last = self.renewal.is_some_and(|r| !r.agreed || started >= r.after);
        !last && self.operations.len() < MAX_OPEN
    }

    pub(super) fn on_renew(&mut self, channels: &mut dyn Channels, after: u64, decided: bool) {
        let (first, own) = (self.member.rank == 0, *self.own());
        let renewal = match self.renewal {
            // All have told which operation is their latest.
            Some(r) if first && !r.agreed && !decided && after >= r.after => {
                Renewal { after, agreed: true }
            }
            // All know.
            Some(r) if first && r.agreed && decided && after == r.after => return,
            // This one could not join, and has stayed, before it heard that all know.
            _ if first && decided && after <= own.completed => return,
            // Or the others have stayed, and this one is about to.
            r if !first && !decided && r.is_none_or(|r| r.agreed) && after > own.completed => {
                Renewal { after: after.max(own.started), agreed: false }
            }
            Some(r) if !first && !r.agreed && decided && after >= r.after => {
                Renewal { after, agreed: true }
            }
            _ => {
                let previous = self.name(self.previous());
                let text = format!("rank {previous} asks to connect anew after operation {after}");
                self.fail(channels, Error::Protocol(text));
                return;
            }
        };
        self.renewal = Some(renewal);
        self.tell(channels, &Frame::Renew { after: renewal.after, decided: renewal.agreed });
    }

    /// Whether this rank has completed the last operation over these connections.
    pub fn is_to_renew(&self) -> bool {
        let completed = self.progress[self.member.rank as usize].completed;
        self.failure.is_none() && self.renewal.is_some_and(|r| r.agreed && r.after == completed)
    }

    /// This rank could not join again: it goes on over the present connections.
    pub fn stay(&mut self) {
        // The others may have agreed to try again.
        if self.is_to_renew() {
            self.renewal = None;
        }
    }
}
