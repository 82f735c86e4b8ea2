//! `netsum trace`: streams single packets to clients. The data plane notes packets only while a
//! client is connected, however that connection ends.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use netsum_api::v1 as api;
use netsum_controller::message::refused;
use netsum_core::trace::TraceSelection;
use netsum_core::{JobRing, Rank};
use tokio::sync::mpsc;
use tokio_stream::Stream;
use tonic::Status;

use super::agent::{Agent, Inner, Shared};
use super::tracers::{BATCH, Reply};
use crate::clock;

/// Interval at which noted packets are read; the data plane has room for some ten thousand.
const INTERVAL: Duration = Duration::from_millis(5);

/// A client's stream. Dropping it ends the trace.
pub struct Tracing {
    replies: mpsc::Receiver<Reply>,
    shared: Shared,
    id: u64,
}

impl Tracing {
    /// Noted packets that have not been taken yet, without waiting.
    pub fn drain(&mut self) -> Vec<api::TracedPacket> {
        let replies = std::iter::from_fn(|| self.replies.try_recv().ok());
        replies.flatten().flat_map(|reply| reply.packets).collect()
    }
}

impl Stream for Tracing {
    type Item = Reply;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.replies.poll_recv(cx)
    }
}

impl Drop for Tracing {
    fn drop(&mut self) {
        let Agent { tracers, plane, .. } = &mut self.shared.lock().executor;
        if let Err(e) = tracers.remove(self.id, plane.as_mut()) {
            log::error!("cannot stop the tracing of packets: {e:#}");
        }
    }
}

/// Starts a trace.
///
/// # Errors
/// If the job, ring or counter does not exist, or too many clients trace.
pub fn begin(shared: &Shared, request: &api::TraceRequest) -> Result<Tracing, Status> {
    let mut inner = shared.lock();
    let job = match request.job.as_str() {
        "" => None,
        name => Some(inner.controller.job(name).map_err(refused)?),
    };
    let selection = TraceSelection::new(job, request.ring.map(JobRing))
        .map_err(refused)?
        .of_rank(request.rank.map(Rank))
        .seen_by_program(&request.program)
        .map_err(refused)?
        .counted_by(&request.verdicts)
        .map_err(refused)?
        .with_bytes(request.capture);
    let Agent { tracers, plane, .. } = &mut inner.executor;
    let (id, replies) = tracers.add(selection, plane.as_mut())?;
    if !std::mem::replace(&mut tracers.pumping, true) {
        tokio::spawn(pump(shared.clone()));
    }
    drop(inner);
    Ok(Tracing { replies, shared: shared.clone(), id })
}

/// Reads packets while some client traces.
async fn pump(shared: Shared) {
    let clock = clock::offset();
    loop {
        let full = {
            let Inner { executor: Agent { tracers, plane, .. }, controller, .. } =
                &mut *shared.lock();
            if tracers.is_empty() {
                tracers.pumping = false;
                return;
            }
            match tracers.forward(plane.as_mut(), controller, clock) {
                Ok(packets) => packets == BATCH,
                Err(e) => {
                    log::error!("traced packets cannot be read: {e:#}");
                    tracers.end_all(&Status::internal(format!("{e:#}")));
                    continue;
                }
            }
        };
        if full {
            tokio::task::yield_now().await;
        } else {
            tokio::time::sleep(INTERVAL).await;
        }
    }
}
