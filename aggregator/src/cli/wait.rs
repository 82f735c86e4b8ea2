//! `netsum job create --wait`: a job that waits for its turn, and a command that waits with it.
//!
//! Where the daemon goes away, the command waits for the next one, and for its turn there. It says since when it waits, so that it
//! has its age again, and gets a job that the daemon has created and not been able to tell of.

use std::io::Write;
use std::time::{Duration, Instant};

use netsum_api::v1::{self as api, queue_job_reply::Turn};
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::client::{Client, Turns};
use super::failure::{Failure, Kind, Result};
use super::print::{self, Format};
use crate::clock;

/// How long a command waits for a daemon to come back, and how often it looks.
const PATIENCE: Duration = Duration::from_secs(120);
const LOOK: Duration = Duration::from_millis(250);

/// A command that waits.
struct Waiting<'a> {
    client: &'a mut Client,
    job: api::CreateJobRequest,
    deadline: Option<Instant>,
    since_ns: u64,
    overtaken: u32,
}

/// SIGINT and SIGTERM.
struct Signals([Signal; 2]);

impl Signals {
    async fn next(&mut self) {
        let [interrupt, terminate] = &mut self.0;
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
    }
}

/// Creates a job as soon as its turn has come. An interrupt takes it out of the queue.
pub async fn create(
    job: api::CreateJobRequest,
    timeout: Option<Duration>,
    format: Format,
    client: &mut Client,
    out: &mut impl Write,
) -> Result<()> {
    // From before the job is in the queue, so that nothing can leave it there.
    let signals = Signals([signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?]);
    let deadline = timeout.and_then(|t| Instant::now().checked_add(t));
    let since_ns = clock::monotonic();
    Waiting { client, job, deadline, since_ns, overtaken: 0 }.wait(signals, format, out).await
}

impl Waiting<'_> {
    async fn wait(mut self, mut signals: Signals, format: Format, out: &mut impl Write) -> Result<()> {
        let mut turns = match self.ask().await {
            Err(e) if e.kind == Kind::NoDaemon => self.ask_the_next_daemon(&mut signals).await?,
            asked => asked?,
        };
        let mut last = None;
        loop {
            let turn = tokio::select! {
                turn = turns.next() => turn,
                () = signals.next() => return Err(self.leave().await),
            };
            match turn {
                Ok(Turn::Waits(place)) => {
                    self.overtaken = place.overtaken;
                    let place = api::QueuePlace { overtaken: 0, ..place };
                    if last.as_ref() != Some(&place) {
                        print::place(out, format, &self.job.name, &place)?;
                        last = Some(place);
                    }
                }
                Ok(Turn::Created(job)) => return print::job(out, format, job),
                Err(e) if e.kind == Kind::NoDaemon => turns = self.ask_the_next_daemon(&mut signals).await?,
                Err(e) => return Err(e),
            }
        }
    }

    /// Gets into the queue.
    async fn ask(&mut self) -> Result<Turns> {
        let left = self.deadline.map(|d| d.saturating_duration_since(Instant::now()));
        let request = api::QueueJobRequest {
            job: Some(self.job.clone()),
            timeout_ms: left.map_or(0, |t| u64::try_from(t.as_millis()).unwrap_or(u64::MAX).max(1)),
            since_ns: self.since_ns,
            overtaken: self.overtaken,
        };
        self.client.queue_job(request).await
    }

    /// The same again with the daemon that comes next.
    async fn ask_the_next_daemon(&mut self, signals: &mut Signals) -> Result<Turns> {
        let name = self.job.name.clone();
        let left =
            self.deadline.map_or(PATIENCE, |d| d.saturating_duration_since(Instant::now()).min(PATIENCE));
        let seconds = left.as_secs();
        eprintln!(
            "netsum: the daemon has gone away; job `{name}` waits up to {seconds} s for the next one, and keeps its age"
        );
        let again = async {
            loop {
                tokio::time::sleep(LOOK).await;
                match self.ask().await {
                    Err(e) if e.kind == Kind::NoDaemon => {}
                    asked => return asked,
                }
            }
        };
        tokio::select! {
            asked = tokio::time::timeout(left, again) => asked.unwrap_or_else(|_| {
                let why = format!("the daemon has gone away and not come back in {seconds} s; job `{name}` waits no more");
                Err(Failure::new(Kind::NoDaemon, why))
            }),
            () = signals.next() => {
                Err(Failure::new(Kind::Failed, format!("interrupted: job `{name}` waits no more")))
            }
        }
    }

    /// Takes the job out of the queue; what to say of it.
    async fn leave(&mut self) -> Failure {
        let name = self.job.name.clone();
        match self.client.delete_job(name.clone(), false).await {
            Err(e) if e.kind != Kind::NotFound && e.kind != Kind::NoDaemon => e,
            _ => Failure::new(Kind::Failed, format!("interrupted: job `{name}` has left the queue")),
        }
    }
}
