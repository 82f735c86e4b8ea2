//! Connections over an RDMA adapter: the engine's messages are built in, and received into, memory
//! that the adapter reads and writes itself.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::BorrowedFd;
use std::time::Instant;

use nix::poll::PollFlags;

use super::allocator::QpAllocator;
use super::config::CommConfig;
use super::network::{Connections, Network};
use crate::udp::wait_for;
use crate::verbs::device::{
    Adapter, Completion, Depths, Device, Direction, Remote, Retry, WorkError,
};
use crate::verbs::gid::GidEntry;
use crate::verbs::memory::{Arena, Block};
use crate::verbs::send_queue::{Outcome, SendQueue, Ticket};
use netsum_collective::buffer::{Buffer, Registered as _};
use netsum_collective::channels::{Channel, ChannelEvent, Channels};
use netsum_collective::error::Error;
use netsum_collective::frame::{bypass_buffers, bypass_room};
use netsum_collective::queue_pairs::{QpInfo, RankQpInfo, SourcePorts};
use netsum_collective::report::Traffic;
use netsum_collective::shape::JobShape;
use netsum_rc::Psn;

/// Frames on the bypass connection that are posted at a time; the others wait here.
const BYPASS_SENDS: usize = 64;
/// Batches of completions to process before the engine runs.
const BATCHES: usize = 8;

/// An adapter with the queue pairs of a rank, which are not connected yet.
struct Opened {
    device: Device,
    name: String,
    own: Vec<Pair>,
}

/// The queue pairs to the next and from the previous rank, of one ring or of the bypass connection.
#[derive(Clone, Copy)]
struct Pair {
    out: Channel,
    into: Channel,
    first_psn: Psn,
    depths: Depths,
}

/// Opens the adapter that has the rank's address.
pub(super) fn open(config: &CommConfig, gid: GidEntry) -> Result<Box<dyn Network>, Error> {
    let name = gid.device.clone();
    let retry = Retry { timeout: config.retry.timeout, count: config.retry.count };
    let device = Device::open(gid, retry);
    let device =
        device.map_err(|e| Error::Adapter { device: name.clone(), reason: e.to_string() })?;
    Ok(Box::new(Opened { device, name, own: Vec::new() }))
}

impl Opened {
    fn error(&self, e: &io::Error) -> Error {
        Error::Adapter { device: self.name.clone(), reason: e.to_string() }
    }
}

/// The connections of a job, the bypass connection first.
fn pairs(shape: &JobShape, allocator: &mut QpAllocator) -> Vec<Pair> {
    let window = shape.layout.window as usize;
    let pair = |out, into, send, receive| Pair {
        out,
        into,
        first_psn: allocator.psn(),
        depths: Depths { send, receive },
    };
    let bypass = pair(Channel::BypassOut, Channel::BypassIn, BYPASS_SENDS, bypass_buffers(shape));
    // A message may be acknowledged after its sum has arrived and the next one has been sent.
    let rings = (0..shape.layout.rings)
        .map(|i| pair(Channel::RingOut(i), Channel::RingIn(i), window * 2, window + 2));
    std::iter::once(bypass).chain(rings).collect()
}

impl Network for Opened {
    fn numbers(&mut self, shape: &JobShape) -> Result<(Vec<QpInfo>, QpInfo), Error> {
        self.own = pairs(shape, &mut QpAllocator::new());
        let depths: Vec<Depths> = self
            .own
            .iter()
            .flat_map(|p| [Depths { receive: 0, ..p.depths }, Depths { send: 0, ..p.depths }])
            .collect();
        let made = self.device.make_queue_pairs(&depths, shape.mtu);
        let qpns = made.map_err(|e| self.error(&e))?;
        let numbers = qpns.as_chunks::<2>().0.iter().zip(&self.own).map(|(qpns, pair)| QpInfo {
            send_qpn: qpns[0],
            receive_qpn: qpns[1],
            first_psn: pair.first_psn,
        });
        let mut numbers: Vec<QpInfo> = numbers.collect();
        let bypass = numbers.remove(0);
        Ok((numbers, bypass))
    }

