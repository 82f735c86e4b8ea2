//! The clients that trace packets, and their replies.

use netsum_api::v1 as api;
use netsum_common::abi::{RingNumber, TraceEvent};
use netsum_controller::message::{refused, senders};
use netsum_core::trace::{TraceSelection, union};
use netsum_core::{Controller, Refusal};
use netsum_dataplane::{DataPlane, Traced};
use tokio::sync::mpsc;
use tonic::Status;

use super::packet::{RingOfJob, packet_message};

/// Packets in a reply, and read under one lock.
pub const BATCH: usize = 512;
/// Replies that may wait for a client; further ones are lost to it.
const REPLIES: usize = 64;
/// Most clients at once.
const MAX_CLIENTS: usize = 16;

/// A reply for a client, or why its trace ends.
pub type Reply = Result<api::TraceReply, Status>;

#[derive(Default)]
pub struct Tracers {
    clients: Vec<Client>,
    next: u64,
    /// Whether a task reads packets.
    pub pumping: bool,
    /// The data plane's count of lost packets at the last read.
    lost: u64,
}

struct Client {
    id: u64,
    selection: TraceSelection,
    replies: mpsc::Sender<Reply>,
    lost: u64,
}

impl Tracers {
    /// Whether no client traces.
    pub fn is_empty(&self) -> bool {
        self.clients.is_empty()
    }

    /// Adds a client; returns its number, and the receiver of its replies.
    ///
    /// # Errors
    /// If too many clients trace, or the data plane refuses.
    pub fn add(
        &mut self,
        selection: TraceSelection,
        plane: &mut dyn DataPlane,
    ) -> Result<(u64, mpsc::Receiver<Reply>), Status> {
        if self.clients.len() >= MAX_CLIENTS {
            return Err(refused(Refusal::Exhausted(format!(
                "{MAX_CLIENTS} clients trace already"
            ))));
        }
        let internal = |e: anyhow::Error| Status::internal(format!("{e:#}"));
        if self.clients.is_empty() {
            self.lost = plane.trace_lost().map_err(internal)?;
        }
        let (sender, replies) = mpsc::channel(REPLIES);
        // Tells the client that the trace has begun.
        sender
            .try_send(Ok(api::TraceReply::default()))
            .map_err(|e| Status::internal(e.to_string()))?;
        self.next += 1;
        let id = self.next;
        self.clients.push(Client { id, selection, replies: sender, lost: 0 });
        if let Err(e) = self.switch(plane) {
            self.clients.retain(|c| c.id != id);
            return Err(internal(e));
        }
        Ok((id, replies))
    }

    /// Removes a client.
    pub fn remove(&mut self, id: u64, plane: &mut dyn DataPlane) -> anyhow::Result<()> {
        self.clients.retain(|c| c.id != id);
        self.switch(plane)
    }

    /// Ends all traces with this status. A client then calls [`remove`](Self::remove) when it is
    /// dropped.
    pub fn end_all(&mut self, status: &Status) {
        self.clients.drain(..).for_each(|c| drop(c.replies.try_send(Err(status.clone()))));
    }

    /// Updates the data plane's filter to what the clients want now.
    fn switch(&self, plane: &mut dyn DataPlane) -> anyhow::Result<()> {
        let filter =
            (!self.clients.is_empty()).then(|| union(self.clients.iter().map(|c| &c.selection)));
        plane.trace(filter.as_ref())
    }

    /// Passes one batch on; returns its number of packets.
    pub fn forward(
        &mut self,
        plane: &mut dyn DataPlane,
        controller: &Controller,
        clock: u64,
    ) -> anyhow::Result<usize> {
        let packets = plane.traced(BATCH)?;
        let lost = plane.trace_lost()?;
        let lost_now = lost.wrapping_sub(std::mem::replace(&mut self.lost, lost));
        let ring_of_job = |ring: RingNumber| {
            controller.jobs().find_map(|job| {
                let ring = job.job_ring(ring)?;
                Some(RingOfJob { job: job.spec.name.clone(), ring, senders: senders(job) })
            })
        };
        let rings: Vec<_> = packets.iter().map(|p| ring_of_job(RingNumber(p.event.ring))).collect();
        let all = || packets.iter().zip(&rings);
        for client in &mut self.clients {
            client.lost += lost_now;
            let is_wanted = |(p, ring): &(&Traced, &Option<RingOfJob>)| {
                let rank = ring.as_ref().map_or(p.event.rank, |ring| ring.sender(p.event.rank));
                client.selection.has(&TraceEvent { rank, ..p.event })
            };
            let mut messages: Vec<api::TracedPacket> = all()
                .filter(is_wanted)
                .map(|(p, ring)| {
                    let port = controller.port_name(p.event.ifindex);
                    packet_message(p, clock, port, ring.clone(), client.selection.capture)
                })
                .collect();
            if messages.is_empty() && client.lost == 0 {
                continue;
            }
            let number = messages.len() as u64;
            let reply =
                api::TraceReply { packets: std::mem::take(&mut messages), lost: client.lost };
            match client.replies.try_send(Ok(reply)) {
                Ok(()) => client.lost = 0,
                // The next reply that fits reports these as lost.
                Err(_) => client.lost += number,
            }
        }
        Ok(packets.len())
    }
}
