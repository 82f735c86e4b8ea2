//! The communicator and its operations.

use std::convert::Infallible;
use std::ffi::c_void;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use netsum_worker::half::{bf16, f16};
use netsum_worker::{Bool8, CommConfig, Communicator, Element, Error, Op, Owned, Pending, Room};

use crate::config::{netsum_config, settings};
use crate::memory::Memory;
use crate::status::{clear, netsum_status, null, status};
use crate::work::{netsum_mode, netsum_work};

/// How long a call that waits drives by itself: operations that complete in this time wake no other
/// thread.
const FIRST_WAIT: Duration = Duration::from_millis(1);

/// A member of a job. Several threads may use it at once; their calls are serialized. All ranks
/// must call the same operations in the same order, with the same counts, types, roots and
/// operators; otherwise all get NETSUM_ERROR_MISMATCH. If only one rank gets NETSUM_ERROR_ARGUMENT,
/// the others get NETSUM_ERROR_MISMATCH, too.
#[expect(non_camel_case_types, reason = "C's name")]
pub struct netsum_comm {
    inner: Mutex<Communicator>,
    room: Room,
    /// The process that connected. In a forked one a thread that does not exist there may hold a
    /// lock.
    process: u32,
    rank: u32,
    ranks: u32,
}

impl netsum_comm {
    fn is_here(&self) -> bool {
        self.process == std::process::id()
    }

    fn lock(&self) -> MutexGuard<'_, Communicator> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Element types.
#[expect(non_camel_case_types, reason = "C's name")]
pub type netsum_dtype = u32;
/// 32-bit integers. Sums and products of all integers are modulo two to the power of the width.
pub const NETSUM_INT32: netsum_dtype = 1;
/// Single precision floats. Their sums have a scale for each block of 1,024.
pub const NETSUM_FLOAT32: netsum_dtype = 2;
/// Half precision floats. Long sums of them take 16 bits each on the links.
pub const NETSUM_FLOAT16: netsum_dtype = 3;
/// Floats of 16 bits with the exponents of NETSUM_FLOAT32. Their sums are as those of
/// NETSUM_FLOAT16.
pub const NETSUM_BFLOAT16: netsum_dtype = 4;
/// 8-bit integers.
pub const NETSUM_INT8: netsum_dtype = 5;
/// 8-bit integers without a sign.
pub const NETSUM_UINT8: netsum_dtype = 6;
/// 16-bit integers.
pub const NETSUM_INT16: netsum_dtype = 7;
/// 16-bit integers without a sign.
pub const NETSUM_UINT16: netsum_dtype = 8;
/// 32-bit integers without a sign.
pub const NETSUM_UINT32: netsum_dtype = 9;
/// 64-bit integers.
pub const NETSUM_INT64: netsum_dtype = 10;
/// 64-bit integers without a sign.
pub const NETSUM_UINT64: netsum_dtype = 11;
/// Double precision floats. Sums are rounded after each rank.
pub const NETSUM_FLOAT64: netsum_dtype = 12;
/// Bytes that are true unless they are 0. The sum is the or.
pub const NETSUM_BOOL: netsum_dtype = 13;

/// How all ranks' elements are reduced. With N ranks NETSUM_MIN, NETSUM_MAX, NETSUM_PRODUCT and all
/// operations on NETSUM_FLOAT64 send N times the bytes of the elements.
#[expect(non_camel_case_types, reason = "C's name")]
pub type netsum_op = u32;
/// Their sum.
pub const NETSUM_SUM: netsum_op = 0;
/// Their sum divided by the number of ranks; of floats only.
pub const NETSUM_AVERAGE: netsum_op = 1;
/// The smallest. A NaN at any rank is the result, and -0 is less than +0.
pub const NETSUM_MIN: netsum_op = 2;
/// The largest, in the same order.
pub const NETSUM_MAX: netsum_op = 3;
/// Their product; of floats rounded after each rank.
pub const NETSUM_PRODUCT: netsum_op = 4;
/// The bitwise and; of integers and NETSUM_BOOL.
pub const NETSUM_BAND: netsum_op = 5;
/// The bitwise or; of integers and NETSUM_BOOL.
pub const NETSUM_BOR: netsum_op = 6;
/// The bitwise exclusive or; of integers and NETSUM_BOOL.
pub const NETSUM_BXOR: netsum_op = 7;

/// Joins a job, and returns when all ranks have joined. If `config` is NULL, the environment is
/// used. netsum_finalize() leaves the job. If this fails, `*comm` is NULL.
///
/// # Safety
/// `config` is NULL or comes from netsum_config_new(); `comm` points to room for a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netsum_init(
    config: *const netsum_config,
    comm: *mut *mut netsum_comm,
) -> netsum_status {
    versioned!("netsum_init");
    // SAFETY: the caller's promise.
    unsafe { clear(comm) };
    status(|| {
        if comm.is_null() {
            return Err(null("comm"));
        }
        // SAFETY: the caller's promise.
        let config = unsafe { settings(config) }?.config()?;
        // SAFETY: the caller's promise.
        unsafe { comm.write(connected(config)?) };
        Ok(())
    })
}

