//! Tests of bounds on an engine's memory, whatever a neighbour sends.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use super::{Engine, MAX_OPEN, Settings, Work};
use crate::buffer::Buffer;
use crate::call::Call;
use crate::channels::{Channel, ChannelEvent, Channels};
use crate::error::{Error, Position, UnreachableReason};
use crate::frame::{DataHeader, Descriptor, Frame, Progress, Reason, VERSION};
use crate::numeric::element::{Dtype, Slice};
use crate::numeric::layout::Layout;
use crate::shape::JobShape;

const TIMEOUT: Duration = Duration::from_secs(10);

const SHAPE: JobShape = JobShape {
    ranks: 3,
    mtu: 1024,
    layout: Layout { message_size: 1024, window: 2, rings: 1 },
    relaxed: false,
    on_host_ring: false,
    is_sealed: false,
};

/// Connections with a test's events. Sent messages are acknowledged at once.
#[derive(Default)]
struct ScriptedChannels {
    arrived: Vec<ChannelEvent>,
    kept: Vec<(u64, Buffer)>,
    /// Frames to the next rank.
    sent: Vec<Frame>,
}

impl Channels for ScriptedChannels {
    fn send(&mut self, channel: Channel, id: u64, data: Buffer) {
        if channel == Channel::RingOut(0) {
            self.kept.push((id, data));
        } else {
            self.sent.extend(Frame::decode(&data));
        }
    }
    fn expect(&mut self, _: Instant, _: Channel, _: u64) {}
    fn receive_into(&mut self, _: Channel, _: Buffer) {}
    fn poll(&mut self) -> Option<ChannelEvent> {
        self.arrived.pop()
    }
    fn close(&mut self, channel: Channel) -> Vec<(u64, Buffer)> {
        if channel == Channel::RingOut(0) { std::mem::take(&mut self.kept) } else { Vec::new() }
    }
}

struct Rank {
    engine: Engine,
    channels: ScriptedChannels,
    now: Instant,
    data: [i32; 100],
}

impl Rank {
    /// Rank 1 of 3, connected, in its first operation.
    fn new() -> Self {
        let (now, mut channels) = (Instant::now(), ScriptedChannels::default());
        let settings =
            Settings { rank: 1, shape: SHAPE, summands: SHAPE.ranks, timeout: TIMEOUT, session: 1 };
        let engine = Engine::new(now, settings, None, &mut channels);
        let mut rank = Self { engine, channels, now, data: [1; 100] };
        rank.receive(&Frame::Hello { shape: SHAPE, timeout: TIMEOUT, rank: 0, nonce: 1 }, &[]);
        assert!(!rank.engine.greeted() && rank.engine.greeted_by_small_packets() == Some(now));
        rank.receive(&Frame::FullSize(SHAPE.mtu as usize), &[]);
        assert!(rank.engine.greeted() && rank.engine.greeted_by_small_packets().is_none());
        rank.receive(&Frame::Session(5), &[]);
        rank.engine
            .start(now, &mut rank.channels, Call::SUM, Work::Lent(&Slice(&mut rank.data[..])))
            .unwrap();
        rank
    }

    /// The same after a fallback.
    fn on_host_ring() -> Self {
        let mut rank = Self::new();
        for origin in [0, 2] {
            let unverified = vec![0];
            rank.receive(&Frame::FallBack { origin, reason: Reason::Unsummed, unverified }, &[]);
        }
        rank
    }

    fn receive(&mut self, frame: &Frame, lanes: &[u8]) {
        let mut data = Buffer::default();
        frame.encode_to(&mut data);
        data.extend_from_slice(lanes);
        self.channels.arrived.push(ChannelEvent::Received { channel: Channel::BypassIn, data });
        self.engine.step(self.now, &mut self.channels, Some(&mut Slice(&mut self.data[..])));
    }

