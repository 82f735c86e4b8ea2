//! What moves connections on: the engine, the connections and the word of the daemon, in one place
//! for whoever drives.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::network::Connections;
use super::promise::Promise;
use crate::control::heartbeat::Heartbeat;
use crate::unshared::Unshared;
use netsum_collective::call::Call;
use netsum_collective::engine::{Engine, Finished, Outcome, Work};
use netsum_collective::error::Error;
use netsum_collective::numeric::element::{Data, Owned, Slice};
use netsum_collective::numeric::memory::Memory;
use netsum_collective::report::{Mode, Statistics};
use netsum_collective::way_back::WayBack;

/// The longest that a driver waits without looking at the daemon's word.
pub(super) const LOOK_UP: Duration = Duration::from_millis(100);
/// How long it leaves the daemon's answer alone, which it waits for.
const ANSWER: Duration = Duration::from_millis(1);
/// How long rank 0 waits for the daemon's answer before it goes on without.
const DAEMON: Duration = Duration::from_millis(500);
/// How long a rank that leaves waits for others that may still need it.
pub(super) const LINGER: Duration = Duration::from_secs(2);

/// The state of connections.
pub(super) struct Core {
    pub engine: Engine,
    pub connections: Box<dyn Connections>,
    heartbeat: Option<Heartbeat>,
    /// The connections' descriptor once more, for the keeper to wait at while others have the core.
    fd: Arc<Unshared<OwnedFd>>,
    /// Who waits for which operation whose data the engine owns, in their order, and what memory it
    /// uses.
    promises: VecDeque<(u64, Promise, Memory)>,
    /// What the operation came to whose data was lent.
    lent: Option<Result<Finished, Error>>,
    /// What rank 0 has asked the daemon, and until when it waits for the answer.
    question: Option<(u64, Instant)>,
    /// The rank, where the ranks have summed by themselves before and the box has not yet.
    pub returning: Option<u32>,
    /// Whether a warning has said that an operation loses small values.
    pub has_warned: bool,
}

impl Core {
    /// Connections that stand, or are about to.
    pub fn new(
        engine: Engine,
        connections: Box<dyn Connections>,
        heartbeat: Option<Heartbeat>,
    ) -> std::io::Result<Self> {
        let fd = Arc::new(Unshared::new(connections.fd().try_clone_to_owned()?));
        let (promises, lent, question, returning) = (VecDeque::new(), None, None, None);
        let has_warned = false;
        Ok(Self {
            engine,
            connections,
            heartbeat,
            fd,
            promises,
            lent,
            question,
            returning,
            has_warned,
        })
    }

    /// What is readable when something has arrived. Connections are closed only when nobody has it
    /// any more.
    pub fn fd(&self) -> &Arc<Unshared<OwnedFd>> {
        &self.fd
    }

    /// Receives, moves the engine on, and sends what came of it. Waits for packets until `until`
    /// where there were none. Whether there were any.
    pub fn drive(&mut self, until: Instant, data: &mut dyn Data) -> Result<bool, Error> {
        let driven = self.advance(until, data);
        self.deliver();
        driven
    }

    /// Tells those who wait what operations have come to.
    fn deliver(&mut self) {
        while let Some(Outcome { number, result, data }) = self.engine.outcome() {
            if let (Ok(Finished { mode: Mode::Box, .. }), Some(rank)) = (&result, self.returning) {
                log::info!("rank {rank}: the box sums again");
                self.returning = None;
            }
            if let Ok(Finished { underflow, .. }) = &result
                && underflow.is_large()
                && !std::mem::replace(&mut self.has_warned, true)
            {
                log::warn!(
                    "rank {}: {} of {} floats that are not zero counted as 0, beside far larger ones in \
                     their message of an all-reduce; `Report::underflow` counts on, without a warning",
                    self.engine.own_name(),
                    underflow.zeroed,
                    underflow.nonzero
                );
            }
            // Operations that are given up have an outcome before older ones that are still open.
            let at = self.promises.iter().position(|(n, ..)| *n == number);
            match (data, at.and_then(|at| self.promises.remove(at))) {
                (Some(data), Some((_, promise, _))) => {
                    promise.settle(result, data, self.retransmissions());
                }
                _ => self.lent = Some(result),
            }
        }
    }