fn connected(config: CommConfig) -> Result<*mut netsum_comm, Error> {
    let made = Communicator::connect(config)?;
    let (rank, ranks) = (made.rank(), made.ranks());
    Ok(Box::into_raw(Box::new(netsum_comm {
        room: made.room(),
        inner: Mutex::new(made),
        process: std::process::id(),
        rank,
        ranks,
    })))
}

/// Makes a communicator of all ranks of `comm` that pass the same `color`, in the order of their
/// `key`, and of their ranks where keys are equal. All ranks of `comm` must call it. With a
/// negative `color`, or if this fails, `*part` is NULL. netsum_finalize() leaves the group.
///
/// # Safety
/// `comm` comes from netsum_init() or netsum_split(); `part` points to room for a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netsum_split(
    comm: *mut netsum_comm,
    color: i32,
    key: i32,
    part: *mut *mut netsum_comm,
) -> netsum_status {
    versioned!("netsum_split");
    // SAFETY: the caller's promise.
    unsafe { clear(part) };
    status(|| {
        if part.is_null() {
            return Err(null("part"));
        }
        // SAFETY: the caller's promise.
        let comm = unsafe { comm.as_ref() }.ok_or_else(|| null("comm"))?;
        if !comm.is_here() {
            return Err(Error::Forked);
        }
        let color = u32::try_from(color).ok();
        let config = comm.lock().split_config(color, key)?;
        if let Some(config) = config {
            // SAFETY: the caller's promise.
            unsafe { part.write(connected(config)?) };
        }
        Ok(())
    })
}

/// Leaves the job, and frees the communicator; does nothing for NULL. Completes operations in
/// flight if the other ranks call them within two seconds; for others netsum_wait() returns
/// NETSUM_ERROR_CLOSED. Afterwards no operation touches memory.
///
/// # Safety
/// `comm` comes from netsum_init() or netsum_split(), and no thread uses it afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netsum_finalize(comm: *mut netsum_comm) {
    versioned!("netsum_finalize");
    if !comm.is_null() {
        // SAFETY: the caller's promise.
        let comm = unsafe { Box::from_raw(comm) };
        // Standard error already has the message of a panic.
        status(|| {
            drop(comm);
            Ok(())
        });
    }
}

/// This rank, from 0.
///
/// # Safety
/// `comm` comes from netsum_init() or netsum_split().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netsum_rank(comm: *const netsum_comm) -> u32 {
    versioned!("netsum_rank");
    // SAFETY: the caller's promise.
    unsafe { comm.as_ref() }.map_or(0, |comm| comm.rank)
}

/// Ranks of the job.
///
/// # Safety
/// `comm` comes from netsum_init() or netsum_split().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netsum_ranks(comm: *const netsum_comm) -> u32 {
    versioned!("netsum_ranks");
    // SAFETY: the caller's promise.
    unsafe { comm.as_ref() }.map_or(0, |comm| comm.ranks)
}

