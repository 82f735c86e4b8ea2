//! The driver lock: the application's threads drive while they are in a call, the progress thread
//! drives between calls.
//!
//! Written over `super::sync`, which lets a test try every interleaving with loom's locks
//! (`tests/driver_lock.rs`).

use std::ops::{Deref, DerefMut};

use super::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Callers drive while there are any, else the progress thread; nobody drives after the end.
#[derive(Clone, Copy, Default, Debug)]
struct State {
    /// Threads that drive, or wait until another one releases the lock.
    callers: usize,
    /// The progress thread returns, and the caller of [`DriverLock::end`] is the last to drive.
    ended: bool,
}

/// The lock of what callers and progress thread drive.
///
/// The state is changed under its own lock, never while waiting for the core. The thread that has
/// the core may read the state.
pub struct DriverLock<C> {
    core: Mutex<C>,
    state: Mutex<State>,
    changed: Condvar,
}

/// A caller's hold of the lock. When dropped, the next caller drives, or the progress thread.
pub struct DriverGuard<'a, C> {
    // Dropped in this order: the progress thread does not wake up to wait for the core.
    core: MutexGuard<'a, C>,
    _caller: Caller<'a, C>,
}

struct Caller<'a, C>(&'a DriverLock<C>);

pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<C> DriverLock<C> {
    /// The progress thread drives first.
    pub fn new(core: C) -> Self {
        Self { core: Mutex::new(core), state: Mutex::default(), changed: Condvar::new() }
    }

    /// Takes the lock for a caller. The progress thread releases it after its current step, another
    /// caller when it is done or finds the lock [contended](Self::is_contended).
    pub fn lock(&self) -> DriverGuard<'_, C> {
        lock(&self.state).callers += 1;
        let caller = Caller(self);
        DriverGuard { core: lock(&self.core), _caller: caller }
    }

    /// Takes the lock for a caller, unless another caller has it or the end has come.
    pub fn try_lock(&self) -> Option<DriverGuard<'_, C>> {
        {
            let mut state = lock(&self.state);
            if state.callers > 0 || state.ended {
                return None;
            }
            state.callers += 1;
        }
        let caller = Caller(self);
        let guard = DriverGuard { core: lock(&self.core), _caller: caller };
        // The state's lock is released before the guard is dropped, which changes the state.
        let ended = lock(&self.state).ended;
        (!ended).then_some(guard)
    }

    /// Whether another caller waits for the lock that a caller has.
    pub fn is_contended(&self) -> bool {
        let state = lock(&self.state);
        state.callers > 1 || state.ended
    }

    /// Whether [`end`](Self::end) has been called.
    pub fn has_ended(&self) -> bool {
        lock(&self.state).ended
    }

    /// Ends the progress thread, and takes the lock for the last time, after earlier callers.
    pub fn end(&self) -> MutexGuard<'_, C> {
        lock(&self.state).ended = true;
        self.changed.notify_all();
        lock(&self.core)
    }

    /// Takes the lock for the progress thread, once no caller has it; `None` when the thread is to
    /// return. `pause` is called when callers have just released the lock: those that call again at
    /// once need no progress thread, which would take the processor from them.
    pub fn lock_between_calls(&self, pause: impl Fn()) -> Option<MutexGuard<'_, C>> {
        loop {
            let mut waited = false;
            {
                let mut state = lock(&self.state);
                while state.callers > 0 && !state.ended {
                    state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                    waited = true;
                }
                if state.ended {
                    return None;
                }
            }
            if waited {
                pause();
                let state = *lock(&self.state);
                if state.callers > 0 || state.ended {
                    continue;
                }
            }
            let core = lock(&self.core);
            let state = *lock(&self.state);
            if state.callers == 0 && !state.ended {
                return Some(core);
            }
        }
    }
}

impl<C> DriverGuard<'_, C> {
    /// Sleeps while other callers may take the lock. The progress thread stays asleep.
    pub fn unlocked_while(self, sleep: impl FnOnce()) -> Self {
        let Self { core, _caller: caller } = self;
        drop(core);
        sleep();
        Self { core: lock(&caller.0.core), _caller: caller }
    }
}

impl<C> Drop for Caller<'_, C> {
    fn drop(&mut self) {
        let mut state = lock(&self.0.state);
        state.callers -= 1;
        if state.callers == 0 {
            self.0.changed.notify_all();
        }
    }
}

impl<C> Deref for DriverGuard<'_, C> {
    type Target = C;

    fn deref(&self) -> &C {
        &self.core
    }
}

impl<C> DerefMut for DriverGuard<'_, C> {
    fn deref_mut(&mut self) -> &mut C {
        &mut self.core
    }
}
