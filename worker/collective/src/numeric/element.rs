//! The element types of an all-reduce.

use std::any::Any;
use std::ops::{Deref, DerefMut, Range};

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::block::{Width, write_exponent};
use super::format::Format;
use super::memory::Memory;
use super::number::{Bool8, Number};
use super::quant::{self, Exponents, Underflow};

/// Data type of a reduction.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Dtype {
    /// 8-bit integers. Sums and products of all integers are modulo two to the power of the width.
    I8,
    /// 8-bit integers without a sign.
    U8,
    /// 16-bit integers.
    I16,
    /// 16-bit integers without a sign.
    U16,
    /// 32-bit integers.
    I32,
    /// 32-bit integers without a sign.
    U32,
    /// 64-bit integers.
    I64,
    /// 64-bit integers without a sign.
    U64,
    /// Half precision floats. Sums of over 4,096 of them take 16 bits each, as sums of `f32` do in
    /// [half a lane](super::block::Width::Half).
    F16,
    /// Floats with the exponents of `f32`, of which sums are as those of [`F16`](Self::F16).
    Bf16,
    /// Single precision floats. Sums are sums of integers with a scale for each block of 1,024.
    F32,
    /// Double precision floats. Sums are rounded after each rank.
    F64,
    /// Bytes that are true or false.
    Bool,
}

impl Dtype {
    /// All.
    pub const ALL: [Self; 13] = [
        Self::I8,
        Self::U8,
        Self::I16,
        Self::U16,
        Self::I32,
        Self::U32,
        Self::I64,
        Self::U64,
        Self::F16,
        Self::Bf16,
        Self::F32,
        Self::F64,
        Self::Bool,
    ];

    /// As in tables and options: `i32`, `f64` and so on.
    pub const fn name(self) -> &'static str {
        match self {
            Self::I8 => "i8",
            Self::U8 => "u8",
            Self::I16 => "i16",
            Self::U16 => "u16",
            Self::I32 => "i32",
            Self::U32 => "u32",
            Self::I64 => "i64",
            Self::U64 => "u64",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::F32 => "f32",
            Self::F64 => "f64",
            Self::Bool => "bool",
        }
    }

    /// Whether its elements are floats that travel as integers with a scale.
    pub const fn is_scaled(self) -> bool {
        matches!(self, Self::F16 | Self::Bf16 | Self::F32)
    }

    /// Bytes of an element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::I8 | Self::U8 | Self::Bool => 1,
            Self::I16 | Self::U16 | Self::F16 | Self::Bf16 => 2,
            Self::I32 | Self::U32 | Self::F32 => 4,
            Self::I64 | Self::U64 | Self::F64 => 8,
        }
    }

    /// How elements travel in a long operation; `of_floats` is what a caller asks for.
    pub fn width(self, of_floats: Option<Width>) -> Width {
        match self {
            Self::F16 | Self::Bf16 => of_floats.unwrap_or(Width::Half),
            Self::F32 => of_floats.unwrap_or(Width::Full),
            _ => Width::Full,
        }
    }

    pub const fn code(self) -> u32 {
        match self {
            Self::I32 => 1,
            Self::F32 => 2,
            Self::F16 => 3,
            Self::Bf16 => 4,
            Self::I8 => 5,
            Self::U8 => 6,
            Self::I16 => 7,
            Self::U16 => 8,
            Self::U32 => 9,
            Self::I64 => 10,
            Self::U64 => 11,
            Self::F64 => 12,
            Self::Bool => 13,
        }
    }

    pub fn of_code(code: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|dtype| dtype.code() == code)
    }
}

impl std::fmt::Display for Dtype {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// A type whose slices can be reduced: integers of 8 to 64 bits, `f16`, `bf16`, `f32`, `f64`,
/// `bool` and [`Bool8`](super::number::Bool8).
///
/// Sums of types that the hidden methods here do not turn into lanes, and all other operations,
/// use [`operators`](super::operators), as [`encoding`](super::operators::encoding) says.
pub trait Element: Number + Send + Sync + std::fmt::Debug + PartialEq + 'static {
    /// The data type.
    const DTYPE: Dtype;

    /// The largest exponents of floats.
    #[doc(hidden)]
    fn exponents(_: &[Self]) -> Exponents {
        Exponents::default()
    }

    /// Writes the elements as lanes. Floats need a format; without one the lanes are zero.
    #[doc(hidden)]
    fn to_lanes(_: &[Self], _: Option<Format<'_>>, out: &mut [u8]) {
        out.fill(0);
    }

    /// Counts nonzero elements that become 0.
    #[doc(hidden)]
    fn underflow(_: &[Self], _: Format<'_>) -> Underflow {
        Underflow::default()
    }

