//! Floats as 32-bit integers after SwitchML (NSDI 2021).
//!
//! A scale is a power of two, the same at all ranks. It follows from the largest exponent over all
//! ranks' elements: N quantised values of the largest magnitude must not overflow. Long operations
//! have a scale for each [block](super::block). For small ones the exponents are added up by the box
//! like everything else, as a histogram of [`BUCKETS`] buckets of eight bits, four to a lane. Each
//! rank adds at most one to a bucket, so with at most 64 ranks no bucket carries into its neighbour.

use multiversion::multiversion;
use netsum_common::lanes::{DATA_SUMS, data_sums};

/// Buckets of a histogram: one for each biased exponent of an f32.
pub const BUCKETS: usize = 256;
pub const HISTOGRAM_LANES: usize = BUCKETS / 4;
pub const HISTOGRAM_BYTES: usize = BUCKETS;
/// The bucket of elements with an infinity or a NaN among them.
pub const NON_FINITE: u8 = 255;

/// The largest biased exponents of some elements.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Exponents {
    /// Of all: [`NON_FINITE`] if there is an infinity or a NaN, 0 if all are zero or subnormal.
    pub largest: u8,
    /// Of the finite ones: |x| < 2^(finite - 126) for each.
    pub finite: u8,
}

impl Exponents {
    /// Whether there is an infinity or a NaN.
    pub fn is_non_finite(self) -> bool {
        self.largest == NON_FINITE
    }

    /// Those of both.
    pub fn max(self, other: Self) -> Self {
        Self { largest: self.largest.max(other.largest), finite: self.finite.max(other.finite) }
    }
}

/// The largest exponents among `x`.
pub fn exponents(x: &[f32]) -> Exponents {
    let largest = bucket(x);
    let finite = if largest == NON_FINITE { finite_bucket(x) } else { largest };
    Exponents { largest, finite }
}

/// The largest biased exponent: [`Exponents::largest`].
#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq", "x86_64+avx2"))]
pub fn bucket(x: &[f32]) -> u8 {
    // Without the sign bit, floats have the same order as their bits.
    let largest = x.iter().fold(0u32, |m, x| m.max(x.to_bits() & 0x7fff_ffff));
    (largest >> 23) as u8
}

fn finite_bucket(x: &[f32]) -> u8 {
    let exponents = x.iter().map(|x| (x.to_bits() >> 23) as u8);
    exponents.filter(|e| *e != NON_FINITE).max().unwrap_or(0)
}

/// The histogram of one rank: one in the buckets of its exponents.
pub fn write_histogram(exponents: Exponents, out: &mut [u8]) {
    out[..HISTOGRAM_BYTES].fill(0);
    out[usize::from(exponents.largest)] = 1;
    out[usize::from(exponents.finite)] = 1;
}

/// The exponents of all ranks in a summed histogram.
pub fn read_histogram(histogram: &[u8]) -> Exponents {
    let highest = |buckets: &[u8]| buckets.iter().rposition(|b| *b != 0).unwrap_or(0) as u8;
    let histogram = &histogram[..HISTOGRAM_BYTES];
    let finite = &histogram[..usize::from(NON_FINITE)];
    Exponents { largest: highest(histogram), finite: highest(finite) }
}

/// Whether a summed histogram is that of this many ranks, as far as its total shows it. That does
/// not contain the ranks with infinities and NaNs, which set a finite bucket, too.
pub fn histogram_counts_all(histogram: &[u8], ranks: u32) -> bool {
    let finite = &histogram[..usize::from(NON_FINITE)];
    finite.iter().map(|count| u32::from(*count)).sum::<u32>() == ranks
}

/// Elements for which a scale was too coarse.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Underflow {
    /// Elements that are not zero.
    pub nonzero: u64,
    /// Those of them that became 0.
    pub zeroed: u64,
}

impl Underflow {
    /// Whether more than a hundredth of the nonzero elements became 0, which is worth a warning.
    pub fn is_large(self) -> bool {
        self.zeroed * 100 > self.nonzero
    }
}

impl std::ops::AddAssign for Underflow {
    fn add_assign(&mut self, other: Self) {
        self.nonzero += other.nonzero;
        self.zeroed += other.zeroed;
    }
}

/// The scale by which floats become integers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scale {
    /// s: a float is multiplied by 2^s.
    pub exponent: i32,
    /// Quantised values are at most this large.
    pub limit: i32,
}

