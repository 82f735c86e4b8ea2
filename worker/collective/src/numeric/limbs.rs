//! Few floats as fixed-point numbers of two or three lanes each, so that a sum loses almost
//! nothing. The bytes cost a small operation some latency: BENCHMARKS.md, "On links with a
//! bandwidth".
//!
//! With b = 32 - ceil(log2 N) bits a lane, a number is an integer of K b bits in two's complement,
//! lowest limb first. The limbs below the last one have no sign. N of each fit in 32 bits, so the
//! box's additions carry nothing between lanes. All ranks use the same unit in the last place. It
//! follows from the largest finite exponent over all ranks, rounded up to a *window* of exponents,
//! so that a prediction of it is usually right.
//!
//! Where a rank has an infinity or a NaN, one more lane an element counts the ranks that have a
//! positive or negative infinity or a NaN there, in eight bits each (at most 64 ranks).

use multiversion::multiversion;

use super::quant::{self, Exponents, Underflow};
use super::signs::Signs;

/// How the floats of a small operation become lanes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limbs {
    /// Lanes of a number.
    count: u8,
    /// Bits of a lane.
    bits: u32,
    /// A number is an integer times 2^this.
    unit: i32,
    /// Whether another lane counts infinities and NaNs.
    has_classes: bool,
}

impl Limbs {
    /// The format for `ranks` messages with these largest exponents.
    pub fn new(count: u8, exponents: Exponents, ranks: u32) -> Self {
        let bits = 32 - ranks.next_power_of_two().ilog2();
        let window = i32::from(Self::window(count, exponents.finite));
        // |x| < 2^top for every finite element of every rank.
        let top = ((window + 1) * i32::from(window_len(count)) - 1).min(254) - 126;
        let unit = top - (i32::from(count) * bits as i32 - 1);
        Self { count, bits, unit, has_classes: exponents.is_non_finite() }
    }

    /// The window of an exponent.
    pub fn window(count: u8, bucket: u8) -> u8 {
        bucket / window_len(count)
    }

    /// Lanes of an element.
    pub fn lanes(self) -> usize {
        usize::from(self.count) + usize::from(self.has_classes)
    }

    /// Writes elements as lanes, little-endian words.
    pub fn write(self, x: &[f32], out: &mut [u8]) {
        if self.is_pair() {
            return write_pairs(self.unit, self.bits, x, out.as_chunks_mut().0);
        }
        for (x, out) in x.iter().zip(out.chunks_exact_mut(4 * self.lanes())) {
            let (limbs, class) = out.as_chunks_mut::<4>().0.split_at_mut(self.count.into());
            let mut number = self.number(*x);
            let Some((highest, low)) = limbs.split_last_mut() else { continue };
            for limb in low {
                *limb = (number as u32 & (u32::MAX >> (32 - self.bits))).to_le_bytes();
                number >>= self.bits;
            }
            *highest = (number as i32).to_le_bytes();
            for class in class {
                *class = class_of(*x).to_le_bytes();
            }
        }
    }

    /// An element in units, rounded to the nearest, ties to even; 0 for infinities and NaN.
    fn number(self, x: f32) -> i128 {
        let bits = x.to_bits();
        let biased = (bits >> 23 & 0xff) as i32;
        if biased == 0xff {
            return 0;
        }
        let mantissa = i128::from(bits & 0x7f_ffff | u32::from(biased != 0) << 23);
        let shift = biased.max(1) - 150 - self.unit;
        let magnitude = match shift {
            // A wrong prediction may be far too small; the number is not used then, but must fit:
            // tags add up only where lanes do not wrap.
            0.. => mantissa << shift.min(100),
            -25.. => {
                let by = -shift as u32;
                (mantissa + ((1 << (by - 1)) - 1) + (mantissa >> by & 1)) >> by
            }
            _ => 0,
        };
        let magnitude = magnitude.min((1 << (u32::from(self.count) * self.bits - 1)) - 1);
        if x.is_sign_negative() { -magnitude } else { magnitude }
    }

    /// Which lanes are signed.
    pub fn signs(self) -> Signs {
        Signs::One { place: usize::from(self.count) - 1, of: self.lanes() }
    }

