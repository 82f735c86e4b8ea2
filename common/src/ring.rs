//! A ring as user space sets it up.

use core::fmt;

use crate::limits::float_sum_bytes;

/// A ring's number on the box, over all jobs, 1 to [`MAX_RINGS`](crate::limits::MAX_RINGS)` - 1`:
/// its place in the maps.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(transparent))]
#[repr(transparent)]
pub struct RingNumber(pub u32);

impl RingNumber {
    /// Stands for no ring.
    pub const NONE: Self = Self(0);
}

impl fmt::Display for RingNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Messages, as a window counts them.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(transparent))]
pub struct Messages(pub u32);

/// Fragments, as a credit counts them.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Fragments(pub u32);

impl Messages {
    /// The fragments of this many messages of `each`. `None` if that overflows.
    pub const fn of(self, each: Fragments) -> Option<Fragments> {
        match self.0.checked_mul(each.0) {
            Some(all) => Some(Fragments(all)),
            None => None,
        }
    }
}

impl fmt::Display for Messages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for Fragments {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

pub mod ring_flags {
    /// All flows are registered: contributions count.
    pub const ACTIVE: u32 = 1;
    /// The ICRC of contributions is not verified.
    pub const ICRC_IGNORE: u32 = 2;
    /// Results go out as they complete.
    pub const RELAXED: u32 = 4;
    /// The job is set up in band: messages begin with a [`crate::wire::JobHeader`].
    pub const IN_BAND: u32 = 8;
    /// The box has a parent: the last member is the way up to it.
    pub const UPLINK: u32 = 16;
    /// Members are groups of ranks behind boxes below.
    pub const GROUPS: u32 = 32;
    /// Some of its members have an entry in [`crate::abi::maps::HOPS`].
    pub const ROUTED: u32 = 64;
    /// Lanes are f32, and each takes 64 bits of a sum.
    pub const FLOAT: u32 = 128;
    /// Lowest bit of the mark that its sums carry towards the parent ([`crate::wire::GROUP_MARK`]).
    pub const GROUP_MARK_SHIFT: u32 = 8;
}

/// Configuration of a ring, set by user space.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(C)]
pub struct RingConfig {
    /// Bits of [`ring_flags`].
    pub flags: u32,
    /// Members, 2 to 64: ranks, groups of ranks behind other boxes, and the uplink to a parent.
    pub members: u32,
    /// Slots, a power of two and at least `2 * credit`.
    pub slots: u32,
    /// Fragments that a rank may send before it has received their sums: the job's window, which is
    /// in messages, times the fragments of a full message.
    pub credit: u32,
    /// Path MTU in bytes.
    pub mtu: u32,
    /// The CPU that serves it: index into the CPU map.
    pub cpu: u32,
    /// Exponent of the LSB, if [`ring_flags::FLOAT`].
    pub lsb: i32,
}

impl RingConfig {
    /// Bytes of the largest sum.
    #[inline(always)]
    pub const fn sum_bytes(&self) -> u32 {
        if self.flags & ring_flags::FLOAT == 0 { self.mtu } else { float_sum_bytes(self.mtu) }
    }
}