impl Scale {
    /// The scale for sums of `ranks` elements whose largest exponent is in `bucket`, with magnitudes
    /// of `sum_bits`: 31, or 15 for halves of lanes. `None` for [`NON_FINITE`].
    pub fn new(bucket: u8, ranks: u32, sum_bits: i32) -> Option<Self> {
        if bucket == NON_FINITE {
            return None;
        }
        let bits = sum_bits - ranks.next_power_of_two().ilog2() as i32;
        // |x| < 2^e, so |x 2^s| < 2^bits. The limit applies where rounding reaches that power.
        let e = i32::from(bucket) - 126;
        Some(Self { exponent: bits - e, limit: ((1i64 << bits) - 1) as i32 })
    }

    /// 2^-s.
    pub fn inverse(self) -> f64 {
        power_of_two(-self.exponent)
    }

    /// `x 2^s`, rounded to the nearest integer, ties to even, as little-endian words into `out`.
    pub fn quantise(self, x: &[f32], out: &mut [u8]) {
        quantise(self.exponent, self.limit as u32, x, out);
    }

    /// `x 2^s`, rounded up or down at random, so that the expected value is `x 2^s`: by a number
    /// that follows from the seed and the element's place.
    pub fn quantise_stochastically(self, x: &[f32], seed: u32, out: &mut [u8]) {
        quantise_stochastically(self.exponent, self.limit as u32, seed, x, out);
    }

    /// Counts the elements that are not zero, and those of them that rounding to the nearest makes
    /// 0.
    pub fn underflow(self, x: &[f32]) -> Underflow {
        count_underflow(self.exponent, x)
    }

    /// Sums of quantised values, as little-endian words, back to floats: `sum 2^-s`, rounded once.
    pub fn restore(self, sums: &[u8], out: &mut [f32]) {
        // No sum overflows, and all but zero are at least the least normal number.
        let usual = (-96..=126).contains(&self.exponent);
        if usual {
            restore(self.inverse(), sums, out)
        } else {
            restore_extreme(self.inverse(), sums, out)
        }
    }

    /// The same divided by 2 to 64, and rounded once.
    pub fn average(self, sums: &[u8], by: u32, out: &mut [f32]) {
        average(self.inverse(), by, sums, out);
    }
}

// Plain loops that compilers vectorise, in versions for wider registers than every x86-64 has; the
// processor chooses at run time. `cargo xtask bench numeric`, 64 KiB on a Xeon with AVX-512, in us:
// largest exponent 0.4; quantise 2.1; restore 1.7; check lanes 1.0. A copy takes 0.7.
//
// The processor's rounding is not used here: an application may have set another rounding mode, or
// that subnormal numbers count as zero (MXCSR on x86-64, FPCR on AArch64), in one thread but not in
// the progress thread, at one rank but not at others. Integers do not depend on these, and the one
// product of floats is exact and has normal factors.

#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq", "x86_64+avx2"))]
fn quantise(exponent: i32, limit: u32, x: &[f32], out: &mut [u8]) {
    for (x, out) in x.iter().zip(out.as_chunks_mut::<4>().0) {
        // To the nearest, ties to even.
        *out = integer(exponent, limit, *x, |wide, by| (((1 << by) - 1) >> 1) + (wide >> by & 1));
    }
}

#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq", "x86_64+avx2"))]
fn quantise_stochastically(exponent: i32, limit: u32, seed: u32, x: &[f32], out: &mut [u8]) {
    for (i, (x, out)) in x.iter().zip(out.as_chunks_mut::<4>().0).enumerate() {
        let random = mix(seed.wrapping_add(i as u32));
        *out = integer(exponent, limit, *x, |_, by| random & ((1 << by) - 1));
    }
}

/// `x 2^exponent` as a little-endian word; `up` is what to add before the lowest bits are cut.
#[inline(always)]
fn integer(exponent: i32, limit: u32, x: f32, up: impl Fn(u32, u32) -> u32) -> [u8; 4] {
    let bits = x.to_bits();
    let biased = (bits >> 23 & 0xff) as i32;
    let mantissa = (bits & 0x7f_ffff) | u32::from(biased != 0) << 23;
    // |x 2^s| = mantissa 2^7 2^-shift. Elements that are too large for the scale exceed the limit, too.
    let (wide, shift) = (mantissa << 7, 157 - exponent - biased.max(1));
    // Beyond 31 it is less than a half, and this many bits of probability are enough.
    let (wide, by) = (wide >> (shift - 31).clamp(0, 31), shift.clamp(0, 31) as u32);
    let rounded = (wide + up(wide, by)) >> by;
    let magnitude = if shift < 0 { wide << 1 } else { rounded };
    let magnitude = magnitude.min(limit);
    let sign = (bits as i32 >> 31) as u32;
    (magnitude ^ sign).wrapping_sub(sign).to_le_bytes()
}

