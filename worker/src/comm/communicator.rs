//! The communicator: the engine, its connections and a socket, driven by whoever has time.
//!
//! While the application is in a call, its thread drives. Between calls the *keeper* thread does: packets that others
//! miss are sent again, keep-alives go out, and other ranks can fall back to the ring while this one computes.

use std::net::IpAddr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::poll::PollFlags;

use super::bootstrap::{Membership, bootstrap};
use super::config::{CommConfig, JobShape, Mode, Report, Statistics};
use super::engine::{Engine, Settings};
use super::error::Error;
use super::links::Links;
use super::turns::Turns;
use crate::control::heartbeat::Heartbeat;
use crate::numeric::element::{Data, Element, Slice};
use crate::numeric::layout::Layout;
use crate::rc::{Endpoint, EndpointConfig};
use crate::udp::{UdpDriver, wait_for};

/// The longest that a driver waits without looking at the daemon's word.
const LOOK_UP: Duration = Duration::from_millis(100);
/// How long a rank that leaves waits for others that may still need it.
const LINGER: Duration = Duration::from_secs(2);

/// A member of a job, connected to the ring of all ranks.
///
/// Dropping it leaves the job in good order; that may take up to two seconds where other ranks are behind.
pub struct Communicator {
    rank: u32,
    shape: JobShape,
    /// `None` for a single rank, which needs no network.
    shared: Option<Arc<Turns<Core>>>,
    keeper: Option<JoinHandle<()>>,
    alone: Statistics,
}

struct Core {
    engine: Engine,
    links: Links,
    driver: UdpDriver,
    ip: IpAddr,
    heartbeat: Option<Heartbeat>,
}

impl Core {
    /// Receives, moves the engine on, and sends what came of it. Waits for packets until `until` where there were none.
    fn drive(&mut self, until: Instant, data: &mut dyn Data) -> Result<(), Error> {
        let until = until.min(self.engine.next_timeout());
        let driven = self.driver.drive(&mut self.links.endpoint, until);
        if let Err(e) = driven {
            let error = Error::Socket { ip: self.ip, reason: e.to_string() };
            self.engine.fail(&mut self.links, error.clone());
            return Err(error);
        }
        if let Some(reason) = self.heartbeat.as_ref().and_then(Heartbeat::failed) {
            self.engine.fail(&mut self.links, Error::JobFailed { reason });
        }
        self.engine.step(Instant::now(), &mut self.links, data);
        Ok(())
    }
}

impl Core {
    /// Waits for the previous rank's greeting, at most until `until`.
    fn meet(&mut self, until: Instant, unreachable: Error) -> Result<(), Error> {
        loop {
            if let Some(error) = self.engine.failure() {
                return Err(error.clone());
            }
            if self.engine.greeted() {
                return Ok(());
            }
            if Instant::now() >= until {
                self.engine.fail_to_meet(&mut self.links, &unreachable);
                return Err(unreachable);
            }
            self.drive(Instant::now() + LOOK_UP, &mut Slice(&mut idle()))?;
        }
    }
}

/// Nothing to reduce: what the engine is given between operations.
fn idle() -> [i32; 0] {
    []
}

