//! The nonces of a sealed session, which go around the ring twice: [`crate::seal`] says why. Until
//! then ranks only greet each other, report errors, and show that they live: nobody can tell who
//! sends.

use std::borrow::Cow;
use std::time::{Duration, Instant};

use super::Engine;
use crate::buffer::Buffer;
use crate::channels::Channels;
use crate::error::Error;
use crate::frame::{Frame, VERSION};
use crate::seal::{Nonce, Seal, Share};

impl Engine {
    /// Whether this rank has the session's keys, and the previous rank seals its frames; or there
    /// are no keys.
    pub fn is_open(&self) -> bool {
        self.settings.share.is_none() || self.seal.as_ref().is_some_and(|seal| seal.opens)
    }

    /// Adds this rank's nonce to those of the ranks before it.
    pub(super) fn add_nonce(&mut self, channels: &mut dyn Channels, mut nonces: Vec<Nonce>) {
        if let Some(share) = self.settings.share {
            self.is_listed = true;
            nonces.push(share.nonce);
            self.tell(channels, &Frame::Nonces(nonces));
        }
    }

    fn on_nonces(&mut self, channels: &mut dyn Channels, nonces: Vec<Nonce>) {
        let (rank, ranks) = (self.member.rank as usize, self.member.ranks as usize);
        match (self.settings.share, &mut self.seal) {
            // The first time around: up to this rank.
            (Some(_), None) if nonces.len() == rank && !self.is_listed => {
                self.add_nonce(channels, nonces);
            }
            // The list is complete.
            (Some(share), None) if nonces.len() == ranks && nonces[rank] == share.nonce => {
                self.begin_sealed(channels, share, nonces);
            }
            // It has gone around twice.
            (_, Some(seal)) if rank == 0 && seal.nonces() == nonces => {
                self.open_session(channels);
            }
            _ => {
                let previous = self.rank_of(self.previous());
                let text = format!(
                    "rank {previous} sent nonces of another session than rank {}'s, or somebody \
                     replayed or changed them",
                    self.own_rank()
                );
                self.fail(channels, Error::Protocol(text));
            }
        }
    }

    fn begin_sealed(&mut self, channels: &mut dyn Channels, share: Share, nonces: Vec<Nonce>) {
        // The next rank opens what comes after the list.
        self.tell(channels, &Frame::Nonces(nonces.clone()));
        let super::Settings { rank, shape, summands, timeout, .. } = self.settings;
        let job = format!("{VERSION} {shape:?} {summands} {timeout:?}");
        let sizes = (shape.layout.rings, shape.message_room());
        self.seal = Some(Seal::new(&share, job.as_bytes(), nonces, rank, sizes));
        if rank != 0 {
            self.open_session(channels);
        }
        // Another secret shows at once.
        self.tell_status(channels);
        for frame in std::mem::take(&mut self.unsealed) {
            self.tell(channels, &frame);
        }
    }

    fn open_session(&mut self, channels: &mut dyn Channels) {
        if let Some(seal) = &mut self.seal {
            seal.opens = true;
            self.session = Some(seal.session());
        }
        let open: Vec<_> = self.operations.iter().map(|o| o.descriptor).collect();
        open.into_iter().for_each(|d| self.tell(channels, &Frame::Operation(d)));
    }

    /// Ends a session that has not opened in time.
    pub fn fail_to_open(&mut self, channels: &mut dyn Channels, after: Duration) {
        let text = format!(
            "the nonces of a sealed session have not reached rank {} within {after:?}: a rank has \
             not started, or somebody drops them",
            self.own_rank()
        );
        self.fail(channels, Error::Protocol(text));
    }

