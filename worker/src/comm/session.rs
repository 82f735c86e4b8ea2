//! A membership in a job over all its connections: where the box asks for it, the ranks leave these
//! and connect anew, in a thread of its own, while operations that are started wait in line. And
//! the thread that drives between calls.

use std::collections::VecDeque;
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Weak, mpsc};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags};

use super::bootstrap::{Membership, Patience, bootstrap, control};
use super::config::{Bootstrap, CommConfig};
use super::core::{Core, LINGER};
use super::network::{Bind, Connections, Network};
use super::numbers::nonce;
use super::promise::Promise;
use super::transport;
use super::turns::{Turn, Turns};
use crate::unshared::Unshared;
use netsum_collective::call::Call;
use netsum_collective::engine::{Engine, MAX_OPEN, Settings};
use netsum_collective::error::{Error, Unanswered};
use netsum_collective::numeric::element::{Data, Owned};
use netsum_collective::numeric::memory::Memory;
use netsum_collective::report::{Mode, Report, Statistics};
use netsum_collective::shape::JobShape;
use netsum_collective::way_back::WayBack;

/// How long the keeper leaves the connections alone when a call has ended: much less than any
/// time-out.
const PAUSE: Duration = Duration::from_micros(500);

/// How long a rank that joins again leaves the daemon's answer alone, and who waits for it the
/// rank.
const JOINING: Duration = Duration::from_millis(5);

/// What to wait for, if anything, and how long.
pub(super) type Wait = (Option<Arc<Unshared<OwnedFd>>>, Duration);

/// Waits until packets have arrived, or for so long. Interrupted is as good as over.
/// Lets go of the descriptor, which a reconnect waits for.
pub(super) fn sleep_at((fd, wait): Wait) {
    let mut fds: Vec<_> = fd.iter().map(|fd| PollFd::new(fd.as_fd(), PollFlags::POLLIN)).collect();
    let _ = nix::poll::ppoll(&mut fds, Some(nix::sys::time::TimeSpec::from_duration(wait)), None);
}

/// What waits until an operation may be started.
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
struct Renewing {
    outcome: mpsc::Receiver<Renewed>,
    /// The thread gives up when it is dropped.
    wanted: Arc<()>,
    /// Of the connections before.
    mode: Mode,
    statistics: Statistics,
}

/// What it came to.
enum Renewed {
    /// The ranks could not join again: the connections before.
    Stayed(Box<Core>),
    /// What was done over the connections before, and others.
    Left(Statistics, Box<Result<Established, Error>>),
}

type Established = (JobShape, Arc<str>, Core);

/// What the application's threads and the keeper drive.
pub(super) struct Session {
    config: CommConfig,
    pub shape: JobShape,
    /// What the connections run over.
    pub title: Arc<str>,
    /// `None` when it is over, or broken, or while `renewing`.
    core: Option<Core>,
    renewing: Option<Renewing>,
    /// In their order, behind those that are open.
    queue: VecDeque<Queued>,
    /// Counted over earlier connections.
    before: Statistics,
    way_back: WayBack,
    /// Why the ranks could not connect anew.
    broken: Option<Error>,
}

impl Session {
    /// Finds the job, opens connections and waits until the ring stands.
    pub fn new(config: CommConfig) -> Result<Self, Error> {
        let started = Instant::now();
        let (network, membership) = join(&config, Bind::Now, Patience::Short)?;
        let (shape, title, core) = establish(&config, started, network, membership, || true)?;
        log::info!("rank {}: over {title}", config.rank);
        let (before, way_back) = (Statistics::default(), WayBack::new(Instant::now()));
        let (core, renewing, queue, broken) = (Some(core), None, VecDeque::new(), None);
        Ok(Self { config, shape, title, core, renewing, queue, before, way_back, broken })
    }

    /// Whether an operation may be started now; never waits.
    fn may_start(&mut self) -> Result<bool, Error> {
        self.renew_if_due();
        if self.renewing.is_some() {
            return Ok(false);
        }
        let rank = self.config.rank;
        let core =
            self.core.as_mut().ok_or_else(|| self.broken.clone().unwrap_or(Error::Closed))?;
        Ok(core.has_consent(rank, &mut self.way_back) && !core.engine.is_full())
    }

    /// Whether one may be [run](Self::run).
    pub fn may_run(&mut self) -> Result<bool, Error> {
        Ok(self.queue.is_empty() && self.may_start()?)
    }

