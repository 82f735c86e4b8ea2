//! A communicator's sessions, one after the other. When the ranks reconnect, a thread of its own
//! replaces the connections, while new operations wait in a queue.

use std::collections::VecDeque;
use std::sync::{Arc, Weak, mpsc};
use std::time::{Duration, Instant};

use super::allocator::{nonce, seal_random};
use super::bootstrap::{Membership, RetryFor, bootstrap, control};
use super::config::{Bootstrap, CommConfig};
use super::core::{Core, LINGER, Wait, sleep_at};
use super::driver_lock::{DriverGuard, DriverLock};
use super::network::{Bind, Connections, Network};
use super::promise::Promise;
use super::transport;
use crate::control::{Cause, MissingPackets};
use netsum_collective::call::Call;
use netsum_collective::engine::{Engine, MAX_OPEN, Settings};
use netsum_collective::error::{Error, UnreachableReason};
use netsum_collective::failback::Failback;
use netsum_collective::numeric::element::{Data, Owned};
use netsum_collective::numeric::memory::Memory;
use netsum_collective::report::{Mode, Report, Statistics};
use netsum_collective::seal::{Secret, Share};
use netsum_collective::shape::JobShape;

/// How often a rank that joins again polls for the controller's answer, and callers for the end of
/// the reconnect.
const JOINING: Duration = Duration::from_millis(5);

/// A call that waits until an operation may be started.
enum Queued {
    Operation {
        call: Call,
        data: Owned,
        promise: Promise,
        memory: Memory,
    },
    /// A call that this rank has refused.
    Refused,
}

impl Queued {
    fn memory(&self) -> Option<&Memory> {
        match self {
            Self::Operation { memory, .. } => Some(memory),
            Self::Refused => None,
        }
    }

    fn fail(self, error: &Error) {
        if let Self::Operation { promise, .. } = self {
            promise.fail(error.clone());
        }
    }
}

/// Connections that a thread replaces.
struct Reconnecting {
    outcome: mpsc::Receiver<Reconnected>,
    /// The thread gives up when this is dropped.
    wanted: Arc<()>,
    /// Mode and statistics of the session before.
    mode: Mode,
    statistics: Statistics,
}

/// The result of a reconnect.
enum Reconnected {
    /// The ranks could not join again, and keep their connections.
    Stayed(Box<Core>),
    /// The statistics of the connections before, and the new connections.
    Left(Statistics, Box<Result<Established, Error>>),
}

type Established = (JobShape, Arc<str>, Core);

/// The application's threads and the progress thread drive this.
pub(super) struct Session {
    config: CommConfig,
    pub shape: JobShape,
    /// The name of the transport.
    pub transport_name: Arc<str>,
    /// Whether two ranks have one address.
    pub has_shared_address: bool,
    /// `None` after the end, after a failed reconnect, and while `reconnecting`.
    core: Option<Core>,
    reconnecting: Option<Reconnecting>,
    /// Calls in their order, after the operations that are open.
    queue: VecDeque<Queued>,
    /// Statistics of earlier connections.
    before: Statistics,
    failback: Failback,
    /// Why the ranks could not reconnect.
    broken: Option<Error>,
}

/// A session that several threads drive, one at a time.
pub(super) type SharedSession = Arc<DriverLock<Session>>;

impl Session {
    /// Finds the job, opens connections and waits until the ring is connected.
    pub fn new(config: CommConfig) -> Result<Self, Error> {
        let started = Instant::now();
        let (network, membership) = join(&config, Bind::Now, RetryFor::Short)?;
        let ranks = &membership.ranks;
        let has_shared_address =
            ranks.iter().enumerate().any(|(i, rank)| ranks[..i].iter().any(|r| r.ip == rank.ip));
        let (shape, transport_name, core) =
            establish(&config, started, network, membership, || true)?;
        match &config.inter_host_ring {
            Some(ring) => {
                log::debug!("ring {} of hosts: connected over {transport_name}", ring.number)
            }
            None => log::info!("rank {}: connected over {transport_name}", config.rank),
        }
        let (before, mut failback) = (Statistics::default(), Failback::new(Instant::now()));
        failback.connected(Instant::now(), core.program_generation());
        let (core, reconnecting, queue, broken) = (Some(core), None, VecDeque::new(), None);
        Ok(Self {
            config,
            shape,
            transport_name,
            has_shared_address,
            core,
            reconnecting,
            queue,
            before,
            failback,
            broken,
        })
    }

