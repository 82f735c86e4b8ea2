//! `netsum job create --wait`: a job that waits for its turn, and a command that waits with it.

use std::io::Write;
use std::time::Duration;

use netsum_api::v1::{self as api, queue_job_reply::Turn};
use tokio::signal::unix::{SignalKind, signal};

use super::client::Client;
use super::failure::{Failure, Kind, Result};
use super::print::{self, Format};

/// Creates a job as soon as its turn has come. An interrupt takes it out of the queue.
pub async fn create(
    request: api::CreateJobRequest,
    timeout: Option<Duration>,
    format: Format,
    client: &mut Client,
    out: &mut impl Write,
) -> Result<()> {
    let name = request.name.clone();
    // From before the job is in the queue, so that nothing can leave it there.
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let mut turns = client.queue_job(request, timeout).await?;
    loop {
        let turn = tokio::select! {
            turn = turns.next() => Some(turn?),
            _ = interrupt.recv() => None,
            _ = terminate.recv() => None,
        };
        match turn {
            Some(Turn::Waits(place)) => print::place(out, format, &name, &place)?,
            Some(Turn::Created(job)) => return print::job(out, format, job),
            None => {
                return match client.delete_job(name.clone()).await {
                    Err(e) if e.kind != Kind::NotFound => Err(e),
                    _ => Err(Failure::new(
                        Kind::Failed,
                        format!("interrupted: job `{name}` has left the queue"),
                    )),
                };
            }
        }
    }
}
