//! Float lanes: sums of IEEE f32 that do not depend on the order of their terms.
//!
//! Each lane has a 64-bit fixed-point accumulator, in units of its ring's LSB, a power of two. A
//! contribution is rounded to the nearest multiple of the LSB, ties away from zero, by a function
//! of this lane's bits alone; integers are added; and the sum is rounded once, to the nearest f32,
//! ties to even.
//!
//! A contribution overflows from 2^63 LSBs divided by the ranks (rounded up to a power of two) on.
//! So no sum of others wraps, in any order. If a contribution overflows, or is infinite, its lane's
//! sum is infinite with its sign; NaN with contributions of both signs, and with a NaN. The
//! accumulator itself then holds one of three values that no finite sum reaches.
//!
//! The bits of all numbers with the same sign and exponent move alike. So a [`Table`] has a shift
//! and a sign for each, and no lane needs a branch: about 20 instructions for a contribution, twice
//! as many for a result. BPF has neither floats nor an instruction that counts leading zeros.

use crate::limits::MAX_RANKS;

/// Exponents of the LSBs that a job may have: every result but zero is a normal f32 then.
pub const LSB_MIN: i32 = -120;
/// The largest one.
pub const LSB_MAX: i32 = 60;
/// The usual one: contributions below 65,536 of 64 ranks, with an error of 5e-13 each.
pub const LSB_DEFAULT: i32 = -40;

/// Accumulators of lanes whose sum is not finite.
const NAN: i64 = i64::MIN;
const MINUS_INFINITY: i64 = i64::MIN + 1;
const PLUS_INFINITY: i64 = i64::MAX;

/// Flag of a part: these numbers overflow, are infinite or not numbers.
const SPECIAL: u64 = 1 << 6;
/// Behind the shift and the flag.
const FACTOR_SHIFT: u32 = 8;
/// Of the other parts of a [`Table`]: the exponent, behind the shift.
const EXPONENT_SHIFT: u32 = 32;

/// Numbers by their parts; depends on the ring's LSB and its ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct Table {
    /// By sign and exponent of an f32: a shift, [`SPECIAL`], and a factor of 1, -1 or 0.
    pub parts: [u64; 512],
    /// By the bytes of an accumulator that are not zero: a shift by whole bytes, and an exponent.
    pub bytes: [u64; 256],
    /// By bits 62 to 55 then: a shift by bits, and what that takes from the exponent.
    pub leading: [u64; 256],
}

const _: () = assert!(size_of::<Table>() == 8192);

impl Table {
    /// For an LSB of 2^`lsb`, between [`LSB_MIN`] and [`LSB_MAX`], and this many ranks.
    pub fn new(lsb: i32, ranks: u32) -> Self {
        let ranks_bits =
            ranks.clamp(1, MAX_RANKS as u32).next_power_of_two().trailing_zeros() as i32;
        let mut table = Self { parts: [0; 512], bytes: [0; 256], leading: [0; 256] };
        for (i, part) in table.parts.iter_mut().enumerate() {
            let factor: i64 = if i < 256 { 1 } else { -1 };
            // A significand of 24 bits has weight 2^(exponent - 150); see `fixed`.
            let shift = 189 + lsb - (i % 256) as i32;
            *part = if shift < ranks_bits || i % 256 == 255 {
                SPECIAL
            } else if shift > 63 {
                0
            } else {
                (factor << FACTOR_SHIFT) as u64 | shift as u64
            };
        }
        for (i, entry) in table.bytes.iter_mut().enumerate().skip(1) {
            // Its first bit gets to bit 62 or below, and the last byte's already is.
            let shift = (55 - 8 * i.ilog2() as i32).max(0);
            // The result adds the leading one of the significand to the exponent.
            let exponent = 62 - shift + lsb + 126;
            *entry = (exponent as u64) << EXPONENT_SHIFT | shift as u64;
        }
        for (i, entry) in table.leading.iter_mut().enumerate().skip(1) {
            let zeros = u64::from((i as u8).leading_zeros());
            *entry = zeros.wrapping_sub(zeros << EXPONENT_SHIFT);
        }
        table
    }
}

