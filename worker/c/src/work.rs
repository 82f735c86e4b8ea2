//! Operations in flight.

use std::time::Duration;

use netsum_worker::{Mode, Owned, Pending, Report};

use crate::status::{netsum_status, null, status};

/// An operation in flight. It must be passed to netsum_wait() once. Its memory belongs to the
/// operation until that, or netsum_finalize(), has returned: another operation that would write it,
/// or use what it writes, gets NETSUM_ERROR_ARGUMENT. Several threads may test it.
#[expect(non_camel_case_types, reason = "C's name")]
pub struct netsum_work(pub(crate) Pending<Owned>);

/// Most seconds that one call waits.
const LONGEST: f64 = 86_400.0;

/// Whether the box or the ring sums.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[expect(non_camel_case_types, reason = "C's name")]
pub enum netsum_mode {
    /// The box.
    NETSUM_BOX = 0,
    /// The hosts' ring.
    NETSUM_HOST_RING = 1,
}

impl From<Mode> for netsum_mode {
    fn from(mode: Mode) -> Self {
        match mode {
            Mode::Box => Self::NETSUM_BOX,
            Mode::HostRing => Self::NETSUM_HOST_RING,
        }
    }
}

/// The result of an operation.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct netsum_report {
    /// NETSUM_HOST_RING if the hosts' ring summed any part.
    mode: netsum_mode,
    /// Seconds since the call.
    elapsed: f64,
    /// Sums of messages that were checked with all their data. Over the hosts' ring, a rank counts
    /// only those whose data it gets.
    verified: u64,
    /// This rank's floats that became 0, because their block has far larger ones; not in 16 bits,
    /// where they are kept on the average.
    underflows: u64,
    /// Whether the ranks of each host added their data before they sent it.
    hierarchical: bool,
}

impl From<Report> for netsum_report {
    fn from(report: Report) -> Self {
        let (mode, elapsed) = (report.mode.into(), report.elapsed.as_secs_f64());
        let Report { verified, hierarchical, .. } = report;
        Self { mode, elapsed, verified, underflows: report.underflow.zeroed, hierarchical }
    }
}

/// Sets `done` to whether netsum_wait() would return at once. Never blocks.
///
/// # Safety
/// `work` comes from an operation, and `done` points to room.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netsum_test(work: *const netsum_work, done: *mut bool) -> netsum_status {
    versioned!("netsum_test");
    // SAFETY: the caller's promise.
    unsafe { netsum_wait_for(work, 0.0, done) }
}

/// Waits for at most `seconds`, and no longer than a day, and sets `done` to whether
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
        // A NaN counts as 0 seconds.
        let seconds = if seconds > 0.0 { seconds.min(LONGEST) } else { 0.0 };
        let is_done = work.0.wait_for(Duration::from_secs_f64(seconds));
        // SAFETY: the caller's promise.
        unsafe { done.write(is_done) };
        Ok(())
    })
}

/// Waits for an operation, frees its handle, and writes its result to `report`, unless that is
/// NULL. Afterwards the memory belongs to the caller, whatever is returned.
///
/// # Safety
/// `work` comes from an operation, and is not used afterwards; `report` is NULL or points to room.
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
