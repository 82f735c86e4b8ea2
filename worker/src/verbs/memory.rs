//! Registered memory: slabs that the adapter reads and writes, cut into blocks of one message each.
//!
//! Slabs are registered on demand and kept as long as any of their blocks is in use.

use std::collections::HashMap;
use std::io;
use std::num::NonZeroUsize;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use netsum_collective::buffer::Registered;

use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap_anonymous, munmap};

/// Smaller blocks are allocated together, because registering is slow.
const SLAB: usize = 1 << 20;
/// Least room of a block.
const LEAST: usize = 1024;
/// Larger blocks begin at pages.
const PAGE: usize = 4096;

/// Registers memory. Returns its local key, and a value that ends the registration when it is
/// dropped.
pub(crate) type Register =
    dyn Fn(NonNull<u8>, usize) -> io::Result<(u32, Box<dyn Send + Sync>)> + Send + Sync;

/// Memory in one piece.
struct Slab {
    start: NonNull<u8>,
    len: usize,
    key: u32,
    registration: Option<Box<dyn Send + Sync>>,
}

// SAFETY: a slab is memory that is not read or written through this type.
unsafe impl Send for Slab {}
// SAFETY: as above.
unsafe impl Sync for Slab {}

impl Slab {
    fn new(len: usize, register: &Register) -> io::Result<Self> {
        let size = NonZeroUsize::new(len).ok_or(io::ErrorKind::InvalidInput)?;
        let rights = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: new pages, which nothing else uses.
        let start =
            unsafe { mmap_anonymous(None, size, rights, MapFlags::MAP_PRIVATE) }?.cast::<u8>();
        let mut slab = Self { start, len, key: 0, registration: None };
        // After a fork, the adapter would keep using the pages of the process that does not write
        // to them first. SAFETY: the pages are this slab's.
        unsafe { madvise(start.cast(), len, MmapAdvise::MADV_DONTFORK) }?;
        let (key, registration) = register(start, len)?;
        (slab.key, slab.registration) = (key, Some(registration));
        Ok(slab)
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        // First, the adapter releases the memory.
        drop(self.registration.take());
        // SAFETY: blocks keep their slab alive, so no block is left.
        let gone = unsafe { munmap(self.start.cast(), self.len) };
        if let Err(e) = gone {
            log::debug!("cannot unmap {} bytes: {e}", self.len);
        }
    }
}

/// A place for a block.
struct Piece {
    start: NonNull<u8>,
    slab: Arc<Slab>,
}

// SAFETY: the owner of the piece is the only one that uses its memory.
unsafe impl Send for Piece {}

/// Free blocks of one size.
struct FreeBlocks {
    room: usize,
    free: Mutex<Vec<Piece>>,
}

impl FreeBlocks {
    fn pieces(&self) -> std::sync::MutexGuard<'_, Vec<Piece>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// All registered memory of a rank.
pub(crate) struct Arena {
    register: Box<Register>,
    shelves: HashMap<usize, Arc<FreeBlocks>>,
}

impl std::fmt::Debug for Arena {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Arena").field("sizes", &self.shelves.keys()).finish_non_exhaustive()
    }
}

impl Arena {
    /// An arena without memory.
    pub fn new(register: Box<Register>) -> Self {
        Self { register, shelves: HashMap::new() }
    }

    /// Registers `count` blocks with room for `room` bytes each, in advance.
    pub fn reserve(&mut self, room: usize, count: usize) -> io::Result<()> {
        let shelf = self.shelf(room);
        let slab = Arc::new(Slab::new(shelf.room * count.max(1), &self.register)?);
        let pieces = (0..count).map(|i| {
            // SAFETY: within the slab.
            let start = unsafe { slab.start.add(i * shelf.room) };
            Piece { start, slab: Arc::clone(&slab) }
        });
        shelf.pieces().extend(pieces);
        Ok(())
    }

    /// An empty block with room for `room` bytes.
    pub fn block(&mut self, room: usize) -> io::Result<Block> {
        let shelf = self.shelf(room);
        let free = shelf.pieces().pop();
        let piece = match free {
            Some(piece) => piece,
            None => {
                self.reserve(room, (SLAB / shelf.room).max(1))?;
                let piece = shelf.pieces().pop();
                piece.ok_or(io::ErrorKind::OutOfMemory)?
            }
        };
        Ok(Block { piece: Some(piece), len: 0, shelf })
    }

