//! Buffers that are used again: what has been sent once costs no allocation any more.

use crate::buffer::Buffer;
use crate::channels::Channels;

/// Buffers of one size that nobody uses at the moment. With those in use they are never more than
/// were in use at once, which the window limits.
#[derive(Debug)]
pub(super) struct Pool {
    room: usize,
    free: Vec<Buffer>,
    /// Taken, and not yet given back.
    lent: usize,
}

impl Pool {
    /// None yet, of buffers with room for so many bytes.
    pub fn new(room: usize) -> Self {
        Self { room, free: Vec::new(), lent: 0 }
    }

    /// A buffer with whatever it held last: to clear a message that will be written anew costs a
    /// pass over it.
    pub fn take(&mut self, channels: &mut dyn Channels) -> Buffer {
        self.lent += 1;
        self.free.pop().unwrap_or_else(|| channels.buffer(self.room))
    }

    /// Takes a buffer back. Those that came from elsewhere are dropped.
    pub fn give(&mut self, buffer: Buffer) {
        if buffer.room() >= self.room && self.lent > 0 {
            self.lent -= 1;
            self.free.push(buffer);
        }
    }
}