    /// Whether an operation may be started now; never waits.
    fn may_start(&mut self) -> Result<bool, Error> {
        self.reconnect_if_due();
        if self.reconnecting.is_some() {
            return Ok(false);
        }
        let rank = self.config.rank;
        let core =
            self.core.as_mut().ok_or_else(|| self.broken.clone().unwrap_or(Error::Closed))?;
        Ok(core.has_consent(rank, &mut self.failback) && !core.engine.is_full())
    }

    /// Whether [`run`](Self::run) may be called now; never waits.
    pub fn may_run(&mut self) -> Result<bool, Error> {
        Ok(self.queue.is_empty() && self.may_start()?)
    }

    /// Drives an operation from its start to its end.
    pub fn run(
        &mut self,
        call: Call,
        data: &mut dyn Data,
        called: Instant,
    ) -> Result<Report, Error> {
        let core = self.core.as_mut().ok_or(Error::Closed)?;
        let before = core.retransmissions();
        let outcome = core.drive_to_end(call, data);
        core.send_now();
        let again = core.retransmissions().zip(before).map(|(after, before)| after - before);
        let elapsed = called.elapsed();
        self.reconnect_if_due();
        outcome?.report(elapsed, again)
    }

    /// Starts an operation, or queues it after those that wait.
    pub fn enqueue(
        &mut self,
        call: Call,
        data: Owned,
        promise: Promise,
        memory: Memory,
    ) -> Result<(), Error> {
        let queued = self.queue.iter().filter_map(Queued::memory);
        let open: Vec<_> = self.core.iter().flat_map(Core::memories).chain(queued).collect();
        if let Some(other) = open.iter().position(|other| other.collides(&memory)) {
            return Err(Error::InFlight(format!(
                "the array shares memory with that of operation {} of {} in flight, counted from \
                 the oldest: wait for that operation first, or pass a copy",
                other + 1,
                open.len()
            )));
        }
        let may_run = self.may_run()?;
        match self.core.as_mut().filter(|_| may_run) {
            Some(core) => core.start(call, data, promise, memory),
            None => {
                self.queue.push_back(Queued::Operation { call, data, promise, memory });
                Ok(())
            }
        }
    }

    /// Reconnects if that is due, and starts queued operations that may be started.
    fn start_queued(&mut self) {
        self.reconnect_if_due();
        while !self.queue.is_empty() {
            match self.may_start() {
                Ok(false) => return,
                Ok(true) => {
                    let (Some(core), Some(next)) = (&mut self.core, self.queue.pop_front()) else {
                        return;
                    };
                    match next {
                        Queued::Operation { call, data, promise, memory } => {
                            // The promise reports an error to the caller. A call that only this
                            // rank may have refused is also announced to the others.
                            let started = core.start(call, data, promise, memory);
                            if let Err(Error::Argument(_) | Error::MessageSize { .. }) = started {
                                core.refuse();
                            }
                        }
                        Queued::Refused => core.refuse(),
                    }
                }
                Err(error) => self.queue.drain(..).for_each(|queued| queued.fail(&error)),
            }
        }
    }

    /// Announces a call that this rank has refused to the others, as soon as there is room, and in
    /// its place among the queued ones. Never waits.
    pub fn refuse(&mut self) {
        match &mut self.core {
            Some(core) if self.queue.is_empty() => core.refuse(),
            None if self.reconnecting.is_none() => {}
            _ => self.queue.push_back(Queued::Refused),
        }
    }