    /// Reads elements from summed lanes, divided by `by`. Floats need a format; without one they
    /// become NaN. Integers are not divided.
    #[doc(hidden)]
    fn from_lanes(_: &[u8], _: Option<Format<'_>>, _: u32, _: &mut [Self]) {}
}

/// Integers of at most a lane.
macro_rules! integers {
    ($($type:ty = $dtype:ident),*) => {$(
        impl Element for $type {
            const DTYPE: Dtype = Dtype::$dtype;

            fn to_lanes(x: &[Self], _: Option<Format<'_>>, out: &mut [u8]) {
                for (x, out) in x.iter().zip(out.as_chunks_mut::<4>().0) {
                    *out = (*x as u32).to_le_bytes();
                }
            }

            fn from_lanes(sums: &[u8], _: Option<Format<'_>>, _: u32, out: &mut [Self]) {
                for (sum, out) in sums.as_chunks::<4>().0.iter().zip(out) {
                    *out = u32::from_le_bytes(*sum) as Self;
                }
            }
        }
    )*};
}

integers!(i8 = I8, u8 = U8, i16 = I16, u16 = U16, i32 = I32, u32 = U32);

macro_rules! others {
    ($($type:ty = $dtype:ident),*) => {$(
        impl Element for $type {
            const DTYPE: Dtype = Dtype::$dtype;
        }
    )*};
}

others!(i64 = I64, u64 = U64, f64 = F64, bool = Bool, Bool8 = Bool);

impl Element for f32 {
    const DTYPE: Dtype = Dtype::F32;

    fn exponents(x: &[Self]) -> Exponents {
        quant::exponents(x)
    }

    fn to_lanes(x: &[Self], format: Option<Format<'_>>, out: &mut [u8]) {
        match format {
            Some(format) => format.write(x, out),
            None => out.fill(0),
        }
    }

    fn underflow(x: &[Self], format: Format<'_>) -> Underflow {
        format.underflow(x)
    }