    /// A frame as it may be sent now.
    pub(super) fn sendable<'a>(&mut self, frame: &'a Frame) -> Option<Cow<'a, Frame>> {
        if self.settings.share.is_none() || self.seal.is_some() {
            return Some(Cow::Borrowed(frame));
        }
        match frame {
            Frame::Hello { .. }
            | Frame::FullSize(_)
            | Frame::OtherVersion(_)
            | Frame::Nonces(_)
            | Frame::Failure { .. } => Some(Cow::Borrowed(frame)),
            Frame::Status { .. } => Some(Cow::Owned(Frame::Status { ranks: Vec::new() })),
            _ => {
                self.unsealed.push(frame.clone());
                None
            }
        }
    }

    /// A frame that anybody may have sent.
    pub(super) fn on_open_frame(
        &mut self,
        now: Instant,
        channels: &mut dyn Channels,
        frame: Frame,
    ) {
        match frame {
            Frame::Nonces(nonces) => self.on_nonces(channels, nonces),
            Frame::Hello { .. }
            | Frame::FullSize(_)
            | Frame::OtherVersion(_)
            | Frame::Session(_)
            | Frame::Failure { .. } => self.on_frame(now, channels, frame),
            _ => {}
        }
    }

    /// Whether a message of the previous rank is from it.
    pub(super) fn open_bypass(&mut self, frame: &mut Buffer) -> bool {
        match self.seal.as_mut().filter(|seal| seal.opens) {
            Some(seal) => seal.open_bypass(frame).is_ok(),
            None => true,
        }
    }

    pub(super) fn on_forged_frame(&mut self, channels: &mut dyn Channels) {
        let text = format!(
            "rank {} cannot open what rank {} sends: NETSUM_SECRET must be the same at all ranks, \
             with the names of job and peers, or somebody has changed it on its way",
            self.own_rank(),
            self.rank_of(self.previous())
        );
        self.fail(channels, Error::Mismatch(text));
    }
}

#[cfg(test)]
mod tests {
    use super::super::Settings;
    use super::super::queue::Work;
    use super::*;
    use crate::call::Call;
    use crate::channels::{Channel, ChannelEvent};
    use crate::frame::{Descriptor, Progress, Reason};
    use crate::numeric::element::{Dtype, Slice};
    use crate::numeric::layout::Layout;
    use crate::seal::Secret;
    use crate::shape::JobShape;

    /// What an attacker gives to a rank, and what the rank sends to the next one.
    #[derive(Default)]
    struct Wire {
        arrived: Vec<ChannelEvent>,
        sent: Vec<Vec<u8>>,
        contributions: usize,
    }

    impl Channels for Wire {
        fn send(&mut self, channel: Channel, _: u64, data: Buffer) {
            match channel {
                Channel::RingOut(_) => self.contributions += 1,
                _ => self.sent.push(data.to_vec()),
            }
        }
        fn expect(&mut self, _: Instant, _: Channel, _: u64) {}
        fn receive_into(&mut self, _: Channel, _: Buffer) {}
        fn poll(&mut self) -> Option<ChannelEvent> {
            self.arrived.pop()
        }
        fn close(&mut self, _: Channel) -> Vec<(u64, Buffer)> {
            Vec::new()
        }
    }

    struct Rank {
        engine: Engine,
        wire: Wire,
        now: Instant,
    }

    fn share(rank: u8) -> Share {
        let secret = Secret::new("0123456789abcdef").unwrap();
        Share::new(secret, &["job"], [rank; 16])
    }

    /// A rank of three in its first operation.
    fn rank(rank: u32) -> Rank {
        let layout = Layout { message_size: 1024, window: 2, rings: 1 };
        let (relaxed, on_host_ring, is_sealed) = (false, false, true);
        let shape = JobShape { ranks: 3, mtu: 1024, layout, relaxed, on_host_ring, is_sealed };
        let (now, mut wire, timeout) = (Instant::now(), Wire::default(), Duration::from_secs(10));
        let share = Some(share(rank as u8));
        let settings = Settings { rank, shape, summands: 3, timeout, session: 1, share };
        let mut engine = Engine::new(now, settings, &mut wire);
        let data = Work::Owned(Box::new(Slice(vec![1i32; 100])));
        engine.start(now, &mut wire, Call::SUM, data).unwrap();
        Rank { engine, wire, now }
    }

    impl Rank {
        fn receive(&mut self, frame: &Frame) -> Option<String> {
            let mut data = Buffer::default();
            frame.encode_to(&mut data);
            self.receive_bytes(data)
        }

        fn receive_bytes(&mut self, data: Buffer) -> Option<String> {
            self.wire.arrived.push(ChannelEvent::Received { channel: Channel::BypassIn, data });
            self.engine.step(self.now, &mut self.wire, None);
            self.engine.failure().map(ToString::to_string)
        }

