//! Shared by the benchmark of a host, which includes this file, and its reflector.

/// Name of the program, and of its array of one [`Reflected`].
pub const PROGRAM: &str = "reflector";
pub const MAP: &str = "REFLECTED";

/// What the reflector has done.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(C)]
pub struct Reflected {
    /// What rank 1 adds to the check lane `rank` of a message beyond what rank 0 does.
    pub member: u32,
    /// 1 once the session is known, which `member` follows from.
    pub session: u32,
    /// Packets that were returned.
    pub returned: u64,
    /// Packets that were dropped: of no known session, or malformed.
    pub dropped: u64,
}
