//! Lanes in which programs run side by side.

use std::collections::VecDeque;
use std::process::Command;
use std::sync::Mutex;

/// Programs that wait for a lane, in the order in which they start.
pub struct Queue<T>(Mutex<VecDeque<T>>);

impl<T> Queue<T> {
    pub fn new(programs: impl IntoIterator<Item = T>) -> Self {
        Self(Mutex::new(programs.into_iter().collect()))
    }

    /// Runs programs one by one until none is left.
    pub fn lane(&self, run: impl Fn(&T)) {
        let next = || self.0.lock().expect("nobody panics here").pop_front();
        std::iter::from_fn(next).for_each(|program| run(&program));
    }
}

/// Lets other threads go first: this one and the programs that it starts get the time that those
/// leave. Where it fails, it only takes longer.
pub fn give_way() {
    let thread = nix::unistd::gettid().to_string();
    let _ = Command::new("renice").args(["-n", "10", "-p", &thread]).output();
}