        fn wait(&mut self) -> Option<String> {
            for _ in 0..30 {
                self.now += Duration::from_secs(1);
                let alive = Frame::Status { ranks: Vec::new() };
                if let Some(failure) = self.receive(&alive) {
                    return Some(failure);
                }
            }
            None
        }
    }

    #[test]
    fn nothing_is_sent_in_clear_but_greetings_nonces_errors_and_signs_of_life() {
        for place in 0..3 {
            let mut rank = rank(place);
            rank.engine.leave(&mut rank.wire);
            rank.now += Duration::from_secs(3);
            rank.engine.step(rank.now, &mut rank.wire, None);
            assert!(!rank.engine.may_leave(true), "its goodbye waits");
            rank.engine.fail(&mut rank.wire, Error::Protocol(String::new()));
            for bytes in &rank.wire.sent {
                let frame = Frame::decode(bytes).unwrap();
                let is_plain = match &frame {
                    Frame::Hello { .. } | Frame::FullSize(_) | Frame::Nonces(_) => true,
                    Frame::Failure { .. } => true,
                    Frame::Status { ranks } => ranks.is_empty(),
                    _ => false,
                };
                assert!(is_plain, "{frame:?}");
            }
            assert_eq!(rank.wire.contributions, 0);
        }
    }

    #[test]
    fn no_frame_of_an_attacker_opens_a_session_or_moves_a_rank() {
        let all = Frame::Nonces((0..3).map(|rank| [rank; 16]).collect());
        for place in 0..3 {
            let error = rank(place).receive(&Frame::Session(7)).unwrap();
            assert!(error.contains("another session"), "{error}");
            for before in [false, true] {
                let mut rank = rank(place);
                // The list is complete, but at rank 0 it has not gone around twice.
                if before && place == 0 {
                    assert_eq!(rank.receive(&all), None);
                }
                let started = Progress { started: 1, completed: 1 };
                let call = Call::SUM;
                for frame in [
                    Frame::Status { ranks: vec![started; 3] },
                    Frame::Operation(Descriptor { number: 9, length: 1, dtype: Dtype::F32, call }),
                    Frame::FallBack { origin: 2, reason: Reason::Wrong, unverified: vec![9] },
                    Frame::Goodbye { origin: 1, completed: 0 },
                    Frame::Reconnect { after: 1, decided: false },
                    Frame::Silent { rank: 1 },
                ] {
                    assert_eq!(rank.receive(&frame), None, "{frame:?}");
                }
                assert_eq!(rank.wire.contributions, 0);
                let error = rank.wait().unwrap();
                assert!(error.contains("the nonces of a sealed session"), "{error}");
            }
        }
    }

    #[test]
    fn lists_without_the_ranks_own_nonce_and_repeated_ones_are_refused() {
        let of = |nonces: &[u8]| Frame::Nonces(nonces.iter().map(|n| [*n; 16]).collect());
        for (place, lists) in [
            (1, vec![of(&[0, 7, 2])]),
            (1, vec![of(&[0]), of(&[5])]),
            (1, vec![of(&[])]),
            (1, vec![of(&[0, 1, 2, 3])]),
            (0, vec![of(&[1, 0, 2])]),
            (0, vec![of(&[0, 1, 2]), of(&[0, 1, 3])]),
            (2, vec![of(&[0, 1, 2]), of(&[0, 1, 2])]),
        ] {
            let mut rank = rank(place);
            let last = lists.iter().map(|list| rank.receive(list)).last().flatten();
            assert!(last.is_some(), "rank {place}, {lists:?}");
        }
    }

    #[test]
    fn a_rank_contributes_once_all_nonces_have_gone_around() {
        let all = Frame::Nonces((0..3).map(|rank| [rank; 16]).collect());
        let mut first = rank(0);
        assert_eq!(first.receive(&all), None);
        assert_eq!(first.wire.contributions, 0);
        assert_eq!(first.receive(&all), None);
        assert_eq!(first.wire.contributions, 1);
        // What it sends now, only the next rank opens.
        let sealed = first.wire.sent.pop().unwrap();
        let mut third = rank(2);
        assert_eq!(third.receive(&all), None);
        let error = third.receive_bytes(sealed.into()).unwrap();
        assert!(error.contains("rank 2 cannot open what rank 1 sends"), "{error}");
    }
}