impl Communicator {
    /// Finds the job, opens the connections and waits until the ring stands.
    ///
    /// # Errors
    /// [`Error::Config`] with the argument that is wrong, [`Error::Socket`], [`Error::Controller`] (which names the ranks
    /// that are missing), [`Error::Unreachable`].
    pub fn connect(config: CommConfig) -> Result<Self, Error> {
        let CommConfig { rank, ranks, ip, timeout, .. } = config;
        if ranks == 0 || ranks > 64 {
            return Err(Error::Config(format!("ranks {ranks}: 1 to 64")));
        }
        if rank >= ranks {
            return Err(Error::Config(format!("rank {rank}: 0 to {} with {ranks} ranks", ranks - 1)));
        }
        if timeout < Duration::from_millis(100) {
            return Err(Error::Config(format!("timeout {timeout:?}: at least 100ms")));
        }
        if ranks == 1 {
            return Self::alone(&config);
        }
        let driver = UdpDriver::bind(ip).map_err(|e| Error::Socket { ip, reason: e.to_string() })?;
        let started = Instant::now();
        let Membership { shape, ranks, heartbeat } = bootstrap(&config)?;
        let endpoint = Endpoint::new(ip, EndpointConfig::default());
        let capacity = driver.receive_capacity(shape.mtu as usize);
        let mut links = Links::new(endpoint, &shape, rank, &ranks, capacity)
            .map_err(|e| Error::Config(format!("connections: {e}")))?;
        let engine = Engine::new(Instant::now(), Settings { rank, shape, timeout }, &mut links);
        let mut core = Core { engine, links, driver, ip, heartbeat };
        let previous = (rank + ranks.len() as u32 - 1) % ranks.len() as u32;
        let unreachable = Error::Unreachable {
            rank: previous,
            ip: ranks[previous as usize].ip,
            after: config.connect_timeout,
        };
        if let Err(error) = core.meet(started + config.connect_timeout, unreachable) {
            // The others must hear why.
            core.linger();
            return Err(error);
        }
        let shared = Arc::new(Turns::new(core));
        let theirs = Arc::clone(&shared);
        let keeper = std::thread::Builder::new()
            .name("netsum-keeper".to_owned())
            .spawn(move || keep(&theirs))
            .map_err(|e| Error::Config(format!("cannot start a thread: {e}")))?;
        let alone = Statistics::default();
        Ok(Self { rank, shape, shared: Some(shared), keeper: Some(keeper), alone })
    }

    fn alone(config: &CommConfig) -> Result<Self, Error> {
        let layout = match &config.bootstrap {
            super::config::Bootstrap::Static { message_size, window, rings, .. } => {
                Layout { message_size: *message_size, window: *window, rings: *rings }
            }
            _ => Layout { message_size: 1 << 16, window: 1, rings: 1 },
        };
        let shape = JobShape { ranks: 1, mtu: 1024, layout };
        shape.check().map_err(Error::Config)?;
        Ok(Self { rank: 0, shape, shared: None, keeper: None, alone: Statistics::default() })
    }

    /// Replaces each element by the sum over all ranks' elements at its place: `i32` modulo 2^32, `f32` as
    /// [`reference_sum`](crate::reference_sum) does it, the same bits at every rank and in every run. All ranks must call
    /// with the same length and type.
    ///
    /// # Errors
    /// See [`Error`]. After an error the slice holds sums in some places and this rank's own elements in others.
    pub fn all_reduce<T: Element>(&mut self, data: &mut [T]) -> Result<Report, Error> {
        let started = Instant::now();
        let Some(shared) = &self.shared else { return self.all_reduce_alone(data, started) };
        let mut core = shared.take();
        let core = &mut *core;
        let before = core.links.endpoint.stats().retransmissions;
        let outcome = (|| {
            let mut data = Slice(data);
            core.engine.start(Instant::now(), &mut core.links, &data)?;
            core.engine.step(Instant::now(), &mut core.links, &mut data);
            loop {
                if let Some(outcome) = core.engine.finished() {
                    return outcome;
                }
                core.drive(Instant::now() + LOOK_UP, &mut data)?;
            }
        })();
        // Nothing that the engine has just decided waits for the keeper to wake up.
        if core.driver.drive(&mut core.links.endpoint, Instant::now()).is_err() {
            log::debug!("rank {}: the socket failed at the end of an operation", self.rank);
        }
        let retransmissions = core.links.endpoint.stats().retransmissions - before;
        shared.give();
        let finished = outcome?;
        if let Some(range) = finished.non_finite {
            return Err(Error::NonFinite { first: range.start, end: range.end });
        }
        Ok(Report {
            mode: finished.mode,
            verified: finished.verified,
            elapsed: started.elapsed(),
            retransmissions,
        })
    }

