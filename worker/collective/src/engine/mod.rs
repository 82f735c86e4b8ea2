//! The collective as a state machine: what the connections bring goes in, messages for them come
//! out. No I/O; the time is passed in. Each step is deterministic.
//!
//! | module | what lives there |
//! | --- | --- |
//! | [`queue`] | all-reduces that are open: how they begin and end |
//! | [`operation`] | what they consist of: messages out, sums in |
//! | [`fallback`] | from the box to an ordinary ring, agreed by all ranks |
//! | [`liveness`] | keep-alives, the dead, those who leave, failures |
//! | [`renewal`] | after which operation all connect anew |
//! | [`pool`] | buffers that are used again |
//!
//! ## Runs
//! Each message bears a number of its run, which rank 0 has drawn and which goes around the plain
//! ring once. So what a box still has of an earlier run, with the same queue pairs and PSNs, is no
//! sum of this one. Nothing is sent to be summed before a rank knows the number.
//!
//! ## Which messages are kept
//! A rank that has verified message m + W knows that every rank has sent m + W, hence has verified
//! m: m is *committed*. Originals are kept until then. So when the ranks fall back, the first
//! message that some rank has not verified is still kept by all who have sent it.
//!
//! ## Several operations
//! Up to [`MAX_OPEN`] operations may be open. Their messages have numbers in the order of the
//! operations, which is that of the calls at every rank, so that each number belongs to the same
//! message of the same operation everywhere, whoever has started how many. The window is about
//! numbers alone: the next operation's messages go out while the window has room and this one has
//! no more to send. What is said above about messages says nothing of operations, and holds as it
//! is. Operations are completed in their order.
//!
//! ## Few floats
//! An operation of few floats is one message, if the scale is guessed right. All ranks guess the
//! same: what the last such message of the ring and of such a length has turned out to need, and
//! next to it where that fits a packet. That is known when the next one is built, because behind a
//! guess nothing is sent in its ring before its sum is there. A sum tells all ranks the same; so
//! where no guess was right, all ranks put the second message in right behind it, before those of
//! later operations, none of which has been sent. The result has the bits of the right scale, never
//! of another one.

#[cfg(test)]
mod bounds;
mod fallback;
mod liveness;
mod operation;
mod pool;
mod queue;
mod renewal;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

pub use operation::{Finished, Outcome};
pub use queue::Work;

use crate::buffer::Buffer;
use crate::channels::{Channel, ChannelEvent, Channels};
use crate::error::Error;
use crate::frame::{DATA_HEADER, Descriptor, Frame, Progress, Reason, plain_buffers, plain_room};
use crate::numeric::element::Data;
use crate::numeric::layout::Lasts;
use crate::reduction::{Member, Reductions};
use crate::report::{Mode, Statistics};
use crate::shape::JobShape;
use crate::way_back::Standing;
use operation::{Operation, RingPart};
use pool::Pool;
use renewal::Renewal;

/// What an engine is told once.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Its place in the ring.
    pub rank: u32,
    pub shape: JobShape,
    /// A rank that is silent for so long is dead, if it is needed.
    pub timeout: Duration,
    /// A random number, of this connection. That of rank 0 tells this run's messages from those of
    /// others.
    pub run: u64,
}

impl Settings {
    /// Without progress for so long, although all ranks take part, the box is given up.
    fn stall(&self) -> Duration {
        self.timeout * 3 / 10
    }

    fn keep_alive(&self) -> Duration {
        self.timeout / 5
    }
}

/// Who sums at the moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Summer {
    Box,
    /// The ranks tell each other where they stand; nothing is summed.
    Agreeing,
    Ring,
}

/// A message that has been sent to the box.
#[derive(Debug)]
struct Kept {
    number: u64,
    /// `None` while the connection has it.
    payload: Option<Buffer>,
}

/// One ring's messages, numbered over the connection's life.
#[derive(Debug, Default)]
struct Ring {
    /// The next to send.
    next: u64,
    /// Behind the last of the operations that have been started.
    end: u64,
    /// Behind a guess that has been sent: before its sum is there, nobody knows what the next
    /// message is.
    guessed: u64,
    /// Of the last guess messages whose sums have been verified.
    lasts: Lasts,
    /// The first without a verified sum.
    verified: u64,
    /// The first that the connection has not been told to expect an acknowledgement of.
    expected: u64,
    /// Sent and not committed.
    kept: VecDeque<Kept>,
}

