//! The fallback from the box to the hosts' ring.
//!
//! A rank that no longer trusts the box stops accepting sums from it, and sends its first
//! unverified message number of each ring to its next rank. Every rank that receives such a frame
//! does the same and forwards it. A rank that has the frames of all ranks knows the first message
//! that *some* rank has not verified. The ranks sum from this message on over the bypass
//! connections: first the messages that they have kept, then new ones. A rank that has verified
//! such a message takes part too, and discards the sum, which is the same.

use std::time::Instant;

use super::{Engine, SumMode};
use crate::channels::{Channel, Channels};
use crate::error::Error;
use crate::frame::{Frame, Reason};
use crate::numeric::element::Data;

impl Engine {
    /// Gives the box up, because `origin` found a reason.
    pub(super) fn fall_back(&mut self, channels: &mut dyn Channels, reason: Reason, origin: u32) {
        if self.sum_mode != SumMode::Box || self.failure.is_some() || !self.is_open() {
            return;
        }
        if let Some(rank) = (0..self.member.ranks).find(|r| self.has_left(*r)) {
            self.fail(channels, Error::RankLeft { rank: self.rank_of(rank) });
            return;
        }
        log::debug!(
            "rank {}: rank {} gave the box up: {}",
            self.own_rank(),
            self.rank_of(origin),
            reason.text()
        );
        // Perhaps the ranks' calls differ.
        self.announce(channels);
        self.reason = Some((origin, reason));
        self.wrong |= reason == Reason::Wrong;
        self.sum_mode = SumMode::Agreeing;
        self.statistics.fallbacks += 1;
        for ring in 0..self.rings.len() as u32 {
            for (number, payload) in channels.close(Channel::RingOut(ring)) {
                self.give_back(ring, number, payload);
            }
            channels.close(Channel::RingIn(ring));
        }
        let unverified: Vec<u64> = self.rings.iter().map(|r| r.verified).collect();
        self.unverified[self.member.rank as usize] = Some(unverified.clone());
        self.send_frame(
            channels,
            &Frame::FallBack { origin: self.member.rank, reason, unverified },
        );
    }

    pub(super) fn on_fall_back(
        &mut self,
        channels: &mut dyn Channels,
        origin: u32,
        reason: Reason,
        unverified: Vec<u64>,
    ) {
        if origin >= self.member.ranks || unverified.len() != self.rings.len() {
            let text = format!("received a fallback of rank {origin}, which is of another job");
            self.fail(channels, Error::Protocol(text));
            return;
        }
        self.wrong |= reason == Reason::Wrong;
        self.fall_back(channels, reason, origin);
        let known = &mut self.unverified[origin as usize];
        if known.is_some() {
            return;
        }
        *known = Some(unverified.clone());
        if self.next() != origin {
            self.send_frame(channels, &Frame::FallBack { origin, reason, unverified });
        }
    }

    /// Switches to the ring, once the frames of all ranks have arrived.
    pub(super) fn switch_when_agreed(
        &mut self,
        now: Instant,
        channels: &mut dyn Channels,
        data: &mut dyn Data,
    ) {
        if self.sum_mode != SumMode::Agreeing || self.failure.is_some() {
            return;
        }
        let Some(reported) =
            self.unverified.iter().map(Option::as_deref).collect::<Option<Vec<_>>>()
        else {
            return;
        };
        let from: Vec<u64> = (0..self.rings.len())
            .map(|r| reported.iter().map(|u| u[r]).min().unwrap_or(0))
            .collect();
        self.sum_mode = SumMode::HostRing;
        // Logged only now: what looked like a fault of the box may have been a rank's death.
        if let Some((origin, reason)) = self.reason {
            log::warn!(
                "rank {}: falling back from the box to the hosts' ring: rank {} \
                 found that {}",
                self.own_rank(),
                self.rank_of(origin),
                reason.text()
            );
        }
        self.last_progress = now;
        for (ring, from) in from.into_iter().enumerate() {
            let kept = std::mem::take(&mut self.rings[ring].kept);
            let first = kept.front().map_or(self.rings[ring].next, |k| k.number);
            if from < first {
                let text = format!(
                    "message {from} of ring {ring} is needed for the fallback, but this rank has \
                     only those from {first}"
                );
                self.fail(channels, Error::Protocol(text));
                return;
            }
            for message in kept {
                match message.payload {
                    Some(payload) if message.number >= from => {
                        let (number, chains) = (message.number, message.chains);
                        let id = (ring as u32, number);
                        self.contribute(now, channels, data, id, payload, chains);
                    }
                    None if message.number >= from => {
                        self.fail(
                            channels,
                            Error::Protocol(format!(
                                "message {} of ring {ring} is needed for the fallback, but the \
                                 connection has not returned it",
                                message.number
                            )),
                        );
                        return;
                    }
                    payload => payload.into_iter().for_each(|p| self.messages.give(p)),
                }
            }
        }
    }
}