    /// The error that ended the session, at once or when no rank has explained a contradiction.
    fn failure(mut self) -> String {
        self.now += Duration::from_secs(4);
        self.engine.step(self.now, &mut self.channels, Some(&mut Slice(&mut self.data[..])));
        match self.engine.failure() {
            Some(Error::Protocol(text) | Error::Mismatch(text)) => text.clone(),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn impossible_announcements_are_refused() {
    let announce = |number| {
        Frame::Operation(Descriptor { number, length: 1, dtype: Dtype::I32, call: Call::SUM })
    };
    let mut rank = Rank::new();
    for number in 2..=MAX_OPEN as u64 + 1 {
        rank.receive(&announce(number), &[]);
    }
    assert_eq!((rank.engine.failure(), rank.engine.announced.len()), (None, MAX_OPEN));
    rank.receive(&announce(MAX_OPEN as u64 + 2), &[]);
    assert_eq!(rank.engine.announced.len(), MAX_OPEN);
    assert!(rank.failure().contains("rank 0 cannot have started operation 66"));
    for again in [2, 3] {
        let mut rank = Rank::new();
        rank.receive(&announce(3), &[]);
        rank.receive(&announce(again), &[]);
        assert!(rank.failure().contains("cannot have started"));
    }
}

#[test]
fn progress_that_others_cannot_have_is_refused() {
    for (started, completed) in [(u64::MAX, 0), (66, 0), (2, 2)] {
        let mut rank = Rank::new();
        let there = Progress { started, completed };
        rank.receive(
            &Frame::Status { ranks: vec![Progress::default(), Progress::default(), there] },
            &[],
        );
        assert!(
            rank.failure().contains("rank 2 cannot have the progress that rank 0 reports"),
            "{there:?}"
        );
    }
    let mut rank = Rank::new();
    rank.receive(&Frame::Goodbye { origin: 2, completed: 2 }, &[]);
    assert!(rank.failure().contains("rank 2 leaves after operation 2"));
}

/// Behind a dead rank may be one that waits for nothing, and names nobody.
#[test]
fn a_silent_rank_is_dead_for_those_that_wait_for_it_and_for_no_others() {
    let silent = |all_started: bool| {
        let mut rank = Rank::new();
        let started = Progress { started: 1, completed: 0 };
        let last = if all_started { started } else { Progress::default() };
        rank.receive(&Frame::Status { ranks: vec![started, started, last] }, &[]);
        rank.now += TIMEOUT / 2;
        rank.receive(&Frame::Silent { rank: 2 }, &[]);
        rank
    };
    let dead = silent(true);
    assert!(
        matches!(dead.engine.failure(), Some(Error::RankDied { rank: 2, reason })
            if reason == "rank 0 has received nothing from it for 10s"),
        "{:?}",
        dead.engine.failure()
    );
    assert_eq!(silent(false).engine.failure(), None);

    // A report from before the stall: the rank may have continued since.
    let all = Frame::Status { ranks: vec![Progress { started: 1, completed: 0 }; 3] };
    let mut rank = Rank::new();
    rank.receive(&Frame::Silent { rank: 2 }, &[]);
    rank.receive(&all, &[]);
    rank.now += TIMEOUT / 2;
    rank.receive(&all, &[]);
    assert_eq!(rank.engine.failure(), None);

    // It ignores reports of itself and of ranks that do not exist, and passes the others on.
    let mut rank = Rank::new();
    rank.receive(&Frame::Silent { rank: 1 }, &[]);
    rank.receive(&Frame::Silent { rank: 3 }, &[]);
    rank.receive(&Frame::Silent { rank: 0 }, &[]);
    let passed: Vec<_> =
        rank.channels.sent.iter().filter(|f| matches!(f, Frame::Silent { .. })).collect();
    assert_eq!(passed, [&Frame::Silent { rank: 0 }]);
}

#[test]
fn impossible_steps_are_refused() {
    let step = |number, step| Frame::Data(DataHeader { ring: 0, step, number });
    let mut rank = Rank::on_host_ring();
    for number in 1..2000 {
        rank.receive(&step(number, 0), &[0; 4]);
        rank.receive(&step(u64::MAX - number, 0), &[0; 4]);
    }
    assert!(rank.engine.reductions.len() <= 4, "{}", rank.engine.reductions.len());
    assert!(rank.failure().contains("rank 0 is at message"));
    for (number, wrong) in [(0, u32::MAX), (0, 4), (1, u32::MAX), (1, 3)] {
        let mut rank = Rank::on_host_ring();
        rank.receive(&step(number, wrong), &[0; 4]);
        assert!(rank.failure().contains("does not fit this rank"), "{number} {wrong}");
    }
}

#[test]
fn another_version_or_session_is_an_error() {
    let mut rank = Rank::new();
    rank.receive(&Frame::OtherVersion(VERSION - 1), &[]);
    let text = rank.failure();
    assert!(
        text.contains(&format!("rank 0 has version {}", VERSION - 1))
            && text.contains("all must run the same netsum"),
        "{text}"
    );
    let mut rank = Rank::new();
    rank.receive(&Frame::Session(6), &[]);
    assert!(rank.failure().contains("rank 0 is in another session"));
}

/// Differences are named as users know them, and nothing else is.
#[test]
fn settings_that_differ_between_ranks_are_named() {
    let layout = Layout { window: 4, ..SHAPE.layout };
    for (shape, timeout, words) in [
        (
            JobShape { on_host_ring: true, ..SHAPE },
            TIMEOUT,
            "who sums is the ranks at rank 0 and a box at rank 1",
        ),
        (
            JobShape { ranks: 4, ..SHAPE },
            TIMEOUT,
            "ranks (NETSUM_RANKS) is 4 at rank 0 and 3 at rank 1",
        ),
        (
            JobShape { mtu: 256, layout, ..SHAPE },
            TIMEOUT,
            "mtu (NETSUM_MTU) is 256 at rank 0 and 1024 at rank 1; window (NETSUM_WINDOW) is 4 at \
             rank 0 and 2 at rank 1",
        ),
        (SHAPE, TIMEOUT / 4, "timeout (NETSUM_TIMEOUT) is 2.5s at rank 0 and 10s at rank 1"),
    ] {
        let mut rank = Rank::new();
        rank.receive(&Frame::Hello { shape, timeout, rank: 0, nonce: 1 }, &[]);
        assert_eq!(rank.failure(), format!("{words}: all ranks must have the same"));
    }
}

#[test]
fn others_hear_whose_error_it_is_and_which() {
    let text = || "why it is so".to_owned();
    let at = |element| Position { tensor: 0, element };
    let ip = IpAddr::from([192, 0, 2, 1]);
    let as_it_is = [
        Error::RankDied { rank: 9, reason: text() },
        Error::RankLeft { rank: 9 },
        Error::Mismatch(text()),
        Error::JobFailed { reason: text() },
        Error::Protocol(text()),
    ];
    let own = [
        Error::Config(text()),
        Error::Controller { address: "box:1".to_owned(), reason: text() },
        Error::Socket { ip, reason: text() },
        Error::Adapter { device: "mlx5_0".to_owned(), reason: text() },
        Error::Unreachable {
            rank: 4,
            ip,
            after: Duration::from_secs(1),
            reason: UnreachableReason::Silent,
        },
        Error::NonFinite { first: 1, end: 2 },
        Error::NonFiniteTensors { first: at(1), last: at(2) },
        Error::Closed,
        Error::Argument(text()),
        Error::Forked,
        Error::MessageSize { dtype: Dtype::F32, reason: text() },
    ];
    let received = own.map(|e| (e.clone(), Error::RankDied { rank: 7, reason: e.to_string() }));
    for (error, received) in as_it_is.map(|e| (e.clone(), e)).into_iter().chain(received) {
        let mut rank = Rank::new();
        rank.engine.name_ranks(vec![4, 7, 9]);
        rank.engine.fail(&mut rank.channels, error.clone());
        assert_eq!(rank.engine.failure(), Some(&error));
        assert_eq!(rank.channels.sent.pop(), Some(Frame::Failure { origin: 1, error: received }));
    }
}
