//! Clocks as numbers.

use nix::sys::time::TimeSpec;
use nix::time::{ClockId, clock_gettime};

fn nanoseconds(clock: ClockId) -> u64 {
    let t = clock_gettime(clock).unwrap_or(TimeSpec::new(0, 0));
    t.tv_sec() as u64 * 1_000_000_000 + t.tv_nsec() as u64
}

/// The offset from CLOCK_MONOTONIC to nanoseconds since 1970.
pub fn offset() -> u64 {
    nanoseconds(ClockId::CLOCK_REALTIME).wrapping_sub(nanoseconds(ClockId::CLOCK_MONOTONIC))
}
