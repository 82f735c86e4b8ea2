//! Engine, connections and heartbeat of one session, in one place for the thread that drives.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags};
use nix::sys::time::TimeSpec;

use super::network::Connections;
use super::promise::Promise;
use crate::control::heartbeat::Heartbeat;
use crate::control::{Cause, MissingPackets};
use crate::unshared::Unshared;
use netsum_collective::call::Call;
use netsum_collective::engine::{Engine, Finished, Outcome, Work};
use netsum_collective::error::Error;
use netsum_collective::failback::Failback;
use netsum_collective::numeric::element::{Data, Owned, Slice};
use netsum_collective::numeric::layout::CHECK_BYTES;
use netsum_collective::numeric::memory::Memory;
use netsum_collective::report::{Mode, Statistics};

/// How often a thread that drives polls the heartbeat at least.
pub(super) const POLL: Duration = Duration::from_millis(100);
/// How often it polls for a controller's answer that it waits for.
const ANSWER_POLL: Duration = Duration::from_millis(1);
/// How long rank 0 waits for the controller's answer before it continues without.
const DAEMON_ANSWER_TIMEOUT: Duration = Duration::from_millis(500);
/// How long a packet may take on a path that is tested, and a sum. An answer of the controller
/// takes some 300 ms, and the cause is to be known within 2 s.
const PATH_TEST_TIMEOUT: Duration = Duration::from_millis(1400);
/// How long a rank that leaves waits for others that may still need it.
pub(super) const LINGER: Duration = Duration::from_secs(2);

/// A descriptor to wait at, if any, and the longest time to wait.
pub(super) type Wait = (Option<Arc<Unshared<OwnedFd>>>, Duration);

/// Waits until the descriptor is readable or the time is over; a signal also ends the wait.
/// Releases the descriptor, which a reconnect waits for.
pub(super) fn sleep_at((fd, wait): Wait) {
    let mut fds: Vec<_> = fd.iter().map(|fd| PollFd::new(fd.as_fd(), PollFlags::POLLIN)).collect();
    let _ = nix::poll::ppoll(&mut fds, Some(TimeSpec::from_duration(wait)), None);
}

/// One session.
pub(super) struct Core {
    pub engine: Engine,
    pub connections: Box<dyn Connections>,
    heartbeat: Option<Heartbeat>,
    /// The controller's numbers of the ranks, in the order of the ring.
    pub ranks: Vec<u32>,
    /// A duplicate of the connections' descriptor, to wait at without the driver lock. It is
    /// readable when packets have arrived. The connections are closed only after all its clones
    /// have been dropped.
    pub fd: Arc<Unshared<OwnedFd>>,
    /// Number, promise and memory of each operation whose data the engine owns, in their order.
    promises: VecDeque<(u64, Promise, Memory)>,
    /// The result of the operation whose data was lent.
    lent: Option<Result<Finished, Error>>,
    /// Rank 0's request to the controller, and until when it waits for the answer.
    heartbeat_request: Option<(u64, Instant)>,
    /// This rank, if the ranks return to the box and it has not summed yet.
    pub returning: Option<u32>,
    /// Whether a warning about lost small values has been logged.
    pub has_warned: bool,
    /// The number of the last path test.
    path_test: u32,
}

impl Core {
    pub fn new(
        engine: Engine,
        connections: Box<dyn Connections>,
        heartbeat: Option<Heartbeat>,
    ) -> std::io::Result<Self> {
        let fd = Arc::new(Unshared::new(connections.fd().try_clone_to_owned()?));
        let (promises, lent, heartbeat_request, returning) = (VecDeque::new(), None, None, None);
        let has_warned = false;
        Ok(Self {
            engine,
            connections,
            heartbeat,
            fd,
            promises,
            lent,
            heartbeat_request,
            returning,
            has_warned,
            ranks: Vec::new(),
            path_test: 0,
        })
    }

    /// Receives, steps the engine and sends. If no packet is there, waits for one until `until`.
    /// Returns whether there were any. `lent` as for [`Engine::step`].
    fn drive(&mut self, until: Instant, lent: Option<&mut dyn Data>) -> Result<bool, Error> {
        let driven = self.advance(until, lent);
        self.deliver();
        driven
    }