    fn from_lanes(sums: &[u8], format: Option<Format<'_>>, by: u32, out: &mut [Self]) {
        match format {
            Some(format) => format.read(sums, by, out),
            None => out.fill(f32::NAN),
        }
    }
}

/// The bytes of a range of elements among their lanes, and their format.
pub(super) fn part_of(
    range: Range<usize>,
    format: Option<Format<'_>>,
) -> (Range<usize>, Option<Format<'_>>) {
    let element = format.map_or(4, Format::bytes);
    let after = format.map(|format| format.after(range.start));
    (range.start * element..range.end * element, after)
}

/// A slice of any element type, from which the engine reads contributions and to which it writes
/// results.
#[expect(clippy::len_without_is_empty, reason = "nobody asks")]
pub trait Data {
    fn dtype(&self) -> Dtype;
    fn len(&self) -> usize;
    /// The type and number of the caller's elements, which all ranks compare. They differ from
    /// [`dtype`](Self::dtype) and [`len`](Self::len) if elements are encoded as lanes.
    fn elements(&self) -> (Dtype, usize) {
        (self.dtype(), self.len())
    }
    /// The caller's elements that are in some of the lanes.
    fn elements_in(&self, lanes: Range<usize>) -> Range<usize> {
        lanes
    }
    fn exponents(&self, range: Range<usize>) -> Exponents;
    /// Writes the counts for a block's largest exponent.
    fn write_exponent(&self, range: Range<usize>, counts: &mut [u8]) {
        write_exponent(self.exponents(range).largest, counts);
    }
    fn load(&self, range: Range<usize>, format: Option<Format<'_>>, out: &mut [u8]);
    /// Elements for which a format is too coarse.
    fn underflow(&self, range: Range<usize>, format: Format<'_>) -> Underflow;
    fn store(&mut self, range: Range<usize>, format: Option<Format<'_>>, sums: &[u8]);
    /// Whether it is a part of a longer operation: then its floats have scales for blocks, however
    /// few they are.
    fn is_part(&self) -> bool {
        false
    }
    /// Makes this rank's own data the result, for a job of one rank.
    fn keep_own(&mut self) {}
    /// The memory that it uses, if other operations may use it, too.
    fn memory(&self) -> Memory {
        Memory::default()
    }
}

/// A slice as [`Data`], borrowed or owned.
pub struct Slice<B>(pub B);

impl<T: Element, B: DerefMut<Target = [T]>> Data for Slice<B> {
    fn dtype(&self) -> Dtype {
        T::DTYPE
    }
    fn len(&self) -> usize {
        self.0.len()
    }
    fn exponents(&self, range: Range<usize>) -> Exponents {
        T::exponents(&self.0[range])
    }
    fn load(&self, range: Range<usize>, format: Option<Format<'_>>, out: &mut [u8]) {
        T::to_lanes(&self.0[range], format, out);
    }
    fn underflow(&self, range: Range<usize>, format: Format<'_>) -> Underflow {
        T::underflow(&self.0[range], format)
    }
    fn store(&mut self, range: Range<usize>, format: Option<Format<'_>>, sums: &[u8]) {
        T::from_lanes(sums, format, 1, &mut self.0[range]);
    }
    fn memory(&self) -> Memory {
        Memory::default().with(&self.0, true)
    }
}

/// Several slices as [`Data`]: their concatenation, without a copy of it.
pub struct Slices<S> {
    pub tensors: S,
    /// Where each ends in the concatenation.
    ends: Vec<usize>,
    /// 1, or for an average the number of ranks.
    pub divisor: u32,
}

impl<T, B: Deref<Target = [T]>, S: Deref<Target = [B]>> Slices<S> {
    pub fn new(tensors: S) -> Self {
        let ends = tensors.iter().scan(0, |end, tensor| {
            *end += tensor.len();
            Some(*end)
        });
        Self { ends: ends.collect(), tensors, divisor: 1 }
    }
}

impl<S> Slices<S> {
    /// The parts of a range of the concatenation: tensor, range in it, and where that lies in the
    /// range.
    pub(super) fn parts(
        &self,
        range: Range<usize>,
    ) -> impl Iterator<Item = (usize, Range<usize>, Range<usize>)> {
        parts(&self.ends, range)
    }

    /// The tensor that an element of the concatenation belongs to, and its place there.
    pub fn locate(&self, element: usize) -> (usize, usize) {
        let tensor = self.ends.partition_point(|end| *end <= element);
        (tensor, element - start(&self.ends, tensor))
    }
}

/// Floats that are widened at a time.
const WIDENED: usize = 256;

macro_rules! halves {
    ($($type:ty = $dtype:ident),*) => {$(
        impl Element for $type {
            const DTYPE: Dtype = Dtype::$dtype;

            fn exponents(x: &[Self]) -> Exponents {
                let all = x.chunks(WIDENED).map(|x| {
                    let mut wide = [0.0; WIDENED];
                    x.convert_to_f32_slice(&mut wide[..x.len()]);
                    quant::exponents(&wide[..x.len()])
                });
                all.reduce(Exponents::max).unwrap_or_default()
            }

            fn to_lanes(x: &[Self], format: Option<Format<'_>>, out: &mut [u8]) {
                let Some(format) = format else { return out.fill(0) };
                for (i, x) in x.chunks(WIDENED).enumerate() {
                    let mut wide = [0.0; WIDENED];
                    x.convert_to_f32_slice(&mut wide[..x.len()]);
                    let out = &mut out[i * WIDENED * format.bytes()..][..x.len() * format.bytes()];
                    format.after(i * WIDENED).write(&wide[..x.len()], out);
                }
            }

            fn underflow(x: &[Self], format: Format<'_>) -> Underflow {
                let mut all = Underflow::default();
                for (i, x) in x.chunks(WIDENED).enumerate() {
                    let mut wide = [0.0; WIDENED];
                    x.convert_to_f32_slice(&mut wide[..x.len()]);
                    all += format.after(i * WIDENED).underflow(&wide[..x.len()]);
                }
                all
            }

            fn from_lanes(sums: &[u8], format: Option<Format<'_>>, by: u32, out: &mut [Self]) {
                let Some(format) = format else { return out.fill(Self::NAN) };
                for (i, out) in out.chunks_mut(WIDENED).enumerate() {
                    let mut wide = [0.0; WIDENED];
                    let sums = &sums[i * WIDENED * format.bytes()..][..out.len() * format.bytes()];
                    format.after(i * WIDENED).read(sums, by, &mut wide[..out.len()]);
                    out.convert_from_f32_slice(&wide[..out.len()]);
                }
            }
        }
    )*};
}

halves!(f16 = F16, bf16 = Bf16);

/// Where a tensor starts in the concatenation.
fn start(ends: &[usize], tensor: usize) -> usize {
    tensor.checked_sub(1).map_or(0, |before| ends[before])
}

/// The parts of a range of the concatenation: tensor, range in it, and where that lies in the
/// range.
fn parts(
    ends: &[usize],
    range: Range<usize>,
) -> impl Iterator<Item = (usize, Range<usize>, Range<usize>)> {
    let first = ends.partition_point(|end| *end <= range.start);
    (first..ends.len()).map_while(move |tensor| {
        let (start, end) = (start(ends, tensor), ends[tensor]);
        let (from, to) = (range.start.max(start), range.end.min(end));
        (start < range.end).then(|| {
            let to = to.max(from);
            (tensor, from - start..to - start, from - range.start..to - range.start)
        })
    })
}

impl<T: Element, B: DerefMut<Target = [T]>, S: DerefMut<Target = [B]>> Data for Slices<S> {
    fn dtype(&self) -> Dtype {
        T::DTYPE
    }
    fn len(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }
    fn exponents(&self, range: Range<usize>) -> Exponents {
        let parts = parts(&self.ends, range);
        let of =
            |(tensor, part, _): (usize, Range<usize>, _)| T::exponents(&self.tensors[tensor][part]);
        parts.map(of).reduce(Exponents::max).unwrap_or_default()
    }
    fn load(&self, range: Range<usize>, format: Option<Format<'_>>, out: &mut [u8]) {
        for (tensor, part, at) in parts(&self.ends, range) {
            let (bytes, format) = part_of(at, format);
            T::to_lanes(&self.tensors[tensor][part], format, &mut out[bytes]);
        }
    }
    fn underflow(&self, range: Range<usize>, format: Format<'_>) -> Underflow {
        let mut all = Underflow::default();
        for (tensor, part, at) in parts(&self.ends, range) {
            all += T::underflow(&self.tensors[tensor][part], format.after(at.start));
        }
        all
    }
    fn store(&mut self, range: Range<usize>, format: Option<Format<'_>>, sums: &[u8]) {
        for (tensor, part, at) in parts(&self.ends, range) {
            let (bytes, format) = part_of(at, format);
            T::from_lanes(&sums[bytes], format, self.divisor, &mut self.tensors[tensor][part]);
        }
    }
    fn memory(&self) -> Memory {
        self.tensors.iter().fold(Memory::default(), |memory, tensor| memory.with(tensor, true))
    }
}

/// Data that the engine owns during an operation; the caller knows its type.
#[doc(hidden)]
pub trait OwnedData: Data + Any + Send {}

impl<D: Data + Any + Send> OwnedData for D {}

/// See [`OwnedData`].
#[doc(hidden)]
pub type Owned = Box<dyn OwnedData>;

/// Returns the data that was passed to the engine; `None` if it has another type.
pub fn into_data<D: Data + Any>(owned: Owned) -> Option<D> {
    (owned as Box<dyn Any>).downcast().ok().map(|data| *data)
}

impl std::fmt::Debug for dyn OwnedData {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.len(), self.dtype())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::block::{BLOCK, Blocks};
    use super::super::limbs::Limbs;
    use super::*;

    /// Cuts, some of them at the same place: empty tensors among them.
    fn cut<'a, T>(mut x: &'a mut [T], cuts: &[usize]) -> Vec<&'a mut [T]> {
        let mut tensors = Vec::new();
        for cut in cuts {
            let (tensor, rest) = x.split_at_mut((*cut).min(x.len()));
            tensors.push(tensor);
            x = rest;
        }
        tensors.push(x);
        tensors
    }