    /// Counts the elements that are not zero, and those of them that become 0.
    pub fn underflow(self, x: &[f32]) -> Underflow {
        quant::count_underflow(-self.unit, x)
    }

    /// Whether this has a fast way: two lanes, and all results and averages are normal numbers.
    fn is_pair(self) -> bool {
        self.lanes() == 2 && self.unit >= -120
    }

    /// Reads sums of lanes, divided by `by`, which is 1 to 64: rounded once, to the nearest, ties
    /// to even. Infinities and NaNs follow IEEE 754.
    pub fn read(self, sums: &[u8], by: u32, out: &mut [f32]) {
        if self.is_pair() {
            return read_pairs(self.unit, self.bits, by, sums.as_chunks().0, out);
        }
        for (sum, out) in sums.chunks_exact(4 * self.lanes()).zip(out) {
            let (limbs, class) = sum.as_chunks::<4>().0.split_at(self.count.into());
            let [low @ .., highest] = limbs else { continue };
            let mut number = i128::from(i32::from_le_bytes(*highest));
            for limb in low.iter().rev() {
                number = (number << self.bits) + i128::from(u32::from_le_bytes(*limb));
            }
            *out = special(class.first().map_or(0, |class| u32::from_le_bytes(*class)))
                .unwrap_or_else(|| quotient(number, by, self.unit));
        }
    }
}

// There can be 4,096 pairs. `cargo xtask bench numeric`, on an EPYC with AVX-512, in us by the ways
// above and by these: write 20 and 2.5, read 37 and 2.6, average 63 and 16.

#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq+avx512cd", "x86_64+avx2"))]
fn write_pairs(unit: i32, bits: u32, x: &[f32], out: &mut [[u8; 8]]) {
    for (x, out) in x.iter().zip(out) {
        let pattern = x.to_bits();
        let biased = (pattern >> 23 & 0xff) as i32;
        let mantissa = (pattern & 0x7f_ffff) | u32::from(biased != 0) << 23;
        let shift = biased.max(1) - 150 - unit;
        // One bit more, so that there is always one to cut.
        let (wide, by) = (u64::from(mantissa) << 1, (-shift).clamp(0, 31) as u32 + 1);
        let rounded = (wide + (((1 << by) - 1) >> 1) + (wide >> by & 1)) >> by;
        let magnitude = (rounded << shift.clamp(0, 39)).min((1 << (2 * bits - 1)) - 1) as i64;
        let number = if biased == 0xff { 0 } else { magnitude };
        let sign = i64::from(pattern as i32 >> 31);
        let number = (number ^ sign) - sign;
        let low = number as u64 & ((1 << bits) - 1);
        *out = (low | ((number >> bits) as u64) << 32).to_le_bytes();
    }
}

#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+avx512dq+avx512cd", "x86_64+avx2"))]
fn read_pairs(unit: i32, bits: u32, by: u32, sums: &[[u8; 8]], out: &mut [f32]) {
    for (sum, out) in sums.iter().zip(out) {
        let lanes = u64::from_le_bytes(*sum);
        let number = (i64::from((lanes >> 32) as i32) << bits) + (lanes & 0xffff_ffff) as i64;
        // The first bit is the highest one.
        let magnitude = number.unsigned_abs();
        let zeros = magnitude.leading_zeros();
        let first = magnitude << (zeros & 63);
        let (quotient, rest) =
            if by == 1 { (first, 0) } else { (first / u64::from(by), first % u64::from(by)) };
        let more = quotient.leading_zeros();
        let first = quotient << (more & 63);
        let (mantissa, cut) =
            ((first >> 40) as u32, first & ((1 << 40) - 1) | u64::from(rest != 0));
        let up = cut + u64::from(mantissa & 1) > 1 << 39;
        let exponent = 63 - zeros as i32 - more as i32 + unit;
        let bits = ((exponent + 126) as u32) << 23;
        let result = (bits + mantissa + u32::from(up)).min(0x7f80_0000);
        let result = if number == 0 { 0 } else { result };
        *out = f32::from_bits(result | (number >> 63) as u32 & 1 << 31);
    }
}