    /// Settles the promises of completed operations.
    fn deliver(&mut self) {
        while let Some(Outcome { number, result, data }) = self.engine.outcome() {
            if let (Ok(Finished { mode: Mode::Box, .. }), Some(rank)) = (&result, self.returning) {
                log::info!("rank {rank}: the box sums again");
                self.returning = None;
            }
            if let (Ok(Finished { underflow, .. }), Some(heartbeat)) = (&result, &self.heartbeat)
                && underflow.zeroed > 0
            {
                heartbeat.count_underflows(underflow.zeroed);
            }
            if let Ok(Finished { underflow, .. }) = &result
                && underflow.is_large()
                && !std::mem::replace(&mut self.has_warned, true)
            {
                log::warn!(
                    "rank {}: {} of {} nonzero floats of an all-reduce became 0, because their \
                     block has far larger ones; `Report::underflow` counts them from now on, \
                     without a warning",
                    self.engine.own_rank(),
                    underflow.zeroed,
                    underflow.nonzero
                );
            }
            // Operations that are given up get their outcome before older ones that are still open.
            let at = self.promises.iter().position(|(n, ..)| *n == number);
            match (data, at.and_then(|at| self.promises.remove(at))) {
                (Some(data), Some((_, promise, _))) => {
                    promise.settle(result, data, self.retransmissions());
                }
                _ => self.lent = Some(result),
            }
        }
    }

    fn advance(&mut self, until: Instant, lent: Option<&mut dyn Data>) -> Result<bool, Error> {
        let progressed = self.drive_connections(until.min(self.engine.next_timeout()))?;
        if let Some(reason) = self.heartbeat.as_ref().and_then(Heartbeat::failed) {
            self.engine.fail(&mut *self.connections, Error::JobFailed { reason });
        }
        for rank in self.heartbeat.as_ref().map(Heartbeat::ended_ranks).unwrap_or_default() {
            if let Some(place) = self.ranks.iter().position(|other| *other == rank) {
                self.engine.on_ended(Instant::now(), &mut *self.connections, place as u32);
            }
        }
        self.engine.step(Instant::now(), &mut *self.connections, lent);
        if let Some(heartbeat) = self.heartbeat.as_ref().filter(|_| self.engine.is_on_host_ring()) {
            heartbeat.on_host_ring();
        }
        if let Some(heartbeat) = &self.heartbeat {
            if heartbeat.path_test() != self.path_test {
                self.path_test = heartbeat.path_test();
                self.engine.send_full_size(&mut *self.connections);
            } else if self.path_test > 0 && self.engine.acknowledged() {
                heartbeat.path_test_acknowledged(self.path_test);
            }
        }
        if let (Some(heartbeat), Some(error)) = (&self.heartbeat, self.engine.failure())
            && is_news(error)
        {
            heartbeat.give_up(|| error.to_string());
        }
        Ok(progressed)
    }

    /// Where to wait before the next step. `progressed`: the last one has received or sent
    /// something.
    pub fn wait(&self, progressed: bool) -> Wait {
        let fd = Some(Arc::clone(&self.fd));
        if progressed {
            return (fd, Duration::ZERO);
        }
        if let Some(time) = self.connections.batch_delay() {
            return (None, time);
        }
        let timeout = self.engine.next_timeout();
        let next = self.connections.next_timeout().map_or(timeout, |t| t.min(timeout));
        let most = if self.heartbeat_request.is_some() { ANSWER_POLL } else { POLL };
        (fd, next.saturating_duration_since(Instant::now()).min(most))
    }

    /// Drives only the connections. If they fail, all operations fail.
    fn drive_connections(&mut self, until: Instant) -> Result<bool, Error> {
        self.connections.drive(until).inspect_err(|error| {
            self.engine.fail(&mut *self.connections, error.clone());
        })
    }

    /// Receives and sends what there is, and leaves events to the next step. Returns whether there
    /// was anything.
    pub fn drive_connections_now(&mut self) -> Result<bool, Error> {
        let progressed = self.drive_connections(Instant::now());
        self.deliver();
        progressed
    }