/// Whether the box sums, or the hosts' ring after a fallback.
///
/// # Safety
/// `comm` comes from netsum_init() or netsum_split().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netsum_get_mode(comm: *const netsum_comm) -> netsum_mode {
    versioned!("netsum_get_mode");
    // SAFETY: the caller's promise.
    let comm = unsafe { comm.as_ref() }.filter(|comm| comm.is_here());
    comm.map_or(netsum_mode::NETSUM_HOST_RING, |comm| comm.lock().mode().into())
}

/// Starts an operation with the caller's data, if it is valid; waits while too many are in flight.
///
/// # Safety
/// `comm` is null, or comes from [`netsum_init`]; `work` is null, or points to room.
unsafe fn run<G, B>(
    comm: *const netsum_comm,
    work: *mut *mut netsum_work,
    given: impl FnOnce(&netsum_comm) -> Result<G, Error>,
    start: impl FnOnce(&mut Communicator, G) -> Result<Pending<B>, Error>,
) -> netsum_status {
    // SAFETY: the caller's promise.
    unsafe { clear(work) };
    status(|| {
        // SAFETY: the caller's promise.
        let comm = unsafe { comm.as_ref() }.ok_or_else(|| null("comm"))?;
        if !comm.is_here() {
            return Err(Error::Forked);
        }
        let given = given(comm).inspect_err(|_| comm.lock().refuse())?;
        let pending = {
            let mut inner = comm.lock();
            // Without the lock, which others may want; the place stays this call's.
            while !comm.room.wait_for(Duration::ZERO) {
                drop(inner);
                comm.room.wait_for(Duration::from_secs(1));
                inner = comm.lock();
            }
            inner.wait_first(if work.is_null() { FIRST_WAIT } else { Duration::ZERO });
            start(&mut inner, given)?.untyped()
        };
        if work.is_null() {
            return pending.wait().map(|_| ());
        }
        // SAFETY: the caller's promise.
        unsafe { work.write(Box::into_raw(Box::new(netsum_work(pending)))) };
        Ok(())
    })
}

fn op(op: netsum_op) -> Result<Op, Error> {
    match op {
        NETSUM_SUM => Ok(Op::Sum),
        NETSUM_AVERAGE => Ok(Op::Average),
        NETSUM_MIN => Ok(Op::Min),
        NETSUM_MAX => Ok(Op::Max),
        NETSUM_PRODUCT => Ok(Op::Product),
        NETSUM_BAND => Ok(Op::BitAnd),
        NETSUM_BOR => Ok(Op::BitOr),
        NETSUM_BXOR => Ok(Op::BitXor),
        _ => Err(Error::Argument(format!("op {op}: must be NETSUM_SUM to NETSUM_BXOR"))),
    }
}

/// Calls a function for the type of elements.
macro_rules! with_type {
    ($dtype:expr, $start:ident($($argument:expr),*), _ => $unknown:expr) => {
        match $dtype {
            NETSUM_INT32 => $start::<i32>($($argument),*),
            NETSUM_FLOAT32 => $start::<f32>($($argument),*),
            NETSUM_FLOAT16 => $start::<f16>($($argument),*),
            NETSUM_BFLOAT16 => $start::<bf16>($($argument),*),
            NETSUM_INT8 => $start::<i8>($($argument),*),
            NETSUM_UINT8 => $start::<u8>($($argument),*),
            NETSUM_INT16 => $start::<i16>($($argument),*),
            NETSUM_UINT16 => $start::<u16>($($argument),*),
            NETSUM_UINT32 => $start::<u32>($($argument),*),
            NETSUM_INT64 => $start::<i64>($($argument),*),
            NETSUM_UINT64 => $start::<u64>($($argument),*),
            NETSUM_FLOAT64 => $start::<f64>($($argument),*),
            NETSUM_BOOL => $start::<Bool8>($($argument),*),
            _ => $unknown,
        }
    };
}