    /// Ends the session at all ranks.
    pub fn fail(&mut self, error: &Error) {
        match &mut self.core {
            Some(core) => core.fail(error),
            None => self.broken = Some(error.clone()),
        }
    }

    /// Why the session has ended, if it has failed.
    pub fn failure(&self) -> Option<Error> {
        let of_core = self.core.as_ref().and_then(|core| core.engine.failure());
        of_core.or(self.broken.as_ref()).cloned()
    }

    /// Whether a rank has left in good order, or this one is in no session.
    pub fn has_departed(&self, rank: u32) -> bool {
        self.core.as_ref().is_none_or(|core| core.engine.has_departed(rank))
    }

    /// Counts operations from here, as if those before had not been.
    pub fn forget_operations(&mut self) {
        if let Some(core) = &mut self.core {
            core.engine.forget_operations();
        }
    }

    /// Drives until `is_done`, which is checked after each step, or until `until`.
    pub fn drive_until(&mut self, until: Instant, step: Duration, is_done: impl Fn() -> bool) {
        let Some(core) = &mut self.core else { return };
        while !is_done() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || core.drive_for(step.min(left)).is_err() {
                break;
            }
        }
        core.send_now();
    }

    /// Reconnects if all ranks have agreed to, and this one has completed the operations before;
    /// never waits.
    fn reconnect_if_due(&mut self) {
        match self.reconnecting.as_ref().map(|reconnecting| reconnecting.outcome.try_recv()) {
            Some(Ok(reconnected)) => self.reconnected(reconnected),
            Some(Err(mpsc::TryRecvError::Disconnected)) => {
                (self.reconnecting, self.broken) = (None, Some(Error::Closed));
            }
            _ => {}
        }
        if self.core.as_ref().is_some_and(|core| core.engine.must_reconnect()) {
            self.reconnect();
        }
    }

    /// Starts a thread that reconnects.
    fn reconnect(&mut self) {
        let (mode, statistics) = (self.mode(), self.statistics());
        let Some(mut core) = self.core.take() else { return };
        let (config, wanted) = (self.config.clone(), Arc::new(()));
        let still = Arc::downgrade(&wanted);
        let ((give, given), (send, outcome)) = (mpsc::channel(), mpsc::channel());
        let thread = move || {
            if let Ok(core) = given.recv() {
                // The receiver is dropped only when the process ends.
                let _ = send.send(reconnect(config, core, &still));
            }
        };
        if let Err(e) = std::thread::Builder::new().name("netsum-connect".to_owned()).spawn(thread)
        {
            log::warn!("rank {}: cannot start a thread to reconnect: {e}", self.config.rank);
            core.engine.keep_connections();
            self.reconnected(Reconnected::Stayed(Box::new(core)));
            return;
        }
        let _ = give.send(core);
        self.reconnecting = Some(Reconnecting { outcome, wanted, mode, statistics });
    }

    fn reconnected(&mut self, reconnected: Reconnected) {
        self.reconnecting = None;
        let (left, established) = match reconnected {
            Reconnected::Stayed(core) => {
                self.failback.failed(Instant::now());
                self.core = Some(*core);
                self.fail_as_reported();
                return;
            }
            Reconnected::Left(left, established) => (left, *established),
        };
        self.before = self.before.plus(left);
        match established {
            Ok((shape, transport_name, mut core)) => {
                core.engine.count_from(self.before.all_reduces);
                self.before.reconnects += 1;
                self.failback.connected(Instant::now(), core.program_generation());
                (self.shape, self.transport_name, self.core) = (shape, transport_name, Some(core));
                self.fail_as_reported();
            }
            Err(error) => self.broken = Some(error),
        }
    }

    /// Ends the session if [`fail`](Self::fail) was called during a reconnect.
    fn fail_as_reported(&mut self) {
        if let (Some(error), Some(core)) = (&self.broken, &mut self.core) {
            core.fail(error);
        }
    }

    /// Whether another operation must complete before one can be started.
    pub fn is_full(&self) -> bool {
        self.core.as_ref().map_or(0, |core| core.engine.open()) + self.queue.len() >= MAX_OPEN
    }

    /// Completes what can be completed, and leaves in good order.
    pub fn close(&mut self) {
        let until = Instant::now() + LINGER;
        while (self.reconnecting.is_some() || !self.queue.is_empty()) && Instant::now() < until {
            let Some(wait) = self.step() else { break };
            sleep_at(wait);
        }
        self.queue.clear();
        if let Some(Reconnecting { outcome, wanted, .. }) = self.reconnecting.take() {
            drop(wanted);
            if let Ok(reconnected) = outcome.recv() {
                self.reconnected(reconnected);
            }
        }
        if let Some(mut core) = self.core.take() {
            core.complete(until);
            core.linger();
            self.before = self.before.plus(core.statistics());
        }
    }

    /// Whether the box or the ring sums.
    pub fn mode(&self) -> Mode {
        let before =
            self.reconnecting.as_ref().map_or(Mode::HostRing, |reconnecting| reconnecting.mode);
        self.core.as_ref().map_or(before, |core| core.engine.mode())
    }

    /// Statistics of all sessions.
    pub fn statistics(&self) -> Statistics {
        let before =
            self.reconnecting.as_ref().map_or(self.before, |reconnecting| reconnecting.statistics);
        self.core.as_ref().map_or(before, |core| self.before.plus(core.statistics()))
    }

    /// A step of the progress thread, as [`step`](Self::step).
    pub fn step_between_calls(&mut self) -> Option<Wait> {
        let wait = self.step()?;
        let Some(core) = &mut self.core else { return Some(wait) };
        // If packets have arrived now, the engine needs another step.
        let progressed = core.drive_connections_now().ok()?;
        Some(core.wait(progressed))
    }

    /// A step of a caller that waits for an operation; never waits itself. Returns where to wait
    /// for the next step and how long, or `None` when there is nothing to drive.
    pub fn step(&mut self) -> Option<Wait> {
        let progressed =
            self.core.as_mut().map_or(Ok(false), |core| core.drive_for(Duration::ZERO));
        self.start_queued();
        if self.reconnecting.is_some() {
            return Some((None, JOINING));
        }
        Some(self.core.as_ref()?.wait(progressed.ok()?))
    }

    /// Sends what the engine has decided since the last step.
    pub fn send_now(&mut self) {
        if let Some(core) = &mut self.core {
            core.send_now();
        }
    }
}

