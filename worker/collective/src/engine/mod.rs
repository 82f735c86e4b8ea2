//! The collective as a state machine: it takes events from the connections and returns messages for
//! them. It does no I/O, and the time is passed in. Each step is deterministic.
//!
//! | module | what lives there |
//! | --- | --- |
//! | [`queue`] | all-reduces that are open: how they begin and end |
//! | [`operation`] | their messages and sums |
//! | [`routes`] | how far the hosts' ring carries each message's lanes |
//! | [`fallback`] | from the box to the hosts' ring, agreed by all ranks |
//! | [`liveness`] | keep-alives, ranks that die or leave, failures |
//! | [`sealing`] | the keys of a sealed session |
//! | [`reconnect`] | after which operation all ranks reconnect |
//! | [`pool`] | buffers that are used again |
//!
//! ## Sessions
//! Each message carries the number of its session. Rank 0 draws it at random and sends it around
//! the ring of bypass connections once. So a rank does not accept sums that a box still has from an
//! earlier session with the same queue pairs and PSNs. A rank sends nothing to be summed before it
//! knows the number. In a [sealed](crate::seal) session keys of all ranks take its place, and go
//! around twice.
//!
//! ## Which messages are kept
//! A rank that has verified message m + W knows that every rank has sent m + W, hence has verified
//! m: m is *committed*. A rank keeps its own messages until then. So when the ranks fall back, all
//! that have sent the first unverified message still have it.
//!
//! ## Several operations
//! Up to [`MAX_OPEN`] operations may be open. Their messages are numbered in the order of the
//! calls, which is the same at every rank. So each number belongs to the same message of the same
//! operation everywhere, however many operations a rank has started. The window counts message
//! numbers only: the next operation's messages go out while the window has room and this one has
//! no more to send. Operations are completed in their order.
//!
//! ## Collectives on the hosts' ring
//! Lanes that only some ranks need, or that one rank contributes, do not go around twice: see
//! `engine/routes.rs`. A rank without all lanes of a message checks only its identity, that all
//! ranks take part, and the totals of its exponents; another rank has all lanes, and checks their
//! sums.
//!
//! ## Few floats
//! A small operation of floats is one message, if the prediction of its exponents is right. All
//! ranks predict alike: the exponents that the last such message of this ring has needed whose
//! length was the same modulo 16. Those are known when the next message is built, because a ring
//! sends nothing after a speculative message before it has the sum. All ranks read the same from a
//! sum. So if the prediction was wrong, all of them insert a second message right after it, before
//! those of later operations, which have not been sent yet. The result always has the bits of the
//! right format.

#[cfg(test)]
mod bounds;
mod fallback;
mod liveness;
mod operation;
mod pool;
#[cfg(test)]
mod prices;
mod queue;
mod reconnect;
mod routes;
mod sealing;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

pub use operation::{Finished, Outcome};
pub use queue::Work;

use crate::buffer::Buffer;
use crate::channels::{Channel, ChannelEvent, Channels};
use crate::error::Error;
use crate::failback::BoxTrust;
use crate::frame::{DATA_HEADER, Descriptor, Frame, Progress, Reason, bypass_buffers, bypass_room};
use crate::numeric::element::{Data, Slice};
use crate::numeric::layout::ExponentPredictor;
use crate::reduction::{Chain, Reductions, RingPosition};
use crate::report::{Mode, Statistics};
use crate::seal::{BYPASS_BYTES, Exchange, PublicKey, Seal, Share};
use crate::shape::JobShape;
use operation::{Operation, RingPart};
use pool::Pool;
use reconnect::Reconnect;

/// An engine's settings.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Its place in the ring.
    pub rank: u32,
    pub shape: JobShape,
    /// Vectors in a sum: the number of ranks, or of those whose vectors these add on their hosts.
    pub summands: u32,
    /// The silence after which a rank that is needed counts as dead.
    pub timeout: Duration,
    /// A random number. Rank 0's is the session's, unless it is sealed.
    pub session: u64,
}

impl Settings {
    /// Time without progress after which the ranks give the box up, if all of them take part.
    fn stall(&self) -> Duration {
        self.timeout * 3 / 10
    }

    fn keep_alive(&self) -> Duration {
        self.timeout / 5
    }
}

/// The current way of summing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum SumMode {
    Box,
    /// The ranks exchange the numbers of their first unverified messages; nothing is summed.
    Agreeing,
    HostRing,
}

