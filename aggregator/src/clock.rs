//! Clocks as numbers, for what more than one process has to agree on.

use nix::sys::time::TimeSpec;
use nix::time::{ClockId, clock_gettime};

fn nanoseconds(clock: ClockId) -> u64 {
    let t = clock_gettime(clock).unwrap_or(TimeSpec::new(0, 0));
    t.tv_sec() as u64 * 1_000_000_000 + t.tv_nsec() as u64
}

/// Nanoseconds of CLOCK_MONOTONIC, the same for all processes of this machine: it goes forward only.
pub fn monotonic() -> u64 {
    nanoseconds(ClockId::CLOCK_MONOTONIC)
}

/// What has to be added to [`monotonic`] for nanoseconds since 1970.
pub fn offset() -> u64 {
    nanoseconds(ClockId::CLOCK_REALTIME).wrapping_sub(monotonic())
}
