//! Arithmetic of each element type, the same at every rank: no result depends on the processor or
//! its floating-point modes.

use half::{bf16, f16};
use rustc_apfloat::ieee::{BFloat, Double, Half, Single};
use rustc_apfloat::{Float, StatusAnd};

mod sealed {
    pub trait Sealed {}
}

/// A byte that is true unless it is 0, for memory whose bytes may be anything. `bool` must be 0
/// or 1.
#[derive(Clone, Copy, Debug, Default)]
#[repr(transparent)]
pub struct Bool8(pub u8);

impl PartialEq for Bool8 {
    fn eq(&self, other: &Self) -> bool {
        (self.0 != 0) == (other.0 != 0)
    }
}

/// Arithmetic of an element type. The methods are for the library itself.
#[doc(hidden)]
pub trait Number: sealed::Sealed + Copy + Default {
    /// Bits that its values have.
    const BITS: u32;

    /// The value as the lowest bits.
    fn to_bits(self) -> u64;

    /// The value of the lowest bits.
    fn of_bits(bits: u64) -> Self;

    #[must_use]
    fn add(self, other: Self) -> Self;

    #[must_use]
    fn multiply(self, other: Self) -> Self;

    #[must_use]
    fn smaller(self, other: Self) -> Self;

    #[must_use]
    fn larger(self, other: Self) -> Self;

    /// Of floats; other types stay.
    #[must_use]
    fn divide(self, _: u32) -> Self {
        self
    }
}

macro_rules! integers {
    ($($type:ty),*) => {$(
        impl sealed::Sealed for $type {}

        impl Number for $type {
            const BITS: u32 = Self::BITS;

            fn to_bits(self) -> u64 {
                // Without the copies of the sign.
                self as u64 & (u64::MAX >> (64 - Self::BITS))
            }
            fn of_bits(bits: u64) -> Self {
                bits as Self
            }
            fn add(self, other: Self) -> Self {
                self.wrapping_add(other)
            }
            fn multiply(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }
            fn smaller(self, other: Self) -> Self {
                Ord::min(self, other)
            }
            fn larger(self, other: Self) -> Self {
                Ord::max(self, other)
            }
        }
    )*};
}

integers!(i8, u8, i16, u16, i32, u32, i64, u64);

/// Floats with arithmetic in integers: to the nearest, ties to even, with subnormal numbers and one
/// NaN. An application may have set another rounding mode or flush-to-zero for one thread of the
/// processor and not for another, and processors differ in the bits of a NaN. An addition takes 50 ns.
trait Soft: Sized {
    type Soft;

    fn soft(self) -> Self::Soft;
    fn of_soft(x: StatusAnd<Self::Soft>) -> Self;
}

macro_rules! floats {
    ($($type:ty = $soft:ty),*) => {$(
        impl sealed::Sealed for $type {}

        impl Soft for $type {
            type Soft = $soft;

            fn soft(self) -> $soft {
                <$soft>::from_bits(self.to_bits().into())
            }
            fn of_soft(x: StatusAnd<$soft>) -> Self {
                if x.value.is_nan() { Self::NAN } else { Self::from_bits(x.value.to_bits() as _) }
            }
        }

        impl Number for $type {
            const BITS: u32 = <$soft>::BITS as u32;

            fn to_bits(self) -> u64 {
                self.to_bits().into()
            }
            fn of_bits(bits: u64) -> Self {
                Self::from_bits(bits as _)
            }
            fn add(self, other: Self) -> Self {
                Self::of_soft(self.soft() + other.soft())
            }
            fn multiply(self, other: Self) -> Self {
                Self::of_soft(self.soft() * other.soft())
            }
            fn smaller(self, other: Self) -> Self {
                if self.is_nan() || other.is_nan() {
                    Self::NAN
                } else if other.total_cmp(&self).is_lt() {
                    other
                } else {
                    self
                }
            }
            fn larger(self, other: Self) -> Self {
                if self.is_nan() || other.is_nan() {
                    Self::NAN
                } else if other.total_cmp(&self).is_gt() {
                    other
                } else {
                    self
                }
            }
            fn divide(self, by: u32) -> Self {
                Self::of_soft(self.soft() / <$soft>::from_u128(by.into()).value)
            }
        }
    )*};
}

floats!(f16 = Half, bf16 = BFloat, f32 = Single, f64 = Double);

/// Sum and largest are the or, product and smallest the and.
macro_rules! booleans {
    ($($type:ty: $true:expr, $of:expr);*) => {$(
        impl sealed::Sealed for $type {}

        impl Number for $type {
            const BITS: u32 = 1;

            fn to_bits(self) -> u64 {
                $true(self).into()
            }
            fn of_bits(bits: u64) -> Self {
                $of(bits & 1 != 0)
            }
            fn add(self, other: Self) -> Self {
                $of($true(self) | $true(other))
            }
            fn multiply(self, other: Self) -> Self {
                $of($true(self) & $true(other))
            }
            fn smaller(self, other: Self) -> Self {
                self.multiply(other)
            }
            fn larger(self, other: Self) -> Self {
                self.add(other)
            }
        }
    )*};
}

booleans!(bool: |x| x, |x| x; Bool8: |x: Self| x.0 != 0, |x: bool| Self(x.into()));

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_nan_is_the_smallest_and_the_largest_and_zeros_have_an_order() {
        for (a, b) in [(f64::NAN, 1.0), (-1.0, -f64::NAN)] {
            for x in [Number::smaller(a, b), Number::larger(a, b), a.add(b), a.multiply(b)] {
                assert_eq!(x.to_bits(), f64::NAN.to_bits());
            }
        }
        for (a, b) in [(-0.0f32, 0.0f32), (0.0, -0.0)] {
            assert_eq!(Number::smaller(a, b).to_bits(), (-0.0f32).to_bits());
            assert_eq!(Number::larger(a, b).to_bits(), 0);
        }
        assert_eq!(f32::INFINITY.add(f32::NEG_INFINITY).to_bits(), f32::NAN.to_bits());
        assert_eq!(Number::to_bits(-1i8), 255);
        assert_eq!(i16::of_bits(0xffff_8000), i16::MIN);
    }

    #[test]
    fn a_byte_is_true_unless_it_is_0() {
        assert_eq!((Bool8(2).to_bits(), Bool8(0).to_bits()), (1, 0));
        assert_eq!(Bool8(2).multiply(Bool8(4)), Bool8(1));
    }
}
