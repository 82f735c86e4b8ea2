//! The key exchange of a sealed session, which goes around the ring twice: [`crate::seal`] says
//! why. Until then ranks only greet each other, report errors, and show that they live: nobody can
//! tell who sends.

use std::borrow::Cow;
use std::time::{Duration, Instant};

use super::{Engine, Settings};
use crate::buffer::Buffer;
use crate::channels::Channels;
use crate::error::Error;
use crate::frame::{Frame, VERSION};
use crate::seal::{Forged, GroupKey, Proof, PublicKey, SealedKey};

impl Settings {
    /// What the ranks of a sealed session must agree on.
    pub(super) fn agreed(&self) -> String {
        let Self { shape, summands, timeout, .. } = self;
        format!("{VERSION} {shape:?} {summands} {timeout:?}")
    }
}

impl Engine {
    /// Whether this rank has the session's keys, and the previous rank seals its frames; or there
    /// are no keys.
    pub fn is_open(&self) -> bool {
        !self.settings.shape.is_sealed || self.seal.as_ref().is_some_and(|seal| seal.opens)
    }

    /// Adds this rank's key to those of the ranks before it.
    pub(super) fn add_key(&mut self, channels: &mut dyn Channels, mut keys: Vec<PublicKey>) {
        if let Some(exchange) = &self.exchange {
            keys.push(exchange.public());
            self.listed.clone_from(&keys);
            let proof = exchange.prove(&keys);
            self.send_frame(channels, &Frame::Keys { keys, proof });
        }
    }

    /// Whether the list is complete, and begins with the one that this rank has proved. So whoever
    /// learns the secret from then on can change no key before this rank's.
    fn is_continued(&self, keys: &[PublicKey]) -> bool {
        let is_listed = !self.listed.is_empty();
        is_listed && keys.len() == self.member.ranks as usize && keys.starts_with(&self.listed)
    }

    /// The first time around.
    fn on_keys(&mut self, channels: &mut dyn Channels, keys: Vec<PublicKey>, proof: &Proof) {
        let rank = self.member.rank as usize;
        let is_complete = rank == 0 && self.seal.is_none() && self.is_continued(&keys);
        match &self.exchange {
            Some(exchange) if is_complete || keys.len() == rank && self.listed.is_empty() => {
                match exchange.verify(&keys, proof) {
                    Ok(()) if is_complete => {
                        let group = exchange.group_key().clone();
                        self.begin_sealed(channels, keys, &group);
                    }
                    Ok(()) => self.add_key(channels, keys),
                    Err(Forged) => self.on_forged_frame(channels),
                }
            }
            _ => self.on_other_keys(channels),
        }
    }

    /// The second time around.
    fn on_group_key(
        &mut self,
        channels: &mut dyn Channels,
        keys: Vec<PublicKey>,
        sealed: &SealedKey,
    ) {
        let is_first = self.member.rank == 0;
        match &self.exchange {
            Some(exchange) if self.is_continued(&keys) && self.seal.is_some() == is_first => {
                match exchange.take(&keys, sealed) {
                    Ok(group) if !is_first => self.begin_sealed(channels, keys, &group),
                    Ok(group) if group == *exchange.group_key() => self.open_session(channels),
                    _ => self.on_forged_frame(channels),
                }
            }
            _ => self.on_other_keys(channels),
        }
    }

    fn on_other_keys(&mut self, channels: &mut dyn Channels) {
        let text = format!(
            "rank {} sent keys of another session than rank {}'s, or somebody replayed or changed \
             them",
            self.rank_of(self.previous()),
            self.own_rank()
        );
        self.fail(channels, Error::Protocol(text));
    }

    fn begin_sealed(
        &mut self,
        channels: &mut dyn Channels,
        keys: Vec<PublicKey>,
        group: &GroupKey,
    ) {
        let Some(exchange) = &self.exchange else { return };
        let shape = self.settings.shape;
        let seal = exchange.seal(&keys, group, (shape.layout.rings, shape.message_room()));
        let Ok(sealed) = exchange.pass(&keys, group) else {
            self.on_other_keys(channels);
            return;
        };
        // The next rank opens what comes after the list.
        self.send_frame(channels, &Frame::GroupKey { keys, sealed });
        self.seal = Some(seal);
        if self.member.rank != 0 {
            self.open_session(channels);
        }
        // Another secret shows at once.
        self.send_status(channels);
        for frame in std::mem::take(&mut self.unsealed) {
            self.send_frame(channels, &frame);
        }
    }

    fn open_session(&mut self, channels: &mut dyn Channels) {
        self.exchange = None;
        if let Some(seal) = &mut self.seal {
            seal.opens = true;
            self.session = Some(seal.session());
        }
        let open: Vec<_> = self.operations.iter().map(|o| o.descriptor).collect();
        open.into_iter().for_each(|d| self.send_frame(channels, &Frame::Operation(d)));
    }

