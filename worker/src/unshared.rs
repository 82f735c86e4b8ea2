//! Descriptors that are closed in forked processes: a copy of a socket there would keep its port in
//! use after this process has closed it.

use std::ops::Deref;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Once;
use std::sync::atomic::{AtomicI32, Ordering};

/// Descriptors to be closed, plus one: 0 is a free place. If there is no free place, a descriptor
/// stays shared.
static OPEN: [AtomicI32; 256] = [const { AtomicI32::new(0) }; 256];

/// A descriptor that is closed in processes that are forked from this one. They neither use nor
/// drop it.
#[derive(Debug)]
pub(crate) struct Unshared<T> {
    // Dropped after the place is free: by then the number may be another descriptor's.
    inner: T,
    place: Option<usize>,
}

impl<T: AsFd> Unshared<T> {
    pub fn new(inner: T) -> Self {
        static HANDLER: Once = Once::new();
        // SAFETY: the function does only what signal handlers may do, as the fork of a process with
        // threads requires.
        HANDLER.call_once(|| match unsafe { libc::pthread_atfork(None, None, Some(close_all)) } {
            0 => {}
            error => {
                log::warn!("pthread_atfork: error {error}: forked processes keep UDP ports in use")
            }
        });
        let fd = inner.as_fd().as_raw_fd() + 1;
        let take = |place: &AtomicI32| {
            place.compare_exchange(0, fd, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        };
        let place = OPEN.iter().position(take);
        Self { inner, place }
    }
}

/// Called in the forked process.
extern "C" fn close_all() {
    for place in &OPEN {
        let fd = place.swap(0, Ordering::Relaxed);
        if fd > 0 {
            // SAFETY: nothing uses it here: the threads that did do not exist in this process, and
            // a forked communicator does nothing.
            unsafe { libc::close(fd - 1) };
        }
    }
}

impl<T> Deref for Unshared<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.inner
    }
}

impl<T: AsFd> AsFd for Unshared<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.as_fd()
    }
}

impl<T> Drop for Unshared<T> {
    fn drop(&mut self) {
        if let Some(place) = self.place {
            OPEN[place].store(0, Ordering::Relaxed);
        }
    }
}