/// Waits until `is_so`. Other threads may take the lock meanwhile.
pub(super) fn wait_until(
    mut session: DriverGuard<'_, Session>,
    is_so: impl Fn(&mut Session) -> Result<bool, Error>,
) -> Result<DriverGuard<'_, Session>, Error> {
    while !is_so(&mut session)? {
        let wait = session.step().unwrap_or((None, JOINING));
        session = session.unlocked_while(|| sleep_at(wait));
    }
    Ok(session)
}

type Joined = (Box<dyn Network>, Membership);

/// Finds the job and the other ranks.
fn join(config: &CommConfig, when: Bind, patience: RetryFor) -> Result<Joined, Error> {
    let mut network = transport::open(config, when)?;
    let membership = bootstrap(config, &mut *network, patience)?;
    Ok((network, membership))
}

/// Joins again and replaces the connections, as all ranks do at this moment. If they cannot join,
/// they keep the present connections. If the connections are lost, the next call returns the error,
/// because the last call has its sums already.
fn reconnect(config: CommConfig, mut core: Core, wanted: &Weak<()>) -> Reconnected {
    let (rank, started) = (config.rank, Instant::now());
    let mut heartbeat = core.leave_job();
    // A short timeout is enough: all ranks have just agreed to reconnect.
    let connect_timeout = config.connect_timeout.min(config.timeout);
    let config = CommConfig { connect_timeout, ..config };
    let (network, membership) = match join_while_driving(&config, &mut core, wanted) {
        Ok(joined) => joined,
        Err(error) => {
            if is_wanted(wanted) {
                log::warn!("rank {rank}: cannot join again and keeps its connections: {error}");
                if let Some(heartbeat) = &mut heartbeat
                    && let Err(e) =
                        control(&config).and_then(|control| heartbeat.start_again(control))
                {
                    log::warn!("rank {rank}: cannot restart heartbeats: {e}");
                }
            }
            core.keep_connections(heartbeat);
            return Reconnected::Stayed(Box::new(core));
        }
    };
    core.leave_ranks();
    let returning = (core.engine.mode() == Mode::HostRing).then_some(rank);
    let (left, refused) = (core.statistics(), core.engine.refused());
    let (descriptor, has_warned) = (Arc::downgrade(&core.fd), core.has_warned);
    drop(core);
    // The address is in use until no thread waits at the descriptor.
    while descriptor.strong_count() > 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    log::debug!(
        "rank {rank}: joined again and closed its old connections in {:.1?}",
        started.elapsed()
    );
    let mut established =
        establish(&config, Instant::now(), network, membership, || is_wanted(wanted));
    match &mut established {
        Ok((_, transport_name, core)) => {
            (core.returning, core.has_warned) = (returning, has_warned);
            core.engine.refuse(refused);
            // Ranks that return to the box log that when the box has summed.
            let level = if returning.is_some() { log::Level::Debug } else { log::Level::Info };
            log::log!(
                level,
                "rank {rank}: reconnected over {transport_name} in {:.1?}",
                started.elapsed()
            );
        }
        Err(error) => log::warn!("rank {rank}: cannot reconnect: {error}"),
    }
    Reconnected::Left(left, Box::new(established))
}

