//! Floating-point arithmetic in integers: to the nearest, ties to even, with subnormal numbers and
//! one NaN.
//!
//! The processor's own is not used: an application may have set another rounding mode or
//! flush-to-zero for one thread and not for another, and processors differ in the bits of a NaN.

/// A binary format of IEEE 754, as its bits.
#[derive(Clone, Copy, Debug)]
pub struct Soft {
    /// Bits of the significand, with the leading one.
    precision: u32,
    /// The exponent of the last place of subnormal numbers.
    least: i32,
    /// The bits of infinity.
    infinity: u64,
}

pub const SINGLE: Soft = Soft { precision: 24, least: -149, infinity: 0x7f80_0000 };
pub const DOUBLE: Soft = Soft { precision: 53, least: -1074, infinity: 0x7ff0_0000_0000_0000 };

/// A finite number: `significand` times two to the power of `exponent`.
#[derive(Clone, Copy)]
struct Finite {
    is_negative: bool,
    significand: u128,
    exponent: i32,
}

/// Places that are added below a significand.
const GUARD: i32 = 64;

impl Soft {
    const fn sign(self) -> u64 {
        // One above the bits of the exponent, whose leading ones infinity has.
        (self.infinity << 1) & !self.infinity & !(self.infinity - 1)
    }

    const fn nan(self) -> u64 {
        self.infinity | 1 << (self.precision - 2)
    }

    fn is_nan(self, x: u64) -> bool {
        x & !self.sign() > self.infinity
    }

    /// `None` for infinities and NaNs.
    fn unpack(self, x: u64) -> Option<Finite> {
        let magnitude = x & !self.sign();
        if magnitude >= self.infinity {
            return None;
        }
        let (field, fraction) =
            (magnitude >> (self.precision - 1), magnitude & ((1 << (self.precision - 1)) - 1));
        let leading = if field > 0 { 1 << (self.precision - 1) } else { 0 };
        Some(Finite {
            is_negative: x & self.sign() != 0,
            significand: (fraction | leading).into(),
            exponent: self.least + (field as i32 - 1).max(0),
        })
    }

    /// Rounds. The lowest bit of a significand may stand for all that is below it.
    fn pack(self, Finite { is_negative, significand, exponent }: Finite) -> u64 {
        if significand == 0 {
            return if is_negative { self.sign() } else { 0 };
        }
        let length = 128 - significand.leading_zeros() as i32;
        let shift = (length - self.precision as i32).max(self.least - exponent);
        let rounded = match shift {
            ..=0 => significand << -shift,
            1..=127 => {
                let (kept, rest) = (significand >> shift, significand & ((1 << shift) - 1));
                let half = 1 << (shift - 1);
                kept + u128::from(rest > half || rest == half && kept & 1 == 1)
            }
            _ => 0,
        };
        // A leading one adds one to the exponent's field, as does a carry.
        let field = (exponent + shift - self.least).max(0) as u64;
        let magnitude = (field << (self.precision - 1)) + rounded as u64;
        magnitude.min(self.infinity) | if is_negative { self.sign() } else { 0 }
    }

    pub fn add(self, a: u64, b: u64) -> u64 {
        let (x, y) = match (self.unpack(a), self.unpack(b)) {
            (Some(x), Some(y)) => (x, y),
            (None, None) if a != b => return self.nan(),
            (None, _) => return if self.is_nan(a) { self.nan() } else { a },
            (_, None) => return if self.is_nan(b) { self.nan() } else { b },
        };
        let (large, small) = if x.exponent >= y.exponent { (x, y) } else { (y, x) };
        let apart = large.exponent - small.exponent;
        let (high, low, exponent) = if apart <= GUARD {
            (large.significand << apart, small.significand, small.exponent)
        } else {
            let low = u128::from(small.significand > 0);
            (large.significand << GUARD, low, large.exponent - GUARD)
        };
        let value = |of: u128, is_negative| if is_negative { -(of as i128) } else { of as i128 };
        let sum = value(high, large.is_negative) + value(low, small.is_negative);
        let is_negative = sum < 0 || sum == 0 && x.is_negative && y.is_negative;
        self.pack(Finite { is_negative, significand: sum.unsigned_abs(), exponent })
    }

    pub fn multiply(self, a: u64, b: u64) -> u64 {
        let sign = (a ^ b) & self.sign();
        match (self.unpack(a), self.unpack(b)) {
            (Some(x), Some(y)) => self.pack(Finite {
                is_negative: sign != 0,
                significand: x.significand * y.significand,
                exponent: x.exponent + y.exponent,
            }),
            (x, y) => {
                let is_zero = |x: Option<Finite>| x.is_some_and(|x| x.significand == 0);
                if self.is_nan(a) || self.is_nan(b) || is_zero(x) || is_zero(y) {
                    self.nan()
                } else {
                    sign | self.infinity
                }
            }
        }
    }

    /// Divides by a number above 0.
    pub fn divide(self, a: u64, by: u32) -> u64 {
        let Some(x) = self.unpack(a) else {
            return if self.is_nan(a) { self.nan() } else { a };
        };
        let (whole, by) = (x.significand << GUARD, u128::from(by));
        let significand = whole / by | u128::from(whole % by > 0);
        self.pack(Finite { significand, exponent: x.exponent - GUARD, ..x })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Numbers of all kinds: any bits, close exponents, and special ones.
    fn double() -> impl Strategy<Value = f64> {
        let special = [0.0, 1.0, f64::MAX, f64::MIN_POSITIVE, f64::INFINITY, f64::NAN, 5e-324];
        let signed = special.into_iter().flat_map(|x| [x, -x]).collect::<Vec<_>>();
        prop_oneof![
            any::<u64>().prop_map(f64::from_bits),
            any::<u64>().prop_map(|x| f64::from_bits(x & 0x800f_ffff_ffff_ffff | 1023 << 52)),
            (any::<u64>(), 0u64..60).prop_map(|(x, e)| {
                f64::from_bits(x & 0x800f_ffff_ffff_ff00 | (1000 + e) << 52)
            }),
            any::<u64>().prop_map(|x| f64::from_bits(x & 0x803f_ffff_ffff_ffff)),
            any::<u64>().prop_map(|x| f64::from_bits(x & 0x800f_ffff_ffff_ffff | 511 << 52)),
            proptest::sample::select(signed),
        ]
    }

    fn plain(x: f64) -> u64 {
        if x.is_nan() { f64::NAN.to_bits() } else { x.to_bits() }
    }

    fn plain_single(x: f32) -> u64 {
        if x.is_nan() { f32::NAN.to_bits().into() } else { x.to_bits().into() }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(20_000))]

        #[test]
        fn results_are_the_processors(x in double(), y in double(), by in 1u32..=64) {
            let (a, b) = (x.to_bits(), y.to_bits());
            prop_assert_eq!(DOUBLE.add(a, b), plain(x + y), "{:e} + {:e}", x, y);
            prop_assert_eq!(DOUBLE.multiply(a, b), plain(x * y), "{:e} * {:e}", x, y);
            prop_assert_eq!(DOUBLE.divide(a, by), plain(x / f64::from(by)), "{:e} / {}", x, by);
            let (x, y) = (f32::from_bits((a >> 32) as u32), f32::from_bits((b >> 32) as u32));
            let (a, b) = (x.to_bits().into(), y.to_bits().into());
            prop_assert_eq!(SINGLE.add(a, b), plain_single(x + y), "{:e} + {:e}", x, y);
            prop_assert_eq!(SINGLE.multiply(a, b), plain_single(x * y), "{:e} * {:e}", x, y);
        }
    }
}
