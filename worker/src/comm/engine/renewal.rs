//! Connecting anew, for another window: after which operation, agreed by all ranks.
//!
//! Rank 0 sends [`Frame::Renew`] around the plain ring before it starts an operation, and starts it only when the frame is back.
//! Nobody can complete an operation without rank 0's part, so everybody knows before it has completed this one, however far ahead
//! or behind it is. Whoever has completed it starts no other one over these connections, and leaves when it knows that all have
//! completed it: then nobody needs anybody's messages any more, but for the news that all have completed it. Of itself the next
//! rank knows, and of all others it hears from this one alone; so this one stays until it has acknowledged that, which it does
//! before it can leave itself.
//!
//! It makes no difference who sums: ranks that have given the box up get to it again.

use super::Engine;
use crate::comm::error::Error;
use crate::comm::frame::Frame;
use crate::comm::transport::Transport;

/// What this rank knows about it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Renewal {
    /// The last operation over these connections.
    after: u64,
    /// All ranks know of it.
    agreed: bool,
    /// The next rank has been told that this one has completed it.
    told: bool,
    /// The first frame that has told it that all others have.
    news: Option<u64>,
}

impl Engine {
    /// Asks all ranks to connect anew after the operation that this one, rank 0, starts next.
    pub fn ask_to_renew(&mut self, t: &mut dyn Transport) {
        if self.renewal.is_some() || self.failure.is_some() || self.left != 0 {
            return;
        }
        let after = self.own().started + 1;
        self.renewal = Some(Renewal { after, agreed: false, told: false, news: None });
        self.tell(t, &Frame::Renew { after });
    }

    /// Whether some rank may not have heard yet what this one has asked for. Not for ever: who is silent is dead, and who has left
    /// lets no operation start.
    pub fn waits_for_consent(&self) -> bool {
        self.failure.is_none() && self.left == 0 && self.renewal.is_some_and(|r| !r.agreed)
    }

    pub(super) fn on_renew(&mut self, t: &mut dyn Transport, after: u64) {
        let completed = self.own().completed;
        match &mut self.renewal {
            Some(own) if self.place.rank == 0 && own.after == after => own.agreed = true,
            None if self.place.rank != 0 && after > completed => {
                self.renewal = Some(Renewal { after, agreed: true, told: false, news: None });
                self.tell(t, &Frame::Renew { after });
            }
            _ => {
                let text = format!("rank {} asks to connect anew after operation {after}", self.previous());
                self.fail(t, Error::Protocol(text));
            }
        }
    }

    /// Whether this rank has completed the last operation over these connections.
    pub fn is_to_renew(&self) -> bool {
        let completed = self.progress[self.place.rank as usize].completed;
        self.failure.is_none() && self.renewal.is_some_and(|r| r.agreed && r.after == completed)
    }

    /// Whether all ranks have completed it.
    pub fn all_have_completed(&self) -> bool {
        self.renewal.is_some_and(|r| self.progress.iter().all(|p| p.completed >= r.after))
    }

    /// Whether all ranks have completed it, and the next one knows of all others. It hears of this one.
    pub fn may_part(&mut self, t: &mut dyn Transport) -> bool {
        if self.renewal.is_some_and(|r| !r.told) {
            self.tell_status(t);
        }
        let news = self.renewal.and_then(|r| r.news);
        self.all_have_completed() && news.is_some_and(|news| self.plain_acknowledged >= news)
    }

    /// The next rank has just been told all that this one knows.
    pub(super) fn has_told(&mut self) {
        let (completed, frame, next) = (self.is_to_renew(), self.plain_ids, self.next() as usize);
        if let Some(renewal) = &mut self.renewal {
            renewal.told |= completed;
            let mut others = self.progress.iter().enumerate().filter(|(rank, _)| *rank != next);
            if renewal.news.is_none() && others.all(|(_, p)| p.completed >= renewal.after) {
                renewal.news = Some(frame);
            }
        }
    }
}