fn is_wanted(wanted: &Weak<()>) -> bool {
    wanted.strong_count() > 0
}

/// [`join`], while this thread drives the present connections: the other ranks may need this one.
fn join_while_driving(
    config: &CommConfig,
    core: &mut Core,
    wanted: &Weak<()>,
) -> Result<Joined, Error> {
    let (sender, answer) = mpsc::channel();
    let theirs = config.clone();
    let join = move || {
        let joined = join(&theirs, Bind::Later, RetryFor::Long);
        if let Err(mpsc::SendError(Ok((_, Membership { heartbeat: Some(mut heartbeat), .. })))) =
            sender.send(joined)
        {
            heartbeat.stop(Err("the rank gave up before the controller answered".to_owned()));
        }
    };
    std::thread::Builder::new()
        .name("netsum-join".to_owned())
        .spawn(join)
        .map_err(|e| Error::Config(format!("cannot start a thread: {e}")))?;
    loop {
        match answer.try_recv() {
            Ok(joined) => return joined,
            Err(mpsc::TryRecvError::Empty) if is_wanted(wanted) => {
                core.drive_for(JOINING)?;
            }
            Err(_) => return Err(Error::Closed),
        }
        if let Some(error) = core.engine.failure() {
            return Err(error.clone());
        }
    }
}

/// What this rank brings to a sealed session. Another job, group, hosts' ring or order of ranks
/// gives other keys.
fn share(config: &CommConfig, secret: Secret, ranks: &[u32]) -> Result<Share, Error> {
    let job = match &config.bootstrap {
        Bootstrap::Controller { job, .. } => job.clone(),
        Bootstrap::Static { peers, .. } => format!("{peers:?}"),
    };
    let ring =
        config.inter_host_ring.as_ref().map(|ring| format!("{} {:?}", ring.number, ring.ranks));
    let (group, ring) = (config.group.as_deref().unwrap_or(""), ring.as_deref().unwrap_or(""));
    let names = [&job, group, ring, &format!("{ranks:?}")];
    Ok(Share::new(secret, &names, &seal_random()?))
}

