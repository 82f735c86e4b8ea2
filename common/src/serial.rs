//! 24-bit numbers: serial arithmetic for PSNs, MSNs and fragment indices; and queue pair numbers,
//! which have no arithmetic.
//!
//! IBTA volume 1, section 9.7: PSNs count modulo 2^24 and compare as signed 24-bit differences.

/// Number of bits of a packet sequence number.
pub const BITS: u32 = 24;
/// Mask of a packet sequence number.
pub const MASK: u32 = (1 << BITS) - 1;

/// `a + b` modulo 2^24.
#[inline(always)]
pub const fn add(a: u32, b: u32) -> u32 {
    a.wrapping_add(b) & MASK
}

/// `a - b` modulo 2^24, in `0..2^24`.
#[inline(always)]
pub const fn sub(a: u32, b: u32) -> u32 {
    a.wrapping_sub(b) & MASK
}

/// Signed distance from `b` to `a`: positive when `a` is ahead, in `-2^23..2^23`.
#[inline(always)]
pub const fn diff(a: u32, b: u32) -> i32 {
    // Shift the 24-bit difference to the top, which drops higher bits, then back arithmetically.
    (a.wrapping_sub(b) << (32 - BITS)) as i32 >> (32 - BITS)
}

/// Whether `a` comes before `b`.
#[inline(always)]
pub const fn before(a: u32, b: u32) -> bool {
    diff(a, b) < 0
}

/// A packet sequence number. It counts modulo 2^24: it has no total order, and no plain addition.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(transparent))]
#[repr(transparent)]
pub struct Psn(u32);

impl Psn {
    /// From the lower 24 bits.
    #[inline(always)]
    pub const fn new(n: u32) -> Self {
        Self(n & MASK)
    }

    /// The number, as headers have it.
    #[inline(always)]
    pub const fn get(self) -> u32 {
        self.0
    }

    /// The PSN `packets` later.
    #[inline(always)]
    pub const fn plus(self, packets: u32) -> Self {
        Self(add(self.0, packets))
    }

    /// The PSN `packets` earlier.
    #[inline(always)]
    pub const fn minus(self, packets: u32) -> Self {
        Self(sub(self.0, packets))
    }

    /// Packets from another PSN to this one, in `-2^23..2^23`.
    #[inline(always)]
    pub const fn ahead_of(self, other: Self) -> i32 {
        diff(self.0, other.0)
    }
}

/// A queue pair number, of 24 bits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(transparent))]
#[repr(transparent)]
pub struct Qpn(u32);

impl Qpn {
    /// A number that is known to have 24 bits.
    ///
    /// # Panics
    /// If it has more.
    #[inline(always)]
    pub const fn new(n: u32) -> Self {
        Self::checked(n).expect("a queue pair number has 24 bits")
    }

    /// `None` if it has more than 24 bits.
    #[inline(always)]
    pub const fn checked(n: u32) -> Option<Self> {
        if n <= MASK { Some(Self(n)) } else { None }
    }

    /// The number, as headers have it.
    #[inline(always)]
    pub const fn get(self) -> u32 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_are_signed_and_wrap() {
        for (a, b, expected) in [
            (0, 0, 0),
            (1, 0, 1),
            (0, 1, -1),
            (0, MASK, 1),
            (MASK, 0, -1),
            (0x7f_ffff, 0, 0x7f_ffff),
            (0x80_0000, 0, -0x80_0000),
            (5, 0xff_fffb, 10),
        ] {
            assert_eq!(diff(a, b), expected, "diff({a:#x}, {b:#x})");
            assert_eq!(add(b, sub(a, b)), a);
        }
        assert!(before(MASK, 0));
        assert!(!before(3, 3));
    }
}
