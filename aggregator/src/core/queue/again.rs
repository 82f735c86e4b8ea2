//! Jobs that have waited with an earlier daemon, which was killed. The commands that wait with them come back by themselves and
//! say since when they wait, so each has its age again. Nobody is admitted before all have had time to come back: the first
//! would otherwise get what an older one waits for. And a job that the earlier daemon has created, without being able to say
//! so, is kept for whoever asks for it, and not for ever.

#[cfg(test)]
mod tests;

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::super::{Action, Controller};

/// How long those that come back are waited for, from the first one on.
pub const RETURN: Duration = Duration::from_secs(2);
/// How long a job is kept that nobody has been told of.
pub const UNCLAIMED: Duration = Duration::from_secs(30);

/// A job that has come out of the queue.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Handed {
    /// Since when it had waited, which is what its command knows it by.
    since: u64,
    /// Its command has been told, or is just about to be.
    told: bool,
    /// When it is given up.
    #[serde(skip)]
    give_up: Option<Instant>,
}

impl Handed {
    pub(super) fn new(since: u64) -> Self {
        Self { since, told: false, give_up: None }
    }
}

/// Whether admission waits for others to come back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in super::super) enum Return {
    /// Nobody has come back so far.
    #[default]
    Nobody,
    /// Somebody has.
    Begun,
    /// Until then.
    Until(Instant),
    /// All have had their time.
    Over,
}

impl Controller {
    /// Says when this daemon began, by the clock of [`Arrival`](super::Arrival): who waits since before that comes back.
    pub fn set_began(&mut self, began: u64) {
        self.began = began;
    }

    /// Whether those are waited for that have waited with an earlier daemon.
    pub fn is_waiting_for_others(&self) -> bool {
        matches!(self.comeback, Return::Begun | Return::Until(_))
    }

    /// Somebody comes who waits since then.
    pub(super) fn note_return(&mut self, since: u64) {
        if since < self.began && self.comeback == Return::Nobody {
            self.comeback = Return::Begun;
        }
    }

    /// Looks at the clock. Whether those who come back have now had their time, so that [`admit`](Self::admit) admits again.
    pub fn end_return(&mut self, now: Instant) -> bool {
        match self.comeback {
            Return::Begun => self.comeback = Return::Until(now + RETURN),
            Return::Until(end) if end <= now => {
                self.comeback = Return::Over;
                return true;
            }
            _ => {}
        }
        false
    }

    /// Whether a job has been created for a command that waits since then, and comes for it.
    pub fn claim(&mut self, name: &str, since: u64) -> bool {
        let handed = self.handed.get_mut(name).filter(|h| since > 0 && h.since == since);
        handed.map(|h| h.give_up = None).is_some()
    }

    /// The command that has waited for a job is about to be told of it.
    pub fn tell(&mut self, name: &str) {
        if let Some(handed) = self.handed.get_mut(name) {
            handed.told = true;
        }
    }

    /// Of jobs that were taken over, those that nobody was told of are kept for a while.
    pub(in super::super) fn restore_handed(
        &mut self,
        handed: impl IntoIterator<Item = (String, Handed)>,
        now: Instant,
    ) {
        for (name, handed) in handed {
            if self.jobs.contains_key(&name) {
                let give_up = (!handed.told).then(|| now + UNCLAIMED);
                self.handed.insert(name, Handed { give_up, ..handed });
            }
        }
    }

    /// Deletes jobs for which nobody has come back.
    pub(in super::super) fn give_up_unclaimed(&mut self, now: Instant) -> Vec<Action> {
        let late = |h: &Handed| h.give_up.is_some_and(|end| end <= now);
        let names: Vec<String> =
            self.handed.iter().filter(|(_, h)| late(h)).map(|(n, _)| n.clone()).collect();
        names.iter().flat_map(|name| self.delete_job(name).unwrap_or_default()).collect()
    }
}
