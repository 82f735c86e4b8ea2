//! A membership in a job over all its connections: where the box asks for it, the ranks leave these and connect anew, whoever drives
//! at that moment. And the thread that drives between calls.

use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags};

use super::bootstrap::{Membership, Patience, bootstrap, control};
use super::config::{Bootstrap, CommConfig};
use super::core::{Core, LOOK_UP};
use super::network::{Bind, Connections, Network};
use super::numbers::nonce;
use super::transport;
use super::turns::Turns;
use crate::unshared::Unshared;
use netsum_collective::call::Call;
use netsum_collective::engine::{Engine, Settings};
use netsum_collective::error::{Error, Unanswered};
use netsum_collective::numeric::element::Data;
use netsum_collective::report::{Mode, Report, Statistics};
use netsum_collective::shape::JobShape;
use netsum_collective::way_back::WayBack;

/// How long the keeper leaves the connections alone when a call has ended: much less than any time-out.
const PAUSE: Duration = Duration::from_micros(500);

/// How long a rank that joins again leaves the daemon's answer alone.
const JOINING: Duration = Duration::from_millis(5);

/// What the application's threads and the keeper drive.
pub(super) struct Session {
    config: CommConfig,
    pub shape: JobShape,
    /// What the connections run over.
    pub title: Arc<str>,
    /// `None` when it is over, or broken.
    core: Option<Core>,
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
        let (shape, title, core) = establish(&config, started, network, membership)?;
        log::info!("rank {}: over {title}", config.rank);
        let (before, way_back) = (Statistics::default(), WayBack::new(Instant::now()));
        Ok(Self { config, shape, title, core: Some(core), before, way_back, broken: None })
    }

    /// Waits until an operation may be started.
    pub fn ready(&mut self) -> Result<&mut Core, Error> {
        loop {
            self.renew_if_due();
            let rank = self.config.rank;
            let Some(core) = &mut self.core else { break };
            core.consent(rank, &mut self.way_back)?;
            if core.engine.is_full() {
                core.rest_for(LOOK_UP)?;
            } else if !core.engine.is_to_renew() {
                break;
            }
        }
        self.core.as_mut().ok_or_else(|| self.broken.clone().unwrap_or(Error::Closed))
    }

    /// An operation from its start to its end.
    pub fn run(&mut self, call: Call, data: &mut dyn Data, called: Instant) -> Result<Report, Error> {
        let core = self.ready()?;
        let before = core.retransmissions();
        let outcome = core.run(call, data);
        core.send_now();
        let again = core.retransmissions().zip(before).map(|(after, before)| after - before);
        let elapsed = called.elapsed();
        self.renew_if_due();
        outcome?.report(elapsed, again)
    }

    /// Tells the other ranks of a call that this one has refused, as soon as there is room. Never
    /// waits.
    pub fn refuse(&mut self) {
        let Some(core) = &mut self.core else { return };
        core.engine.refuse(1);
        // An error is one of the next call.
        let _ = core.rest_for(Duration::ZERO);
        core.send_now();
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

    /// Joins again and connects anew, as all ranks do at this moment. Where they cannot join they go on over the present connections. The
    /// next call tells if there are none any more: the sums of the last one are there.
    fn renew(&mut self) {
        let Some(mut core) = self.core.take() else { return };
        let (rank, started) = (self.config.rank, Instant::now());
        let mut heartbeat = core.leave_job();
        // All ranks are there, and have just said so.
        let connect_timeout = self.config.connect_timeout.min(self.config.timeout);
        let config = CommConfig { connect_timeout, ..self.config.clone() };
        let (network, membership) = match join_beside(&config, &mut core) {
            Ok(joined) => joined,
            Err(error) => {
                log::warn!("rank {rank}: could not join again, and goes on as before: {error}");
                if let Some(heartbeat) = &mut heartbeat
                    && let Err(e) = control(&config).and_then(|control| heartbeat.start_again(control))
                {
                    log::warn!("rank {rank}: {e}");
                }
                core.stay(heartbeat);
                self.way_back.in_vain(Instant::now());
                self.core = Some(core);
                return;
            }
        };
        core.go();
        let returning = (core.engine.mode() == Mode::Ring).then_some(rank);
        self.before = self.before.plus(core.statistics());
        let (descriptor, has_warned) = (Arc::downgrade(core.fd()), core.has_warned);
        let refused = core.engine.refused();
        drop(core);
        // Until the keeper has stopped waiting there, the address is in use.
        while descriptor.strong_count() > 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        log::debug!("rank {rank}: joined again, and left, in {:.1?}", started.elapsed());
        match establish(&config, Instant::now(), network, membership) {
            Ok((shape, title, mut core)) => {
                (core.returning, core.has_warned) = (returning, has_warned);
                core.engine.refuse(refused);
                self.before.renewals += 1;
                // Who comes back to the box says so when it has summed.
                let level = if returning.is_some() { log::Level::Debug } else { log::Level::Info };
                log::log!(level, "rank {rank}: connected anew over {title} in {:.1?}", started.elapsed());
                self.way_back.connected(Instant::now());
                (self.shape, self.title, self.core) = (shape, title, Some(core));
            }
            Err(error) => {
                log::warn!("rank {rank}: could not connect anew: {error}");
                self.broken = Some(error);
            }
        }
    }

    /// Connects anew where all ranks have agreed to, and this one has done what comes before.
    pub fn renew_if_due(&mut self) {
        if self.core.as_ref().is_some_and(|core| core.engine.is_to_renew()) {
            self.renew();
        }
    }

    /// Whether an operation that is started now waits for another one to be done.
    pub fn is_full(&self) -> bool {
        self.core.as_ref().is_some_and(|core| core.engine.is_full())
    }

    /// Completes what can be completed, and leaves in good order.
    pub fn close(&mut self) {
        if let Some(mut core) = self.core.take() {
            core.complete();
            core.linger();
            self.before = self.before.plus(core.statistics());
        }
    }

    /// Who sums.
    pub fn mode(&self) -> Mode {
        self.core.as_ref().map_or(Mode::Ring, |core| core.engine.mode())
    }

    /// What has been done over all connections.
    pub fn statistics(&self) -> Statistics {
        self.core.as_ref().map_or(self.before, |core| self.before.plus(core.statistics()))
    }

    /// The keeper's part: never waits, but to connect anew. What to wait for then, and how long; `None` when there is nothing any more.
    fn keep(&mut self) -> Option<(Arc<Unshared<OwnedFd>>, Duration)> {
        loop {
            let core = self.core.as_mut()?;
            core.rest_for(Duration::ZERO).ok()?;
            if core.engine.is_to_renew() {
                self.renew();
                continue;
            }
            // What comes now is for the engine.
            let wait = if core.carry_now().ok()? { Duration::ZERO } else { core.quiet() };
            return Some((Arc::clone(core.fd()), wait));
        }
    }

    /// A waiting caller's part: never waits. What to wait for then, and how long; `None` when there
    /// is nothing to drive.
    pub fn progress(&mut self) -> Option<(Arc<Unshared<OwnedFd>>, Duration)> {
        let core = self.core.as_mut()?;
        let wait = if core.rest_for(Duration::ZERO).ok()? { Duration::ZERO } else { core.quiet() };
        Some((Arc::clone(core.fd()), wait))
    }

    /// Sends what has been decided since the last step.
    pub fn send_now(&mut self) {
        if let Some(core) = &mut self.core {
            core.send_now();
        }
    }
}

