//! Pins threads to a CPU: a test run executes a program there, and the program sees that CPU as its
//! own.

use anyhow::{Context, Result};
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

/// Keeps the calling thread on one CPU until the same thread drops this.
#[derive(Debug)]
pub struct Pinned {
    before: CpuSet,
}

impl Pinned {
    /// # Errors
    /// If the CPU does not exist, or the process may not use it.
    pub fn to(cpu: u32) -> Result<Self> {
        let this = Pid::from_raw(0);
        let before = sched_getaffinity(this).context("the thread's CPUs")?;
        let mut only = CpuSet::new();
        only.set(cpu as usize)
            .and_then(|()| sched_setaffinity(this, &only))
            .with_context(|| format!("to run on CPU {cpu}"))?;
        Ok(Self { before })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // If this fails, some CPU of the old set is still online, and the thread runs.
        let _ = sched_setaffinity(Pid::from_raw(0), &self.before);
    }
}