/// A message that has been sent to the box.
#[derive(Debug)]
struct Kept {
    number: u64,
    /// `None` while the connection has it.
    payload: Option<Buffer>,
    /// How it would travel on the hosts' ring.
    chains: Vec<Chain>,
}

/// One ring's messages, numbered over the connection's life.
#[derive(Debug, Default)]
struct Ring {
    /// The next to send.
    next: u64,
    /// Behind the last of the operations that have been started.
    end: u64,
    /// The end of a speculative message that has been sent: before its sum has arrived, nobody
    /// knows what the next message is.
    speculated: u64,
    /// Exponents that the last speculative messages with verified sums have needed.
    predictor: ExponentPredictor,
    /// The first without a verified sum.
    verified: u64,
    /// The first message whose acknowledgement the connection does not expect yet.
    expected: u64,
    /// Sent and not committed.
    kept: VecDeque<Kept>,
}

/// The state machine of one rank.
#[derive(Debug)]
pub struct Engine {
    settings: Settings,
    member: RingPosition,
    /// The application's numbers of the ranks, by their places in the ring; empty where both are
    /// the same.
    application_ranks: Vec<u32>,
    /// See [`count_from`](Self::count_from).
    begun: u64,
    sum_mode: SumMode,
    /// The session's number; nothing is sent to be summed before it is known.
    session: Option<u64>,
    /// Until a sealed session opens.
    exchange: Option<Exchange>,
    /// The keys of a sealed session.
    seal: Option<Seal>,
    /// The list of keys up to this rank's; empty until it has added its own.
    listed: Vec<PublicKey>,
    /// Frames that wait until they can be sealed.
    unsealed: Vec<Frame>,
    /// The rank that gave the box up first, as far as this rank knows, and the reason.
    reason: Option<(u32, Reason)>,
    /// Some rank has received a sum that was wrong.
    wrong: bool,
    rings: Vec<Ring>,
    /// Open operations, in their order.
    operations: VecDeque<Operation>,
    /// Refused calls that have not been sent to the others, for want of room.
    refused: usize,
    /// Results of completed operations, in their order.
    outcomes: VecDeque<Outcome>,
    /// How far each rank is known to be, this one included.
    progress: Vec<Progress>,
    /// An operation that has not been announced to the next rank: most are complete before an
    /// announcement would help.
    unannounced: Option<Descriptor>,
    /// Operations of the previous rank that this rank has not started.
    announced: VecDeque<Descriptor>,
    /// In [`SumMode::Agreeing`], by rank: the first unverified message of each ring.
    unverified: Vec<Option<Vec<u64>>>,
    reductions: Reductions,
    failure: Option<Error>,
    /// A contradiction that another rank's failure may explain. If no failure arrives in time, the
    /// contradiction itself ends the session.
    suspicion: Option<(Instant, Error)>,
    /// Ranks whose failures have been forwarded, one bit each.
    failures_seen: u64,
    /// Ranks that have left in good order, one bit each.
    left: u64,
    leaving: bool,
    /// A rank that the one after it has just reported as silent.
    silent: Option<u32>,
    /// All ranks are about to reconnect.
    reconnect: Option<Reconnect>,
    /// When the previous rank's hello arrived, and whether a packet of the path MTU has arrived.
    hello: Option<Instant>,
    greeted: bool,
    /// The number of the last frame of the path MTU, and whether the next rank has acknowledged it.
    full_size: u64,
    acknowledged: bool,
    /// While the path is tested: how long the box may take for a sum.
    path_test_timeout: Option<Duration>,
    last_received: Instant,
    /// Since when the caller waits for other ranks.
    waiting: Option<Instant>,
    /// When the next rank last acknowledged something.
    answered: Instant,
    next_keep_alive: Instant,
    next_query: Instant,
    query_interval: Duration,
    last_progress: Instant,
    /// Since when all ranks are known to have started the oldest open operation.
    all_started: Option<Instant>,
    bypass_ids: u64,
    bypass_outstanding: u64,
    /// Buffers for messages, and for steps of the hosts' ring.
    messages: Pool,
    steps: Pool,
    /// Steps that are about to be sent; kept to reuse its memory.
    outgoing: Vec<Buffer>,
    /// Rings' parts of completed operations; kept to reuse their memory.
    parts: Vec<Vec<RingPart>>,
    statistics: Statistics,
}

/// Operations that may be open at a time.
pub const MAX_OPEN: usize = 64;

