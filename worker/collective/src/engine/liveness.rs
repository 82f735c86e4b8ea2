//! Keep-alives, dead ranks, ranks that leave, and failures that end the session for all.
//!
//! Each rank monitors the previous one. The rank after a dead one finds it silent and reports that
//! to its next, and so on around the ring: every living rank is after a dead one, or after a living
//! one that reports it. A rank that waits for others itself ends the session. Otherwise the silent
//! rank may be stopped and continue, and those that wait decide.

use std::time::{Duration, Instant};

use super::operation::Operation;
use super::{Engine, SumMode};
use crate::channels::{Channel, Channels};
use crate::error::Error;
use crate::frame::{Frame, Progress, Reason, VERSION};
use crate::shape::JobShape;

/// How long an operation has stalled before the end of a rank's process ends it.
const ENDED: Duration = Duration::from_millis(500);

impl Engine {
    pub(super) fn on_hello(
        &mut self,
        now: Instant,
        channels: &mut dyn Channels,
        (shape, timeout): (JobShape, Duration),
        rank: u32,
    ) {
        self.hello = Some(now);
        let own = self.settings.shape.named(self.settings.timeout);
        let pairs = own.iter().zip(shape.named(timeout)).filter(|(own, theirs)| *own != theirs);
        let (a, b) = (self.rank_of(self.previous()), self.own_rank());
        let differences: Vec<_> = pairs
            .map(|((name, own), (_, theirs))| {
                format!("{name} is {theirs} at rank {a} and {own} at rank {b}")
            })
            .collect();
        // With another number of ranks the neighbours differ, too.
        if rank != self.previous() && shape.ranks == self.member.ranks {
            let text = format!(
                "connected with rank {} instead of rank {}: check the order of the addresses",
                self.rank_of(rank),
                self.rank_of(self.previous())
            );
            self.fail(channels, Error::Protocol(text));
        } else if !differences.is_empty() {
            let text = differences.join("; ") + ": all ranks must have the same";
            self.fail(channels, Error::Mismatch(text));
        }
    }

    pub(super) fn on_other_version(&mut self, channels: &mut dyn Channels, version: u32) {
        self.greeted = true;
        let text = format!(
            "rank {} has version {version} of the protocol between ranks, rank {} version \
             {VERSION}: all must run the same netsum",
            self.rank_of(self.previous()),
            self.own_rank()
        );
        self.fail(channels, Error::Mismatch(text));
    }

    /// The session's number, which goes around the ring once.
    pub(super) fn on_session(&mut self, channels: &mut dyn Channels, session: u64) {
        match self.session {
            None if !self.settings.shape.is_sealed => {
                self.session = Some(session);
                self.send_frame(channels, &Frame::Session(session));
                // Frames right behind it show at once if it was lost.
                let open: Vec<_> = self.operations.iter().map(|o| o.descriptor).collect();
                open.into_iter().for_each(|d| self.send_frame(channels, &Frame::Operation(d)));
            }
            // It has gone around.
            Some(own) if self.member.rank == 0 && own == session => {}
            _ => {
                let text = format!(
                    "rank {} is in another session than rank {}",
                    self.rank_of(self.previous()),
                    self.own_rank()
                );
                self.fail(channels, Error::Protocol(text));
            }
        }
    }

    pub(super) fn on_status(&mut self, channels: &mut dyn Channels, theirs: &[Progress]) {
        if let Some(rank) = theirs.iter().position(|p| !self.can_be_at(*p)) {
            let text = format!(
                "rank {} cannot have the progress that rank {} reports: {:?}",
                self.rank_of(rank as u32),
                self.rank_of(self.previous()),
                theirs[rank]
            );
            self.fail(channels, Error::Protocol(text));
            return;
        }
        let mut news = false;
        for (rank, (known, reported)) in self.progress.iter_mut().zip(theirs).enumerate() {
            if rank as u32 == self.member.rank {
                continue;
            }
            news |= reported.started > known.started || reported.completed > known.completed;
            known.started = known.started.max(reported.started);
            known.completed = known.completed.max(reported.completed);
        }
        if news {
            self.send_status(channels);
        }
    }

    pub(super) fn send_status(&mut self, channels: &mut dyn Channels) {
        let frame = Frame::Status { ranks: self.progress.clone() };
        self.send_frame(channels, &frame);
    }