/// The finaliser of MurmurHash3 (Appleby): a number whose bits all depend on all of `x`.
#[inline(always)]
pub(super) const fn mix(x: u32) -> u32 {
    let x = (x ^ x >> 16).wrapping_mul(0x85eb_ca6b);
    let x = (x ^ x >> 13).wrapping_mul(0xc2b2_ae35);
    x ^ x >> 16
}

/// Counts the elements that are not zero, and those of them that become 0 in units of 2^-`exponent`:
/// at most half of one, as ties go to even.
pub(super) fn count_underflow(exponent: i32, x: &[f32]) -> Underflow {
    // The bits of the largest float that becomes 0; it may be subnormal, or below all floats.
    let largest = match -1 - exponent {
        e if e >= -126 => ((e + 127) as u32) << 23,
        e => 1u32.checked_shl((e + 149) as u32).unwrap_or(0),
    };
    underflow(largest, x)
}

#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq", "x86_64+avx2"))]
fn underflow(largest: u32, x: &[f32]) -> Underflow {
    let (mut nonzero, mut zeroed) = (0u32, 0u32);
    for x in x {
        let magnitude = x.to_bits() & 0x7fff_ffff;
        nonzero += u32::from(magnitude != 0);
        // A zero wraps to the largest number.
        zeroed += u32::from(magnitude.wrapping_sub(1) < largest);
    }
    Underflow { nonzero: nonzero.into(), zeroed: zeroed.into() }
}

/// Bits of an f64's mantissa that an f32 lacks.
const DROPPED: u32 = 29;
/// The difference of the exponents' biases.
const REBIAS: u64 = 1023 - 127;
const INFINITE: u64 = 0x7f80_0000;

/// The number to add before the lowest `by` bits are cut: rounds to the nearest, ties to even.
#[inline(always)]
fn up(x: u64, by: u32) -> u64 {
    (((1 << by) - 1) >> 1) + (x >> by & 1)
}

#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq", "x86_64+avx2"))]
fn restore(inverse: f64, sums: &[u8], out: &mut [f32]) {
    for (sum, out) in sums.as_chunks::<4>().0.iter().zip(out) {
        let bits = f64::from(i32::from_le_bytes(*sum)).to_bits();
        let rounded = (bits + up(bits, DROPPED)) & !((1 << DROPPED) - 1);
        // Both exact: an f32 has room for it.
        *out = (f64::from_bits(rounded) * inverse) as f32;
    }
}

/// The same where sums may be too large for an f32, or subnormal.
#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq", "x86_64+avx2"))]
fn restore_extreme(inverse: f64, sums: &[u8], out: &mut [f32]) {
    for (sum, out) in sums.as_chunks::<4>().0.iter().zip(out) {
        // Exact.
        *out = rounded(f64::from(i32::from_le_bytes(*sum)) * inverse);
    }
}

/// Rounds to the nearest, ties to even, whatever the processor's mode is.
#[inline(always)]
fn rounded(x: f64) -> f32 {
    let bits = x.to_bits();
    let magnitude = bits & !(1 << 63);
    let normal = ((magnitude + up(magnitude, DROPPED)) >> DROPPED).wrapping_sub(REBIAS << 23);
    // In steps of 2^-149; zero is far below half of one.
    let by = (u64::from(DROPPED) + REBIAS + 1).saturating_sub(magnitude >> 52).clamp(1, 62) as u32;
    let mantissa = (magnitude & ((1 << 52) - 1)) | 1 << 52;
    let subnormal = (mantissa + up(mantissa, by)) >> by;
    let rounded = if magnitude >> 52 > REBIAS { normal.min(INFINITE) } else { subnormal };
    f32::from_bits((bits >> 63 << 31 | rounded) as u32)
}