/// Exponents in a window: a large one is hit more often, and costs bits.
const fn window_len(count: u8) -> u8 {
    if count > 2 { 16 } else { 8 }
}

const POSITIVE: u32 = 1;
const NEGATIVE: u32 = 1 << 8;
const NAN: u32 = 1 << 16;

fn class_of(x: f32) -> u32 {
    match x {
        f32::INFINITY => POSITIVE,
        f32::NEG_INFINITY => NEGATIVE,
        x if x.is_nan() => NAN,
        _ => 0,
    }
}

/// The sum of infinities and NaNs, as `classes` counts them; `None` if there are none.
fn special(classes: u32) -> Option<f32> {
    let has = |class: u32| classes & (class * 0xff) != 0;
    match (has(POSITIVE), has(NEGATIVE), has(NAN)) {
        (false, false, false) => None,
        (true, false, false) => Some(f32::INFINITY),
        (false, true, false) => Some(f32::NEG_INFINITY),
        _ => Some(f32::NAN),
    }
}

/// `number / by 2^unit`, rounded once to the nearest, ties to even.
fn quotient(number: i128, by: u32, unit: i32) -> f32 {
    // Enough bits of the quotient that the rest only decides a tie.
    const MORE: u32 = 31;
    let magnitude = number.unsigned_abs();
    let bits = if by == 1 {
        rounded(magnitude, unit, false)
    } else {
        let (magnitude, by) = (magnitude << MORE, u128::from(by));
        rounded(magnitude / by, unit - MORE as i32, !magnitude.is_multiple_of(by))
    };
    f32::from_bits(bits | u32::from(number < 0) << 31)
}