    pub(super) fn on_goodbye(&mut self, channels: &mut dyn Channels, origin: u32, completed: u64) {
        if origin >= self.member.ranks || origin == self.member.rank || self.has_left(origin) {
            return;
        }
        if !self.can_be_at(Progress { started: completed, completed }) {
            let text = format!(
                "rank {} leaves after operation {completed}, which it cannot have completed",
                self.rank_of(origin)
            );
            self.fail(channels, Error::Protocol(text));
            return;
        }
        if self.next() != origin {
            self.send_frame(channels, &Frame::Goodbye { origin, completed });
        }
        self.left |= 1 << origin;
        let known = &mut self.progress[origin as usize];
        known.completed = known.completed.max(completed);
        known.started = known.started.max(completed);
        // The leaving rank waits until nobody needs it.
        self.send_status(channels);
        if self.sum_mode == SumMode::Agreeing {
            self.fail(channels, Error::RankLeft { rank: self.rank_of(origin) });
        } else {
            // All ranks that need it receive the goodbye themselves.
            self.give_up(completed, &Error::RankLeft { rank: self.rank_of(origin) });
        }
    }

    /// Ends the session, at this rank and at all others.
    pub fn fail(&mut self, channels: &mut dyn Channels, error: Error) {
        let own = self.member.rank;
        if self.failure.is_none() && self.failures_seen & 1 << own == 0 {
            self.failures_seen |= 1 << own;
            let failure = error.for_others(self.own_rank());
            self.send_frame(channels, &Frame::Failure { origin: own, error: failure });
        }
        self.end(error);
    }

    /// The controller reports that a rank's process has ended without leaving. This ends the session
    /// if an operation has stalled: its last packets may still be on their way.
    pub fn on_ended(&mut self, now: Instant, channels: &mut dyn Channels, place: u32) {
        let waits = !self.operations.is_empty() || self.reconnect.is_some();
        let idle = now.saturating_duration_since(self.last_progress);
        let is_other = place != self.member.rank && !self.has_left(place);
        if waits && idle >= ENDED && self.failure.is_none() && is_other {
            let reason = "its process has ended, as the controller reports".to_owned();
            self.fail(channels, Error::RankDied { rank: self.rank_of(place), reason });
        }
    }

    /// Ends the session because a neighbour has never answered. `why` is the error that this rank's
    /// caller gets.
    pub fn fail_to_connect(&mut self, channels: &mut dyn Channels, why: &Error) {
        let reason = format!("rank {} cannot connect: {why}", self.own_rank());
        let rank = match why {
            Error::Unreachable { rank, .. } => *rank,
            _ => self.rank_of(self.previous()),
        };
        self.fail(channels, Error::RankDied { rank, reason });
    }

    pub(super) fn on_failure(&mut self, channels: &mut dyn Channels, origin: u32, error: Error) {
        if origin >= self.member.ranks || self.failures_seen & 1 << origin != 0 {
            return;
        }
        self.failures_seen |= 1 << origin;
        if self.next() != origin {
            self.send_frame(channels, &Frame::Failure { origin, error: error.clone() });
        }
        self.end(error);
    }

    fn end(&mut self, error: Error) {
        if self.failure.is_none() {
            log::debug!("rank {}: {error}", self.own_rank());
            self.give_up(0, &error);
            self.reductions.clear();
            self.exchange = None;
            self.failure = Some(error);
        }
    }

    /// Notes a contradiction, which ends the session unless another rank's failure explains it in
    /// time.
    pub(super) fn suspect(&mut self, now: Instant, error: Error) {
        self.suspicion.get_or_insert((now + self.settings.stall(), error));
    }

    pub(super) fn on_time(&mut self, now: Instant, channels: &mut dyn Channels) {
        self.look_at_parts(channels);
        // It may continue before the next report.
        let silent = self.silent.take();
        if now >= self.next_keep_alive {
            // After a pause of this rank, frames of the previous one may wait in its socket.
            let has_paused = now >= self.next_keep_alive + self.settings.keep_alive();
            self.next_keep_alive = now + self.settings.keep_alive();
            self.send_status(channels);
            let others = self.next() != self.previous();
            let is_silent = others && !has_paused && self.is_previous_silent(now);
            if is_silent && self.is_open() && self.failure.is_none() {
                self.send_frame(channels, &Frame::Silent { rank: self.previous() });
            }
        }
        if self.failure.is_some() {
            return;
        }
        // Silence between operations ends nothing: a stopped process or machine may continue.
        let waits = !self.operations.is_empty() || self.reconnect.is_some();
        self.waiting = waits.then(|| self.waiting.unwrap_or(now));
        // A dead rank is found earlier.
        let patience = self.settings.timeout * 2;
        if !self.is_open() && self.waiting.is_some_and(|since| now >= since + patience) {
            self.fail_to_open(channels, patience);
        }
        if self.is_previous_silent(now)
            && self.waiting.is_some_and(|since| now >= since + self.settings.stall())
        {
            let own = self.own_rank();
            let mut reason =
                format!("rank {own} has received nothing from it for {:?}", self.settings.timeout);
            // The next rank acknowledges keep-alives, several within this time.
            if self.next() != self.previous()
                && now.saturating_duration_since(self.answered) >= self.settings.timeout / 2
            {
                reason += &format!(
                    ", nor from rank {}: rank {own} itself may be cut off",
                    self.rank_of(self.next())
                );
            }
            self.fail(channels, Error::RankDied { rank: self.rank_of(self.previous()), reason });
            return;
        }
        if let Some((_, error)) = self.suspicion.take_if(|(due, _)| now >= *due) {
            self.fail(channels, error);
            return;
        }
        self.check_progress(now, channels, silent);
    }

