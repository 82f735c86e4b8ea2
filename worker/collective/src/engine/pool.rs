//! Buffers that are reused: only the first messages cost an allocation.

use crate::buffer::Buffer;
use crate::channels::Channels;

/// Free buffers of one size. There are never more buffers than were in use at once, which the
/// window limits.
#[derive(Debug)]
pub(super) struct Pool {
    room: usize,
    free: Vec<Buffer>,
    /// Buffers in use.
    lent: usize,
}

impl Pool {
    /// An empty pool of buffers of `room` bytes.
    pub fn new(room: usize) -> Self {
        Self { room, free: Vec::new(), lent: 0 }
    }

    /// A buffer with its old contents: clearing it would cost a pass over the memory, and the
    /// caller overwrites it anyway.
    pub fn take(&mut self, channels: &mut dyn Channels) -> Buffer {
        self.lent += 1;
        self.free.pop().unwrap_or_else(|| channels.buffer(self.room))
    }

    /// Returns a buffer to the pool. One that came from elsewhere is dropped.
    pub fn give(&mut self, buffer: Buffer) {
        if buffer.room() >= self.room && self.lent > 0 {
            self.lent -= 1;
            self.free.push(buffer);
        }
    }
}