#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq", "x86_64+avx2"))]
fn average(inverse: f64, by: u32, sums: &[u8], out: &mut [f32]) {
    // a / by = a reciprocal 2^-(31 + up), rounded down, for all a below 2^31 (Granlund and
    // Montgomery, PLDI 1994, theorem 4.2).
    let up = by.next_power_of_two().ilog2();
    let reciprocal = (1u64 << (31 + up)).div_ceil(u64::from(by));
    for (sum, out) in sums.as_chunks::<4>().0.iter().zip(out) {
        let bits = f64::from(i32::from_le_bytes(*sum)).to_bits();
        // The 31 bits of a sum, the first of them 1: a quotient of 25 at least.
        let a = (bits >> 22 & ((1 << 30) - 1)) as u32 | 1 << 30;
        let whole = ((u64::from(a) * reciprocal) >> (31 + up)) as u32;
        // Rounding to 24 bits only needs to know whether there is a remainder.
        let exact = whole << 1 | u32::from(whole * by != a);
        // Back from the shifted 31 bits to the sum.
        let place = (bits >> 52 & 0x7ff).wrapping_sub(1023 + 31) << 52;
        let quotient = f64::from(exact).to_bits().wrapping_add(place) | bits & 1 << 63;
        let quotient = if bits << 1 == 0 { 0 } else { quotient };
        *out = rounded(f64::from_bits(quotient) * inverse);
    }
}

/// [`data_sums`] of a message's lanes behind the check lanes.
#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq", "x86_64+avx2"))]
pub fn check_sums(lanes: &[u8]) -> [u32; DATA_SUMS] {
    data_sums(lanes)
}

