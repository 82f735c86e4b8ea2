//! On which CPU a thread runs: which one a test-run program runs on, and what it takes for its own.

use anyhow::{Context, Result};
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

/// The calling thread runs on one CPU, until this is dropped, by the same thread.
#[derive(Debug)]
pub struct Pinned {
    before: CpuSet,
}

impl Pinned {
    /// # Errors
    /// If there is no such CPU, or the process may not use it.
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
        // Some CPU of those is still there: the thread runs.
        let _ = sched_setaffinity(Pid::from_raw(0), &self.before);
    }
}