    /// Ends a session that has not opened in time.
    pub fn fail_to_open(&mut self, channels: &mut dyn Channels, after: Duration) {
        let text = format!(
            "the keys of a sealed session have not reached rank {} within {after:?}: a rank has \
             not started, or somebody drops them",
            self.own_rank()
        );
        self.fail(channels, Error::Protocol(text));
    }

    /// A frame as it may be sent now.
    pub(super) fn sendable<'a>(&mut self, frame: &'a Frame) -> Option<Cow<'a, Frame>> {
        if !self.settings.shape.is_sealed || self.seal.is_some() {
            return Some(Cow::Borrowed(frame));
        }
        match frame {
            Frame::Hello { .. }
            | Frame::FullSize(_)
            | Frame::OtherVersion(_)
            | Frame::Keys { .. }
            | Frame::GroupKey { .. }
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
            // A rank that has failed opens no session for others.
            Frame::Keys { .. } | Frame::GroupKey { .. } if self.failure.is_some() => {}
            Frame::Keys { keys, proof } => self.on_keys(channels, keys, &proof),
            Frame::GroupKey { keys, sealed } => self.on_group_key(channels, keys, &sealed),
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
    use super::super::queue::Work;
    use super::*;
    use crate::call::Call;
    use crate::channels::{Channel, ChannelEvent};
    use crate::frame::{Descriptor, Progress, Reason};
    use crate::numeric::element::{Dtype, Slice};
    use crate::numeric::layout::Layout;
    use crate::seal::{Exchange, Secret, Share};
    use crate::shape::JobShape;
    use zeroize::Zeroizing;

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

    fn share(rank: u32) -> Share {
        let secret = Secret::new("0123456789abcdef").unwrap();
        Share::new(secret, &["job"], &Zeroizing::new([1 + rank as u8; 64]))
    }

    fn settings(rank: u32) -> Settings {
        let layout = Layout { message_size: 1024, window: 2, rings: 1 };
        let (relaxed, on_host_ring, is_sealed) = (false, false, true);
        let shape = JobShape { ranks: 3, mtu: 1024, layout, relaxed, on_host_ring, is_sealed };
        Settings { rank, shape, summands: 3, timeout: Duration::from_secs(10), session: 1 }
    }

    /// A rank's keys, and those of all.
    fn exchange(rank: u32) -> Exchange {
        Exchange::new(share(rank), settings(rank).agreed().as_bytes(), rank)
    }

    fn all_keys() -> Vec<PublicKey> {
        (0..3).map(|rank| exchange(rank).public()).collect()
    }

    /// A list with the right proof, as of ranks with other keys where they are 7 or more.
    fn listed(ranks: &[u32]) -> Frame {
        let keys: Vec<_> = ranks.iter().map(|rank| exchange(*rank).public()).collect();
        let proof = exchange(0).prove(&keys);
        Frame::Keys { keys, proof }
    }

    /// The group key that a rank passes to the next.
    fn passed(rank: u32) -> Frame {
        let keys = all_keys();
        let sealed = exchange(rank).pass(&keys, exchange(0).group_key()).unwrap();
        Frame::GroupKey { keys, sealed }
    }

    /// A rank of three in its first operation.
    fn rank(rank: u32) -> Rank {
        let (now, mut wire) = (Instant::now(), Wire::default());
        let mut engine = Engine::new(now, settings(rank), Some(share(rank)), &mut wire);
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
    fn nothing_is_sent_in_clear_but_greetings_keys_errors_and_signs_of_life() {
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
                    Frame::Hello { .. } | Frame::FullSize(_) | Frame::Keys { .. } => true,
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
        for place in 0..3 {
            let error = rank(place).receive(&Frame::Session(7)).unwrap();
            assert!(error.contains("another session"), "{error}");
            for before in [false, true] {
                let mut rank = rank(place);
                // The list is complete, but at rank 0 it has not gone around twice.
                if before && place == 0 {
                    assert_eq!(rank.receive(&listed(&[0, 1, 2])), None);
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
                assert!(error.contains("the keys of a sealed session"), "{error}");
            }
        }
    }

    #[test]
    fn lists_without_the_ranks_own_key_and_repeated_ones_are_refused() {
        let other = |keys: &[u32]| {
            let Frame::GroupKey { sealed, .. } = passed(2) else { unreachable!() };
            let keys = keys.iter().map(|rank| exchange(*rank).public()).collect();
            Frame::GroupKey { keys, sealed }
        };
        for (place, frames) in [
            (1, vec![listed(&[0]), listed(&[7])]),
            (1, vec![listed(&[])]),
            (1, vec![listed(&[0, 1, 2])]),
            (1, vec![listed(&[0]), other(&[0, 7, 2])]),
            (1, vec![listed(&[0]), other(&[0, 1, 2, 3])]),
            (1, vec![listed(&[0]), passed(2)]),
            (1, vec![listed(&[0]), passed(0), passed(0)]),
            (0, vec![listed(&[1, 0, 2])]),
            (0, vec![listed(&[0, 1])]),
            (0, vec![passed(2)]),
            (0, vec![listed(&[0, 1, 2]), listed(&[0, 1, 2])]),
            (0, vec![listed(&[0, 1, 2]), other(&[0, 1, 3])]),
            (0, vec![listed(&[0, 1, 2]), passed(0)]),
            (2, vec![listed(&[0, 1]), passed(1), passed(1)]),
        ] {
            let mut rank = rank(place);
            let last = frames.iter().map(|frame| rank.receive(frame)).last().flatten();
            assert!(last.is_some(), "rank {place}, {frames:?}");
        }
    }

    #[test]
    fn a_rank_contributes_once_it_has_the_group_key() {
        let mut first = rank(0);
        assert_eq!(first.receive(&listed(&[0, 1, 2])), None);
        assert_eq!(first.wire.contributions, 0);
        assert_eq!(first.receive(&passed(2)), None);
        assert_eq!(first.wire.contributions, 1);
        assert!(first.engine.exchange.is_none(), "its private key is forgotten");
        // What it sends now, only the next rank opens.
        let sealed = first.wire.sent.pop().unwrap();
        let mut third = rank(2);
        assert_eq!(third.receive(&listed(&[0, 1])), None);
        assert_eq!(third.receive(&passed(1)), None);
        assert!(third.engine.exchange.is_none());
        let error = third.receive_bytes(sealed.into()).unwrap();
        assert!(error.contains("rank 2 cannot open what rank 1 sends"), "{error}");
    }

    #[test]
    fn a_list_that_does_not_begin_with_the_first_one_is_refused_also_with_the_secret() {
        let attacker = Exchange::new(share(8), settings(1).agreed().as_bytes(), 1);
        let keys = vec![exchange(7).public(), attacker.public(), exchange(2).public()];
        let sealed = attacker.pass(&keys, attacker.group_key()).unwrap();
        let mut rank = rank(2);
        assert_eq!(rank.receive(&listed(&[0, 1])), None);
        let error = rank.receive(&Frame::GroupKey { keys, sealed }).unwrap();
        assert!(error.contains("keys of another session"), "{error}");
    }

    /// Passes on what three ranks send, the frame of this number changed, until all rest: the
    /// ranks, and the frames of the exchange, with their receivers.
    fn run(changed: Option<(usize, usize)>) -> (Vec<Rank>, Vec<(usize, Vec<u8>)>) {
        let mut ranks: Vec<_> = (0..3).map(rank).collect();
        let mut exchanged = Vec::new();
        while let Some(from) = ranks.iter().position(|rank| !rank.wire.sent.is_empty()) {
            let mut data = ranks[from].wire.sent.remove(0);
            let to = (from + 1) % 3;
            if let [11 | 13, 0, 0, 0, ..] = data[..]
                && exchanged.len() < 6
            {
                if let Some((_, byte)) = changed.filter(|(frame, _)| *frame == exchanged.len()) {
                    data[byte] ^= 1;
                }
                exchanged.push((to, data.clone()));
            }
            ranks[to].receive_bytes(data.into());
        }
        (ranks, exchanged)
    }

    #[test]
    fn no_session_opens_over_a_changed_byte_of_the_exchange() {
        let (ranks, exchanged) = run(None);
        assert_eq!(exchanged.len(), 6);
        assert!(ranks.iter().all(|rank| rank.engine.is_open() && rank.wire.contributions == 1));
        for (frame, (to, data)) in exchanged.iter().enumerate() {
            for byte in 0..data.len() {
                let (mut ranks, _) = run(Some((frame, byte)));
                // In the first round all ranks find out before any sends something to be summed.
                assert!(frame >= 3 || ranks.iter().all(|rank| rank.wire.contributions == 0));
                let rank = &mut ranks[*to];
                let error = match rank.engine.failure() {
                    Some(error) => error.to_string(),
                    // It is of no kind that a rank reads.
                    None => rank.wait().unwrap(),
                };
                let found = [
                    "NETSUM_SECRET must be the same at all ranks",
                    "somebody replayed or changed them",
                    "the keys of a sealed session have not reached",
                    "a frame that cannot be decoded",
                ];
                assert!(found.iter().any(|text| error.contains(text)), "{byte} {error}");
                assert!(!rank.engine.is_open() && rank.wire.contributions == 0, "{frame} {byte}");
            }
        }
    }
}