/// Opens connections and waits until the ring is connected.
fn establish(
    config: &CommConfig,
    started: Instant,
    network: Box<dyn Network>,
    membership: Membership,
    is_wanted: impl Fn() -> bool,
) -> Result<Established, Error> {
    let CommConfig { rank, timeout, .. } = *config;
    let Membership { shape, ranks, names, mut heartbeat } = membership;
    let place = names.iter().position(|name| *name == rank).unwrap_or(rank as usize) as u32;
    let in_job = names.clone();
    let names: Vec<u32> = match &config.inter_host_ring {
        Some(ring) => names.iter().map(|name| ring.ranks[*name as usize]).collect(),
        None => names,
    };
    let previous = (place as usize + ranks.len() - 1) % ranks.len();
    let next = (place as usize + 1) % ranks.len();
    let [before, behind] = [previous, next].map(|place| (names[place], ranks[place].ip));
    // As all ranks have it: the controller reported it to them.
    let tests_path = heartbeat.is_some() && !shape.on_host_ring;
    let connected = network.connect(&shape, place, &ranks).and_then(|mut connections| {
        let summands = config.inter_host_ring.as_ref().map_or(shape.ranks, |ring| ring.summands);
        let share =
            config.secret.clone().map(|secret| share(config, secret, &in_job)).transpose()?;
        let settings = Settings { rank: place, shape, summands, timeout, session: nonce() };
        let mut engine = Engine::new(Instant::now(), settings, share, &mut *connections);
        engine.name_ranks(names);
        connections.start().map(|()| (engine, connections))
    });
    let (engine, connections) = match (connected, &mut heartbeat) {
        (Ok(connected), _) => connected,
        (Err(error), heartbeat) => {
            // The others already wait for this rank.
            if let Some(heartbeat) = heartbeat {
                heartbeat.stop(Err(error.to_string()));
            }
            return Err(error);
        }
    };
    let transport_name = connections.transport_name().into();
    let mut core = Core::new(engine, connections, heartbeat)
        .map_err(|e| Error::Config(format!("cannot duplicate a file descriptor: {e}")))?;
    core.ranks = in_job;
    let patience = timeout.min(config.connect_timeout);
    let is_listed = matches!(config.bootstrap, Bootstrap::Static { .. });
    let unreachable =
        |connections: &dyn Connections, missing, since: Instant, cause: Option<Cause>| {
            let ((rank, ip), only_small) = (
                if missing == MissingPackets::Acknowledgement { behind } else { before },
                missing == MissingPackets::FullSize,
            );
            // A possible cause does not tell why a rank is silent: it may not have started.
            let cause = cause.filter(|c| {
                !c.text.is_empty() && (c.is_certain || missing == MissingPackets::Acknowledgement)
            });
            let is_certain = cause.as_ref().is_some_and(|cause| cause.is_certain);
            let stray =
                connections.stray().filter(|ip| is_listed && ranks.iter().any(|r| r.ip == *ip));
            let reason = match stray {
                _ if cause.is_some() => {
                    UnreachableReason::Reported(cause.map(|c| c.text).unwrap_or_default())
                }
                _ if only_small => UnreachableReason::PathMtuTooLarge(shape.mtu),
                _ if connections.previous_is_in_earlier() => UnreachableReason::EarlierSession,
                Some(stray) => UnreachableReason::MisorderedPeers(stray),
                None if is_listed => UnreachableReason::SilentOrMisordered,
                None => UnreachableReason::Silent,
            };
            let after = match only_small {
                _ if is_certain => Duration::from_millis(since.elapsed().as_millis() as u64),
                true => patience,
                false => config.connect_timeout,
            };
            Error::Unreachable { rank, ip, after, reason }
        };
    let met = core.wait_for_neighbours(
        started + config.connect_timeout,
        patience,
        unreachable,
        &is_wanted,
    );
    let tested =
        met.and_then(|()| if tests_path { core.test_path(shape.mtu, &is_wanted) } else { Ok(()) });
    if let Err(error) = tested {
        // The others must receive the reason.
        core.linger();
        return Err(error);
    }
    Ok((shape, transport_name, core))
}

