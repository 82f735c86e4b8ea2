//! Ctrl-C ends the demo in order: the daemon must take its programs and maps along.

use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Result, bail};
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};

static CAUGHT: AtomicBool = AtomicBool::new(false);

extern "C" fn note(_: i32) {
    CAUGHT.store(true, Ordering::Relaxed);
}

/// Catches SIGINT and SIGTERM from now on: once, so that a second one ends a demo that hangs.
pub fn catch() -> Result<()> {
    let action = SigAction::new(SigHandler::Handler(note), SaFlags::SA_RESETHAND, SigSet::empty());
    for signal in [Signal::SIGINT, Signal::SIGTERM] {
        // SAFETY: the handler stores to an atomic and does nothing else.
        unsafe { sigaction(signal, &action)? };
    }
    Ok(())
}

/// An error once a signal has come.
pub fn check() -> Result<()> {
    if CAUGHT.load(Ordering::Relaxed) {
        bail!("interrupted");
    }
    Ok(())
}