/// Shifts a word by the last six bits of another one. BPF's instructions take no others (RFC 9669,
/// 4.1), but the compiler would clear them first, a fifth of the work on a lane.
macro_rules! shift {
    ($name:ident, $instruction:literal, $shift:ident) => {
        #[inline(always)]
        fn $name(word: u64, by: u64) -> u64 {
            #[cfg(target_arch = "bpf")]
            {
                let mut word = word;
                // SAFETY: reads and writes nothing but its operands.
                unsafe {
                    core::arch::asm!(
                        $instruction,
                        inout(reg) word,
                        in(reg) by,
                        options(pure, nomem, nostack, preserves_flags)
                    )
                };
                word
            }
            #[cfg(not(target_arch = "bpf"))]
            word.$shift(by as u32)
        }
    };
}
shift!(shifted_right, "{0} >>= {1}", wrapping_shr);
shift!(shifted_left, "{0} <<= {1}", wrapping_shl);

/// Index into [`Table::parts`] for an f32.
#[inline(always)]
pub const fn part_of(bits: u32) -> usize {
    (bits >> 23) as usize
}

/// Whether the part of some lanes, ORed together, needs [`add_special`].
#[inline(always)]
pub const fn has_special(parts: u64) -> bool {
    parts & SPECIAL != 0
}

/// An f32 as a multiple of the LSB; 0 if it is special.
#[inline(always)]
pub fn fixed(bits: u32, part: u64) -> i64 {
    // The significand at the top of the word, with its leading one in place of the exponent's last
    // bit. Subnormals are too small to matter.
    let significand = (bits as u64 | 1 << 23) << 40;
    let doubled = shifted_right(significand, part);
    let magnitude = (doubled + 1) >> 1;
    (magnitude as i64).wrapping_mul(part as i64 >> FACTOR_SHIFT)
}

/// The sum of an accumulator and an f32, where either may be special.
#[inline(always)]
pub fn add_special(sum: i64, bits: u32, part: u64) -> i64 {
    let term = if !has_special(part) {
        fixed(bits, part)
    } else if bits & 0x7fff_ffff > 0x7f80_0000 {
        NAN
    } else if bits >> 31 == 0 {
        PLUS_INFINITY
    } else {
        MINUS_INFINITY
    };
    match (is_special(sum), is_special(term)) {
        (false, false) => sum + term,
        (false, true) => term,
        (true, false) => sum,
        (true, true) => {
            if sum == term {
                sum
            } else {
                NAN
            }
        }
    }
}

/// Whether an accumulator holds no finite sum.
#[inline(always)]
const fn is_special(sum: i64) -> bool {
    sum == NAN || sum == MINUS_INFINITY || sum == PLUS_INFINITY
}

/// The f32 next to an accumulator that is not special; `bytes` and `leading` read the table.
#[inline(always)]
pub fn rounded(
    sum: i64,
    bytes: impl FnOnce(usize) -> u64,
    leading: impl FnOnce(usize) -> u64,
) -> u32 {
    const LOW: u64 = 0x7f7f_7f7f_7f7f_7f7f;
    let sign = sum >> 63;
    // Below 2^63.
    let mut significand = ((sum ^ sign) - sign) as u64;
    // The highest bit of each byte that is not zero, and these bits side by side.
    let nonzero = (((significand & LOW) + LOW) | significand) & !LOW;
    let byte = bytes((nonzero.wrapping_mul(0x0002_0408_1020_4081) >> 56) as usize);
    significand = shifted_left(significand, byte);
    let bit = leading((significand >> 55 & 0xff) as usize);
    significand = shifted_left(significand, bit);
    let exponent = byte.wrapping_add(bit) >> (EXPONENT_SHIFT - 23);
    let is_odd = significand >> 39 & 1;
    let significand = (significand + (1 << 38) - 1 + is_odd) >> 39;
    (exponent.wrapping_add(significand) | (sign as u64) << 31) as u32
}