    /// An operation from its start to its end, where it may be started.
    pub fn run(
        &mut self,
        call: Call,
        data: &mut dyn Data,
        called: Instant,
    ) -> Result<Report, Error> {
        let core = self.core.as_mut().ok_or(Error::Closed)?;
        let before = core.retransmissions();
        let outcome = core.run(call, data);
        core.send_now();
        let again = core.retransmissions().zip(before).map(|(after, before)| after - before);
        let elapsed = called.elapsed();
        self.renew_if_due();
        outcome?.report(elapsed, again)
    }

    /// Starts an operation, or puts it behind those that wait.
    pub fn start(
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
                "the array shares memory with that of operation {} of {} in flight, counted from the oldest: wait for that first, or give a copy",
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

    /// Connects anew where it is time to, and starts what may be started.
    fn move_on(&mut self) {
        self.renew_if_due();
        while !self.queue.is_empty() {
            match self.may_start() {
                Ok(false) => return,
                Ok(true) => {
                    let (Some(core), Some(next)) = (&mut self.core, self.queue.pop_front()) else {
                        return;
                    };
                    match next {
                        Queued::Operation { call, data, promise, memory } => {
                            // Whoever waits for it is told; others, too, of what this rank alone
                            // may refuse.
                            let started = core.start(call, data, promise, memory);
                            if let Err(Error::Argument(_) | Error::Length { .. }) = started {
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

    /// Tells the other ranks of a call that this one has refused, as soon as there is room, and in
    /// its place among those that wait. Never waits.
    pub fn refuse(&mut self) {
        match &mut self.core {
            Some(core) if self.queue.is_empty() => core.refuse(),
            None if self.renewing.is_none() => {}
            _ => self.queue.push_back(Queued::Refused),
        }
    }

    /// Drives until `is_over`, or for a while at the most, in steps after which one looks.
    pub fn rest(&mut self, until: Instant, step: Duration, is_over: impl Fn() -> bool) {
        let Some(core) = &mut self.core else { return };
        while !is_over() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || core.rest_for(step.min(left)).is_err() {
                break;
            }
        }
        core.send_now();
    }

    /// Connects anew where all ranks have agreed to, and this one has done what comes before; never
    /// waits.
    fn renew_if_due(&mut self) {
        match self.renewing.as_ref().map(|renewing| renewing.outcome.try_recv()) {
            Some(Ok(renewed)) => self.renewed(renewed),
            Some(Err(mpsc::TryRecvError::Disconnected)) => {
                (self.renewing, self.broken) = (None, Some(Error::Closed));
            }
            _ => {}
        }
        if self.core.as_ref().is_some_and(|core| core.engine.is_to_renew()) {
            self.renew();
        }
    }

    /// Has a thread connect anew.
    fn renew(&mut self) {
        let (mode, statistics) = (self.mode(), self.statistics());
        let Some(mut core) = self.core.take() else { return };
        let (config, wanted) = (self.config.clone(), Arc::new(()));
        let still = Arc::downgrade(&wanted);
        let ((give, given), (tell, outcome)) = (mpsc::channel(), mpsc::channel());
        let thread = move || {
            if let Ok(core) = given.recv() {
                // Nobody listens only where the process ends.
                let _ = tell.send(renew(config, core, &still));
            }
        };
        if let Err(e) = std::thread::Builder::new().name("netsum-renew".to_owned()).spawn(thread) {
            log::warn!("rank {}: cannot start a thread to connect anew: {e}", self.config.rank);
            core.engine.stay();
            self.renewed(Renewed::Stayed(Box::new(core)));
            return;
        }
        let _ = give.send(core);
        self.renewing = Some(Renewing { outcome, wanted, mode, statistics });
    }

    fn renewed(&mut self, renewed: Renewed) {
        self.renewing = None;
        let (left, established) = match renewed {
            Renewed::Stayed(core) => {
                self.way_back.in_vain(Instant::now());
                self.core = Some(*core);
                return;
            }
            Renewed::Left(left, established) => (left, *established),
        };
        self.before = self.before.plus(left);
        match established {
            Ok((shape, title, core)) => {
                self.before.renewals += 1;
                self.way_back.connected(Instant::now());
                (self.shape, self.title, self.core) = (shape, title, Some(core));
            }
            Err(error) => self.broken = Some(error),
        }
    }

    /// Whether an operation that is started now waits for another one to be done.
    pub fn is_full(&self) -> bool {
        self.core.as_ref().map_or(0, |core| core.engine.open()) + self.queue.len() >= MAX_OPEN
    }

    /// Completes what can be completed, and leaves in good order.
    pub fn close(&mut self) {
        let until = Instant::now() + LINGER;
        while (self.renewing.is_some() || !self.queue.is_empty()) && Instant::now() < until {
            let Some(wait) = self.progress() else { break };
            sleep_at(wait);
        }
        self.queue.clear();
        if let Some(Renewing { outcome, wanted, .. }) = self.renewing.take() {
            drop(wanted);
            if let Ok(renewed) = outcome.recv() {
                self.renewed(renewed);
            }
        }
        if let Some(mut core) = self.core.take() {
            core.complete(until);
            core.linger();
            self.before = self.before.plus(core.statistics());
        }
    }

    /// Who sums.
    pub fn mode(&self) -> Mode {
        let before = self.renewing.as_ref().map_or(Mode::Ring, |renewing| renewing.mode);
        self.core.as_ref().map_or(before, |core| core.engine.mode())
    }

    /// What has been done over all connections.
    pub fn statistics(&self) -> Statistics {
        let before = self.renewing.as_ref().map_or(self.before, |renewing| renewing.statistics);
        self.core.as_ref().map_or(before, |core| self.before.plus(core.statistics()))
    }

    /// The keeper's part, as [`progress`](Self::progress).
    fn keep(&mut self) -> Option<Wait> {
        let (fd, wait) = self.progress()?;
        let Some(core) = &mut self.core else { return Some((fd, wait)) };
        // What comes now is for the engine.
        let wait = if core.carry_now().ok()? { Duration::ZERO } else { core.quiet() };
        Some((fd, wait))
    }

    /// A waiting caller's part: never waits. What to wait for then, and how long; `None` when there
    /// is nothing to drive.
    pub fn progress(&mut self) -> Option<Wait> {
        let carried = self.core.as_mut().map_or(Ok(false), |core| core.rest_for(Duration::ZERO));
        self.move_on();
        if self.renewing.is_some() {
            return Some((None, JOINING));
        }
        let core = self.core.as_ref()?;
        let wait = if carried.ok()? { Duration::ZERO } else { core.quiet() };
        Some((Some(Arc::clone(core.fd())), wait))
    }

    /// Sends what has been decided since the last step.
    pub fn send_now(&mut self) {
        if let Some(core) = &mut self.core {
            core.send_now();
        }
    }
}

/// Waits until `is_so`; others may have the session meanwhile.
pub(super) fn wait_until(
    mut session: Turn<'_, Session>,
    is_so: impl Fn(&mut Session) -> Result<bool, Error>,
) -> Result<Turn<'_, Session>, Error> {
    while !is_so(&mut session)? {
        let wait = session.progress().unwrap_or((None, JOINING));
        session = session.asleep(|| sleep_at(wait));
    }
    Ok(session)
}

/// Drives between calls. Holds the session only while there is something to do, never while it
/// waits. `alarm` is readable when what it waits for may be another now.
pub(super) fn keep(shared: &Turns<Session>, alarm: UnixStream) {
    // Applications call in loops, and a thread that wakes up between two calls of 200 us costs a
    // tenth of the time (1 KiB, 4 ranks on two cores).
    let pause = || {
        let wait = nix::sys::time::TimeSpec::from_duration(PAUSE);
        // Interrupted is as good as over.
        let _ = nix::poll::ppoll(
            &mut [PollFd::new(alarm.as_fd(), PollFlags::POLLIN)],
            Some(wait),
            None,
        );
    };
    loop {
        let turn = shared.keep(pause);
        let Some((fd, wait)) = turn.and_then(|mut session| session.keep()) else { return };
        if wait.is_zero() {
            continue;
        }
        let fds = fd.iter().map(|fd| fd.as_fd()).chain([alarm.as_fd()]);
        let mut fds: Vec<_> = fds.map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
        let wait = nix::sys::time::TimeSpec::from_duration(wait);
        match nix::poll::ppoll(&mut fds, Some(wait), None) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => {}
            Err(_) => return,
        }
        while (&alarm).read(&mut [0; 64]).is_ok_and(|n| n > 0) {}
    }
}

type Joined = (Box<dyn Network>, Membership);

/// Finds the job and the other ranks.
fn join(config: &CommConfig, when: Bind, patience: Patience) -> Result<Joined, Error> {
    let mut network = transport::open(config, when)?;
    let membership = bootstrap(config, &mut *network, patience)?;
    Ok((network, membership))
}

/// Joins again and connects anew, as all ranks do at this moment. Where they cannot join they go on
/// over the present connections. The next call tells if there are none any more: the sums of the
/// last one are there.
fn renew(config: CommConfig, mut core: Core, wanted: &Weak<()>) -> Renewed {
    let (rank, started) = (config.rank, Instant::now());
    let mut heartbeat = core.leave_job();
    // All ranks are there, and have just said so.
    let connect_timeout = config.connect_timeout.min(config.timeout);
    let config = CommConfig { connect_timeout, ..config };
    let (network, membership) = match join_beside(&config, &mut core, wanted) {
        Ok(joined) => joined,
        Err(error) => {
            if is_wanted(wanted) {
                log::warn!("rank {rank}: could not join again, and goes on as before: {error}");
                if let Some(heartbeat) = &mut heartbeat
                    && let Err(e) =
                        control(&config).and_then(|control| heartbeat.start_again(control))
                {
                    log::warn!("rank {rank}: {e}");
                }
            }
            core.stay(heartbeat);
            return Renewed::Stayed(Box::new(core));
        }
    };
    core.go();
    let returning = (core.engine.mode() == Mode::Ring).then_some(rank);
    let (left, refused) = (core.statistics(), core.engine.refused());
    let (descriptor, has_warned) = (Arc::downgrade(core.fd()), core.has_warned);
    drop(core);
    // Until nobody waits there any more, the address is in use.
    while descriptor.strong_count() > 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    log::debug!("rank {rank}: joined again, and left, in {:.1?}", started.elapsed());
    let mut established =
        establish(&config, Instant::now(), network, membership, || is_wanted(wanted));
    match &mut established {
        Ok((_, title, core)) => {
            (core.returning, core.has_warned) = (returning, has_warned);
            core.engine.refuse(refused);
            // Who comes back to the box says so when it has summed.
            let level = if returning.is_some() { log::Level::Debug } else { log::Level::Info };
            log::log!(
                level,
                "rank {rank}: connected anew over {title} in {:.1?}",
                started.elapsed()
            );
        }
        Err(error) => log::warn!("rank {rank}: could not connect anew: {error}"),
    }
    Renewed::Left(left, Box::new(established))
}

fn is_wanted(wanted: &Weak<()>) -> bool {
    wanted.strong_count() > 0
}

/// [`join`], while the present connections are driven: the other ranks may need this one.
fn join_beside(config: &CommConfig, core: &mut Core, wanted: &Weak<()>) -> Result<Joined, Error> {
    let (told, answer) = mpsc::channel();
    let theirs = config.clone();
    let join = move || {
        let joined = join(&theirs, Bind::Later, Patience::Long);
        if let Err(mpsc::SendError(Ok((_, Membership { heartbeat: Some(mut heartbeat), .. })))) =
            told.send(joined)
        {
            heartbeat.stop(Err("it had given up already".to_owned()));
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
                core.rest_for(JOINING)?;
            }
            Err(_) => return Err(Error::Closed),
        }
        if let Some(error) = core.engine.failure() {
            return Err(error.clone());
        }
    }
}

/// Opens connections and waits until the ring stands.
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
    let previous = (place as usize + ranks.len() - 1) % ranks.len();
    let (before, ip) = (names[previous], ranks[previous].ip);
    let connected = network.connect(&shape, place, &ranks).and_then(|mut connections| {
        let settings = Settings { rank: place, shape, timeout, run: nonce() };
        let mut engine = Engine::new(Instant::now(), settings, &mut *connections);
        engine.name_ranks(names);
        connections.start().map(|()| (engine, connections))
    });
    let (engine, connections) = match (connected, &mut heartbeat) {
        (Ok(connected), _) => connected,
        (Err(error), heartbeat) => {
            // The others wait for this rank already.
            if let Some(heartbeat) = heartbeat {
                heartbeat.stop(Err(error.to_string()));
            }
            return Err(error);
        }
    };
    let title = connections.title().into();
    let mut core = Core::new(engine, connections, heartbeat)
        .map_err(|e| Error::Config(format!("no file descriptor is left: {e}")))?;
    let patience = timeout.min(config.connect_timeout);
    let is_listed = matches!(config.bootstrap, Bootstrap::Static { .. });
    let unreachable = |connections: &dyn Connections, by_small: bool| {
        let stray = connections.stray().filter(|ip| is_listed && ranks.iter().any(|r| r.ip == *ip));
        let why = match stray {
            _ if by_small => Unanswered::Large(shape.mtu),
            _ if connections.previous_is_in_earlier() => Unanswered::Earlier,
            Some(stray) => Unanswered::OtherPlace(stray),
            None if is_listed => Unanswered::SilentOnList,
            None => Unanswered::Silent,
        };
        let after = if by_small { patience } else { config.connect_timeout };
        Error::Unreachable { rank: before, ip, after, why }
    };
    if let Err(error) =
        core.meet(started + config.connect_timeout, patience, unreachable, is_wanted)
    {
        // The others must hear why.
        core.linger();
        return Err(error);
    }
    Ok((shape, title, core))
}

#[cfg(test)]
mod tests {
    use netsum_collective::numeric::element::Slice;
    use netsum_collective::numeric::layout::Layout;

    use super::super::pending::{Pending, Room};
    use super::*;

    /// Ranks that connect anew, for as long as nothing is sent.
    fn renewing() -> (Arc<Turns<Session>>, mpsc::Sender<Renewed>, Weak<()>) {
        let layout = Layout { message_size: 4096, window: 2, rings: 1 };
        let bootstrap =
            Bootstrap::Static { peers: vec![], mtu: 1024, message_size: 4096, window: 2, rings: 1 };
        let (tell, outcome) = mpsc::channel();
        let wanted = Arc::new(());
        let still = Arc::downgrade(&wanted);
        let (mode, mut statistics) = (Mode::Box, Statistics::default());
        statistics.all_reduces = 7;
        let session = Session {
            config: CommConfig::new(0, 2, [127, 0, 0, 1].into(), bootstrap),
            shape: JobShape { ranks: 2, mtu: 1024, layout, relaxed: false, without_box: false },
            title: "nothing".into(),
            core: None,
            renewing: Some(Renewing { outcome, wanted, mode, statistics }),
            queue: VecDeque::new(),
            before: Statistics::default(),
            way_back: WayBack::new(Instant::now()),
            broken: None,
        };
        (Arc::new(Turns::new(session)), tell, still)
    }

    fn start(turns: &Arc<Turns<Session>>) -> Pending<()> {
        let (pending, promise) = Pending::new(Arc::clone(turns), |_| Some(()));
        let data = Box::new(Slice(vec![1]));
        turns.take().start(Call::SUM, data, promise, Memory::default()).unwrap();
        pending
    }

    #[test]
    fn nobody_is_held_while_the_ranks_connect_anew() {
        let (turns, tell, _) = renewing();
        let begun = Instant::now();
        let room = Room { turns: Some(Arc::clone(&turns)), process: std::process::id() };
        let all: Vec<_> = (0..MAX_OPEN).map(|_| start(&turns)).collect();
        assert!(!all[0].is_done() && !all[0].wait_for(Duration::from_millis(100)));
        assert!(!room.wait_for(Duration::ZERO) && !room.wait_for(Duration::from_millis(100)));
        let session = turns.take();
        assert_eq!((session.mode(), session.statistics().all_reduces), (Mode::Box, 7));
        drop(session);
        assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
        // All hear what it comes to.
        let error = Error::Protocol("unreachable".to_owned());
        tell.send(Renewed::Left(Statistics::default(), Box::new(Err(error.clone())))).unwrap();
        all.into_iter().for_each(|pending| assert_eq!(pending.wait().unwrap_err(), error));
        assert!(room.wait_for(Duration::ZERO));
    }

    #[test]
    fn who_leaves_while_the_ranks_connect_anew_ends_that() {
        let (turns, tell, wanted) = renewing();
        let pending = start(&turns);
        let thread = std::thread::spawn(move || {
            while is_wanted(&wanted) {
                std::thread::sleep(JOINING);
            }
            tell.send(Renewed::Left(Statistics::default(), Box::new(Err(Error::Closed)))).unwrap();
        });
        turns.end().close();
        assert_eq!(pending.wait().unwrap_err(), Error::Closed);
        thread.join().unwrap();
    }
}
