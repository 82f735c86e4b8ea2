//! Who drives: the application's thread while it is in a call, the keeper between calls.
//!
//! Written over `super::sync`, so that a test can try every interleaving of it with loom's locks (`tests/turns.rs`).

use super::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Whose turn it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Turn {
    Keeper,
    Caller,
    /// The keeper ends.
    Nobody,
}

/// What both drive.
///
/// The turn is changed under its own lock, never while waiting for the core; whoever has the core may look at the turn.
pub struct Turns<C> {
    core: Mutex<C>,
    turn: Mutex<Turn>,
    changed: Condvar,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<C> Turns<C> {
    /// It is the keeper's turn.
    pub fn new(core: C) -> Self {
        Self { core: Mutex::new(core), turn: Mutex::new(Turn::Keeper), changed: Condvar::new() }
    }

    /// For a look, whoever's turn it is.
    pub fn core(&self) -> MutexGuard<'_, C> {
        lock(&self.core)
    }

    /// The caller drives from now on. The keeper lets go after the step that it is in.
    pub fn take(&self) -> MutexGuard<'_, C> {
        *lock(&self.turn) = Turn::Caller;
        lock(&self.core)
    }

    /// The keeper drives from now on, as soon as the caller has dropped the core.
    pub fn give(&self) {
        *lock(&self.turn) = Turn::Keeper;
        self.changed.notify_all();
    }

    /// The keeper ends; the caller drives.
    pub fn end(&self) -> MutexGuard<'_, C> {
        *lock(&self.turn) = Turn::Nobody;
        self.changed.notify_all();
        lock(&self.core)
    }

    /// The keeper waits for its turn. `None` when it is to end.
    pub fn keep(&self) -> Option<MutexGuard<'_, C>> {
        loop {
            {
                let mut turn = lock(&self.turn);
                while *turn == Turn::Caller {
                    turn = self.changed.wait(turn).unwrap_or_else(PoisonError::into_inner);
                }
                if *turn == Turn::Nobody {
                    return None;
                }
            }
            let core = lock(&self.core);
            if *lock(&self.turn) == Turn::Keeper {
                return Some(core);
            }
        }
    }
}
