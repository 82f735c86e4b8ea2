//! Memory of one message: from the heap, or registered with an adapter, which then reads and writes
//! it in place.

use std::any::Any;
use std::fmt::Debug;
use std::ops::{Deref, DerefMut};

/// Memory of a fixed capacity that an adapter reads and writes.
pub trait Registered: Any + Debug + Send + DerefMut<Target = [u8]> {
    /// The capacity.
    fn room(&self) -> usize;
    /// Makes it `len` bytes long, at most its room; new bytes are zero.
    fn resize(&mut self, len: usize);
}

/// A message, or room for one. When dropped, its memory returns to where it came from.
#[derive(Debug)]
pub struct Buffer(Memory);

#[derive(Debug)]
enum Memory {
    Heap(Vec<u8>),
    Registered(Box<dyn Registered>),
}

impl Buffer {
    /// An empty buffer on the heap.
    pub fn heap(room: usize) -> Self {
        Self(Memory::Heap(Vec::with_capacity(room)))
    }

    /// The capacity without a move.
    pub fn room(&self) -> usize {
        match &self.0 {
            Memory::Heap(bytes) => bytes.capacity(),
            Memory::Registered(block) => block.room(),
        }
    }

    /// Makes it `len` bytes long; new bytes are zero. Beyond its room it moves to the heap.
    pub fn resize(&mut self, len: usize) {
        match &mut self.0 {
            Memory::Heap(bytes) => bytes.resize(len, 0),
            Memory::Registered(block) if len <= block.room() => block.resize(len),
            Memory::Registered(block) => {
                let mut bytes = block.to_vec();
                bytes.resize(len, 0);
                self.0 = Memory::Heap(bytes);
            }
        }
    }

    pub fn extend_from_slice(&mut self, bytes: &[u8]) {
        match &mut self.0 {
            // Without writing zeros first.
            Memory::Heap(own) => own.extend_from_slice(bytes),
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
            Memory::Registered(block) => block.to_vec(),
        }
    }
}

/// Registered memory, by the type of whoever registered it.
impl Buffer {
    /// A message in registered memory.
    pub fn registered(memory: impl Registered) -> Self {
        Self(Memory::Registered(Box::new(memory)))
    }

    /// The registered memory that it is in.
    pub fn as_registered<T: Registered>(&self) -> Option<&T> {
        match &self.0 {
            Memory::Heap(_) => None,
            Memory::Registered(memory) => (&**memory as &dyn Any).downcast_ref(),
        }
    }

    /// The registered memory that it is in; itself where it is elsewhere.
    pub fn into_registered<T: Registered>(self) -> Result<T, Self> {
        match self.0 {
            Memory::Registered(memory) if (&*memory as &dyn Any).is::<T>() => {
                let memory: Box<dyn Any> = memory;
                Ok(*memory.downcast().expect("its type was asked for"))
            }
            memory => Err(Self(memory)),
        }
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
            Memory::Registered(block) => block,
        }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        match &mut self.0 {
            Memory::Heap(bytes) => bytes,
            Memory::Registered(block) => block,
        }
    }
}
