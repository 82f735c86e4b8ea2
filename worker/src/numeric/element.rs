//! The element types of an all-reduce.

use super::quant::{self, Scale};

/// Data type of an all-reduce.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Dtype {
    /// 32-bit integers, summed modulo 2^32.
    I32,
    /// Single precision floats, summed as integers with a scale for each message.
    F32,
}

impl Dtype {
    /// As in tables and options: `i32` or `f32`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::I32 => "i32",
            Self::F32 => "f32",
        }
    }

    pub(crate) const fn code(self) -> u32 {
        match self {
            Self::I32 => 1,
            Self::F32 => 2,
        }
    }

    pub(crate) const fn of_code(code: u32) -> Option<Self> {
        match code {
            1 => Some(Self::I32),
            2 => Some(Self::F32),
            _ => None,
        }
    }
}

impl std::fmt::Display for Dtype {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for i32 {}
    impl Sealed for f32 {}
}

/// A type whose slices can be all-reduced: `i32` or `f32`.
pub trait Element:
    sealed::Sealed + Copy + Default + Send + Sync + std::fmt::Debug + PartialEq + 'static
{
    /// The data type.
    const DTYPE: Dtype;

    /// For floats the largest exponent (see [`quant::bucket`]).
    #[doc(hidden)]
    fn bucket(x: &[Self]) -> u8;

    /// Writes the elements as lanes. Floats need a scale; without one the lanes are zero.
    #[doc(hidden)]
    fn to_lanes(x: &[Self], scale: Option<Scale>, out: &mut [u8]);

    /// Reads elements from summed lanes. Floats need a scale; without one they are left as they are.
    #[doc(hidden)]
    fn from_lanes(sums: &[u8], scale: Option<Scale>, out: &mut [Self]);
}

impl Element for i32 {
    const DTYPE: Dtype = Dtype::I32;

    fn bucket(_: &[Self]) -> u8 {
        0
    }

    fn to_lanes(x: &[Self], _: Option<Scale>, out: &mut [u8]) {
        for (x, out) in x.iter().zip(out.as_chunks_mut::<4>().0) {
            *out = x.to_le_bytes();
        }
    }

    fn from_lanes(sums: &[u8], _: Option<Scale>, out: &mut [Self]) {
        for (sum, out) in sums.as_chunks::<4>().0.iter().zip(out) {
            *out = i32::from_le_bytes(*sum);
        }
    }
}

impl Element for f32 {
    const DTYPE: Dtype = Dtype::F32;

    fn bucket(x: &[Self]) -> u8 {
        quant::bucket(x)
    }

    fn to_lanes(x: &[Self], scale: Option<Scale>, out: &mut [u8]) {
        match scale {
            Some(scale) => scale.quantise(x, out),
            None => out.fill(0),
        }
    }

    fn from_lanes(sums: &[u8], scale: Option<Scale>, out: &mut [Self]) {
        if let Some(scale) = scale {
            scale.restore(sums, out);
        }
    }
}

/// A slice under reduction, whatever its type: what the engine reads contributions from and writes results to.
pub(crate) trait Data {
    fn dtype(&self) -> Dtype;
    fn len(&self) -> usize;
    fn bucket(&self, range: std::ops::Range<usize>) -> u8;
    fn load(&self, range: std::ops::Range<usize>, scale: Option<Scale>, out: &mut [u8]);
    fn store(&mut self, range: std::ops::Range<usize>, scale: Option<Scale>, sums: &[u8]);
}

/// A borrowed slice as [`Data`].
pub(crate) struct Slice<'a, T>(pub &'a mut [T]);

impl<T: Element> Data for Slice<'_, T> {
    fn dtype(&self) -> Dtype {
        T::DTYPE
    }
    fn len(&self) -> usize {
        self.0.len()
    }
    fn bucket(&self, range: std::ops::Range<usize>) -> u8 {
        T::bucket(&self.0[range])
    }
    fn load(&self, range: std::ops::Range<usize>, scale: Option<Scale>, out: &mut [u8]) {
        T::to_lanes(&self.0[range], scale, out);
    }
    fn store(&mut self, range: std::ops::Range<usize>, scale: Option<Scale>, sums: &[u8]) {
        T::from_lanes(sums, scale, &mut self.0[range]);
    }
}
