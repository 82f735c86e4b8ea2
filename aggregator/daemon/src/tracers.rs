//! Who traces packets, and what each of them gets.

use netsum_api::v1 as api;
use netsum_common::abi::{RingNumber, TraceEvent};
use netsum_core::trace::{Wanted, together};
use netsum_core::{Controller, Refusal};
use netsum_dataplane::{DataPlane, Traced};
use tokio::sync::mpsc;
use tonic::Status;

use super::message::{RingOfJob, packet_message, refused, senders};

/// Packets in a reply, and taken out under one lock.
pub const BATCH: usize = 512;
/// Replies that may wait for a client; it loses the next ones.
const REPLIES: usize = 64;
/// Most clients.
const MAX_CLIENTS: usize = 16;

/// What a client gets, or why it gets no more.
pub type Reply = Result<api::TraceReply, Status>;

#[derive(Default)]
pub struct Tracers {
    clients: Vec<Client>,
    next: u64,
    /// A task takes packets out.
    pub pumping: bool,
    /// What the data plane had lost when it was asked last.
    lost: u64,
}

struct Client {
    id: u64,
    wanted: Wanted,
    replies: mpsc::Sender<Reply>,
    lost: u64,
}

impl Tracers {
    /// Nobody does.
    pub fn is_empty(&self) -> bool {
        self.clients.is_empty()
    }

    /// One more; its number, and where its replies come out.
    ///
    /// # Errors
    /// If too many trace, or the data plane cannot.
    pub fn add(
        &mut self,
        wanted: Wanted,
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
        // So that the client knows that it has begun.
        sender
            .try_send(Ok(api::TraceReply::default()))
            .map_err(|e| Status::internal(e.to_string()))?;
        self.next += 1;
        let id = self.next;
        self.clients.push(Client { id, wanted, replies: sender, lost: 0 });
        if let Err(e) = self.switch(plane) {
            self.clients.retain(|c| c.id != id);
            return Err(internal(e));
        }
        Ok((id, replies))
    }

    /// One less.
    pub fn remove(&mut self, id: u64, plane: &mut dyn DataPlane) -> anyhow::Result<()> {
        self.clients.retain(|c| c.id != id);
        self.switch(plane)
    }

    /// Tells all why they get no more. A client that ends comes back by [`remove`](Self::remove).
    pub fn end_all(&mut self, status: &Status) {
        self.clients.drain(..).for_each(|c| drop(c.replies.try_send(Err(status.clone()))));
    }

    /// Has the data plane note what the clients want by now.
    fn switch(&self, plane: &mut dyn DataPlane) -> anyhow::Result<()> {
        let filter =
            (!self.clients.is_empty()).then(|| together(self.clients.iter().map(|c| &c.wanted)));
        plane.trace(filter.as_ref())
    }

    /// One batch; how many packets there were.
    pub fn hand_on(
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
                client.wanted.has(&TraceEvent { rank, ..p.event })
            };
            let mut messages: Vec<api::TracedPacket> = all()
                .filter(is_wanted)
                .map(|(p, ring)| {
                    let port = controller.port_name(p.event.ifindex);
                    packet_message(p, clock, port, ring.clone(), client.wanted.capture)
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
                // It hears of these with the next reply that it has room for.
                Err(_) => client.lost += number,
            }
        }
        Ok(packets.len())
    }
}
