//! Memory that several processes map.

use std::fs::File;
use std::io;
use std::marker::PhantomData;
use std::num::NonZeroUsize;
use std::ops::{Deref, DerefMut, Range};
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use netsum_collective::numeric::element::{Dtype, Element};
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};

/// A file in memory, which others open through `/proc`. Nobody can make it shorter.
pub(crate) fn create() -> io::Result<OwnedFd> {
    let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
    let file = memfd_create("netsum", flags)?;
    fcntl(&file, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_SHRINK))?;
    Ok(file)
}

/// Opens a file that another process of this user has [created](create).
pub(crate) fn open(pid: u32, file: u32) -> io::Result<File> {
    let file = File::options().read(true).write(true).open(format!("/proc/{pid}/fd/{file}"))?;
    // That process may have closed it, or be another one by now.
    let seals = SealFlag::from_bits_truncate(fcntl(&file, FcntlArg::F_GET_SEALS)?);
    if seals != SealFlag::F_SEAL_SHRINK {
        return Err(io::Error::other("it is not a file that netsum has created"));
    }
    Ok(file)
}

/// A file that is mapped.
#[derive(Debug)]
pub(crate) struct SharedMemory {
    start: NonNull<u8>,
    len: NonZeroUsize,
}

// SAFETY: The mapping belongs to no thread. `Part` says who may use which bytes.
unsafe impl Send for SharedMemory {}
// SAFETY: As above.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// Maps `len` bytes of the file, which becomes as long. New bytes are zero, and take memory
    /// only once they are written.
    pub fn map(file: &File, len: NonZeroUsize) -> io::Result<Self> {
        file.set_len(len.get() as u64)?;
        let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: A new mapping, where the kernel chooses. The file cannot be made shorter.
        let start = unsafe { mmap(None, len, protection, MapFlags::MAP_SHARED, file, 0)? };
        Ok(Self { start: start.cast(), len })
    }

    /// The start of a range of bytes.
    ///
    /// # Panics
    /// If the range is not in the memory.
    fn at(&self, range: Range<usize>) -> NonNull<u8> {
        assert!(range.start <= range.end && range.end <= self.len.get(), "{range:?}");
        // SAFETY: It is within the mapping, as just checked.
        unsafe { self.start.add(range.start) }
    }

    /// What is at the start of the memory.
    pub fn head<T: Shared>(&self) -> &T {
        let start = self.at(0..size_of::<T>()).cast::<T>();
        assert!(start.is_aligned());
        // SAFETY: The bytes are mapped as long as `self` lives, aligned, zero at first, which is a
        // value of such a type, and only changed through its atomic fields.
        unsafe { start.as_ref() }
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: The mapping that `map` has made. All references to it borrow this value, or hold
        // an `Arc` of it.
        let unmapped = unsafe { munmap(self.start.cast(), self.len.get()) };
        debug_assert_eq!(unmapped, Ok(()));
    }
}

/// A type that several processes use at once.
///
/// # Safety
/// All its fields are atomic, and all of them zero is a value.
pub(crate) unsafe trait Shared {}

/// Elements in shared memory.
#[derive(Debug)]
pub(crate) struct Part<T> {
    memory: Arc<SharedMemory>,
    start: usize,
    len: usize,
    elements: PhantomData<T>,
}

impl<T: Element> Part<T> {
    /// `len` elements from a byte on.
    ///
    /// # Safety
    /// While a reference to the elements exists, no process or thread writes them, and if it is
    /// mutable, none reads them.
    ///
    /// # Panics
    /// If they are not in the memory or not aligned, or for `bool`, whose bytes may not be
    /// anything.
    pub unsafe fn new(memory: &Arc<SharedMemory>, start: usize, len: usize) -> Self {
        assert!(T::DTYPE != Dtype::Bool);
        let at = memory.at(start..start + len * size_of::<T>());
        assert!(at.cast::<T>().is_aligned());
        Self { memory: Arc::clone(memory), start, len, elements: PhantomData }
    }

    fn pointer(&self) -> NonNull<T> {
        self.memory.at(self.start..self.start + self.len * size_of::<T>()).cast()
    }
}

impl<T: Element> Deref for Part<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: Mapped, aligned, any bytes are a value of such a type (`Element` is sealed, and
        // `new` excludes `bool`), and nobody writes them, as the caller of `new` has promised.
        unsafe { std::slice::from_raw_parts(self.pointer().as_ptr(), self.len) }
    }
}

impl<T: Element> DerefMut for Part<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: As above, and nobody reads them.
        unsafe { std::slice::from_raw_parts_mut(self.pointer().as_ptr(), self.len) }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn two_mappings_have_the_same_bytes() {
        let own = File::from(create().unwrap());
        let other = open(std::process::id(), own.as_raw_fd() as u32).unwrap();
        let len = NonZeroUsize::new(10_000).unwrap();
        let [a, b] = [&own, &other].map(|f| Arc::new(SharedMemory::map(f, len).unwrap()));
        // SAFETY: One thread, and no two references at a time.
        let (mut a, b) = unsafe { (Part::<f32>::new(&a, 4096, 3), Part::<f32>::new(&b, 4096, 3)) };
        assert_eq!(*b, [0.0; 3]);
        a.copy_from_slice(&[1.0, 2.0, 3.0]);
        assert_eq!(*b, [1.0, 2.0, 3.0]);
        assert!(open(std::process::id(), 999_999).is_err());
        assert!(own.set_len(1).is_err(), "the mappings would lose their memory");
        let foreign = tempfile::tempfile().unwrap();
        assert!(open(std::process::id(), foreign.as_raw_fd() as u32).is_err());
    }

    #[test]
    #[should_panic(expected = "9998")]
    fn a_part_is_in_the_memory() {
        let file = File::from(create().unwrap());
        let memory = SharedMemory::map(&file, NonZeroUsize::new(10_000).unwrap()).unwrap();
        // SAFETY: It panics.
        let _ = unsafe { Part::<u16>::new(&Arc::new(memory), 9998, 2) };
    }
}