/// The same for any accumulator.
#[inline(always)]
pub fn rounded_special(
    sum: i64,
    bytes: impl FnOnce(usize) -> u64,
    leading: impl FnOnce(usize) -> u64,
) -> u32 {
    match sum {
        NAN => 0x7fc0_0000,
        PLUS_INFINITY => 0x7f80_0000,
        MINUS_INFINITY => 0xff80_0000,
        _ => rounded(sum, bytes, leading),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Adds as the programs do: special lanes after all others.
    struct Sum {
        table: Table,
        sum: i64,
        special: bool,
    }

    impl Sum {
        fn new(lsb: i32, ranks: u32) -> Self {
            Self { table: Table::new(lsb, ranks), sum: 0, special: false }
        }

        fn of(mut self, terms: impl IntoIterator<Item = f32>) -> u32 {
            for bits in terms.into_iter().map(f32::to_bits) {
                let part = self.table.parts[part_of(bits)];
                if self.special || has_special(part) {
                    self.special = true;
                    self.sum = add_special(self.sum, bits, part);
                } else {
                    self.sum += fixed(bits, part);
                }
            }
            let (bytes, leading) =
                (|i: usize| self.table.bytes[i], |i: usize| self.table.leading[i]);
            let any = rounded_special(self.sum, bytes, leading);
            assert!(self.special || any == rounded(self.sum, bytes, leading));
            any
        }
    }

    /// From f64, which holds every f32 and its quotient by a power of two.
    fn exact(lsb: i32, ranks: u32, terms: &[f32]) -> f32 {
        let unit = 2f64.powi(lsb);
        let limit = 2f64.powi(63) / f64::from(ranks.next_power_of_two());
        let (mut sum, mut plus, mut minus, mut nan) = (0i128, false, false, false);
        for &x in terms {
            let quotient = f64::from(x) / unit;
            if quotient.is_nan() {
                nan = true;
            } else if quotient.abs() >= limit {
                if x > 0.0 { plus = true } else { minus = true }
            } else {
                sum += quotient.round() as i128;
            }
        }
        match (nan || plus && minus, plus, minus) {
            (true, ..) => f32::NAN,
            (_, true, _) => f32::INFINITY,
            (_, _, true) => f32::NEG_INFINITY,
            _ => (f64::from(sum as f32) * unit) as f32,
        }
    }

    #[track_caller]
    fn check(lsb: i32, terms: &[f32]) {
        let ranks = terms.len() as u32;
        let got = Sum::new(lsb, ranks).of(terms.iter().copied());
        assert_eq!(got, exact(lsb, ranks, terms).to_bits(), "2^{lsb}: {terms:?}");
    }

    const INTERESTING: [f32; 16] = [
        0.0,
        -0.0,
        1.0,
        -1.0,
        f32::MIN_POSITIVE,
        -f32::MIN_POSITIVE / 4.0,
        f32::MAX,
        f32::MIN,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        0.1,
        16_777_216.0,
        16_777_217.0,
        65_535.996,
        -131_072.0,
    ];

    #[test]
    fn sums_are_exact_and_do_not_depend_on_the_order() {
        let mut rng = fastrand::Rng::with_seed(1);
        for case in 0..1000 {
            let ranks = if case % 4 == 0 { rng.u32(2..=4) } else { rng.u32(2..=64) };
            let lsb = if case % 2 == 0 { LSB_DEFAULT } else { rng.i32(LSB_MIN..=LSB_MAX) };
            // Exponents around one in the range of this LSB, wide or narrow; few of them special.
            let (middle, spread) = (lsb + rng.i32(-3..60), rng.i32(1..40));
            let special = if case % 3 == 0 { 0.2 } else { 0.0 };
            for _ in 0..20 {
                let mut terms: Vec<f32> = (0..ranks)
                    .map(|_| match rng.f64() {
                        x if x < special => rng.choice(INTERESTING).unwrap(),
                        x if x < 0.3 => {
                            // Halves of the LSB, which are ties.
                            (f64::from(rng.i32(-99..99)) * 2f64.powi(lsb - 1)) as f32
                        }
                        _ => {
                            let exponent = (middle + rng.i32(-spread..=spread)).clamp(-126, 127);
                            let bits = ((exponent + 127) as u32) << 23 | rng.u32(..1 << 23);
                            f32::from_bits(bits | rng.u32(..2) << 31)
                        }
                    })
                    .collect();
                check(lsb, &terms);
                let first = Sum::new(lsb, ranks).of(terms.iter().copied());
                for order in orders(ranks as usize, &mut rng) {
                    let ordered = order.iter().map(|&i| terms[i]);
                    assert_eq!(Sum::new(lsb, ranks).of(ordered), first, "{order:?}: {terms:?}");
                }
                terms.reverse();
                check(lsb, &terms);
            }
        }
    }

    /// All orders of few terms, some of many.
    fn orders(n: usize, rng: &mut fastrand::Rng) -> Vec<Vec<usize>> {
        if n > 4 {
            return (0..5)
                .map(|_| {
                    let mut order: Vec<usize> = (0..n).collect();
                    rng.shuffle(&mut order);
                    order
                })
                .collect();
        }
        let mut all = vec![vec![]];
        for i in 0..n {
            all = all
                .iter()
                .flat_map(|order: &Vec<usize>| {
                    (0..=i).map(|at| {
                        let mut longer = order.clone();
                        longer.insert(at, i);
                        longer
                    })
                })
                .collect();
        }
        all
    }

    #[test]
    fn every_exponent_and_every_lsb() {
        for lsb in LSB_MIN..=LSB_MAX {
            for exponent in 0..=255u32 {
                for significand in [0, 1, 0x40_0000, 0x7f_ffff] {
                    let x = f32::from_bits(exponent << 23 | significand);
                    check(lsb, &[x, 0.0]);
                    check(lsb, &[x, -x]);
                    check(lsb, &[-x, -x, 0.0]);
                }
            }
        }
    }

    #[test]
    fn results_are_rounded_to_even_once() {
        let unit = 2f32.powi(LSB_DEFAULT);
        // 2^24 + 1 is a tie of the units 2^24 and 2^24 + 2, 2^24 + 3 one of ..+ 2 and ..+ 4.
        let even = 16_777_216.0 * unit;
        for (more, rounded) in [(1.0, even), (3.0, even + 4.0 * unit)] {
            assert_eq!(Sum::new(LSB_DEFAULT, 2).of([even, more * unit]), rounded.to_bits());
        }
        // In f32, each of these would be lost.
        let mut terms = vec![unit; 64];
        terms[0] = even;
        assert_eq!(Sum::new(LSB_DEFAULT, 64).of(terms), (even + 64.0 * unit).to_bits());
        // All bits of the significand carry.
        check(LSB_DEFAULT, &[33_554_431.0 * unit, 16_777_215.0 * unit, 2f32.powi(-16)]);
    }

    #[test]
    fn ties_of_contributions_go_away_from_zero() {
        let unit = 2f32.powi(LSB_DEFAULT);
        for (x, units) in [(0.5, 1), (1.5, 2), (2.5, 3), (0.49999997, 0), (-0.5, -1), (-2.5, -3)] {
            let bits = (x * unit).to_bits();
            let table = Table::new(LSB_DEFAULT, 2);
            assert_eq!(fixed(bits, table.parts[part_of(bits)]), units, "{x}");
        }
    }

    #[test]
    fn the_largest_sums_do_not_wrap() {
        for ranks in 2..=64u32 {
            let limit = 2f32.powi(63 + LSB_DEFAULT) / ranks.next_power_of_two() as f32;
            let largest = f32::from_bits(limit.to_bits() - 1);
            for sign in [1.0, -1.0] {
                check(LSB_DEFAULT, &vec![sign * largest; ranks as usize]);
                let mut terms = vec![sign * largest; ranks as usize];
                terms[0] = sign * limit;
                let sum = f32::from_bits(Sum::new(LSB_DEFAULT, ranks).of(terms.iter().copied()));
                assert_eq!(sum, sign * f32::INFINITY);
                terms[1] = -sign * limit;
                check(LSB_DEFAULT, &terms);
            }
        }
    }
}
