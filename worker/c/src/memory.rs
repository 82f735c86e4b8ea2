//! The caller's memory, which the caller does not touch while an operation is in flight.

use std::ops::{Deref, DerefMut};

use netsum_worker::Error;

use crate::status::null;

/// A slice that C owns.
pub struct Memory<T> {
    start: *mut T,
    len: usize,
}

// SAFETY: the memory belongs to the operation, in whatever thread.
unsafe impl<T: Send> Send for Memory<T> {}

impl<T> Memory<T> {
    /// # Safety
    /// There are `len` elements at `start` until the operation is done; they are written if the
    /// result goes there.
    pub unsafe fn new(name: &str, start: *mut T, len: usize) -> Result<Self, Error> {
        if len > 0 && start.is_null() {
            return Err(null(name));
        }
        if !start.is_aligned() {
            return Err(Error::Argument(format!(
                "{name} is not aligned to {} bytes",
                align_of::<T>()
            )));
        }
        if len > isize::MAX as usize / size_of::<T>() {
            return Err(Error::Argument(format!(
                "{name} of {len} elements is more than memory has"
            )));
        }
        Ok(Self { start, len })
    }
}

impl<T> Deref for Memory<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        if self.len == 0 {
            return &[];
        }
        // SAFETY: promised to `new`.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }
}

impl<T> DerefMut for Memory<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        if self.len == 0 {
            return &mut [];
        }
        // SAFETY: promised to `new`.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len) }
    }
}
