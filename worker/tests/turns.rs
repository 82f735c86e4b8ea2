//! The hand-over between the application's thread and the keeper, in every interleaving (loom).

use std::sync::atomic::{AtomicUsize, Ordering};

mod sync {
    pub use loom::sync::{Condvar, Mutex, MutexGuard};
    pub use std::sync::PoisonError;
}

#[path = "../src/comm/turns.rs"]
mod turns;

use loom::sync::Arc;
use turns::Turns;

/// What both threads write: who has the core, and what has happened to it.
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
                let Some(core) = theirs.keep() else { return };
                assert!(!core.ended, "the keeper drives what has ended");
                KEPT.fetch_add(1, Ordering::Relaxed);
            }
        });
        let mut core = turns.take();
        core.calls += 1;
        // As in a call: the turn is given while the core is still held.
        turns.give();
        drop(core);
        assert_eq!(turns.core().calls, 1);
        let mut core = turns.end();
        core.ended = true;
        drop(core);
        // No deadlock in any interleaving: loom finds those.
        keeper.join().unwrap();
    });
    assert!(KEPT.load(Ordering::Relaxed) > 0, "the keeper never had a turn");
}