impl Engine {
    /// An engine that has greeted its next rank.
    ///
    /// # Panics
    /// If there is a share although the job is not sealed, or none although it is.
    pub fn new(
        now: Instant,
        settings: Settings,
        share: Option<Share>,
        channels: &mut dyn Channels,
    ) -> Self {
        let JobShape { ranks, layout, on_host_ring, is_sealed, .. } = settings.shape;
        assert_eq!(share.is_some(), is_sealed);
        let Settings { rank, session, .. } = settings;
        let mut engine = Self {
            settings,
            member: RingPosition { rank: settings.rank, ranks },
            application_ranks: Vec::new(),
            begun: 0,
            sum_mode: if on_host_ring { SumMode::HostRing } else { SumMode::Box },
            session: (settings.rank == 0 && !is_sealed).then_some(session),
            exchange: share.map(|share| Exchange::new(share, settings.agreed().as_bytes(), rank)),
            seal: None,
            listed: Vec::new(),
            unsealed: Vec::new(),
            reason: None,
            wrong: false,
            rings: (0..layout.rings).map(|_| Ring::default()).collect(),
            operations: VecDeque::new(),
            refused: 0,
            outcomes: VecDeque::new(),
            progress: vec![Progress::default(); ranks as usize],
            unannounced: None,
            announced: VecDeque::new(),
            unverified: vec![None; ranks as usize],
            reductions: Reductions::default(),
            failure: None,
            suspicion: None,
            failures_seen: 0,
            left: 0,
            leaving: false,
            silent: None,
            reconnect: None,
            hello: None,
            greeted: false,
            full_size: 0,
            acknowledged: false,
            path_test_timeout: None,
            last_received: now,
            waiting: None,
            answered: now,
            next_keep_alive: now + settings.keep_alive(),
            next_query: now,
            query_interval: Duration::ZERO,
            last_progress: now,
            all_started: None,
            bypass_ids: 0,
            bypass_outstanding: 0,
            messages: Pool::new(settings.shape.message_room()),
            steps: Pool::new(bypass_room(&settings.shape)),
            outgoing: Vec::new(),
            parts: Vec::new(),
            statistics: Statistics::default(),
        };
        for ring in 0..layout.rings {
            if on_host_ring {
                channels.close(Channel::RingOut(ring));
                channels.close(Channel::RingIn(ring));
                continue;
            }
            for _ in 0..layout.window + 2 {
                let buffer = channels.buffer(settings.shape.message_room());
                channels.receive_into(Channel::RingIn(ring), buffer);
            }
        }
        for _ in 0..bypass_buffers(&settings.shape) {
            let buffer = channels.buffer(bypass_room(&settings.shape));
            channels.receive_into(Channel::BypassIn, buffer);
        }
        engine.send_frame(
            channels,
            &Frame::Hello {
                shape: settings.shape,
                timeout: settings.timeout,
                rank,
                nonce: session,
            },
        );
        engine.send_full_size(channels);
        if let Some(session) = engine.session {
            engine.send_frame(channels, &Frame::Session(session));
        }
        if rank == 0 {
            engine.add_key(channels, Vec::new());
        }
        engine
    }

    /// Processes events and timers, and sends what may be sent. `lent` is the data of the operation
    /// that was started with [`Work::Lent`], if there is one.
    pub fn step(&mut self, now: Instant, channels: &mut dyn Channels, lent: Option<&mut dyn Data>) {
        let mut none = Slice(&mut [0i32; 0][..]);
        let data = lent.unwrap_or(&mut none);
        while let Some(event) = channels.poll() {
            self.on_event(now, channels, data, event);
        }
        // After all events: acknowledgements that follow the last announcement return messages that
        // are needed here.
        self.switch_when_agreed(now, channels, data);
        self.start_refused(now, channels);
        self.pump(now, channels, data);
        self.expect_acknowledgements(now, channels);
        self.on_time(now, channels);
    }

    /// When [`step`](Self::step) should be called at the latest.
    pub fn next_timeout(&self) -> Instant {
        let mut next = self.next_keep_alive;
        if !self.operations.is_empty() && self.failure.is_none() {
            next = next.min(self.next_query);
        }
        next
    }