    fn is_previous_silent(&self, now: Instant) -> bool {
        self.greeted
            && !self.has_left(self.previous())
            && now.saturating_duration_since(self.last_received) >= self.settings.timeout
    }

    pub(super) fn on_silent(&mut self, channels: &mut dyn Channels, rank: u32) {
        if rank >= self.member.ranks || rank == self.member.rank {
            return;
        }
        if self.next() != rank {
            self.send_frame(channels, &Frame::Silent { rank });
        }
        self.silent = Some(rank);
    }

    /// A part of a message shows that the previous rank lives. A part of a sum, to which that rank
    /// has contributed, is progress too. On a slow link a whole message, and keep-alives behind it,
    /// may take longer than the timeout.
    fn look_at_parts(&mut self, channels: &mut dyn Channels) {
        let sum = (0..self.rings.len() as u32)
            .filter_map(|ring| channels.last_part(Channel::RingIn(ring)))
            .max();
        self.last_progress = self.last_progress.max(sum.unwrap_or(self.last_progress));
        let part = sum.max(channels.last_part(Channel::BypassIn));
        self.last_received = self.last_received.max(part.unwrap_or(self.last_received));
    }

    /// `silent` is a rank that the one after it has just reported.
    fn check_progress(&mut self, now: Instant, channels: &mut dyn Channels, silent: Option<u32>) {
        let Some(number) = self.operations.front().map(Operation::number) else { return };
        // A timeout means nothing until this rank knows that all ranks have made the call. So it
        // queries them, soon at first.
        if now >= self.next_query {
            self.announce(channels);
            self.query_interval = (self.query_interval * 2).min(self.settings.stall() / 4);
            self.next_query = now + self.query_interval;
            let longest = self.settings.stall() / 4;
            if self.all_started.is_none()
                || now.saturating_duration_since(self.last_progress) >= longest
            {
                self.send_status(channels);
            }
        }
        // A rank that has not made the call yet is not the box's fault.
        if self.all_started.is_none() && self.progress.iter().all(|p| p.started >= number) {
            self.all_started = Some(now);
        }
        let Some(all_started) = self.all_started else { return };
        let idle = now.saturating_duration_since(self.last_progress.max(all_started));
        let stall = self.settings.stall();
        if let Some(rank) = silent.filter(|rank| idle >= stall && !self.has_left(*rank)) {
            let next = self.rank_of((rank + 1) % self.member.ranks);
            let reason =
                format!("rank {next} has received nothing from it for {:?}", self.settings.timeout);
            self.fail(channels, Error::RankDied { rank: self.rank_of(rank), reason });
        } else if self.sum_mode == SumMode::Box
            && idle >= self.path_test_timeout.map_or(stall, |most| most.min(stall))
        {
            self.fall_back(channels, Reason::Stalled, self.member.rank);
        } else if self.left != 0 && idle >= self.settings.timeout {
            let rank = self.left.trailing_zeros();
            self.fail(channels, Error::RankLeft { rank: self.rank_of(rank) });
        }
    }

    /// Says goodbye to all.
    pub fn leave(&mut self, channels: &mut dyn Channels) {
        if !self.leaving {
            self.leaving = true;
            let completed = self.own().completed;
            self.send_frame(channels, &Frame::Goodbye { origin: self.member.rank, completed });
        }
    }

    /// Whether no other rank needs this one: what it sent has been acknowledged, and all have
    /// completed the operations that it has. Unless `patient`, a next rank that has left need not
    /// acknowledge anything: it may have ended.
    pub fn may_leave(&self, patient: bool) -> bool {
        let is_known = self.bypass_outstanding == 0 || !patient && self.has_left(self.next());
        if self.failure.is_some() {
            return is_known;
        }
        let completed = self.progress[self.member.rank as usize].completed;
        let sent = self.has_left(self.next())
            || self.rings.iter().all(|r| r.kept.iter().all(|k| k.payload.is_some()));
        is_known
            && sent
            && self.reductions.is_empty()
            && self.unsealed.is_empty()
            && (0..self.member.ranks)
                .all(|r| self.has_left(r) || self.progress[r as usize].completed >= completed)
    }
}