    /// Waits for the previous rank's hello, the next rank's acknowledgement and the keys of a
    /// sealed session, at most until `until`; for the packet of the path MTU right after the hello,
    /// at most `patience`. Asks the controller for the cause of a delay; fails at once if waiting
    /// cannot help. `unreachable` receives what is missing, and since when. [`Error::Closed`] when
    /// `is_wanted` is false.
    pub fn wait_for_neighbours(
        &mut self,
        until: Instant,
        patience: Duration,
        unreachable: impl Fn(&dyn Connections, MissingPackets, Instant, Option<Cause>) -> Error,
        is_wanted: impl Fn() -> bool,
    ) -> Result<(), Error> {
        let begun = Instant::now();
        let mut reported = None;
        while is_wanted() {
            if let Some(error) = self.engine.failure() {
                return Err(error.clone());
            }
            let Some(missing) = self.missing() else {
                if self.engine.is_open() {
                    return Ok(());
                }
                if Instant::now() >= until {
                    self.engine.fail_to_open(&mut *self.connections, begun.elapsed());
                }
                self.drive_for(POLL)?;
                continue;
            };
            let mut cause = None;
            if let Some(heartbeat) = &self.heartbeat {
                if reported != Some(missing) && begun.elapsed() >= PATH_TEST_TIMEOUT {
                    reported = Some(missing);
                    heartbeat.request_cause(missing);
                }
                cause = heartbeat.cause(missing);
            }
            let small = self.engine.greeted_by_small_packets();
            let is_over =
                Instant::now() >= small.map_or(until, |since| until.min(since + patience));
            if is_over || cause.as_ref().is_some_and(|cause| cause.is_certain) {
                let unreachable = unreachable(&*self.connections, missing, begun, cause);
                self.engine.fail_to_connect(&mut *self.connections, &unreachable);
                return Err(unreachable);
            }
            self.drive_for(POLL)?;
        }
        Err(Error::Closed)
    }

    /// What has not arrived yet: full packets from the previous rank, or the next rank's
    /// acknowledgement of ours. Without a controller, ranks do not wait for acknowledgements.
    fn missing(&self) -> Option<MissingPackets> {
        if !self.engine.greeted() {
            let by_small = self.engine.greeted_by_small_packets().is_some();
            return Some(if by_small {
                MissingPackets::FullSize
            } else {
                MissingPackets::Previous
            });
        }
        (self.heartbeat.is_some() && !self.engine.acknowledged())
            .then_some(MissingPackets::Acknowledgement)
    }

    /// Sends a full packet of `mtu` bytes to the box, as all ranks do, and waits for its sum.
    /// Without one in time the ranks fall back and log why.
    pub fn test_path(&mut self, mtu: u32, is_wanted: impl Fn() -> bool) -> Result<(), Error> {
        let begun = Instant::now();
        let data = vec![0; (mtu as usize - CHECK_BYTES) / 4];
        // An adapter retransmits after up to four times its timeout, and counts no packets here.
        if self.connections.traffic().is_some() {
            self.engine.begin_path_test(PATH_TEST_TIMEOUT);
        }
        let work = Work::Owned(Box::new(Slice(data)));
        self.engine.start(Instant::now(), &mut *self.connections, Call::SUM, work)?;
        self.send_now();
        let outcome = loop {
            self.drive_for(POLL)?;
            if let Some(outcome) = self.lent.take() {
                break outcome;
            }
            if !is_wanted() {
                return Err(Error::Closed);
            }
        };
        self.engine.end_path_test();
        log::debug!("rank {}: path tested in {:.1?}", self.engine.own_rank(), begun.elapsed());
        outcome.map(drop)
    }

    /// Drives operations whose data the engine owns. Waits for packets for at most `time`, and
    /// returns whether there were any.
    pub fn drive_for(&mut self, time: Duration) -> Result<bool, Error> {
        self.drive(Instant::now() + time, None)
    }

    /// Drives an operation from its start to its end, after those that are open.
    pub fn drive_to_end(&mut self, call: Call, data: &mut dyn Data) -> Result<Finished, Error> {
        self.engine.start(Instant::now(), &mut *self.connections, call, Work::Lent(data))?;
        self.engine.step(Instant::now(), &mut *self.connections, Some(data));
        self.deliver();
        loop {
            if let Some(outcome) = self.lent.take() {
                return outcome;
            }
            if let Err(error) = self.drive(Instant::now() + POLL, Some(data)) {
                self.lent = None;
                return Err(error);
            }
        }
    }