/// The state machine of one rank.
#[derive(Debug)]
pub struct Engine {
    settings: Settings,
    member: Member,
    /// What the application calls the ranks, by their places in the ring; empty where these are
    /// their numbers.
    names: Vec<u32>,
    summer: Summer,
    /// Rank 0's random number; nothing is summed before it is known.
    run: Option<u64>,
    /// Who gave the box up first, as far as this rank has heard, and why.
    reason: Option<(u32, Reason)>,
    /// Some rank has received a sum that was wrong.
    wrong: bool,
    rings: Vec<Ring>,
    /// Those that are open, in their order.
    operations: VecDeque<Operation>,
    /// Refused calls that the others have not been told of, for want of room.
    refused: usize,
    /// What others have come to, in their order.
    outcomes: VecDeque<Outcome>,
    /// What is known of all ranks, this one among them.
    progress: Vec<Progress>,
    /// The operation that the next rank has not been told of: most are over before it would help.
    untold: Option<Descriptor>,
    /// Operations of the previous rank that this rank has not started.
    announced: VecDeque<Descriptor>,
    /// In [`Summer::Agreeing`], by rank: the first unverified message of each ring.
    unverified: Vec<Option<Vec<u64>>>,
    reductions: Reductions,
    failure: Option<Error>,
    /// A contradiction that another rank's failure may explain; if none does in time, it is one
    /// itself.
    suspicion: Option<(Instant, Error)>,
    /// Ranks whose failures have been passed on, bit by bit.
    failures_seen: u64,
    /// Ranks that have left in good order, bit by bit.
    left: u64,
    leaving: bool,
    /// All are about to connect anew.
    renewal: Option<Renewal>,
    /// When the previous rank's greeting has come, and whether a packet of the path MTU has, too.
    hello: Option<Instant>,
    greeted: bool,
    heard: Instant,
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
    plain_ids: u64,
    plain_outstanding: u64,
    /// For messages, and for steps of the ranks' own ring.
    messages: Pool,
    steps: Pool,
    /// Steps that are about to be sent; kept for its memory.
    outgoing: Vec<Buffer>,
    /// Rings' parts of operations that are over; kept for their memory.
    parts: Vec<Vec<RingPart>>,
    statistics: Statistics,
}

/// Operations that may be open at a time.
pub const MAX_OPEN: usize = 64;

impl Engine {
    /// An engine that has greeted its next rank.
    pub fn new(now: Instant, settings: Settings, channels: &mut dyn Channels) -> Self {
        let JobShape { ranks, layout, without_box, .. } = settings.shape;
        let Settings { rank, run, .. } = settings;
        let mut engine = Self {
            settings,
            member: Member { rank: settings.rank, ranks },
            names: Vec::new(),
            summer: if without_box { Summer::Ring } else { Summer::Box },
            run: (settings.rank == 0).then_some(settings.run),
            reason: None,
            wrong: false,
            rings: (0..layout.rings).map(|_| Ring::default()).collect(),
            operations: VecDeque::new(),
            refused: 0,
            outcomes: VecDeque::new(),
            progress: vec![Progress::default(); ranks as usize],
            untold: None,
            announced: VecDeque::new(),
            unverified: vec![None; ranks as usize],
            reductions: Reductions::default(),
            failure: None,
            suspicion: None,
            failures_seen: 0,
            left: 0,
            leaving: false,
            renewal: None,
            hello: None,
            greeted: false,
            heard: now,
            waiting: None,
            answered: now,
            next_keep_alive: now + settings.keep_alive(),
            next_query: now,
            query_interval: Duration::ZERO,
            last_progress: now,
            all_started: None,
            plain_ids: 0,
            plain_outstanding: 0,
            messages: Pool::new(layout.message_size as usize),
            steps: Pool::new(plain_room(&settings.shape)),
            outgoing: Vec::new(),
            parts: Vec::new(),
            statistics: Statistics::default(),
        };
        for ring in 0..layout.rings {
            if without_box {
                channels.close(Channel::RingOut(ring));
                channels.close(Channel::RingIn(ring));
                continue;
            }
            for _ in 0..layout.window + 2 {
                let buffer = channels.buffer(layout.message_size as usize);
                channels.receive_into(Channel::RingIn(ring), buffer);
            }
        }
        for _ in 0..plain_buffers(&settings.shape) {
            let buffer = channels.buffer(plain_room(&settings.shape));
            channels.receive_into(Channel::PlainIn, buffer);
        }
        engine.tell(
            channels,
            &Frame::Hello { shape: settings.shape, timeout: settings.timeout, rank, nonce: run },
        );
        engine.tell(channels, &Frame::FullSize(settings.shape.mtu as usize));
        if let Some(run) = engine.run {
            engine.tell(channels, &Frame::Run(run));
        }
        engine
    }