    fn connect(
        self: Box<Self>,
        shape: &JobShape,
        rank: u32,
        ranks: &[RankQpInfo],
    ) -> Result<Box<dyn Connections>, Error> {
        let mut arena = Arena::new(self.device.register());
        let Needs { message, bypass } = Needs::of(shape);
        let reserved = arena
            .reserve(message.0, message.1)
            // As many again to send from.
            .and_then(|()| arena.reserve(bypass.0, bypass.1 * 2));
        reserved.map_err(|e| self.error(&e))?;
        let (count, rank) = (ranks.len(), rank as usize);
        let (next, previous) = (&ranks[(rank + 1) % count], &ranks[(rank + count - 1) % count]);
        let numbers_of = |r: &RankQpInfo| -> Vec<QpInfo> {
            std::iter::once(r.bypass).chain(r.rings.iter().copied()).collect()
        };
        let mut queues = Vec::new();
        for ((pair, next_n), previous_n) in
            self.own.iter().zip(numbers_of(next)).zip(numbers_of(previous))
        {
            let messages = SendQueue::new(pair.first_psn, shape.mtu as usize, pair.depths.send);
            queues.push(Queue {
                channel: pair.out,
                remote: Remote { ip: next.ip, qpn: next_n.receive_qpn },
                side: Side::Send(messages),
                failed: false,
            });
            queues.push(Queue {
                channel: pair.into,
                remote: Remote { ip: previous.ip, qpn: previous_n.send_qpn },
                side: Side::Receive {
                    first_psn: previous_n.first_psn,
                    next: 0,
                    posted: VecDeque::new(),
                },
                failed: false,
            });
        }
        let transport_name = self.device.transport_name();
        Ok(Box::new(Verbs::new(self.device, arena, queues, self.name, transport_name)))
    }

    fn any_ip_id(&self) -> bool {
        true
    }

    fn ports(&self) -> SourcePorts {
        SourcePorts::UNKNOWN
    }

    fn selective(&self) -> bool {
        false
    }
}

/// Sizes and numbers of buffers that a job needs.
struct Needs {
    message: (usize, usize),
    bypass: (usize, usize),
}

impl Needs {
    fn of(shape: &JobShape) -> Self {
        let (window, rings) = (shape.layout.window as usize, shape.layout.rings as usize);
        // Buffers to receive into, and sent messages that are kept for two windows.
        let messages = rings * (window + 2 + window * 2);
        Self {
            message: (shape.message_room(), messages),
            bypass: (bypass_room(shape), bypass_buffers(shape)),
        }
    }
}

/// One direction of a connection.
struct Queue {
    channel: Channel,
    remote: Remote,
    side: Side,
    failed: bool,
}

enum Side {
    Send(SendQueue<Buffer>),
    Receive { first_psn: Psn, next: u32, posted: VecDeque<(u32, Block)> },
    Closed,
}

/// A rank's connections. A queue's place in `queues` is its queue pair's number.
struct Verbs<A> {
    // Dropped before the arena: the adapter must have released all blocks.
    adapter: A,
    arena: Arena,
    queues: Vec<Queue>,
    by_channel: HashMap<Channel, usize>,
    events: VecDeque<ChannelEvent>,
    completions: Vec<Completion>,
    started: bool,
    armed: bool,
    restarts: u64,
    device: String,
    transport_name: String,
}

/// The id of a work request: queue pair, generation of the queue pair, number.
fn work(queue: usize, ticket: Ticket) -> u64 {
    (queue as u64) << 48 | u64::from(ticket.generation) << 32 | u64::from(ticket.sequence)
}

fn ticket(work: u64) -> (usize, Ticket) {
    ((work >> 48) as usize, Ticket { generation: (work >> 32) as u16, sequence: work as u32 })
}

impl<A: Adapter> Verbs<A> {
    fn new(
        adapter: A,
        arena: Arena,
        queues: Vec<Queue>,
        device: String,
        transport_name: String,
    ) -> Self {
        let by_channel = queues.iter().enumerate().map(|(i, q)| (q.channel, i)).collect();
        Self {
            adapter,
            arena,
            queues,
            by_channel,
            events: VecDeque::new(),
            completions: Vec::new(),
            started: false,
            armed: false,
            restarts: 0,
            device,
            transport_name,
        }
    }