    fn on_event(
        &mut self,
        now: Instant,
        channels: &mut dyn Channels,
        data: &mut dyn Data,
        event: ChannelEvent,
    ) {
        match event {
            ChannelEvent::Sent { channel: Channel::RingOut(ring), id, data } => {
                self.give_back(ring, id, data);
            }
            ChannelEvent::Sent { id, data, .. } => {
                self.answered = now;
                self.acknowledged |= id == self.full_size;
                self.bypass_outstanding -= 1;
                self.steps.give(data);
            }
            ChannelEvent::Received { channel: Channel::RingIn(ring), data: mut sum } => {
                self.on_sum(now, channels, data, ring, &mut sum);
                channels.receive_into(Channel::RingIn(ring), sum);
            }
            ChannelEvent::Received { data: mut frame, .. } => {
                self.last_received = now;
                let opened = self.open_bypass(&mut frame);
                match opened.then(|| Frame::decode(&frame)).flatten() {
                    _ if !opened => self.on_forged_frame(channels),
                    Some(frame) if !self.is_open() => self.on_open_frame(now, channels, frame),
                    Some(Frame::Data(h)) if h.ring < self.settings.shape.layout.rings => {
                        self.on_data(now, channels, data, h, &frame[DATA_HEADER..]);
                    }
                    Some(decoded) => self.on_frame(now, channels, decoded),
                    None => {
                        let text = format!(
                            "rank {} sent a frame that cannot be decoded",
                            self.rank_of(self.previous())
                        );
                        self.fail(channels, Error::Protocol(text));
                    }
                }
                channels.receive_into(Channel::BypassIn, frame);
            }
            ChannelEvent::Failed { channel: Channel::BypassOut, reason } => {
                if !self.has_left(self.next()) {
                    self.fail(
                        channels,
                        Error::RankDied { rank: self.rank_of(self.next()), reason },
                    );
                }
            }
            ChannelEvent::Failed { channel: Channel::BypassIn, reason } => {
                self.fail(
                    channels,
                    Error::RankDied { rank: self.rank_of(self.previous()), reason },
                );
            }
            ChannelEvent::Failed { reason, .. } => {
                log::debug!("rank {}: connection through the box: {reason}", self.own_rank());
                self.fall_back(channels, Reason::Broken, self.settings.rank);
            }
        }
    }

    fn on_frame(&mut self, now: Instant, channels: &mut dyn Channels, frame: Frame) {
        match frame {
            Frame::Hello { shape, timeout, rank, .. } => {
                self.on_hello(now, channels, (shape, timeout), rank)
            }
            Frame::FullSize(_) => self.greeted = true,
            Frame::OtherVersion(version) => self.on_other_version(channels, version),
            Frame::Session(session) => self.on_session(channels, session),
            // Expected only before a session is open.
            Frame::Keys { .. } | Frame::GroupKey { .. } => {
                let text = format!("rank {} repeats keys", self.rank_of(self.previous()));
                self.fail(channels, Error::Protocol(text));
            }
            Frame::Status { ranks } => self.on_status(channels, &ranks),
            Frame::Operation(d) => self.on_operation(channels, d),
            Frame::FallBack { origin, reason, unverified } => {
                self.on_fall_back(channels, origin, reason, unverified);
            }
            Frame::Failure { origin, error } => self.on_failure(channels, origin, error),
            Frame::Goodbye { origin, completed } => self.on_goodbye(channels, origin, completed),
            Frame::Reconnect { after, decided } => self.on_reconnect(channels, after, decided),
            Frame::Silent { rank } => self.on_silent(channels, rank),
            Frame::Data(_) => {
                self.suspect(
                    now,
                    Error::Protocol("received a step of a ring that does not exist".to_owned()),
                );
            }
        }
    }

    /// Sends a frame to the next rank.
    fn send_frame(&mut self, channels: &mut dyn Channels, frame: &Frame) {
        let Some(frame) = self.sendable(frame) else { return };
        // In the hosts' ring every operation is announced; through the box, frames are rare and
        // small.
        let mut bytes = if self.sum_mode == SumMode::HostRing {
            self.steps.take(channels)
        } else {
            Buffer::heap(64)
        };
        bytes.resize(0);
        frame.encode_to(&mut bytes);
        self.send_bypass(channels, bytes);
    }

    fn send_bypass(&mut self, channels: &mut dyn Channels, mut bytes: Buffer) {
        if let Some(seal) = &mut self.seal {
            seal.close_bypass(&mut bytes);
        }
        // Also to a rank that has left: it lingers to learn that nobody needs it.
        self.bypass_ids += 1;
        self.bypass_outstanding += 1;
        channels.send(Channel::BypassOut, self.bypass_ids, bytes);
    }

