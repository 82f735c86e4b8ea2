//! `netsum trace`: hands single packets on to whoever wants to see them. The data plane notes packets while there is a
//! client, and no longer, however that goes away.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use netsum_api::v1 as api;
use netsum_common::abi::TraceEvent;
use netsum_common::counters::of_bits;
use netsum_common::serial;
use netsum_common::slot::Slot;
use netsum_core::Refusal;
use netsum_core::trace::{Wanted, program_name, together};
use netsum_dataplane::Traced;
use tokio::sync::mpsc;
use tokio_stream::Stream;
use tonic::Status;

use super::message::refused;
use super::state::{Inner, Shared};
use crate::clock;

/// How often noted packets are taken out; the data plane has room for some ten thousand.
const INTERVAL: Duration = Duration::from_millis(5);
/// Packets in a reply, and taken out under one lock.
const BATCH: usize = 512;
/// Replies that may wait for a client; it loses the next ones.
const REPLIES: usize = 64;
/// Most clients.
const MAX_CLIENTS: usize = 16;

/// Who traces.
#[derive(Default)]
pub struct Tracers {
    clients: Vec<Client>,
    next: u64,
    /// A task takes packets out.
    pumping: bool,
    /// What the data plane had lost when it was asked last.
    lost: u64,
}

struct Client {
    id: u64,
    wanted: Wanted,
    replies: mpsc::Sender<Result<api::TraceReply, Status>>,
    lost: u64,
}

/// What one client gets. Dropping it is how the client goes.
pub struct Tracing {
    replies: mpsc::Receiver<Result<api::TraceReply, Status>>,
    shared: Shared,
    id: u64,
}

impl Stream for Tracing {
    type Item = Result<api::TraceReply, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.replies.poll_recv(cx)
    }
}

impl Drop for Tracing {
    fn drop(&mut self) {
        let mut inner = self.shared.lock();
        inner.tracers.clients.retain(|c| c.id != self.id);
        if let Err(e) = switch(&mut inner) {
            log::error!("the data plane goes on tracing packets: {e:#}");
        }
    }
}

/// Has the data plane note what the clients want by now.
fn switch(inner: &mut Inner) -> anyhow::Result<()> {
    let Inner { tracers, plane, .. } = inner;
    let filter = (!tracers.clients.is_empty()).then(|| together(tracers.clients.iter().map(|c| &c.wanted)));
    plane.trace(filter.as_ref())
}

/// Begins to trace.
///
/// # Errors
/// If there is no such job, ring or counter, or too many clients trace.
pub fn begin(shared: &Shared, request: &api::TraceRequest) -> Result<Tracing, Status> {
    let mut inner = shared.lock();
    let job = match request.job.as_str() {
        "" => None,
        name => Some(inner.controller.job(name).map_err(refused)?),
    };
    let wanted = Wanted::new(job, request.ring)
        .map_err(refused)?
        .of_rank(request.rank)
        .met_by(&request.program)
        .map_err(refused)?
        .counted_by(&request.verdicts)
        .map_err(refused)?
        .with_bytes(request.capture);
    if inner.tracers.clients.len() >= MAX_CLIENTS {
        return Err(refused(Refusal::Exhausted(format!("{MAX_CLIENTS} clients trace already"))));
    }
    let internal = |e: anyhow::Error| Status::internal(format!("{e:#}"));
    if inner.tracers.clients.is_empty() {
        inner.tracers.lost = inner.plane.trace_lost().map_err(internal)?;
    }
    let (sender, replies) = mpsc::channel(REPLIES);
    // So that the client knows that it has begun.
    sender.try_send(Ok(api::TraceReply::default())).map_err(|e| Status::internal(e.to_string()))?;
    inner.tracers.next += 1;
    let id = inner.tracers.next;
    inner.tracers.clients.push(Client { id, wanted, replies: sender, lost: 0 });
    if let Err(e) = switch(&mut inner) {
        inner.tracers.clients.retain(|c| c.id != id);
        return Err(internal(e));
    }
    if !inner.tracers.pumping {
        inner.tracers.pumping = true;
        tokio::spawn(pump(shared.clone()));
    }
    drop(inner);
    Ok(Tracing { replies, shared: shared.clone(), id })
}

