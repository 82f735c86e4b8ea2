//! The interface below the engine: reliable connections that carry whole messages, in order.
//!
//! The engine does not know queue pairs. Tests implement the interface by something simpler than
//! the RC endpoint.

use std::time::Instant;

use crate::buffer::Buffer;

/// One connection, as its user sees it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Channel {
    /// To the next rank, in a ring; the box sums what is sent here.
    RingOut(u32),
    /// From the previous rank, in a ring; brings sums.
    RingIn(u32),
    /// To the next rank, past the box.
    BypassOut,
    /// From the previous rank, past the box.
    BypassIn,
}

/// An event of a channel.
#[derive(Debug)]
pub enum ChannelEvent {
    /// A message has been acknowledged; here is its buffer.
    Sent { channel: Channel, id: u64, data: Buffer },
    /// A message has arrived.
    Received { channel: Channel, data: Buffer },
    /// The connection has failed.
    Failed { channel: Channel, reason: String },
}

/// A rank's reliable connections to its neighbours.
pub trait Channels {
    /// An empty buffer with `room` bytes, of memory that suits the transport best.
    fn buffer(&mut self, room: usize) -> Buffer {
        Buffer::heap(room)
    }
    fn send(&mut self, channel: Channel, id: u64, data: Buffer);
    /// A message that was sent, and all before it, should be acknowledged as soon as it arrives:
    /// all ranks have sent their part, or will at once.
    fn expect(&mut self, now: Instant, channel: Channel, id: u64);
    /// Gives a buffer to receive into.
    fn receive_into(&mut self, channel: Channel, buffer: Buffer);
    /// When a part of a message last arrived, where that is known: a whole message may take longer
    /// than the timeout.
    fn last_part(&self, _: Channel) -> Option<Instant> {
        None
    }
    /// The next event, oldest first.
    fn poll(&mut self) -> Option<ChannelEvent>;
    /// Closes a connection and returns the messages that it has not delivered, by id.
    fn close(&mut self, channel: Channel) -> Vec<(u64, Buffer)>;
}