    fn error(&self, e: &io::Error) -> Error {
        Error::Adapter { device: self.device.clone(), reason: e.to_string() }
    }

    fn fail(&mut self, queue: usize, reason: String) {
        let q = &mut self.queues[queue];
        if !q.failed {
            q.failed = true;
            self.events.push_back(ChannelEvent::Failed { channel: q.channel, reason });
        }
    }

    fn connect(&mut self, queue: usize) -> io::Result<()> {
        let q = &mut self.queues[queue];
        let flow = match &mut q.side {
            Side::Send(messages) => {
                Direction::Send { first_psn: messages.restart(), doublings: messages.doublings() }
            }
            Side::Receive { first_psn, .. } => Direction::Receive { first_psn: *first_psn },
            Side::Closed => return Ok(()),
        };
        self.adapter.connect(queue, flow, q.remote)
    }

    /// Posts messages while the adapter has room.
    fn post(&mut self, queue: usize) {
        let q = &mut self.queues[queue];
        let Side::Send(messages) = &mut q.side else { return };
        if !self.started || q.failed {
            return;
        }
        let mut problem = None;
        while let Some((ticket, message)) =
            messages.post(|m| registered(&mut self.arena, m, &mut problem))
        {
            let Some(block) = message.as_registered() else { continue };
            if let Err(e) = self.adapter.post_send(queue, work(queue, ticket), block) {
                self.fail(queue, e.to_string());
                return;
            }
        }
        // Otherwise completions of posted messages will return memory.
        if let Some(reason) = problem
            && messages.is_idle()
        {
            self.fail(queue, reason);
        }
    }

    /// Processes completions. Returns whether there were any.
    fn progress(&mut self) -> io::Result<bool> {
        let mut any = false;
        for _ in 0..BATCHES {
            let mut completions = std::mem::take(&mut self.completions);
            let more = self.adapter.poll(&mut completions)?;
            any |= !completions.is_empty();
            for completion in completions.drain(..) {
                self.on_completion(completion);
            }
            self.completions = completions;
            if !more {
                break;
            }
        }
        Ok(any)
    }

    fn on_completion(&mut self, Completion { work, result }: Completion) {
        let (queue, ticket) = ticket(work);
        let Some(q) = self.queues.get_mut(queue).filter(|q| !q.failed) else { return };
        let channel = q.channel;
        match (&mut q.side, result) {
            (Side::Closed, _) => {}
            (Side::Send(messages), Ok(_)) => {
                if let Outcome::Sent(sent) = messages.on_success(ticket) {
                    self.events.extend(sent.into_iter().map(|(id, data)| ChannelEvent::Sent {
                        channel,
                        id,
                        data,
                    }));
                    self.post(queue);
                }
            }
            (Side::Send(messages), Err(WorkError::GaveUp | WorkError::Flushed)) => {
                if let Outcome::Stopped = messages.on_stop(ticket) {
                    self.restart(queue);
                }
            }
            (Side::Receive { posted, .. }, Ok(len)) => {
                // In the order in which they were posted.
                let Some((_, mut block)) =
                    posted.pop_front_if(|(number, _)| *number == ticket.sequence)
                else {
                    return self.fail(queue, "the adapter completed receives out of order".into());
                };
                block.set_len(len.min(block.room()));
                self.events
                    .push_back(ChannelEvent::Received { channel, data: Buffer::registered(block) });
            }
            (_, Err(error)) => {
                let reason = match error {
                    WorkError::GaveUp => "no acknowledgement after all retries".to_owned(),
                    WorkError::Flushed => "the queue pair has stopped".to_owned(),
                    WorkError::Broken(text) => text,
                };
                self.fail(queue, format!("{}: {reason}", self.device));
            }
        }
    }

    /// Restarts a queue pair that has given up, at the message where it stopped.
    fn restart(&mut self, queue: usize) {
        log::debug!(
            "{}: restarting the queue pair of {:?}, which has given up",
            self.device,
            self.queues[queue].channel
        );
        self.restarts += 1;
        match self.adapter.reset(queue).and_then(|()| self.connect(queue)) {
            Ok(()) => self.post(queue),
            Err(e) => self.fail(queue, format!("cannot restart the queue pair: {e}")),
        }
    }

