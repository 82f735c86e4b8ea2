//! The communicator: the engine, its connections and a socket, driven by whoever has time.
//!
//! While the application is in a call, its thread drives. Between calls the *keeper* thread does: packets that others
//! miss are sent again, keep-alives go out, and other ranks can fall back to the ring while this one computes.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::bootstrap::{Membership, Patience, bootstrap};
use super::config::{CommConfig, JobShape, Mode, Report, Statistics};
use super::core::{Core, keep};
use super::engine::{Engine, Settings};
use super::error::Error;
use super::network;
use super::turns::Turns;
use crate::numeric::element::{Element, Slice};
use crate::numeric::layout::Layout;

/// A member of a job, connected to the ring of all ranks.
///
/// Where the job has a range of windows, the box may change the window while the job is at work: then all ranks connect anew at the
/// end of an all-reduce, which takes that much longer. Nothing else is noticed of it, but in [`layout`](Self::layout) and
/// [`statistics`](Self::statistics). What it takes longer than `timeout` twice to do is an error of the next call.
///
/// Dropping it leaves the job in good order; that may take up to two seconds where other ranks are behind.
pub struct Communicator {
    config: CommConfig,
    shape: JobShape,
    title: String,
    /// `None` for a single rank, which needs no network, and after `broken`.
    links: Option<Links>,
    /// Counted over earlier connections.
    before: Statistics,
    /// Why the ranks could not connect anew.
    broken: Option<Error>,
}

/// Connections, and the thread that keeps them between calls.
struct Links {
    shared: Arc<Turns<Core>>,
    keeper: JoinHandle<()>,
}

impl Links {
    /// Ends the keeper; the last part of it is done with the core.
    fn end<T>(self, last: impl FnOnce(&mut Core) -> T) -> T {
        let mut core = self.shared.end();
        let done = last(&mut core);
        drop(core);
        // It has a descriptor of the connections, which are closed only then.
        let _ = self.keeper.join();
        done
    }
}

impl Communicator {
    /// Finds the job, opens the connections and waits until the ring stands.
    ///
    /// # Errors
    /// [`Error::Config`] with the argument that is wrong, [`Error::Socket`], [`Error::Controller`] (which names the ranks
    /// that are missing), [`Error::Unreachable`].
    pub fn connect(config: CommConfig) -> Result<Self, Error> {
        let CommConfig { rank, ranks, timeout, .. } = config;
        if ranks == 0 || ranks > 64 {
            return Err(Error::Config(format!("ranks {ranks}: 1 to 64")));
        }
        if rank >= ranks {
            return Err(Error::Config(format!("rank {rank}: 0 to {} with {ranks} ranks", ranks - 1)));
        }
        if timeout < Duration::from_millis(100) {
            return Err(Error::Config(format!("timeout {timeout:?}: at least 100ms")));
        }
        config.retry.check().map_err(Error::Config)?;
        if ranks == 1 {
            return Self::alone(config);
        }
        let (shape, title, links) = establish(&config, Patience::Short)?;
        log::info!("rank {rank}: over {title}");
        let before = Statistics::default();
        Ok(Self { config, shape, title, links: Some(links), before, broken: None })
    }

    fn alone(config: CommConfig) -> Result<Self, Error> {
        let layout = match &config.bootstrap {
            super::config::Bootstrap::Static { message_size, window, rings, .. } => {
                Layout { message_size: *message_size, window: *window, rings: *rings }
            }
            _ => Layout { message_size: 1 << 16, window: 1, rings: 1 },
        };
        let shape = JobShape { ranks: 1, mtu: 1024, layout };
        shape.check().map_err(Error::Config)?;
        let (title, before) = ("nothing".to_owned(), Statistics::default());
        Ok(Self { config, shape, title, links: None, before, broken: None })
    }