    fn advance(&mut self, until: Instant, data: &mut dyn Data) -> Result<bool, Error> {
        let carried = self.carry(until.min(self.engine.next_timeout()))?;
        if let Some(reason) = self.heartbeat.as_ref().and_then(Heartbeat::failed) {
            self.engine.fail(&mut *self.connections, Error::JobFailed { reason });
        }
        self.engine.step(Instant::now(), &mut *self.connections, data);
        if let Some(heartbeat) = self.heartbeat.as_ref().filter(|_| self.engine.sums_without_box())
        {
            heartbeat.without_box();
        }
        if let (Some(heartbeat), Some(error)) = (&self.heartbeat, self.engine.failure())
            && is_news(error)
        {
            heartbeat.give_up(|| error.to_string());
        }
        Ok(carried)
    }

    /// How long nothing needs to be done where nothing arrives.
    pub fn quiet(&self) -> Duration {
        let timeout = self.engine.next_timeout();
        let next = self.connections.next_timeout().map_or(timeout, |t| t.min(timeout));
        let most = if self.question.is_some() { ANSWER } else { LOOK_UP };
        next.saturating_duration_since(Instant::now()).min(most)
    }

    /// Drives the connections alone. Without them the operations are over, too.
    fn carry(&mut self, until: Instant) -> Result<bool, Error> {
        self.connections.drive(until).inspect_err(|error| {
            self.engine.fail(&mut *self.connections, error.clone());
        })
    }

    /// Receives and sends what there is, and leaves it to the next step. Whether there was
    /// anything.
    pub fn carry_now(&mut self) -> Result<bool, Error> {
        let carried = self.carry(Instant::now());
        self.deliver();
        carried
    }

    /// Waits for the previous rank's greeting, at most until `until`; for a packet of the path MTU,
    /// which comes right behind its first ones, at most `patience`. `unreachable` is told whether
    /// small ones came. [`Error::Closed`] when nobody wants it any more.
    pub fn meet(
        &mut self,
        until: Instant,
        patience: Duration,
        unreachable: impl Fn(&dyn Connections, bool) -> Error,
        is_wanted: impl Fn() -> bool,
    ) -> Result<(), Error> {
        while is_wanted() {
            if let Some(error) = self.engine.failure() {
                return Err(error.clone());
            }
            if self.engine.greeted() {
                return Ok(());
            }
            let small = self.engine.greeted_by_small_packets();
            if Instant::now() >= small.map_or(until, |since| until.min(since + patience)) {
                let unreachable = unreachable(&*self.connections, small.is_some());
                self.engine.fail_to_meet(&mut *self.connections, &unreachable);
                return Err(unreachable);
            }
            self.rest_for(LOOK_UP)?;
        }
        Err(Error::Closed)
    }

    /// Drives what the engine owns the data of, for a while at the most.
    /// Whether packets came.
    pub fn rest_for(&mut self, time: Duration) -> Result<bool, Error> {
        self.drive(Instant::now() + time, &mut Slice(&mut idle()[..]))
    }

    /// An operation from its start to its end, behind those that are open.
    pub fn run(&mut self, call: Call, data: &mut dyn Data) -> Result<Finished, Error> {
        self.engine.start(Instant::now(), &mut *self.connections, call, Work::Lent(data))?;
        self.engine.step(Instant::now(), &mut *self.connections, data);
        self.deliver();
        loop {
            if let Some(outcome) = self.lent.take() {
                return outcome;
            }
            if let Err(error) = self.drive(Instant::now() + LOOK_UP, data) {
                self.lent = None;
                return Err(error);
            }
        }
    }

    /// Starts an operation behind those that are open, and sends what may be sent.
    pub fn start(
        &mut self,
        call: Call,
        data: Owned,
        mut promise: Promise,
        memory: Memory,
    ) -> Result<(), Error> {
        promise.retransmissions = self.retransmissions();
        let number = match self.engine.start(
            Instant::now(),
            &mut *self.connections,
            call,
            Work::Owned(data),
        ) {
            Ok(number) => number,
            Err(error) => {
                promise.fail(error.clone());
                return Err(error);
            }
        };
        self.promises.push_back((number, promise, memory));
        self.engine.step(Instant::now(), &mut *self.connections, &mut Slice(&mut idle()[..]));
        self.deliver();
        self.send_now();
        Ok(())
    }

    /// Tells the other ranks of a call that this one has refused, as soon as there is room.
    pub fn refuse(&mut self) {
        self.engine.refuse(1);
        // An error is one of the next call.
        let _ = self.rest_for(Duration::ZERO);
        self.send_now();
    }

    /// What operations that are open use.
    pub fn memories(&self) -> impl Iterator<Item = &Memory> {
        self.promises.iter().map(|(.., memory)| memory)
    }

    /// Nothing that the engine has just decided waits for the keeper to wake up.
    pub fn send_now(&mut self) {
        if let Err(e) = self.connections.drive(Instant::now()) {
            log::debug!("at the end of a call: {e}");
        }
    }

