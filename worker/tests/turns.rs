//! The hand-over between the application's threads and the keeper, in every interleaving (loom).

use std::sync::atomic::{AtomicUsize, Ordering};

mod sync {
    pub use loom::sync::{Condvar, Mutex, MutexGuard};
    pub use std::sync::PoisonError;
}

#[path = "../src/comm/turns.rs"]
mod turns;

use loom::sync::Arc;
use turns::Turns;

/// What all threads write: who has the core, and what has happened to it.
#[derive(Default)]
struct Core {
    calls: u32,
    ended: bool,
}

#[test]
fn the_core_goes_from_hand_to_hand_and_the_keeper_ends() {
    static KEPT: AtomicUsize = AtomicUsize::new(0);
    loom::model(|| {
        let turns = Arc::new(Turns::new(Core::default()));
        let theirs = Arc::clone(&turns);
        let keeper = loom::thread::spawn(move || {
            // A few steps; then it would wait at the socket, which brings nothing new.
            for _ in 0..2 {
                let Some(core) = theirs.keep(loom::thread::yield_now) else { return };
                assert!(!core.ended, "the keeper drives what has ended");
                KEPT.fetch_add(1, Ordering::Relaxed);
            }
        });
        let mut core = turns.take();
        core.calls += 1;
        assert!(!turns.is_wanted(), "the keeper waits without a word");
        drop(core);
        assert_eq!(turns.take().calls, 1);
        let mut core = turns.end();
        core.ended = true;
        drop(core);
        assert!(turns.try_take().is_none());
        // No deadlock in any interleaving: loom finds those.
        keeper.join().unwrap();
    });
    assert!(KEPT.load(Ordering::Relaxed) > 0, "the keeper never had a turn");
}

#[test]
fn one_who_waits_for_a_handle_makes_room_for_other_callers_and_for_the_end() {
    static DRIVEN: AtomicUsize = AtomicUsize::new(0);
    static REFUSED: AtomicUsize = AtomicUsize::new(0);
    loom::model(|| {
        let turns = Arc::new(Turns::new(Core::default()));
        let theirs = Arc::clone(&turns);
        // As `Pending::wait`.
        let waits = loom::thread::spawn(move || match theirs.try_take() {
            Some(mut core) => {
                // Who ends it waits for this one.
                assert!(!core.ended, "somebody drives what has ended");
                core.calls += 1;
                DRIVEN.fetch_add(1, Ordering::Relaxed);
            }
            None => {
                REFUSED.fetch_add(1, Ordering::Relaxed);
            }
        });
        // As `Communicator::all_reduce`, and as its drop.
        turns.take().calls += 1;
        let mut core = turns.end();
        core.ended = true;
        drop(core);
        assert!(turns.is_over());
        waits.join().unwrap();
    });
    assert!(DRIVEN.load(Ordering::Relaxed) > 0 && REFUSED.load(Ordering::Relaxed) > 0);
}

#[test]
fn a_waiter_that_sleeps_holds_nobody_up() {
    static STARTED: AtomicUsize = AtomicUsize::new(0);
    loom::model(|| {
        let turns = Arc::new(Turns::new(Core::default()));
        let theirs = Arc::clone(&turns);
        // As `Pending::wait`, until somebody wants the turn.
        let waits = loom::thread::spawn(move || {
            let Some(mut core) = theirs.try_take() else { return };
            let before = core.calls;
            core = core.asleep(loom::thread::yield_now);
            // The other one has started meanwhile, and not waited for this thread's end.
            STARTED.fetch_add((core.calls - before) as usize, Ordering::Relaxed);
        });
        turns.take().calls += 1;
        // Blocks for ever, which loom finds, if the keeper is not told when both are done.
        assert!(turns.keep(loom::thread::yield_now).is_some());
        waits.join().unwrap();
        assert_eq!(turns.take().calls, 1);
    });
    assert!(STARTED.load(Ordering::Relaxed) > 0, "nobody started while the other slept");
}

#[test]
fn the_keeper_has_its_turn_again_after_two_callers() {
    loom::model(|| {
        let turns = Arc::new(Turns::new(Core::default()));
        let theirs = Arc::clone(&turns);
        let other = loom::thread::spawn(move || theirs.take().calls += 1);
        turns.take().calls += 1;
        // Blocks for ever, which loom finds, if a caller's end is not told.
        assert!(turns.keep(loom::thread::yield_now).is_some());
        other.join().unwrap();
        assert_eq!(turns.take().calls, 2);
    });
}