    /// Sets the numbers by which errors and logs name the ranks, by their places in the ring.
    pub fn name_ranks(&mut self, names: Vec<u32>) {
        self.application_ranks = names;
    }

    /// Whether a rank, by the application's number, has left in good order.
    pub fn has_departed(&self, rank: u32) -> bool {
        self.place_of(rank).is_some_and(|place| self.has_left(place))
    }

    /// Counts on from the operations of the connections before, which decides how floats in 16 bits
    /// are rounded.
    pub fn count_from(&mut self, operations: u64) {
        self.begun = operations;
    }

    /// Counts operations from here, as if those before had not been.
    pub fn forget_operations(&mut self) {
        (self.begun, self.statistics.all_reduces) = (0, 0);
    }

    fn rank_of(&self, place: u32) -> u32 {
        self.application_ranks.get(place as usize).copied().unwrap_or(place)
    }

    /// The place of a rank in the ring, by the application's number.
    fn place_of(&self, rank: u32) -> Option<u32> {
        (0..self.member.ranks).find(|place| self.rank_of(*place) == rank)
    }

    pub fn own_rank(&self) -> u32 {
        self.rank_of(self.member.rank)
    }

    fn next(&self) -> u32 {
        (self.member.rank + 1) % self.member.ranks
    }

    fn previous(&self) -> u32 {
        (self.member.rank + self.member.ranks - 1) % self.member.ranks
    }

    /// Messages of a ring without a sum.
    fn window(&self) -> u64 {
        u64::from(self.settings.shape.layout.window)
    }

    fn has_left(&self, rank: u32) -> bool {
        self.left & 1 << rank != 0
    }

    fn own(&mut self) -> &mut Progress {
        &mut self.progress[self.member.rank as usize]
    }

    /// The connection no longer needs a message.
    fn give_back(&mut self, ring: u32, number: u64, data: Buffer) {
        match self.rings[ring as usize].kept.iter_mut().find(|k| k.number == number) {
            Some(kept) => kept.payload = Some(data),
            None => self.messages.give(data),
        }
    }

    /// Whether the box or the ring sums; the ring as soon as the box is given up.
    pub fn mode(&self) -> Mode {
        if self.sum_mode == SumMode::Box { Mode::Box } else { Mode::HostRing }
    }

    /// Whether all ranks have agreed to sum over the hosts' ring.
    pub fn is_on_host_ring(&self) -> bool {
        self.sum_mode == SumMode::HostRing
    }

    /// Whether the ranks trust the box, as far as this one knows.
    pub fn box_trust(&self) -> BoxTrust {
        match self.sum_mode {
            SumMode::Box => BoxTrust::Trusted,
            _ if self.wrong => BoxTrust::Wrong,
            _ => BoxTrust::GivenUp,
        }
    }

    /// Whether the previous rank has greeted this one, and packets of the path MTU arrive from it.
    pub fn greeted(&self) -> bool {
        self.greeted
    }

    /// Sends the next rank a packet of the path MTU.
    pub fn send_full_size(&mut self, channels: &mut dyn Channels) {
        let more = if self.seal.is_some() { BYPASS_BYTES } else { 0 };
        self.send_frame(channels, &Frame::FullSize(self.settings.shape.mtu as usize - more));
        (self.full_size, self.acknowledged) = (self.bypass_ids, false);
    }

    /// Whether the next rank has acknowledged the last one.
    pub fn acknowledged(&self) -> bool {
        self.acknowledged
    }

    /// During the path test, falls back from the box after `patience` if that is shorter than
    /// usual.
    pub fn begin_path_test(&mut self, patience: Duration) {
        self.path_test_timeout = Some(patience);
    }

    /// Ends the path test, whose operations do not count in the statistics.
    pub fn end_path_test(&mut self) {
        self.path_test_timeout = None;
        let Statistics { fallbacks, unsummed, wrong, .. } = self.statistics;
        self.statistics = Statistics { fallbacks, unsummed, wrong, ..Statistics::default() };
    }

    /// When the previous rank greeted this one, if no packet of the path MTU has arrived since.
    pub fn greeted_by_small_packets(&self) -> Option<Instant> {
        self.hello.filter(|_| !self.greeted)
    }

    /// The error that ended the session.
    pub fn failure(&self) -> Option<&Error> {
        self.failure.as_ref()
    }

    /// Counters of the engine; the connections count packets and bytes on the wire.
    pub fn statistics(&self) -> &Statistics {
        &self.statistics
    }
}
