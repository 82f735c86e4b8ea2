//! The driver lock between the application's threads and the progress thread, in every interleaving
//! (loom).

use std::sync::atomic::{AtomicUsize, Ordering};

mod sync {
    pub use loom::sync::{Condvar, Mutex, MutexGuard};
    pub use std::sync::PoisonError;
}

#[path = "../src/comm/driver_lock.rs"]
mod driver_lock;

use driver_lock::DriverLock;
use loom::sync::Arc;

/// Written by all threads.
#[derive(Default)]
struct Core {
    calls: u32,
    ended: bool,
}

#[test]
fn the_threads_alternate_and_the_progress_thread_ends() {
    static STEPS: AtomicUsize = AtomicUsize::new(0);
    loom::model(|| {
        let driver = Arc::new(DriverLock::new(Core::default()));
        let theirs = Arc::clone(&driver);
        let progress = loom::thread::spawn(move || {
            // A few steps; then it would wait at the socket, which adds no interleavings.
            for _ in 0..2 {
                let Some(core) = theirs.lock_between_calls(loom::thread::yield_now) else { return };
                assert!(!core.ended, "the progress thread drives after the end");
                STEPS.fetch_add(1, Ordering::Relaxed);
            }
        });
        let mut core = driver.lock();
        core.calls += 1;
        assert!(!driver.is_contended(), "the progress thread counts as a caller");
        drop(core);
        assert_eq!(driver.lock().calls, 1);
        let mut core = driver.end();
        core.ended = true;
        drop(core);
        assert!(driver.try_lock().is_none());
        // Loom finds deadlocks.
        progress.join().unwrap();
    });
    assert!(STEPS.load(Ordering::Relaxed) > 0, "the progress thread never drove");
}

#[test]
fn a_caller_that_waits_yields_to_other_callers_and_to_the_end() {
    static DRIVEN: AtomicUsize = AtomicUsize::new(0);
    static REFUSED: AtomicUsize = AtomicUsize::new(0);
    loom::model(|| {
        let driver = Arc::new(DriverLock::new(Core::default()));
        let theirs = Arc::clone(&driver);
        // As `Pending::wait`.
        let waits = loom::thread::spawn(move || match theirs.try_lock() {
            Some(mut core) => {
                // `end` waits for this caller.
                assert!(!core.ended, "a caller drives after the end");
                core.calls += 1;
                DRIVEN.fetch_add(1, Ordering::Relaxed);
            }
            None => {
                REFUSED.fetch_add(1, Ordering::Relaxed);
            }
        });
        // As `Communicator::all_reduce` and its drop.
        driver.lock().calls += 1;
        let mut core = driver.end();
        core.ended = true;
        drop(core);
        assert!(driver.has_ended());
        waits.join().unwrap();
    });
    assert!(DRIVEN.load(Ordering::Relaxed) > 0 && REFUSED.load(Ordering::Relaxed) > 0);
}

#[test]
fn a_caller_that_sleeps_blocks_no_other() {
    static STARTED: AtomicUsize = AtomicUsize::new(0);
    loom::model(|| {
        let driver = Arc::new(DriverLock::new(Core::default()));
        let theirs = Arc::clone(&driver);
        // As `Pending::wait`, until another caller wants the lock.
        let waits = loom::thread::spawn(move || {
            let Some(mut core) = theirs.try_lock() else { return };
            let before = core.calls;
            core = core.unlocked_while(loom::thread::yield_now);
            // The other caller has started meanwhile, without waiting for this one's end.
            STARTED.fetch_add((core.calls - before) as usize, Ordering::Relaxed);
        });
        driver.lock().calls += 1;
        // Blocks for ever, which loom finds, if the last caller does not notify the progress
        // thread.
        assert!(driver.lock_between_calls(loom::thread::yield_now).is_some());
        waits.join().unwrap();
        assert_eq!(driver.lock().calls, 1);
    });
    assert!(STARTED.load(Ordering::Relaxed) > 0, "no caller started while the other slept");
}

#[test]
fn the_progress_thread_drives_again_after_two_callers() {
    loom::model(|| {
        let driver = Arc::new(DriverLock::new(Core::default()));
        let theirs = Arc::clone(&driver);
        let other = loom::thread::spawn(move || theirs.lock().calls += 1);
        driver.lock().calls += 1;
        // Blocks for ever, which loom finds, if a caller's end does not notify.
        assert!(driver.lock_between_calls(loom::thread::yield_now).is_some());
        other.join().unwrap();
        assert_eq!(driver.lock().calls, 2);
    });
}