    /// Starts an operation after those that are open, and sends what may be sent.
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
        self.engine.step(Instant::now(), &mut *self.connections, None);
        self.deliver();
        self.send_now();
        Ok(())
    }

    /// Announces a call that this rank has refused, as soon as there is room.
    pub fn refuse(&mut self) {
        self.engine.refuse(1);
        // The next call returns an error of this.
        let _ = self.drive_for(Duration::ZERO);
        self.send_now();
    }

    /// Ends the session, at all ranks.
    pub fn fail(&mut self, error: &Error) {
        self.engine.fail(&mut *self.connections, error.clone());
        self.deliver();
        self.send_now();
    }

    /// Memory of open operations.
    pub fn memories(&self) -> impl Iterator<Item = &Memory> {
        self.promises.iter().map(|(.., memory)| memory)
    }

    /// Sends what the engine has just decided, which otherwise waits for the progress thread.
    pub fn send_now(&mut self) {
        if let Err(e) = self.connections.drive(Instant::now()) {
            log::debug!("rank {}: sending at the end of a call: {e}", self.engine.own_rank());
        }
    }

    /// Called before an operation. If a reconnect is due, rank 0 proposes it to all ranks. Returns
    /// whether the operation may start, as far as a reconnect is concerned; never waits.
    pub fn has_consent(&mut self, rank: u32, failback: &mut Failback) -> bool {
        if rank == 0 && !self.engine.reconnects() {
            match self.should_reconnect(failback) {
                Some(true) => self.engine.propose_reconnect(&mut *self.connections),
                Some(false) => {}
                None => return false,
            }
        }
        !self.engine.waits_for_consent()
    }

    /// The number of the box's programs, as the controller reported it last.
    pub fn program_generation(&self) -> u64 {
        self.heartbeat
            .as_ref()
            .map_or(0, |heartbeat| heartbeat.reconnect_request().program_generation)
    }

    /// Whether a reconnect is due and the controller answers: without it no rank could join. `None`
    /// until it has answered.
    fn should_reconnect(&mut self, failback: &mut Failback) -> Option<bool> {
        let Some(heartbeat) = &self.heartbeat else { return Some(false) };
        let now = Instant::now();
        let answered = self
            .heartbeat_request
            .map(|(heartbeat_request, _)| heartbeat.has_answered(heartbeat_request));
        let is_over = self.engine.failure().is_some()
            || self.heartbeat_request.is_some_and(|(_, until)| now >= until);
        if is_over && answered == Some(false) {
            self.heartbeat_request = None;
            failback.failed(now);
            return Some(false);
        }
        let is_due = failback.is_due(now, heartbeat.reconnect_request(), self.engine.box_trust());
        match answered {
            Some(false) => return None,
            None if is_due => {
                self.heartbeat_request = Some((heartbeat.request(), now + DAEMON_ANSWER_TIMEOUT));
                return None;
            }
            _ => self.heartbeat_request = None,
        }
        Some(is_due)
    }

    /// Leaves the job before a reconnect, but stays connected with the other ranks.
    pub fn leave_job(&mut self) -> Option<Heartbeat> {
        let mut heartbeat = self.heartbeat.take();
        if let Some(heartbeat) = &mut heartbeat {
            heartbeat.stop(Ok(()));
        }
        heartbeat
    }

    /// Leaves the other ranks, when all have joined again.
    pub fn leave_ranks(&mut self) {
        self.engine.leave(&mut *self.connections);
        self.send_now();
    }

    /// Keeps the connections, when this rank could not join again.
    pub fn keep_connections(&mut self, heartbeat: Option<Heartbeat>) {
        self.engine.keep_connections();
        self.heartbeat = heartbeat;
    }

    /// Statistics of these connections.
    pub fn statistics(&self) -> Statistics {
        let mut statistics = *self.engine.statistics();
        (statistics.restarts, statistics.traffic) =
            (self.connections.restarts(), self.connections.traffic());
        statistics
    }

    pub fn retransmissions(&self) -> Option<u64> {
        self.connections.traffic().map(|t| t.retransmissions)
    }

    /// Completes open operations, at most until `until`.
    pub fn complete(&mut self, until: Instant) {
        while self.engine.open() > 0 && Instant::now() < until {
            if self.drive_for(LINGER / 100).is_err() {
                break;
            }
        }
    }

    /// Says goodbye, and stays as long as another rank may need this one.
    pub fn linger(&mut self) {
        let failure = self.engine.failure().cloned();
        let patient = Instant::now() + LINGER / 10;
        let until = Instant::now() + if failure.is_some() { LINGER / 4 } else { LINGER };
        self.engine.leave(&mut *self.connections);
        self.engine.abandon(&Error::Closed);
        self.deliver();
        while Instant::now() < until && !self.engine.may_leave(Instant::now() < patient) {
            if self.drive_for(Duration::from_millis(10)).is_err() {
                break;
            }
        }
        self.depart(match failure {
            Some(error) if is_news(&error) => Err(error.to_string()),
            _ => Ok(()),
        });
    }

    /// Reports to the controller how the job has ended for this rank.
    fn depart(&mut self, end: Result<(), String>) {
        // The others need not stay for these.
        self.connections.acknowledge_all();
        let _ = self.connections.drive(Instant::now());
        if let Some(heartbeat) = &mut self.heartbeat {
            heartbeat.stop(end);
        }
    }
}