    /// Before an operation: where it is time to, rank 0 has all ranks agree to connect anew after
    /// it. Whether that is out of the way; never waits.
    pub fn has_consent(&mut self, rank: u32, way_back: &mut WayBack) -> bool {
        if rank == 0 && !self.engine.renews() {
            match self.should_renew(way_back) {
                Some(true) => self.engine.ask_to_renew(&mut *self.connections),
                Some(false) => {}
                None => return false,
            }
        }
        !self.engine.waits_for_consent()
    }

    /// Whether it is time to connect anew, and the daemon is there: without it nobody could join.
    /// `None` until it has answered.
    fn should_renew(&mut self, way_back: &mut WayBack) -> Option<bool> {
        let Some(heartbeat) = &self.heartbeat else { return Some(false) };
        let now = Instant::now();
        let answered = self.question.map(|(question, _)| heartbeat.has_answered(question));
        let is_over =
            self.engine.failure().is_some() || self.question.is_some_and(|(_, until)| now >= until);
        if is_over && answered == Some(false) {
            self.question = None;
            way_back.in_vain(now);
            return Some(false);
        }
        let is_due = way_back.is_due(now, heartbeat.wish(), self.engine.standing());
        match answered {
            Some(false) => return None,
            None if is_due => {
                self.question = Some((heartbeat.ask(), now + DAEMON));
                return None;
            }
            _ => self.question = None,
        }
        Some(is_due)
    }

    /// After the operation that all ranks connect anew after: leaves the job, but not the others.
    pub fn leave_job(&mut self) -> Option<Heartbeat> {
        let mut heartbeat = self.heartbeat.take();
        if let Some(heartbeat) = &mut heartbeat {
            heartbeat.stop(Ok(()));
        }
        heartbeat
    }

    /// This rank has joined again: leaves the others, which do the same.
    pub fn go(&mut self) {
        self.engine.leave(&mut *self.connections);
        self.send_now();
    }

    /// This rank could not join again: goes on as before.
    pub fn stay(&mut self, heartbeat: Option<Heartbeat>) {
        self.engine.stay();
        self.heartbeat = heartbeat;
    }

    /// What has been done over these connections.
    pub fn statistics(&self) -> Statistics {
        let mut statistics = *self.engine.statistics();
        (statistics.restarts, statistics.traffic) =
            (self.connections.restarts(), self.connections.traffic());
        statistics
    }

    pub fn retransmissions(&self) -> Option<u64> {
        self.connections.traffic().map(|t| t.retransmissions)
    }

    /// Waits until then for operations that are open; gives up those that the other ranks are not
    /// ready for.
    pub fn complete(&mut self, until: Instant) {
        while self.engine.open() > 0 && Instant::now() < until {
            if self.rest_for(LINGER / 100).is_err() {
                break;
            }
        }
    }

    /// Says goodbye, and stays as long as somebody may need this rank.
    pub fn linger(&mut self) {
        let failure = self.engine.failure().cloned();
        let patient = Instant::now() + LINGER / 10;
        let until = Instant::now() + if failure.is_some() { LINGER / 4 } else { LINGER };
        self.engine.leave(&mut *self.connections);
        self.engine.abandon(&Error::Closed);
        self.deliver();
        while Instant::now() < until && !self.engine.may_leave(Instant::now() < patient) {
            if self
                .drive(Instant::now() + Duration::from_millis(10), &mut Slice(&mut idle()[..]))
                .is_err()
            {
                break;
            }
        }
        self.depart(match failure {
            Some(error) if is_news(&error) => Err(error.to_string()),
            _ => Ok(()),
        });
    }

    /// Tells the daemon how the job has ended for this rank.
    fn depart(&mut self, end: Result<(), String>) {
        // Acknowledgements of what came last.
        let _ = self.connections.drive(Instant::now());
        if let Some(heartbeat) = &mut self.heartbeat {
            heartbeat.stop(end);
        }
    }
}

/// Nothing to reduce: what the engine is given between operations.
fn idle() -> [i32; 0] {
    []
}