/// # Safety
/// As of [`run`].
unsafe fn no_dtype(
    comm: *const netsum_comm,
    dtype: netsum_dtype,
    work: *mut *mut netsum_work,
) -> netsum_status {
    let wrong = Error::Argument(format!("dtype {dtype}: not one of NETSUM_INT32 to NETSUM_BOOL"));
    // SAFETY: the caller's promise.
    unsafe { run::<Infallible, Owned>(comm, work, |_| Err(wrong), |_, never| match never {}) }
}

/// Replaces each of `count` elements by the sum of all ranks' elements at its place, or what `op`
/// makes of them; the same bits at every rank. `*work` becomes a handle for netsum_wait(), or NULL
/// if the operation cannot be started. If `work` is NULL, the call waits.
///
/// # Safety
/// `data` has `count` elements, which belong to the operation until it is done.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netsum_all_reduce(
    comm: *mut netsum_comm,
    data: *mut c_void,
    count: usize,
    dtype: netsum_dtype,
    op: netsum_op,
    work: *mut *mut netsum_work,
) -> netsum_status {
    versioned!("netsum_all_reduce");
    // SAFETY: the caller's promise.
    unsafe { reduce(comm, data, count, dtype, op, None, work) }
}

/// The same, but only rank `root` gets the result; the others' data is unchanged.
///
/// # Safety
/// As netsum_all_reduce().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netsum_reduce(
    comm: *mut netsum_comm,
    data: *mut c_void,
    count: usize,
    dtype: netsum_dtype,
    op: netsum_op,
    root: u32,
    work: *mut *mut netsum_work,
) -> netsum_status {
    versioned!("netsum_reduce");
    // SAFETY: the caller's promise.
    unsafe { reduce(comm, data, count, dtype, op, Some(root), work) }
}

/// # Safety
/// As [`netsum_all_reduce`].
unsafe fn reduce(
    comm: *mut netsum_comm,
    data: *mut c_void,
    count: usize,
    dtype: netsum_dtype,
    op: netsum_op,
    root: Option<u32>,
    work: *mut *mut netsum_work,
) -> netsum_status {
    /// # Safety
    /// As the function around it.
    unsafe fn start<T: Element>(
        comm: *const netsum_comm,
        (data, count): (*mut c_void, usize),
        op: netsum_op,
        root: Option<u32>,
        work: *mut *mut netsum_work,
    ) -> netsum_status {
        // SAFETY: the caller's promise.
        let given =
            |_: &_| Ok((unsafe { Memory::<T>::new("data", data.cast(), count) }?, self::op(op)?));
        // SAFETY: the caller's promise.
        unsafe { run(comm, work, given, |comm, (data, op)| comm.reduce_async(data, op, root)) }
    }
    // SAFETY: the caller's promise.
    unsafe {
        with_type!(dtype, start(comm, (data, count), op, root, work), _ => {
            no_dtype(comm, dtype, work)
        })
    }
}

/// Reduces `count` elements for each rank, and writes rank r's part of the result to rank r's
/// `output`.
/// `input` has `count` elements for each rank; its part for this rank may be `output`, otherwise
/// they must not share memory. `work` as with netsum_all_reduce().
///
/// # Safety
/// `input` and `output` have their elements, which belong to the operation until it is done.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netsum_reduce_scatter(
    comm: *mut netsum_comm,
    output: *mut c_void,
    input: *const c_void,
    count: usize,
    dtype: netsum_dtype,
    op: netsum_op,
    work: *mut *mut netsum_work,
) -> netsum_status {
    versioned!("netsum_reduce_scatter");
    /// # Safety
    /// As the function around it.
    unsafe fn start<T: Element>(
        comm: *const netsum_comm,
        output: *mut c_void,
        input: *const c_void,
        count: usize,
        op: netsum_op,
        work: *mut *mut netsum_work,
    ) -> netsum_status {
        let given = |comm: &netsum_comm| {
            let all = count.saturating_mul(comm.ranks as usize);
            // SAFETY: the caller's promise.
            let input = unsafe { Memory::<T>::new("input", input.cast_mut().cast(), all) }?;
            // SAFETY: the caller's promise.
            let output = unsafe { Memory::<T>::new("output", output.cast(), count) }?;
            Ok((input, output, self::op(op)?))
        };
        let start = |comm: &mut Communicator, (input, output, op)| {
            comm.reduce_scatter_async(input, output, op)
        };
        // SAFETY: the caller's promise.
        unsafe { run(comm, work, given, start) }
    }
    // SAFETY: the caller's promise.
    unsafe {
        with_type!(dtype, start(comm, output, input, count, op, work), _ => {
            no_dtype(comm, dtype, work)
        })
    }
}

