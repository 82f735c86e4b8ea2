//! Defaults of a job.

/// Path MTU in bytes, where no box chooses the largest that fits its ports.
pub const MTU: u32 = 1024;
/// Size of a message.
pub const MESSAGE_SIZE: &str = "64KiB";
/// Messages of a rank in flight.
pub const WINDOW: u32 = 8;
/// The tenant of jobs that do not name one.
pub const TENANT: &str = "default";
