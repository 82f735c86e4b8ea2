//! Handles Ctrl-C: the demo ends in order, as the daemon must remove its programs and maps.

use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Result, bail};
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};

static CAUGHT: AtomicBool = AtomicBool::new(false);

extern "C" fn note(_: i32) {
    CAUGHT.store(true, Ordering::Relaxed);
}

/// Catches the first SIGINT or SIGTERM; a second one ends the demo at once.
pub fn catch() -> Result<()> {
    let action = SigAction::new(SigHandler::Handler(note), SaFlags::SA_RESETHAND, SigSet::empty());
    for signal in [Signal::SIGINT, Signal::SIGTERM] {
        // SAFETY: the handler stores to an atomic and does nothing else.
        unsafe { sigaction(signal, &action)? };
    }
    Ok(())
}

/// An error after a signal.
pub fn check() -> Result<()> {
    if CAUGHT.load(Ordering::Relaxed) {
        bail!("interrupted");
    }
    Ok(())
}