/// Copies the bytes of rank `root` to all ranks. `work` as with netsum_all_reduce().
///
/// # Safety
/// `data` has `bytes` bytes, which belong to the operation until it is done.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netsum_broadcast(
    comm: *mut netsum_comm,
    data: *mut c_void,
    bytes: usize,
    root: u32,
    work: *mut *mut netsum_work,
) -> netsum_status {
    versioned!("netsum_broadcast");
    // SAFETY: the caller's promise.
    unsafe {
        run(
            comm,
            work,
            |_| Memory::<u8>::new("data", data.cast(), bytes),
            |comm, data| comm.broadcast_async(data, root),
        )
    }
}

/// Concatenates the `bytes` bytes of each rank's `input` in all ranks' `output`, which has room for
/// those of all ranks. `input` may be this rank's part of `output`, otherwise they must not share
/// memory. `work` as with netsum_all_reduce().
///
/// # Safety
/// `input` and `output` have their bytes, which belong to the operation until it is done.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netsum_all_gather(
    comm: *mut netsum_comm,
    output: *mut c_void,
    input: *const c_void,
    bytes: usize,
    work: *mut *mut netsum_work,
) -> netsum_status {
    versioned!("netsum_all_gather");
    // SAFETY: the caller's promise.
    unsafe {
        let given = |comm: &netsum_comm| {
            let all = bytes.saturating_mul(comm.ranks as usize);
            let input = Memory::<u8>::new("input", input.cast_mut().cast(), bytes)?;
            Ok((input, Memory::<u8>::new("output", output.cast(), all)?))
        };
        run(comm, work, given, |comm, (input, output)| comm.all_gather_async(input, output))
    }
}

/// Concatenates the r-th `bytes` bytes of each rank's `input` in rank r's `output`. Both have room
/// for `bytes` bytes of each rank. With N ranks it takes up to N times as long as direct
/// connections would. `work` as with netsum_all_reduce().
///
/// # Safety
/// `input` and `output` have their bytes, which belong to the operation until it is done.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netsum_all_to_all(
    comm: *mut netsum_comm,
    output: *mut c_void,
    input: *const c_void,
    bytes: usize,
    work: *mut *mut netsum_work,
) -> netsum_status {
    versioned!("netsum_all_to_all");
    // SAFETY: the caller's promise.
    unsafe {
        let given = |comm: &netsum_comm| {
            let all = bytes.saturating_mul(comm.ranks as usize);
            let input = Memory::<u8>::new("input", input.cast_mut().cast(), all)?;
            Ok((input, Memory::<u8>::new("output", output.cast(), all)?))
        };
        run(comm, work, given, |comm, (input, output)| comm.all_to_all_async(input, output))
    }
}

/// Completes once all ranks have called it, and all earlier operations have completed. `work` as
/// with netsum_all_reduce().
///
/// # Safety
/// As of the arguments of netsum_all_reduce().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netsum_barrier(
    comm: *mut netsum_comm,
    work: *mut *mut netsum_work,
) -> netsum_status {
    versioned!("netsum_barrier");
    // SAFETY: the caller's promise.
    unsafe { run(comm, work, |_| Ok(()), |comm, ()| comm.barrier_async()) }
}