    /// Takes in what has happened, moves on, looks at the clock. `data` is the slice of the
    /// operation that was started with [`Work::Lent`]; an empty one where there is none.
    pub fn step(&mut self, now: Instant, channels: &mut dyn Channels, data: &mut dyn Data) {
        while let Some(event) = channels.poll() {
            self.on_event(now, channels, data, event);
        }
        // Only now: acknowledgements behind the last announcement gave back messages that are
        // needed.
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
            ChannelEvent::Sent { data, .. } => {
                self.answered = now;
                self.plain_outstanding -= 1;
                self.steps.give(data);
            }
            ChannelEvent::Received { channel: Channel::RingIn(ring), data: sum } => {
                self.on_sum(now, channels, data, ring, &sum);
                channels.receive_into(Channel::RingIn(ring), sum);
            }
            ChannelEvent::Received { data: frame, .. } => {
                self.heard = now;
                match Frame::decode(&frame) {
                    Some(Frame::Data(h)) if h.ring < self.settings.shape.layout.rings => {
                        self.on_data(now, channels, data, h, &frame[DATA_HEADER..]);
                    }
                    Some(decoded) => self.on_frame(now, channels, decoded),
                    None => {
                        let text = format!(
                            "rank {} sent something unintelligible",
                            self.name(self.previous())
                        );
                        self.fail(channels, Error::Protocol(text));
                    }
                }
                channels.receive_into(Channel::PlainIn, frame);
            }
            ChannelEvent::Failed { channel: Channel::PlainOut, reason } => {
                if !self.has_left(self.next()) {
                    self.fail(channels, Error::RankDied { rank: self.name(self.next()), reason });
                }
            }
            ChannelEvent::Failed { channel: Channel::PlainIn, reason } => {
                self.fail(channels, Error::RankDied { rank: self.name(self.previous()), reason });
            }
            ChannelEvent::Failed { reason, .. } => {
                log::debug!("rank {}: connection through the box: {reason}", self.own_name());
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
            Frame::Run(run) => self.on_run(channels, run),
            Frame::Status { ranks } => self.on_status(channels, &ranks),
            Frame::Operation(d) => self.on_operation(channels, d),
            Frame::FallBack { origin, reason, unverified } => {
                self.on_fall_back(channels, origin, reason, unverified);
            }
            Frame::Failure { origin, error } => self.on_failure(channels, origin, error),
            Frame::Goodbye { origin, completed } => self.on_goodbye(channels, origin, completed),
            Frame::Renew { after, decided } => self.on_renew(channels, after, decided),
            Frame::Data(_) => {
                self.suspect(
                    now,
                    Error::Protocol("a step of a ring that does not exist".to_owned()),
                );
            }
        }
    }

    /// Sends a frame to the next rank.
    fn tell(&mut self, channels: &mut dyn Channels, frame: &Frame) {
        // Where the ranks sum themselves, every operation is announced; otherwise frames are rare
        // and small.
        let mut bytes =
            if self.summer == Summer::Ring { self.steps.take(channels) } else { Buffer::heap(64) };
        bytes.resize(0);
        frame.encode_to(&mut bytes);
        self.send_plain(channels, bytes);
    }

    fn send_plain(&mut self, channels: &mut dyn Channels, bytes: Buffer) {
        // Also to a rank that has left: it stays a while, to hear that nobody needs it.
        self.plain_ids += 1;
        self.plain_outstanding += 1;
        channels.send(Channel::PlainOut, self.plain_ids, bytes);
    }

    /// Ranks are told of by these numbers, by their places in the ring.
    pub fn name_ranks(&mut self, names: Vec<u32>) {
        self.names = names;
    }

    fn name(&self, place: u32) -> u32 {
        self.names.get(place as usize).copied().unwrap_or(place)
    }

    pub fn own_name(&self) -> u32 {
        self.name(self.member.rank)
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

    /// Who sums; the ring as soon as the box is given up.
    pub fn mode(&self) -> Mode {
        if self.summer == Summer::Box { Mode::Box } else { Mode::Ring }
    }

    /// Whether all ranks have agreed to sum by themselves.
    pub fn sums_without_box(&self) -> bool {
        self.summer == Summer::Ring
    }

    /// How the ranks stand with the box, as far as this one has heard.
    pub fn standing(&self) -> Standing {
        match self.summer {
            Summer::Box => Standing::Trusted,
            _ if self.wrong => Standing::Wrong,
            _ => Standing::GivenUp,
        }
    }

    /// Whether the previous rank has said hello, and packets of the path MTU get here from it.
    pub fn greeted(&self) -> bool {
        self.greeted
    }

    /// Since when the previous rank has said hello, where no packet of the path MTU has come.
    pub fn greeted_by_small_packets(&self) -> Option<Instant> {
        self.hello.filter(|_| !self.greeted)
    }

    /// What ended this communicator.
    pub fn failure(&self) -> Option<&Error> {
        self.failure.as_ref()
    }

    /// What has been counted here; bytes and packets are the connections' to count.
    pub fn statistics(&self) -> &Statistics {
        &self.statistics
    }
}