    /// Replaces each element by the sum over all ranks' elements at its place: `i32` modulo 2^32, `f32` as
    /// [`reference_sum`](crate::reference_sum) does it, the same bits at every rank and in every run. All ranks must call
    /// with the same length and type.
    ///
    /// # Errors
    /// See [`Error`]. After an error the slice holds sums in some places and this rank's own elements in others.
    pub fn all_reduce<T: Element>(&mut self, data: &mut [T]) -> Result<Report, Error> {
        let started = Instant::now();
        if let Some(error) = &self.broken {
            return Err(error.clone());
        }
        let Some(Links { shared, .. }) = &self.links else { return self.all_reduce_alone(data, started) };
        let (outcome, retransmissions, renew) = {
            let mut core = shared.take();
            let before = core.retransmissions();
            let consent = core.consent(self.config.rank, self.shape.layout.window);
            let outcome = consent.and_then(|()| core.all_reduce(&mut Slice(data)));
            // Nothing that the engine has just decided waits for the keeper to wake up.
            if let Err(e) = core.connections.drive(Instant::now()) {
                log::debug!("rank {}: at the end of an operation: {e}", self.config.rank);
            }
            let sent_again = core.retransmissions().zip(before).map(|(after, before)| after - before);
            let renew = core.engine.is_to_renew();
            // Otherwise the keeper is about to end.
            if !renew {
                shared.give();
            }
            (outcome, sent_again, renew)
        };
        let elapsed = started.elapsed();
        if renew {
            self.renew();
        }
        let finished = outcome?;
        if let Some(range) = finished.non_finite {
            return Err(Error::NonFinite { first: range.start, end: range.end });
        }
        Ok(Report { mode: finished.mode, verified: finished.verified, elapsed, retransmissions })
    }

    /// Leaves in good order and connects anew, as all ranks do at this moment. The next call tells if that was in vain: the sums of
    /// this one are there.
    fn renew(&mut self) {
        let Some(links) = self.links.take() else { return };
        let (rank, window, started) = (self.config.rank, self.shape.layout.window, Instant::now());
        let parted = links.end(|core| {
            let parted = core.part();
            if parted.is_err() {
                core.linger();
            }
            self.before = self.before.plus(core.statistics());
            parted
        });
        log::debug!("rank {rank}: left to connect anew, in {:.1?}", started.elapsed());
        // All ranks are there, and have just said so.
        let connect_timeout = self.config.connect_timeout.min(self.config.timeout * 2);
        let config = CommConfig { connect_timeout, ..self.config.clone() };
        match parted.and_then(|()| establish(&config, Patience::Long)) {
            Ok((shape, title, links)) => {
                self.before.renewals += 1;
                let elapsed = started.elapsed();
                log::info!(
                    "rank {rank}: connected anew over {title} in {elapsed:.1?}: window {}, before {window}",
                    shape.layout.window
                );
                (self.shape, self.title, self.links) = (shape, title, Some(links));
            }
            Err(error) => {
                log::warn!("rank {rank}: could not connect anew, for another window: {error}");
                self.broken = Some(error);
            }
        }
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
        self.before.all_reduces += 1;
        Ok(Report { mode: Mode::Ring, verified: 0, elapsed: started.elapsed(), retransmissions: Some(0) })
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
        self.config.rank
    }

    /// Ranks of the job.
    pub fn ranks(&self) -> u32 {
        self.shape.ranks
    }

    /// How data is cut into messages, for [`reference_sum`](crate::reference_sum).
    pub fn layout(&self) -> Layout {
        self.shape.layout
    }

    /// What carries this rank's packets: `UDP`, or an adapter with its port and its GID's index.
    pub fn transport(&self) -> &str {
        &self.title
    }

    /// Who sums: the box, until the ranks find that none does.
    pub fn mode(&self) -> Mode {
        self.links.as_ref().map_or(Mode::Ring, |l| l.shared.core().engine.mode())
    }

    /// What this rank has done since it was connected.
    pub fn statistics(&self) -> Statistics {
        match &self.links {
            Some(links) => self.before.plus(links.shared.core().statistics()),
            None => self.before,
        }
    }
}

impl std::fmt::Debug for Communicator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Communicator")
            .field("rank", &self.config.rank)
            .field("shape", &self.shape)
            .finish_non_exhaustive()
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        if let Some(links) = self.links.take() {
            links.end(Core::linger);
        }
    }
}

/// Finds the job, opens connections and waits until the ring stands.
fn establish(config: &CommConfig, patience: Patience) -> Result<(JobShape, String, Links), Error> {
    let CommConfig { rank, timeout, .. } = *config;
    let mut network = network::open(config)?;
    let started = Instant::now();
    let Membership { shape, ranks, mut heartbeat } = bootstrap(config, &mut *network, patience)?;
    let connected = network.connect(&shape, rank, &ranks).and_then(|mut connections| {
        let engine = Engine::new(Instant::now(), Settings { rank, shape, timeout }, &mut *connections);
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
    let title = connections.title();
    let mut core = Core { engine, connections, heartbeat };
    let previous = (rank + ranks.len() as u32 - 1) % ranks.len() as u32;
    let unreachable =
        Error::Unreachable { rank: previous, ip: ranks[previous as usize].ip, after: config.connect_timeout };
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
    Ok((shape, title, Links { shared, keeper }))
}
