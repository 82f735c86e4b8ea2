//! The status of functions, and the text of the last error.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

use netsum_worker::Error;

/// The result of a function. netsum_error_text() has details.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[expect(non_camel_case_types, reason = "C's name")]
pub enum netsum_status {
    /// Success.
    NETSUM_OK = 0,
    /// An argument is not valid. The communicator can still be used, if all ranks get this for the
    /// same call.
    NETSUM_ERROR_ARGUMENT = 1,
    /// A setting is missing or wrong, or contradicts the job's.
    NETSUM_ERROR_CONFIG = 2,
    /// The controller could not be reached, it refused, or ranks are missing.
    NETSUM_ERROR_CONTROLLER = 3,
    /// A rank did not answer when the connections were opened: netsum_error_rank().
    NETSUM_ERROR_UNREACHABLE = 4,
    /// A rank has died: netsum_error_rank().
    NETSUM_ERROR_RANK_DIED = 5,
    /// A rank has left the job, but is needed: netsum_error_rank().
    NETSUM_ERROR_RANK_LEFT = 6,
    /// The ranks called for different operations.
    NETSUM_ERROR_MISMATCH = 7,
    /// One of over 4,096 floats is an infinity or a NaN at some rank. The communicator can still be
    /// used.
    NETSUM_ERROR_NON_FINITE = 8,
    /// The communicator was finalized before the operation was complete.
    NETSUM_ERROR_CLOSED = 9,
    /// This process was forked from the one that connected.
    NETSUM_ERROR_FORKED = 10,
    /// A socket or an adapter has failed, or the ranks contradict each other.
    NETSUM_ERROR_FAILED = 11,
    /// The job has failed: a rank gave up, or the job was deleted.
    NETSUM_ERROR_JOB_FAILED = 12,
    /// A defect of the library.
    NETSUM_ERROR_INTERNAL = 13,
}

use netsum_status::*;

thread_local! {
    /// The last error's text, and the rank that it is about. Destructors of other libraries may
    /// call functions after it has been destroyed.
    static LAST: RefCell<(CString, i32)> = RefCell::new((CString::default(), -1));
}

/// The text of this thread's last error: what is wrong, and what to do. It is valid until the
/// thread's next error.
#[unsafe(no_mangle)]
pub extern "C" fn netsum_error_text() -> *const c_char {
    versioned!("netsum_error_text");
    LAST.try_with(|last| last.borrow().0.as_ptr()).unwrap_or(c"".as_ptr())
}

/// The rank that this thread's last error is about, or -1.
#[unsafe(no_mangle)]
pub extern "C" fn netsum_error_rank() -> i32 {
    versioned!("netsum_error_rank");
    LAST.try_with(|last| last.borrow().1).unwrap_or(-1)
}

/// Runs a function of the interface: stores its error, and lets no panic into C.
pub fn status(call: impl FnOnce() -> Result<(), Error>) -> netsum_status {
    let (status, text, rank) = match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(())) => return NETSUM_OK,
        Ok(Err(error)) => {
            let (status, rank) = kind(&error);
            (status, error.to_string(), rank.map_or(-1, |rank| rank as i32))
        }
        Err(_) => (
            NETSUM_ERROR_INTERNAL,
            "a defect of netsum: standard error has the message".to_owned(),
            -1,
        ),
    };
    let last = (CString::new(text.replace('\0', " ")).unwrap_or_default(), rank);
    // If the thread's data have been destroyed already, the error is not stored.
    let _ = LAST.try_with(|place| place.replace(last));
    status
}

fn kind(error: &Error) -> (netsum_status, Option<u32>) {
    match error {
        Error::Argument(_) | Error::InFlight(_) | Error::MessageSize { .. } => {
            (NETSUM_ERROR_ARGUMENT, None)
        }
        Error::Config(_) => (NETSUM_ERROR_CONFIG, None),
        Error::Controller { .. } => (NETSUM_ERROR_CONTROLLER, None),
        Error::Unreachable { rank, .. } => (NETSUM_ERROR_UNREACHABLE, Some(*rank)),
        Error::RankDied { rank, .. } => (NETSUM_ERROR_RANK_DIED, Some(*rank)),
        Error::RankLeft { rank } => (NETSUM_ERROR_RANK_LEFT, Some(*rank)),
        Error::Mismatch(_) => (NETSUM_ERROR_MISMATCH, None),
        Error::NonFinite { .. } | Error::NonFiniteTensors { .. } => (NETSUM_ERROR_NON_FINITE, None),
        Error::JobFailed { .. } => (NETSUM_ERROR_JOB_FAILED, None),
        Error::Closed => (NETSUM_ERROR_CLOSED, None),
        Error::Forked => (NETSUM_ERROR_FORKED, None),
        _ => (NETSUM_ERROR_FAILED, None),
    }
}

/// Sets a pointer to NULL, which is set again on success.
///
/// # Safety
/// `place` is null, or points to room for a pointer.
pub unsafe fn clear<T>(place: *mut *mut T) {
    if !place.is_null() {
        // SAFETY: the caller's promise.
        unsafe { place.write(std::ptr::null_mut()) };
    }
}

/// The error for a pointer that must not be null.
pub fn null(name: &str) -> Error {
    Error::Argument(format!("{name} is NULL"))
}

/// A text of the caller.
///
/// # Safety
/// `text` is null, or ends with a null byte.
pub unsafe fn text<'a>(name: &str, text: *const c_char) -> Result<&'a str, Error> {
    if text.is_null() {
        return Err(null(name));
    }
    // SAFETY: the caller's promise.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map_err(|_| Error::Argument(format!("{name} is not UTF-8")))
}