/// 2^e, for exponents that an f64 has.
fn power_of_two(e: i32) -> f64 {
    f64::from_bits(((e + 1023) as u64) << 52)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn quantise(scale: Scale, x: &[f32]) -> Vec<i32> {
        let mut out = vec![0; x.len() * 4];
        scale.quantise(x, &mut out);
        out.as_chunks::<4>().0.iter().map(|w| i32::from_le_bytes(*w)).collect()
    }

    #[test]
    fn buckets_bound_magnitudes() {
        for (x, expected) in [
            (0.0, 0),
            (-0.0, 0),
            (f32::from_bits(1), 0),
            (f32::MIN_POSITIVE, 1),
            (1.0, 127),
            (-1.5, 127),
            (2.0, 128),
            (f32::MAX, 254),
            (f32::INFINITY, NON_FINITE),
            (f32::NAN, NON_FINITE),
            (-f32::NAN, NON_FINITE),
        ] {
            assert_eq!(bucket(&[0.0, x]), expected, "{x}");
        }
        let mixed = [0.5, f32::NAN, -8.0, f32::NEG_INFINITY];
        assert_eq!(exponents(&mixed), Exponents { largest: NON_FINITE, finite: 130 });
        assert_eq!(bucket(&[]), 0);
    }

    #[test]
    fn sums_of_histograms_show_the_highest_bucket() {
        let mut sum = vec![0i32; HISTOGRAM_LANES];
        for rank in 0..64 {
            let mut h = vec![0; HISTOGRAM_BYTES];
            let largest = if rank == 9 { NON_FINITE } else { 130 };
            write_histogram(Exponents { largest, finite: 130 - rank % 2 }, &mut h);
            for (s, l) in sum.iter_mut().zip(h.as_chunks::<4>().0) {
                *s = s.wrapping_add(i32::from_le_bytes(*l));
            }
        }
        let bytes: Vec<u8> = sum.iter().flat_map(|l| l.to_le_bytes()).collect();
        let exponents = Exponents { largest: NON_FINITE, finite: 130 };
        assert_eq!((read_histogram(&bytes), bytes[130], bytes[255]), (exponents, 63, 1));
        assert_eq!(read_histogram(&[0; HISTOGRAM_BYTES]), Exponents::default());
    }

    #[test]
    fn the_largest_values_of_all_ranks_do_not_overflow() {
        for ranks in [1, 2, 3, 4, 5, 8, 33, 64] {
            for x in [
                f32::MAX,
                1.999_999_9,
                f32::MIN_POSITIVE,
                f32::from_bits(0x7f_ffff),
                f32::from_bits(1),
            ] {
                let scale = Scale::new(bucket(&[x]), ranks, 31).unwrap();
                let q = quantise(scale, &[x, -x]);
                assert_eq!(q[0], -q[1]);
                assert!(
                    i64::from(q[0]) * i64::from(ranks) <= i64::from(i32::MAX),
                    "{ranks} ranks, {x}: {}",
                    q[0]
                );
                assert!(q[0] > 0, "{ranks} ranks, {x}");
            }
        }
    }

    #[test]
    fn halves_round_to_even() {
        let scale = Scale { exponent: 0, limit: 100 };
        let x = [0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0.49, 99.5, 1e9, -1e9];
        assert_eq!(quantise(scale, &x), [0, 2, 2, 0, -2, -2, 0, 100, 100, -100]);
    }

    fn finite() -> impl Strategy<Value = f32> {
        any::<u32>().prop_map(f32::from_bits).prop_filter("finite", |x| x.is_finite())
    }

    proptest! {
        /// Each quantised value is the exact product, rounded once: compared in integers, without
        /// floats.
        #[test]
        fn quantising_is_exact_arithmetic(x in finite(), up in 0u8..20, ranks in 1u32..=64) {
            let b = bucket(&[x]).saturating_add(up).min(254);
            let scale = Scale::new(b, ranks, 31).unwrap();
            let bits = x.to_bits();
            let (exponent, mantissa) = ((bits >> 23 & 0xff) as i32, i128::from(bits & 0x7f_ffff));
            let (mantissa, exponent) = if exponent == 0 { (mantissa, 1) } else { (mantissa | 1 << 23, exponent) };
            // |x 2^s| = mantissa 2^p
            let p = exponent - 150 + scale.exponent;
            let magnitude = if p >= 0 {
                mantissa << p
            } else if p < -60 {
                0
            } else {
                let (floor, rest, half) = (mantissa >> -p, mantissa & ((1 << -p) - 1), 1i128 << (-p - 1));
                floor + i128::from(rest > half || rest == half && floor & 1 == 1)
            };
            let magnitude = magnitude.min(i128::from(scale.limit)) as i32;
            let expected = if x.is_sign_negative() { -magnitude } else { magnitude };
            prop_assert_eq!(quantise(scale, &[x])[0], expected);
        }

        /// The elements counted as underflow are those that quantising makes 0.
        #[test]
        fn underflows_are_nonzero_floats_that_become_zero(
            x in prop::collection::vec(finite(), 0..40),
            near in 0u32..3,
            bucket in 0u8..255,
            ranks in 1u32..=64,
        ) {
            let scale = Scale::new(bucket, ranks, 31).unwrap();
            // Also values next to the limit, which are halves of subnormal numbers at the lowest
            // scales.
            let half = (-f64::from(scale.exponent) - 1.0).exp2() as f32;
            let edge = f32::from_bits(half.to_bits().saturating_add(near).saturating_sub(1));
            let x: Vec<f32> = x.into_iter().chain([edge, -edge, 0.0, -0.0, f32::from_bits(1)]).collect();
            let nonzero = x.iter().filter(|x| **x != 0.0).count() as u64;
            let becomes_zero = |(x, q): &(&f32, i32)| **x != 0.0 && *q == 0;
            let zeroed = x.iter().zip(quantise(scale, &x)).filter(becomes_zero).count() as u64;
            prop_assert_eq!(scale.underflow(&x), Underflow { nonzero, zeroed });
        }

        /// The sum errs by at most half a step for each rank (one step for a value at the limit),
        /// and by the last rounding.
        #[test]
        fn the_error_is_bounded(x in prop::collection::vec(-1e30f32..1e30, 1..64), shift in -100i32..20) {
            let x: Vec<f32> = x.iter().map(|x| (f64::from(*x) * (2f64).powi(shift)) as f32).collect();
            let ranks = x.len() as u32;
            let scale = Scale::new(bucket(&x), ranks, 31).unwrap();
            let sum: i32 = quantise(scale, &x).iter().sum();
            let mut result = [0.0];
            scale.restore(&sum.to_le_bytes(), &mut result);
            // Magnitudes within 2^25 of each other at most matter: f64 holds the sum to far below
            // the bound.
            let exact: f64 = x.iter().map(|x| f64::from(*x)).sum();
            let at_limit = quantise(scale, &x).iter().filter(|q| q.abs() == scale.limit).count();
            let bound = (f64::from(ranks) + at_limit as f64) * scale.inverse() * 0.5
                + f64::from(f32::EPSILON) * exact.abs() + f64::from(f32::MIN_POSITIVE) * 1e-7;
            prop_assert!((f64::from(result[0]) - exact).abs() <= bound * (1.0 + 1e-9), "{} \
                {exact} {bound}", result[0]);
        }
    }
}