    fn shelf(&mut self, room: usize) -> Arc<FreeBlocks> {
        let room = if room < PAGE {
            room.max(LEAST).next_power_of_two()
        } else {
            room.next_multiple_of(PAGE)
        };
        let shelf = || Arc::new(FreeBlocks { room, free: Mutex::new(Vec::new()) });
        Arc::clone(self.shelves.entry(room).or_insert_with(shelf))
    }
}

/// Registered memory of one message.
pub(crate) struct Block {
    /// `None` only while it is dropped.
    piece: Option<Piece>,
    len: usize,
    shelf: Arc<FreeBlocks>,
}

impl Block {
    fn piece(&self) -> &Piece {
        self.piece.as_ref().expect("a block has its piece until it is dropped")
    }

    /// Makes it `len` bytes long; new bytes have old contents.
    ///
    /// # Panics
    /// If that is more than its room.
    pub fn set_len(&mut self, len: usize) {
        assert!(len <= self.room(), "{len} bytes in a block of {}", self.room());
        self.len = len;
    }

    /// Address for the adapter.
    pub fn address(&self) -> u64 {
        self.piece().start.as_ptr() as u64
    }

    /// Local key of its registration.
    pub fn key(&self) -> u32 {
        self.piece().slab.key
    }
}

impl Registered for Block {
    fn room(&self) -> usize {
        self.shelf.room
    }

    fn resize(&mut self, len: usize) {
        let before = self.len;
        self.set_len(len);
        if len > before {
            self[before..].fill(0);
        }
    }
}

impl Deref for Block {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the piece's memory is mapped, was zero at first, and belongs to this block alone.
        // While the adapter has a block, it is not touched in a queue of `comm::verbs`.
        unsafe { std::slice::from_raw_parts(self.piece().start.as_ptr(), self.len) }
    }
}

impl DerefMut for Block {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and this is the only reference.
        unsafe { std::slice::from_raw_parts_mut(self.piece().start.as_ptr(), self.len) }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let piece = self.piece.take();
        self.shelf.pieces().extend(piece);
    }
}

impl std::fmt::Debug for Block {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Block")
            .field("len", &self.len)
            .field("room", &self.room())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// Counts bytes that are registered.
    pub fn counting(registered: &Arc<AtomicUsize>) -> Box<Register> {
        struct Ends(Arc<AtomicUsize>, usize);
        impl Drop for Ends {
            fn drop(&mut self) {
                self.0.fetch_sub(self.1, Ordering::Relaxed);
            }
        }
        let registered = Arc::clone(registered);
        Box::new(move |_, len| {
            registered.fetch_add(len, Ordering::Relaxed);
            Ok((7, Box::new(Ends(Arc::clone(&registered), len))))
        })
    }

    #[test]
    fn blocks_come_back_and_do_not_overlap() {
        let registered = Arc::default();
        let mut arena = Arena::new(counting(&registered));
        let mut blocks: Vec<Block> = (0..300).map(|_| arena.block(5000).unwrap()).collect();
        for (i, block) in blocks.iter_mut().enumerate() {
            assert_eq!((block.room(), block.len(), block.key()), (8192, 0, 7));
            block.resize(5000);
            assert!(block.iter().all(|b| *b == 0));
            block.fill(i as u8);
        }
        for (i, block) in blocks.iter().enumerate() {
            assert!(block.iter().all(|b| *b == i as u8), "block {i}");
        }
        let before = registered.load(Ordering::Relaxed);
        assert_eq!(before, 3 << 20);
        let last = blocks.pop().unwrap();
        let address = last.address();
        drop(last);
        let again = arena.block(4097).unwrap();
        assert_eq!(again.address(), address, "free blocks are used first");
        assert_eq!(registered.load(Ordering::Relaxed), before);
        assert_eq!(arena.block(100).unwrap().room(), 1024);
    }

    #[test]
    fn memory_is_let_go_with_its_last_block() {
        let registered = Arc::default();
        let mut arena = Arena::new(counting(&registered));
        arena.reserve(65_536, 3).unwrap();
        assert_eq!(registered.load(Ordering::Relaxed), 3 * 65_536);
        let mut block = arena.block(65_536).unwrap();
        drop(arena);
        block.resize(10);
        block.copy_from_slice(b"0123456789");
        assert_eq!(registered.load(Ordering::Relaxed), 3 * 65_536, "a block keeps its slab");
        drop(block);
        assert_eq!(registered.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn memory_that_cannot_be_registered_is_an_error() {
        let mut arena = Arena::new(Box::new(|_, _| Err(io::ErrorKind::OutOfMemory.into())));
        assert!(arena.block(1).is_err());
        assert!(arena.reserve(1 << 16, 4).is_err());
    }
}
