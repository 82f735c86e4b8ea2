//! Memory of one message: from the heap, or registered with an adapter, which then reads and writes it in place.

use std::ops::{Deref, DerefMut};

#[cfg(feature = "verbs")]
use crate::verbs::memory::Block;

/// A message, or room for one. Dropped, its memory goes back to where it came from.
#[derive(Debug)]
pub(crate) struct Buffer(Memory);

#[derive(Debug)]
enum Memory {
    Heap(Vec<u8>),
    #[cfg(feature = "verbs")]
    Registered(Block),
}

impl Buffer {
    /// An empty one with room on the heap.
    pub fn heap(room: usize) -> Self {
        Self(Memory::Heap(Vec::with_capacity(room)))
    }

    /// How long it can become where it is.
    pub fn room(&self) -> usize {
        match &self.0 {
            Memory::Heap(bytes) => bytes.capacity(),
            #[cfg(feature = "verbs")]
            Memory::Registered(block) => block.room(),
        }
    }

    /// Makes it `len` bytes long; new bytes are zero. Beyond its room it moves to the heap.
    pub fn resize(&mut self, len: usize) {
        match &mut self.0 {
            Memory::Heap(bytes) => bytes.resize(len, 0),
            #[cfg(feature = "verbs")]
            Memory::Registered(block) if len <= block.room() => block.resize(len),
            #[cfg(feature = "verbs")]
            Memory::Registered(block) => {
                let mut bytes = block.to_vec();
                bytes.resize(len, 0);
                self.0 = Memory::Heap(bytes);
            }
        }
    }

    /// Appends bytes.
    pub fn extend_from_slice(&mut self, bytes: &[u8]) {
        match &mut self.0 {
            // Without zeros first.
            Memory::Heap(own) => own.extend_from_slice(bytes),
            #[cfg(feature = "verbs")]
            Memory::Registered(_) => {
                let before = self.len();
                self.resize(before + bytes.len());
                self[before..].copy_from_slice(bytes);
            }
        }
    }

    /// The bytes on the heap; without a copy if they are there.
    pub fn into_vec(self) -> Vec<u8> {
        match self.0 {
            Memory::Heap(bytes) => bytes,
            #[cfg(feature = "verbs")]
            Memory::Registered(block) => block.to_vec(),
        }
    }
}

#[cfg(feature = "verbs")]
impl Buffer {
    /// The registered memory that it is in.
    pub fn block(&self) -> Option<&Block> {
        match &self.0 {
            Memory::Heap(_) => None,
            Memory::Registered(block) => Some(block),
        }
    }

    /// The registered memory that it is in; itself where it is on the heap.
    pub fn into_block(self) -> Result<Block, Self> {
        match self.0 {
            Memory::Heap(_) => Err(self),
            Memory::Registered(block) => Ok(block),
        }
    }
}

#[cfg(feature = "verbs")]
impl From<Block> for Buffer {
    fn from(block: Block) -> Self {
        Self(Memory::Registered(block))
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl Default for Buffer {
    fn default() -> Self {
        Self::heap(0)
    }
}

impl From<Vec<u8>> for Buffer {
    fn from(bytes: Vec<u8>) -> Self {
        Self(Memory::Heap(bytes))
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.0 {
            Memory::Heap(bytes) => bytes,
            #[cfg(feature = "verbs")]
            Memory::Registered(block) => block,
        }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        match &mut self.0 {
            Memory::Heap(bytes) => bytes,
            #[cfg(feature = "verbs")]
            Memory::Registered(block) => block,
        }
    }
}