/// The bits of `magnitude 2^unit`, and a bit more if there is a `rest`, as the nearest float.
fn rounded(magnitude: u128, unit: i32, rest: bool) -> u32 {
    const LEAST: i32 = -149;
    let Some(highest) = magnitude.checked_ilog2() else { return 0 };
    let exponent = highest as i32 + unit;
    // The mantissa counts in 2^place.
    let place = (exponent - 23).max(LEAST);
    let mantissa = match u32::try_from(place - unit) {
        Err(_) => magnitude << (unit - place),
        Ok(0) => magnitude,
        Ok(by) if by > 127 => 0,
        Ok(by) => {
            let (whole, cut) = (magnitude >> by, magnitude & ((1 << by) - 1));
            let half = 1 << (by - 1);
            whole + u128::from(cut > half || cut == half && (rest || whole & 1 == 1))
        }
    };
    // A carry out of the mantissa counts the exponent up, as it should.
    let biased = (place - LEAST) as u32;
    let bits = (biased << 23) + mantissa as u32;
    if exponent > 127 { 0x7f80_0000 } else { bits.min(0x7f80_0000) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::reference::add_lanes;
    use super::*;

    fn exponents(ranks: &[Vec<f32>]) -> Exponents {
        let all = ranks.iter().map(|x| quant::exponents(x));
        all.reduce(Exponents::max).unwrap()
    }

    /// As ranks and a box do it.
    fn sum(limbs: u8, by: u32, ranks: &[Vec<f32>]) -> Vec<f32> {
        let format = Limbs::new(limbs, exponents(ranks), ranks.len() as u32);
        let mut sums = vec![0; ranks[0].len() * 4 * format.lanes()];
        for x in ranks {
            let mut lanes = vec![0xa5; sums.len()];
            format.write(x, &mut lanes);
            add_lanes(&mut sums, &lanes);
        }
        let mut out = vec![7.0; ranks[0].len()];
        format.read(&sums, by, &mut out);
        out
    }

    fn one(limbs: u8, ranks: &[f32]) -> f32 {
        sum(limbs, 1, &ranks.iter().map(|x| vec![*x]).collect::<Vec<_>>())[0]
    }

    #[test]
    fn small_values_beside_large_ones_are_kept() {
        let x = vec![4096., 4.1e8, 8e13, 1e-3];
        assert_eq!(sum(3, 1, &[x.clone(), x.clone()]), [8192., 8.2e8, 1.6e14, 2e-3]);
        assert_eq!(sum(3, 2, &[x.clone(), x.clone()]), x);
        assert_eq!(sum(2, 1, &[x.clone(), x])[..3], [8192., 8.2e8, 1.6e14]);
    }

    #[test]
    fn special_values_follow_ieee_754() {
        const INF: f32 = f32::INFINITY;
        for limbs in [2, 3] {
            assert_eq!(one(limbs, &[INF, 1.0, INF]), INF);
            assert_eq!(one(limbs, &[1.0, -INF, 1.0]), -INF);
            assert!(one(limbs, &[INF, -INF, 1.0]).is_nan());
            assert!(one(limbs, &[0.0, f32::NAN, -f32::NAN]).is_nan());
            assert_eq!(one(limbs, &[f32::MAX, f32::MAX]), INF);
            assert_eq!(one(limbs, &[-f32::MAX, -f32::MAX, f32::MAX]), -f32::MAX);
            assert_eq!(one(limbs, &[f32::from_bits(1), f32::from_bits(2)]).to_bits(), 3);
            assert_eq!(one(limbs, &[-0.0, -0.0]).to_bits(), 0);
            let beside = sum(limbs, 1, &[vec![INF, 1.5], vec![0.0, 2.5]]);
            assert_eq!(beside, [INF, 4.0]);
        }
        let all_ranks = vec![f32::NAN; 64];
        assert!(one(2, &all_ranks).is_nan());
        assert_eq!(one(2, &[INF; 64]), INF);
    }

    #[test]
    fn one_rank_keeps_its_numbers() {
        for exponent in 1..255 {
            let x = f32::from_bits(exponent << 23 | 0x40_0001);
            assert_eq!((one(2, &[x]), one(3, &[-x])), (x, -x));
        }
    }

    #[test]
    fn floats_that_become_zero_are_counted() {
        let x = [1.0, 1e-30, 0.0, -1e-30, 1e-5, f32::NAN];
        let format = Limbs::new(2, quant::exponents(&x), 4);
        assert_eq!(format.underflow(&x), Underflow { nonzero: 5, zeroed: 2 });
    }

    /// An element in units of 2^-149, exactly.
    fn units(x: f32) -> i128 {
        let biased = (x.to_bits() >> 23 & 0xff) as i32;
        let mantissa = i128::from(x.to_bits() & 0x7f_ffff | u32::from(biased != 0) << 23);
        (mantissa << (biased.max(1) - 1)) * if x < 0.0 { -1 } else { 1 }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        /// Also of averages, of numbers down to 2^-20 of the largest and far below, if they have
        /// bits there.
        #[test]
        fn sums_are_rounded_once(
            limbs in 2u8..4,
            ranks in 1usize..65,
            first in 1u32..70,
            seeds in prop::collection::vec((any::<u32>(), 0u32..21), 64),
            is_average in any::<bool>(),
        ) {
            let x: Vec<f32> = seeds[..ranks]
                .iter()
                .map(|(bits, by)| f32::from_bits(bits & 0x807f_ffff | (first + by) << 23))
                .collect();
            let exact: i128 = x.iter().map(|x| units(*x)).sum();
            let by = if is_average { ranks as i128 } else { 1 };
            let lists: Vec<_> = x.iter().map(|x| vec![*x]).collect();
            let got = sum(limbs, by as u32, &lists)[0];
            let error = |x: f32| (exact - units(x) * by).abs();
            let (below, above) = (error(got.next_down()), error(got.next_up()));
            prop_assert!(error(got) <= below.min(above), "{x:?}: {got}");
            if error(got) == below.min(above) {
                prop_assert!(got.to_bits() & 1 == 0, "{x:?}: {got} is odd, and as near");
            }
        }

        /// The largest numbers of all ranks fit the lanes.
        #[test]
        fn nothing_overflows(limbs in 2u8..4, ranks in 1usize..65, bits in any::<u32>()) {
            let x = f32::from_bits(bits);
            let x = if x.is_finite() { x } else { f32::MAX };
            let sum = one(limbs, &vec![x; ranks]);
            prop_assert_eq!(sum, (f64::from(x) * ranks as f64) as f32);
        }
    }
}