/// Whether the controller is to report it to the others, which may not have received it from this
/// rank.
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
    use netsum_collective::numeric::element::Slice;
    use netsum_collective::numeric::layout::Layout;
    use netsum_collective::report::Traffic;
    use netsum_collective::shape::JobShape;

    use super::super::promise::Settlement;
    use super::*;

    /// Connections that deliver a test's events, or whose adapter is gone.
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
        fn transport_name(&self) -> String {
            String::new()
        }
    }

    /// Of rank 0 of two.
    fn settings() -> Settings {
        let layout = Layout { message_size: 4096, window: 2, rings: 1 };
        let shape = JobShape {
            ranks: 2,
            mtu: 1024,
            layout,
            relaxed: false,
            on_host_ring: false,
            is_sealed: false,
        };
        Settings { rank: 0, shape, summands: 2, timeout: Duration::from_secs(10), session: 1 }
    }

    #[test]
    fn a_failure_of_the_connections_ends_operations_in_flight() {
        let settings = settings();
        let mut connections = Scripted::new(true);
        let engine = Engine::new(Instant::now(), settings, None, &mut connections);
        let mut core = Core::new(engine, Box::new(connections), None).unwrap();
        let (settlement, promise) = Promise::new();
        core.start(Call::SUM, Box::new(Slice(vec![1])), promise, Memory::default()).unwrap();
        assert!(!settlement.lock().is_settled);
        // As the progress thread does between two steps.
        assert_eq!(core.drive_connections_now().unwrap_err(), gone());
        assert!(matches!(&settlement.lock().outcome, Some(Err(error)) if *error == gone()));
    }

    /// Rank 1 has the sum of operation 1, which is late here, and leaves.
    #[test]
    fn a_leaving_rank_settles_newer_operations_while_an_older_one_is_open() {
        let settings = settings();
        let mut connections = Scripted::new(false);
        let script = Arc::clone(&connections.script);
        let engine = Engine::new(Instant::now(), settings, None, &mut connections);
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
            Frame::Hello { shape: settings.shape, timeout: settings.timeout, rank: 1, nonce: 2 },
            Frame::Goodbye { origin: 1, completed: 1 },
        ] {
            let mut data = Buffer::heap(64);
            frame.encode_to(&mut data);
            script
                .lock()
                .unwrap()
                .push_back(ChannelEvent::Received { channel: Channel::BypassIn, data });
        }
        core.drive_for(Duration::ZERO).unwrap();
        let left = |known: &Settlement| {
            matches!(known.lock().outcome, Some(Err(Error::RankLeft { rank: 1 })))
        };
        assert!(!settlements[0].lock().is_settled, "its sum may still come");
        assert!(left(&settlements[1]) && left(&settlements[2]));
    }
}