/// Takes packets out while somebody traces.
async fn pump(shared: Shared) {
    let clock = clock::offset();
    loop {
        let full = {
            let mut inner = shared.lock();
            if inner.tracers.clients.is_empty() {
                inner.tracers.pumping = false;
                return;
            }
            match hand_on(&mut inner, clock) {
                Ok(packets) => packets == BATCH,
                Err(e) => {
                    let status = Status::internal(format!("{e:#}"));
                    log::error!("traced packets cannot be read: {e:#}");
                    // A client that ends comes back through its `Drop`.
                    inner
                        .tracers
                        .clients
                        .drain(..)
                        .for_each(|c| drop(c.replies.try_send(Err(status.clone()))));
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

/// One batch; how many packets there were.
fn hand_on(inner: &mut Inner, clock: u64) -> anyhow::Result<usize> {
    let packets = inner.plane.traced(BATCH)?;
    let lost = inner.plane.trace_lost()?;
    let lost_now = lost.wrapping_sub(std::mem::replace(&mut inner.tracers.lost, lost));
    let Inner { tracers, controller, .. } = inner;
    let place = |ring: u32| {
        controller.jobs().find_map(|job| {
            let number = job.rings.iter().position(|r| r.id == ring)?;
            Some(Place { job: job.spec.name.clone(), ring: number as u32, ranks: job.spec.ranks })
        })
    };
    for client in &mut tracers.clients {
        client.lost += lost_now;
        let wanted = packets.iter().filter(|p| client.wanted.has(&p.event));
        let mut messages: Vec<api::TracedPacket> = wanted
            .map(|p| {
                let port = controller.port_name(p.event.ifindex);
                message(p, clock, port, place(p.event.ring), client.wanted.capture)
            })
            .collect();
        if messages.is_empty() && client.lost == 0 {
            continue;
        }
        let number = messages.len() as u64;
        let reply = api::TraceReply { packets: std::mem::take(&mut messages), lost: client.lost };
        match client.replies.try_send(Ok(reply)) {
            Ok(()) => client.lost = 0,
            // It hears of these with the next reply that it has room for.
            Err(_) => client.lost += number,
        }
    }
    Ok(packets.len())
}

/// Where a ring belongs.
#[derive(Clone, Debug)]
pub struct Place {
    /// Its job.
    pub job: String,
    /// Its number in the job.
    pub ring: u32,
    /// The job's ranks.
    pub ranks: u32,
}

/// A traced packet for the API, with `capture` bytes of its frame at the most.
pub fn message(
    traced: &Traced,
    clock: u64,
    port: String,
    place: Option<Place>,
    capture: u32,
) -> api::TracedPacket {
    let Traced { event, frame } = traced;
    let ranks = place.as_ref().map_or(0, |p| p.ranks);
    api::TracedPacket {
        time_ns: event.time.wrapping_add(clock),
        program: program_name(event.program).into(),
        port,
        ifindex: event.ifindex,
        cpu: event.cpu,
        verdict: of_bits(event.counters).map(|c| c.name().into()).collect(),
        len: event.len,
        frame: frame[..frame.len().min(capture as usize)].to_vec(),
        ring: place.as_ref().map(|p| p.ring),
        job: place.map(|p| p.job).unwrap_or_default(),
        slot: (event.rank != TraceEvent::NONE).then(|| slot(event, ranks)),
    }
}

fn slot(event: &TraceEvent, ranks: u32) -> api::SlotSeen {
    let is = |flag: u32| event.slot_flags & flag != 0;
    // What has been released has come from every rank, as the slot machine has it.
    let expected = if serial::before(event.expected, event.low) { event.low } else { event.expected };
    api::SlotSeen {
        rank: event.rank,
        index: event.index,
        low: event.low,
        gap: serial::diff(event.index, expected).max(0) as u32,
        holds: is(Slot::USED).then_some(event.slot_index),
        contributors: (0..64).filter(|rank| event.contributors >> rank & 1 != 0).collect(),
        ranks,
        complete: is(Slot::COMPLETE),
        released: is(Slot::RELEASED),
    }
}