/// Whether the daemon is to tell the others of it: over the network they may not have heard.
fn is_news(error: &Error) -> bool {
    use Error::{Adapter, Mismatch, Protocol, RankDied, Socket};
    matches!(error, RankDied { .. } | Mismatch(_) | Protocol(_) | Socket { .. } | Adapter { .. })
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, BorrowedFd};
    use std::os::unix::net::UnixStream;

    use netsum_collective::buffer::Buffer;
    use netsum_collective::channels::{Channel, ChannelEvent, Channels};
    use netsum_collective::engine::Settings;
    use netsum_collective::frame::Frame;
    use netsum_collective::numeric::layout::Layout;
    use netsum_collective::report::Traffic;
    use netsum_collective::shape::JobShape;

    use super::super::promise::Settlement;
    use super::*;

    /// Connections that bring what a test has put there, or whose adapter is gone.
    struct Scripted {
        socket: UnixStream,
        script: Arc<std::sync::Mutex<VecDeque<ChannelEvent>>>,
        is_gone: bool,
    }

    impl Scripted {
        fn new(is_gone: bool) -> Self {
            Self { socket: UnixStream::pair().unwrap().0, script: Arc::default(), is_gone }
        }
    }

    fn gone() -> Error {
        Error::Adapter { device: "mlx5_0".to_owned(), reason: "gone".to_owned() }
    }

    impl Channels for Scripted {
        fn send(&mut self, _: Channel, _: u64, _: Buffer) {}
        fn expect(&mut self, _: Instant, _: Channel, _: u64) {}
        fn receive_into(&mut self, _: Channel, _: Buffer) {}
        fn poll(&mut self) -> Option<ChannelEvent> {
            self.script.lock().unwrap().pop_front()
        }
        fn close(&mut self, _: Channel) -> Vec<(u64, Buffer)> {
            Vec::new()
        }
    }

    impl Connections for Scripted {
        fn start(&mut self) -> Result<(), Error> {
            Ok(())
        }
        fn drive(&mut self, _: Instant) -> Result<bool, Error> {
            if self.is_gone { Err(gone()) } else { Ok(false) }
        }
        fn next_timeout(&self) -> Option<Instant> {
            None
        }
        fn fd(&self) -> BorrowedFd<'_> {
            self.socket.as_fd()
        }
        fn traffic(&self) -> Option<Traffic> {
            None
        }
        fn restarts(&self) -> u64 {
            0
        }
        fn title(&self) -> String {
            String::new()
        }
    }

    #[test]
    fn what_ends_the_connections_ends_what_is_in_flight() {
        let layout = Layout { message_size: 4096, window: 2, rings: 1 };
        let shape = JobShape { ranks: 2, mtu: 1024, layout, relaxed: false, without_box: false };
        let settings = Settings { rank: 0, shape, timeout: Duration::from_secs(10), run: 1 };
        let mut connections = Scripted::new(true);
        let engine = Engine::new(Instant::now(), settings, &mut connections);
        let mut core = Core::new(engine, Box::new(connections), None).unwrap();
        let (settlement, promise) = Promise::new();
        core.start(Call::SUM, Box::new(Slice(vec![1])), promise, Memory::default()).unwrap();
        assert!(!settlement.lock().is_settled);
        // As the keeper does between two steps.
        assert_eq!(core.carry_now().unwrap_err(), gone());
        assert!(matches!(&settlement.lock().outcome, Some(Err(error)) if *error == gone()));
    }

    /// Rank 1 has the sum of operation 1, which is late here, and leaves.
    #[test]
    fn a_rank_that_leaves_settles_newer_operations_while_an_older_one_is_open() {
        let layout = Layout { message_size: 4096, window: 2, rings: 1 };
        let shape = JobShape { ranks: 2, mtu: 1024, layout, relaxed: false, without_box: false };
        let settings = Settings { rank: 0, shape, timeout: Duration::from_secs(10), run: 1 };
        let mut connections = Scripted::new(false);
        let script = Arc::clone(&connections.script);
        let engine = Engine::new(Instant::now(), settings, &mut connections);
        let mut core = Core::new(engine, Box::new(connections), None).unwrap();
        let settlements: Vec<_> = (0..3)
            .map(|_| {
                let (settlement, promise) = Promise::new();
                core.start(Call::SUM, Box::new(Slice(vec![1])), promise, Memory::default())
                    .unwrap();
                settlement
            })
            .collect();
        for frame in [
            Frame::Hello { shape, timeout: Duration::from_secs(10), rank: 1, nonce: 2 },
            Frame::Goodbye { origin: 1, completed: 1 },
        ] {
            let mut data = Buffer::heap(64);
            frame.encode_to(&mut data);
            script
                .lock()
                .unwrap()
                .push_back(ChannelEvent::Received { channel: Channel::PlainIn, data });
        }
        core.rest_for(Duration::ZERO).unwrap();
        let left = |known: &Settlement| {
            matches!(known.lock().outcome, Some(Err(Error::RankLeft { rank: 1 })))
        };
        assert!(!settlements[0].lock().is_settled, "its sum may still come");
        assert!(left(&settlements[1]) && left(&settlements[2]));
    }
}