/// Drives between calls. Holds the session only while there is something to do, never while it waits. `alarm` is readable when what it
/// waits for may be another now.
pub(super) fn keep(shared: &Turns<Session>, alarm: UnixStream) {
    // Applications call in loops, and a thread that wakes up between two calls of 200 us costs a tenth of the time (1 KiB, 4 ranks on
    // two cores).
    let pause = || {
        let wait = nix::sys::time::TimeSpec::from_duration(PAUSE);
        // Interrupted is as good as over.
        let _ = nix::poll::ppoll(&mut [PollFd::new(alarm.as_fd(), PollFlags::POLLIN)], Some(wait), None);
    };
    loop {
        let turn = shared.keep(pause);
        let Some((fd, wait)) = turn.and_then(|mut session| session.keep()) else { return };
        if wait.is_zero() {
            continue;
        }
        let readable = |fd| PollFd::new(fd, PollFlags::POLLIN);
        let wait = nix::sys::time::TimeSpec::from_duration(wait);
        match nix::poll::ppoll(&mut [readable(fd.as_fd()), readable(alarm.as_fd())], Some(wait), None) {
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

/// The same, while the present connections are driven: the other ranks may need this one.
fn join_beside(config: &CommConfig, core: &mut Core) -> Result<Joined, Error> {
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
            Err(mpsc::TryRecvError::Disconnected) => return Err(Error::Closed),
            Err(mpsc::TryRecvError::Empty) => {
                core.rest_for(JOINING)?;
            }
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
) -> Result<(JobShape, Arc<str>, Core), Error> {
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
    if let Err(error) = core.meet(started + config.connect_timeout, patience, unreachable) {
        // The others must hear why.
        core.linger();
        return Err(error);
    }
    Ok((shape, title, core))
}
