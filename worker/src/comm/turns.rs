//! Who drives: the application's threads while they are in a call, the keeper between calls.
//!
//! Written over `super::sync`, so that a test can try every interleaving of it with loom's locks
//! (`tests/turns.rs`).

use std::ops::{Deref, DerefMut};

use super::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Whose turn it is: the callers' while there are any, else the keeper's; nobody's when it is over.
#[derive(Clone, Copy, Default, Debug)]
struct State {
    /// Threads that drive, or wait until another one lets them.
    callers: usize,
    /// The keeper ends, and who has called it over is the last to drive.
    over: bool,
}

/// What all of them drive.
///
/// The state is changed under its own lock, never while waiting for the core; whoever has the core
/// may look at the state.
pub struct Turns<C> {
    core: Mutex<C>,
    state: Mutex<State>,
    changed: Condvar,
}

/// A caller's turn. Dropped, it goes to the next caller, or back to the keeper.
pub struct Turn<'a, C> {
    // Dropped in this order: the keeper does not wake up to wait for the core.
    core: MutexGuard<'a, C>,
    _caller: Caller<'a, C>,
}

struct Caller<'a, C>(&'a Turns<C>);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<C> Turns<C> {
    /// It is the keeper's turn.
    pub fn new(core: C) -> Self {
        Self { core: Mutex::new(core), state: Mutex::default(), changed: Condvar::new() }
    }

    /// The caller drives from now on. The keeper lets go after the step that it is in, another
    /// caller when it is done or finds itself [`wanted`](Self::is_wanted).
    pub fn take(&self) -> Turn<'_, C> {
        lock(&self.state).callers += 1;
        let caller = Caller(self);
        Turn { core: lock(&self.core), _caller: caller }
    }

    /// The caller drives from now on, if no other one does and it is not over.
    pub fn try_take(&self) -> Option<Turn<'_, C>> {
        {
            let mut state = lock(&self.state);
            if state.callers > 0 || state.over {
                return None;
            }
            state.callers += 1;
        }
        let caller = Caller(self);
        let turn = Turn { core: lock(&self.core), _caller: caller };
        // Let go of before the turn is, which changes it.
        let over = lock(&self.state).over;
        (!over).then_some(turn)
    }

    /// Whether somebody else waits for the turn that a caller has.
    pub fn is_wanted(&self) -> bool {
        let state = lock(&self.state);
        state.callers > 1 || state.over
    }

    /// Whether the last one who drives has come, or has been.
    pub fn is_over(&self) -> bool {
        lock(&self.state).over
    }

    /// The keeper ends; the caller drives, once those before it have let go.
    pub fn end(&self) -> MutexGuard<'_, C> {
        lock(&self.state).over = true;
        self.changed.notify_all();
        lock(&self.core)
    }

    /// The keeper waits for its turn. `None` when it is to end. `pause` is called when callers have
    /// just let go: those that will be back at once need no keeper, and it takes the processor from
    /// them.
    pub fn keep(&self, pause: impl Fn()) -> Option<MutexGuard<'_, C>> {
        loop {
            let mut waited = false;
            {
                let mut state = lock(&self.state);
                while state.callers > 0 && !state.over {
                    state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                    waited = true;
                }
                if state.over {
                    return None;
                }
            }
            if waited {
                pause();
                let state = *lock(&self.state);
                if state.callers > 0 || state.over {
                    continue;
                }
            }
            let core = lock(&self.core);
            let state = *lock(&self.state);
            if state.callers == 0 && !state.over {
                return Some(core);
            }
        }
    }
}

impl<C> Turn<'_, C> {
    /// Sleeps while other callers may have the core. It stays the callers': the keeper is not
    /// woken.
    pub fn asleep(self, sleep: impl FnOnce()) -> Self {
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

impl<C> Deref for Turn<'_, C> {
    type Target = C;

    fn deref(&self) -> &C {
        &self.core
    }
}

impl<C> DerefMut for Turn<'_, C> {
    fn deref_mut(&mut self) -> &mut C {
        &mut self.core
    }
}