    fn all_reduce_alone<T: Element>(&mut self, data: &mut [T], started: Instant) -> Result<Report, Error> {
        let dtype = T::DTYPE;
        let elements = self.shape.layout.elements(dtype).map_err(|reason| Error::Length { dtype, reason })?;
        if let Some(chunk) =
            data.chunks(elements).position(|c| dtype == crate::Dtype::F32 && T::bucket(c) == 255)
        {
            let first = chunk * elements;
            return Err(Error::NonFinite { first, end: (first + elements).min(data.len()) });
        }
        let sum = crate::reference_sum(&[&*data], &self.shape.layout);
        data.copy_from_slice(&sum);
        self.alone.all_reduces += 1;
        Ok(Report { mode: Mode::Ring, verified: 0, elapsed: started.elapsed(), retransmissions: 0 })
    }

    /// Returns once all ranks have called it.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    pub fn barrier(&mut self) -> Result<(), Error> {
        self.all_reduce(&mut [0i32]).map(|_| ())
    }

    /// This rank.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// Ranks of the job.
    pub fn ranks(&self) -> u32 {
        self.shape.ranks
    }

    /// How data is cut into messages, for [`reference_sum`](crate::reference_sum).
    pub fn layout(&self) -> Layout {
        self.shape.layout
    }

    /// Who sums: the box, until the ranks find that none does.
    pub fn mode(&self) -> Mode {
        self.shared.as_ref().map_or(Mode::Ring, |s| s.core().engine.mode())
    }

    /// What this rank has done since it was connected.
    pub fn statistics(&self) -> Statistics {
        let Some(shared) = &self.shared else { return self.alone };
        let core = shared.core();
        let stats = core.links.endpoint.stats();
        Statistics {
            bytes_sent: stats.sent_bytes,
            bytes_received: stats.received_bytes,
            packets_sent: stats.sent_packets,
            packets_received: stats.received_packets,
            retransmissions: stats.retransmissions,
            congestion_marks: stats.ce_received,
            ..*core.engine.statistics()
        }
    }
}

impl std::fmt::Debug for Communicator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Communicator")
            .field("rank", &self.rank)
            .field("shape", &self.shape)
            .finish_non_exhaustive()
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        let Some(shared) = self.shared.take() else { return };
        let mut core = shared.end();
        core.linger();
        drop(core);
        if let Some(keeper) = self.keeper.take() {
            let _ = keeper.join();
        }
    }
}

impl Core {
    /// Says goodbye, and stays as long as somebody may need this rank.
    fn linger(&mut self) {
        let failure = self.engine.failure().cloned();
        let patient = Instant::now() + LINGER / 10;
        let until = Instant::now() + if failure.is_some() { LINGER / 4 } else { LINGER };
        self.engine.leave(&mut self.links);
        while Instant::now() < until && !self.engine.may_leave(Instant::now() < patient) {
            if self.drive(Instant::now() + Duration::from_millis(10), &mut Slice(&mut idle())).is_err() {
                break;
            }
        }
        // Acknowledgements of what came last.
        let _ = self.driver.drive(&mut self.links.endpoint, Instant::now());
        if let Some(heartbeat) = &mut self.heartbeat {
            heartbeat.stop(match failure {
                Some(error @ (Error::RankDied { .. } | Error::Mismatch(_) | Error::Protocol(_))) => {
                    Err(error.to_string())
                }
                _ => Ok(()),
            });
        }
    }
}

/// Drives between calls. Holds the core only while there is something to do, never while it waits.
fn keep(shared: &Turns<Core>) {
    let Ok(fd) = shared.core().driver.as_fd().try_clone_to_owned() else {
        log::warn!("no file descriptor is left: connections rest between operations");
        return;
    };
    loop {
        let wait = {
            let Some(mut core) = shared.keep() else { return };
            let core = &mut *core;
            // Never waits: the time is now.
            let now = Instant::now();
            if core.drive(now, &mut Slice(&mut idle())).is_err() {
                return;
            }
            let sent = core.driver.drive(&mut core.links.endpoint, now);
            if sent.is_err() {
                return;
            }
            let next = core
                .links
                .endpoint
                .next_timeout()
                .map_or(core.engine.next_timeout(), |t| t.min(core.engine.next_timeout()));
            next.saturating_duration_since(Instant::now()).min(LOOK_UP)
        };
        if !wait.is_zero() && wait_for(fd.as_fd(), PollFlags::POLLIN, wait).is_err() {
            return;
        }
    }
}