    proptest! {
        #[test]
        fn tensors_are_their_concatenation(
            bits in prop::collection::vec(any::<u32>(), 0..3000),
            cuts in prop::collection::vec(0usize..600, 0..12),
            (from, to) in (0usize..=3000, 0usize..=3000),
            bucket in 100u8..160,
            limbs in 0u8..4,
        ) {
            let mut whole: Vec<f32> = bits.iter().map(|b| f32::from_bits(*b)).collect();
            let mut copy = whole.clone();
            let len = whole.len();
            let range = from.min(to).min(len)..from.max(to).min(len);
            let exponents = Exponents { largest: bucket, finite: bucket };
            let buckets = [bucket, bucket + 20, 255];
            prop_assert!(buckets.len() * BLOCK >= range.len());
            let format = match limbs {
                0 => Format::Blocks(Blocks::new(&buckets, Width::Half, 3)),
                1 => Format::Blocks(Blocks::new(&buckets, Width::Full, 3)),
                n => Format::Limbs(Limbs::new(n, exponents, 3)),
            };
            let bytes = range.len() * format.bytes();
            let mut tensors = cut(&mut copy, &cuts);
            let (mut one, mut many) = (Slice(&mut whole[..]), Slices::new(&mut tensors[..]));
            prop_assert_eq!(one.len(), many.len());
            prop_assert_eq!(one.exponents(range.clone()), many.exponents(range.clone()));
            let underflow = one.underflow(range.clone(), format);
            prop_assert_eq!(underflow, many.underflow(range.clone(), format));
            let (mut a, mut b) = (vec![7; bytes], vec![9; bytes]);
            one.load(range.clone(), Some(format), &mut a);
            many.load(range.clone(), Some(format), &mut b);
            prop_assert_eq!(&a, &b);
            let sums: Vec<u8> = (0..bytes).map(|i| (i * 89) as u8).collect();
            one.store(range.clone(), Some(format), &sums);
            many.store(range, Some(format), &sums);
            for i in 0..len {
                let (tensor, element) = many.locate(i);
                prop_assert_eq!(many.tensors[tensor][element].to_bits(), one.0[i].to_bits());
            }
        }
    }
}
