//! Operations in flight.

use std::time::Duration;

use netsum_worker::{Mode, Owned, Pending, Report};

use crate::status::{netsum_status, null, status};

/// An operation in flight. It must be given to netsum_wait() once; until that, or
/// netsum_finalize(), has returned, its memory belongs to the operation: another one that would
/// write it, or use what it writes, is NETSUM_ERROR_ARGUMENT. Several threads may test it.
#[expect(non_camel_case_types, reason = "C's name")]
pub struct netsum_work(pub(crate) Pending<Owned>);

/// Seconds that one call waits at the most.
const LONGEST: f64 = 86_400.0;

/// Who sums.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[expect(non_camel_case_types, reason = "C's name")]
pub enum netsum_mode {
    /// The box.
    NETSUM_BOX = 0,
    /// The ranks themselves, by an ordinary ring.
    NETSUM_RING = 1,
}

impl From<Mode> for netsum_mode {
    fn from(mode: Mode) -> Self {
        match mode {
            Mode::Box => Self::NETSUM_BOX,
            Mode::Ring => Self::NETSUM_RING,
        }
    }
}

/// What an operation came to.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct netsum_report {
    /// Who did the sum; NETSUM_RING if the ranks did any part of it.
    mode: netsum_mode,
    /// Seconds since the call.
    elapsed: f64,
    /// Sums of messages that were checked.
    verified: u64,
    /// Floats of this rank that were not zero and counted as 0, as they are so small beside the
    /// largest of their message.
    underflows: u64,
}

impl From<Report> for netsum_report {
    fn from(report: Report) -> Self {
        let (mode, elapsed) = (report.mode.into(), report.elapsed.as_secs_f64());
        Self { mode, elapsed, verified: report.verified, underflows: report.underflow.zeroed }
    }
}

/// Puts into `done` whether netsum_wait() would return at once. Never blocks.
///
/// # Safety
/// `work` comes from an operation, and `done` points to room.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netsum_test(work: *const netsum_work, done: *mut bool) -> netsum_status {
    versioned!("netsum_test");
    // SAFETY: the caller's promise.
    unsafe { netsum_wait_for(work, 0.0, done) }
}

/// Waits for so many seconds at the most, and no longer than a day, and puts into `done` whether
/// netsum_wait() would return at once.
///
/// # Safety
/// `work` comes from an operation, and `done` points to room.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netsum_wait_for(
    work: *const netsum_work,
    seconds: f64,
    done: *mut bool,
) -> netsum_status {
    versioned!("netsum_wait_for");
    status(|| {
        // SAFETY: the caller's promise.
        let work = unsafe { work.as_ref() }.ok_or_else(|| null("work"))?;
        if done.is_null() {
            return Err(null("done"));
        }
        // What is no number is no time.
        let seconds = if seconds > 0.0 { seconds.min(LONGEST) } else { 0.0 };
        let is_done = work.0.wait_for(Duration::from_secs_f64(seconds));
        // SAFETY: the caller's promise.
        unsafe { done.write(is_done) };
        Ok(())
    })
}

/// Waits for an operation, frees its handle, and says what it came to: in `report`, unless that is
/// NULL. The memory belongs to the caller again, whatever is returned.
///
/// # Safety
/// `work` comes from an operation, and is not used any more; `report` is NULL or points to room.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netsum_wait(
    work: *mut netsum_work,
    report: *mut netsum_report,
) -> netsum_status {
    versioned!("netsum_wait");
    status(|| {
        if work.is_null() {
            return Err(null("work"));
        }
        // SAFETY: the caller's promise.
        let work = unsafe { Box::from_raw(work) };
        let (_, made) = work.0.wait()?;
        if !report.is_null() {
            // SAFETY: the caller's promise.
            unsafe { report.write(made.into()) };
        }
        Ok(())
    })
}