#[cfg(test)]
mod tests {
    use netsum_collective::numeric::element::Slice;
    use netsum_collective::numeric::layout::Layout;

    use super::super::pending::{Pending, Room};
    use super::*;

    /// A session that reconnects until the test sends a result.
    fn reconnecting() -> (Arc<DriverLock<Session>>, mpsc::Sender<Reconnected>, Weak<()>) {
        let layout = Layout { message_size: 4096, window: 2, rings: 1 };
        let bootstrap =
            Bootstrap::Static { peers: vec![], mtu: 1024, message_size: 4096, window: 2, rings: 1 };
        let (send, outcome) = mpsc::channel();
        let wanted = Arc::new(());
        let still = Arc::downgrade(&wanted);
        let (mode, mut statistics) = (Mode::Box, Statistics::default());
        statistics.all_reduces = 7;
        let session = Session {
            config: CommConfig::new(0, 2, [127, 0, 0, 1].into(), bootstrap),
            shape: JobShape {
                ranks: 2,
                mtu: 1024,
                layout,
                relaxed: false,
                on_host_ring: false,
                is_sealed: false,
            },
            transport_name: "nothing".into(),
            has_shared_address: false,
            core: None,
            reconnecting: Some(Reconnecting { outcome, wanted, mode, statistics }),
            queue: VecDeque::new(),
            before: Statistics::default(),
            failback: Failback::new(Instant::now()),
            broken: None,
        };
        (Arc::new(DriverLock::new(session)), send, still)
    }

    fn start(driver: &Arc<DriverLock<Session>>) -> Pending<()> {
        let (pending, promise) = Pending::new(Arc::clone(driver), |_| Some(()));
        let data = Box::new(Slice(vec![1]));
        driver.lock().enqueue(Call::SUM, data, promise, Memory::default()).unwrap();
        pending
    }

    #[test]
    fn callers_are_not_blocked_by_a_reconnect() {
        let (driver, send, _) = reconnecting();
        let begun = Instant::now();
        let room = Room { driver: Some(Arc::clone(&driver)), process: std::process::id() };
        let all: Vec<_> = (0..MAX_OPEN).map(|_| start(&driver)).collect();
        assert!(!all[0].is_done() && !all[0].wait_for(Duration::from_millis(100)));
        assert!(!room.wait_for(Duration::ZERO) && !room.wait_for(Duration::from_millis(100)));
        let session = driver.lock();
        assert_eq!((session.mode(), session.statistics().all_reduces), (Mode::Box, 7));
        drop(session);
        assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
        // All callers get the error.
        let error = Error::Protocol("unreachable".to_owned());
        send.send(Reconnected::Left(Statistics::default(), Box::new(Err(error.clone())))).unwrap();
        all.into_iter().for_each(|pending| assert_eq!(pending.wait().unwrap_err(), error));
        assert!(room.wait_for(Duration::ZERO));
    }

    #[test]
    fn leaving_ends_a_reconnect() {
        let (driver, send, wanted) = reconnecting();
        let pending = start(&driver);
        let thread = std::thread::spawn(move || {
            while is_wanted(&wanted) {
                std::thread::sleep(JOINING);
            }
            send.send(Reconnected::Left(Statistics::default(), Box::new(Err(Error::Closed))))
                .unwrap();
        });
        driver.end().close();
        assert_eq!(pending.wait().unwrap_err(), Error::Closed);
        thread.join().unwrap();
    }
}
