//! 24-bit serial number arithmetic for PSNs, MSNs and fragment indices.
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
    // Shift the 24-bit difference to the top so that the sign bit falls out, then back arithmetically.
    (a.wrapping_sub(b) << (32 - BITS)) as i32 >> (32 - BITS)
}

/// Whether `a` comes before `b`.
#[inline(always)]
pub const fn before(a: u32, b: u32) -> bool {
    diff(a, b) < 0
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