    fn wait(&mut self, until: Instant) -> io::Result<bool> {
        if self.armed {
            // A pending event would end the next wait at once.
            self.adapter.disarm()?;
            self.armed = false;
        }
        if !self.events.is_empty() || self.progress()? {
            return Ok(true);
        }
        self.adapter.arm()?;
        self.armed = true;
        // Completions before `arm` give no event.
        if self.progress()? {
            return Ok(true);
        }
        let wait = until.saturating_duration_since(Instant::now());
        if wait.is_zero() {
            return Ok(false);
        }
        wait_for(self.adapter.fd(), PollFlags::POLLIN, wait)?;
        self.progress()
    }
}

/// Moves a message to registered memory; returns it with a `problem` if there is none.
fn registered(
    arena: &mut Arena,
    message: Buffer,
    problem: &mut Option<String>,
) -> Result<Buffer, Buffer> {
    if message.as_registered::<Block>().is_some() {
        return Ok(message);
    }
    match arena.block(message.len()) {
        Ok(mut block) => {
            block.set_len(message.len());
            block.copy_from_slice(&message);
            Ok(Buffer::registered(block))
        }
        Err(e) => {
            *problem = Some(e.to_string());
            Err(message)
        }
    }
}

impl<A: Adapter> Channels for Verbs<A> {
    fn buffer(&mut self, room: usize) -> Buffer {
        match self.arena.block(room) {
            Ok(block) => Buffer::registered(block),
            Err(e) => {
                log::debug!("{}: {e}", self.device);
                Buffer::heap(room)
            }
        }
    }

    fn send(&mut self, channel: Channel, id: u64, data: Buffer) {
        let Some(queue) = self.by_channel.get(&channel).copied() else { return };
        if let Side::Send(messages) = &mut self.queues[queue].side {
            messages.push(id, data);
            self.post(queue);
        }
    }

    /// An adapter has its own timeouts.
    fn expect(&mut self, _: Instant, _: Channel, _: u64) {}

    fn receive_into(&mut self, channel: Channel, buffer: Buffer) {
        let Some(queue) = self.by_channel.get(&channel).copied() else { return };
        let block = match buffer.into_registered() {
            Ok(block) => Ok(block),
            Err(buffer) => self.arena.block(buffer.room()),
        };
        let Side::Receive { next, posted, .. } = &mut self.queues[queue].side else { return };
        let done = block.and_then(|block| {
            let number = *next;
            *next = number.wrapping_add(1);
            let ticket = Ticket { generation: 0, sequence: number };
            self.adapter.post_receive(queue, work(queue, ticket), &block)?;
            posted.push_back((number, block));
            Ok(())
        });
        if let Err(e) = done {
            self.fail(queue, e.to_string());
        }
    }

    fn poll(&mut self) -> Option<ChannelEvent> {
        self.events.pop_front()
    }

    fn close(&mut self, channel: Channel) -> Vec<(u64, Buffer)> {
        let Some(queue) = self.by_channel.remove(&channel) else { return Vec::new() };
        // First, because the adapter must release the blocks.
        self.adapter.destroy(queue);
        match std::mem::replace(&mut self.queues[queue].side, Side::Closed) {
            Side::Send(messages) => messages.into_messages().collect(),
            Side::Receive { .. } | Side::Closed => Vec::new(),
        }
    }
}

impl<A: Adapter> Connections for Verbs<A> {
    fn start(&mut self) -> Result<(), Error> {
        for queue in 0..self.queues.len() {
            self.connect(queue).map_err(|e| self.error(&e))?;
        }
        self.started = true;
        (0..self.queues.len()).for_each(|queue| self.post(queue));
        Ok(())
    }

    fn drive(&mut self, until: Instant) -> Result<bool, Error> {
        self.wait(until).map_err(|e| self.error(&e))
    }

    fn next_timeout(&self) -> Option<Instant> {
        None
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.adapter.fd()
    }

    fn traffic(&self) -> Option<Traffic> {
        None
    }

    fn restarts(&self) -> u64 {
        self.restarts
    }

    fn transport_name(&self) -> String {
        self.transport_name.clone()
    }
}

#[cfg(test)]
mod tests;
