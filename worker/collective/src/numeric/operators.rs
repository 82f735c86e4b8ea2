//! Operations that are not sums of lanes by themselves, as sums of lanes: ranks contribute lanes
//! from whose sum each computes the same result. [`encoding`] decides how.
//!
//! Elements are encoded in *groups* with a fixed number of elements and lanes. A group may begin in
//! one message and end in a later one. Its elements are replaced only once the sums of all its
//! lanes are known. So no message that may still be built, loses an element of this rank.

use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut, Range};

use super::collectives::{Reduce, Scatter};
use super::element::{Data, Dtype, Element, Slices};
use super::format::Format;
use super::memory::Memory;
use super::number::Number;
use super::quant::{Exponents, Underflow};
use crate::call::Op;

/// How elements become lanes whose sums have the result.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Encoding {
    /// An element is a lane; floats have scales.
    Lanes,
    /// Two elements of 8 bits are a lane.
    Halves,
    /// An element is several lanes of 22 bits, of which the last has the rest.
    Limbs,
    /// Each bit of an element is a field that counts the ranks which have set it.
    Bits,
    /// Each rank's elements have lanes of their own, and each rank combines the values of all, in
    /// the order of ranks.
    Gather,
}

/// How an operation on a type is encoded; `None` if there is no such operation. Nothing else
/// decides it.
pub const fn encoding(dtype: Dtype, op: Op) -> Option<Encoding> {
    use Dtype::*;
    use Op::*;
    match (dtype, op) {
        (I16 | U16 | I32 | U32, Sum) | (F16 | Bf16 | F32, Sum | Average) => Some(Encoding::Lanes),
        (I8 | U8, Sum) => Some(Encoding::Halves),
        (I64 | U64, Sum) => Some(Encoding::Limbs),
        (F64, Sum | Average) => Some(Encoding::Gather),
        (F16 | Bf16 | F32 | F64, BitAnd | BitOr | BitXor) => None,
        (_, Average) => None,
        (Bool, _) | (_, BitAnd | BitOr | BitXor) => Some(Encoding::Bits),
        (_, Min | Max | Product) => Some(Encoding::Gather),
    }
}

/// The error's text where there is no such operation.
pub fn unsupported(dtype: Dtype, op: Op) -> String {
    let types = match op {
        Op::Average => "floats have an average",
        _ => "integers and bool have bitwise operations",
    };
    format!("{op} of {dtype}: only {types}")
}

/// Bytes of the lanes of the longest group: 64-bit elements of 64 ranks.
const GROUP_BYTES: usize = 512;
const LIMB_BITS: usize = 22;
/// Elements that are converted at once, unless a group has more.
const BATCH: usize = 64;

/// The code of an operation on elements of a type.
#[derive(Clone, Copy, Debug)]
pub struct Code {
    encoding: Encoding,
    op: Op,
    bits: usize,
    rank: usize,
    ranks: usize,
}

impl Code {
    /// `None` for [`Encoding::Lanes`], which needs no code. In [sealed](crate::seal) sums
    /// elements of 32 bits are two lanes, because tags add up only where lanes do not wrap.
    ///
    /// # Errors
    /// A text, where there is no such operation.
    pub fn new<T: Element>(
        op: Op,
        rank: u32,
        ranks: u32,
        is_sealed: bool,
    ) -> Result<Option<Self>, String> {
        let encoding = match encoding(T::DTYPE, op).ok_or_else(|| unsupported(T::DTYPE, op))? {
            Encoding::Lanes if is_sealed && matches!(T::DTYPE, Dtype::I32 | Dtype::U32) => {
                Encoding::Limbs
            }
            encoding => encoding,
        };
        let (bits, rank, ranks) = (T::BITS as usize, rank as usize, ranks as usize);
        let code = Self { encoding, op, bits, rank, ranks };
        Ok((encoding != Encoding::Lanes).then_some(code))
    }

    /// Bits of a field that counts ranks.
    fn width(&self) -> usize {
        (usize::BITS - self.ranks.leading_zeros()) as usize
    }

    /// Elements and lanes of a group.
    fn group(&self) -> (usize, usize) {
        match self.encoding {
            Encoding::Lanes => (1, 1),
            Encoding::Halves => (2, 1),
            Encoding::Limbs => (1, self.bits.div_ceil(LIMB_BITS)),
            // The highest bit stays free: lanes are not negative.
            Encoding::Bits => (31 / self.width(), self.bits),
            Encoding::Gather => ((32 / self.bits).max(1), self.ranks * self.bits.div_ceil(32)),
        }
    }

    /// The number of lanes that `elements` take.
    pub fn lanes(&self, elements: usize) -> usize {
        let (size, lanes) = self.group();
        let rest = elements % size;
        elements / size * lanes
            + match self.encoding {
                _ if rest == 0 => 0,
                Encoding::Bits => (rest * self.bits).div_ceil(size),
                _ => lanes,
            }
    }

    /// Writes the lanes of whole groups, the last of which may be the shorter one at the end.
    fn encode<T: Number>(&self, x: &[T], out: &mut [u8]) {
        let (elements, lanes) = self.group();
        for (x, out) in x.chunks(elements).zip(out.chunks_mut(lanes * 4)) {
            let out = out.as_chunks_mut::<4>().0;
            match self.encoding {
                Encoding::Lanes | Encoding::Halves => {
                    let [low, high] = [0, 1].map(|i| x.get(i).map_or(0, |x| x.to_bits() as u32));
                    out[0] = (low | high << 16).to_le_bytes();
                }
                Encoding::Limbs => {
                    let bits = x[0].to_bits();
                    for (i, lane) in out.iter_mut().enumerate() {
                        let limb = (bits >> (LIMB_BITS * i)) as u32 & ((1 << LIMB_BITS) - 1);
                        *lane = limb.to_le_bytes();
                    }
                }
                Encoding::Bits => self.encode_bits(x, out),
                Encoding::Gather => {
                    let bits = |(i, x): (usize, &T)| x.to_bits() << (self.bits * i);
                    let word: u64 = x.iter().enumerate().map(bits).sum();
                    let own = lanes / self.ranks;
                    out.fill([0; 4]);
                    let place = &mut out[own * self.rank..][..own];
                    place.copy_from_slice(&word.to_le_bytes().as_chunks().0[..own]);
                }
            }
        }
    }

    fn encode_bits<T: Number>(&self, x: &[T], out: &mut [[u8; 4]]) {
        let (width, fields) = (self.width(), self.group().0);
        let mut out = out.iter_mut();
        let (mut lane, mut filled) = (0u32, 0);
        for x in x {
            let bits = x.to_bits();
            for bit in 0..self.bits {
                lane |= ((bits >> bit) as u32 & 1) << (filled * width);
                filled += 1;
                if filled == fields {
                    out.next().into_iter().for_each(|out| *out = lane.to_le_bytes());
                    (lane, filled) = (0, 0);
                }
            }
        }
        out.for_each(|out| *out = lane.to_le_bytes());
    }

    /// Reads the results of whole groups, as [`encode`](Self::encode) writes them.
    fn decode<T: Number>(&self, sums: &[u8], out: &mut [T]) {
        let (elements, lanes) = self.group();
        for (sums, out) in sums.chunks(lanes * 4).zip(out.chunks_mut(elements)) {
            let lane = |i: usize| u32::from_le_bytes(sums.as_chunks().0[i]);
            match self.encoding {
                Encoding::Lanes | Encoding::Halves => {
                    let sum = lane(0);
                    for (x, half) in out.iter_mut().zip([sum & 0xffff, sum >> 16]) {
                        *x = T::of_bits(half.into());
                    }
                }
                Encoding::Limbs => {
                    let limbs = (0..lanes).map(|i| u64::from(lane(i)) << (LIMB_BITS * i));
                    out.fill(T::of_bits(limbs.fold(0, u64::wrapping_add)));
                }
                Encoding::Bits => self.decode_bits(sums.as_chunks().0, out),
                Encoding::Gather => self.combine(sums, out),
            }
        }
    }

    fn decode_bits<T: Number>(&self, sums: &[[u8; 4]], out: &mut [T]) {
        let (width, fields) = (self.width(), self.group().0);
        let (ranks, mask) = (self.ranks as u32, u32::MAX >> (32 - width));
        let mut sums = sums.iter().map(|sum| u32::from_le_bytes(*sum));
        let (mut sum, mut left) = (0, 0);
        for x in out {
            let mut bits = 0;
            for bit in 0..self.bits {
                if left == 0 {
                    (sum, left) = (sums.next().unwrap_or(0), fields);
                }
                let count = sum & mask;
                let is_set = match self.op {
                    Op::BitAnd | Op::Min | Op::Product => count == ranks,
                    Op::BitXor => count % 2 == 1,
                    Op::BitOr | Op::Max | Op::Sum | Op::Average => count > 0,
                };
                bits |= u64::from(is_set) << bit;
                (sum, left) = (sum.checked_shr(width as u32).unwrap_or(0), left - 1);
            }
            *x = T::of_bits(bits);
        }
    }

    /// Combines the values of all ranks.
    fn combine<T: Number>(&self, sums: &[u8], out: &mut [T]) {
        let combined = match self.op {
            Op::Min => T::smaller,
            Op::Max => T::larger,
            Op::Product => T::multiply,
            _ => T::add,
        };
        let size = self.bits.div_ceil(8);
        for (i, x) in out.iter_mut().enumerate() {
            let values = sums.chunks_exact(sums.len() / self.ranks).map(|of_rank| {
                let mut bytes = [0; 8];
                bytes[..size].copy_from_slice(&of_rank[i * size..][..size]);
                T::of_bits(u64::from_le_bytes(bytes))
            });
            let result = values.reduce(combined).unwrap_or_default();
            *x = match self.op {
                Op::Average => result.divide(self.ranks as u32),
                _ => result,
            };
        }
    }
}

/// Where an operation's elements come from, and where its results go.
pub trait Elements: Data {
    type Element: Element;

    fn read(&self, from: usize, out: &mut [Self::Element]);
    fn write(&mut self, from: usize, results: &[Self::Element]);
}

impl<T: Element, B: DerefMut<Target = [T]>> Elements for Reduce<B> {
    type Element = T;

    fn read(&self, from: usize, out: &mut [T]) {
        out.copy_from_slice(&self.data[from..][..out.len()]);
    }
    fn write(&mut self, from: usize, results: &[T]) {
        if self.keeps {
            self.data[from..][..results.len()].copy_from_slice(results);
        }
    }
}

impl<T: Element, I: Deref<Target = [T]>, O: DerefMut<Target = [T]>> Elements for Scatter<I, O> {
    type Element = T;

    fn read(&self, from: usize, out: &mut [T]) {
        out.copy_from_slice(&self.input[from..][..out.len()]);
    }
    fn write(&mut self, from: usize, results: &[T]) {
        let first = from.max(self.start);
        let end = (from + results.len()).min(self.start + self.output.len());
        if first < end {
            let place = first - self.start..end - self.start;
            self.output[place].copy_from_slice(&results[first - from..end - from]);
        }
    }
}

impl<T: Element, B: DerefMut<Target = [T]>, S: DerefMut<Target = [B]>> Elements for Slices<S> {
    type Element = T;

    fn read(&self, from: usize, out: &mut [T]) {
        for (tensor, part, at) in self.parts(from..from + out.len()) {
            out[at].copy_from_slice(&self.tensors[tensor][part]);
        }
    }
    fn write(&mut self, from: usize, results: &[T]) {
        let parts: Vec<_> = self.parts(from..from + results.len()).collect();
        for (tensor, part, at) in parts {
            self.tensors[tensor][part].copy_from_slice(&results[at]);
        }
    }
}

/// Lanes of a group whose sums are not all known.
#[derive(Clone, Debug)]
struct Partial {
    sums: Vec<u8>,
    missing: usize,
}

/// A reduction with any operator.
#[derive(Clone, Debug)]
pub struct Reduction<E> {
    pub elements: E,
    code: Option<Code>,
    /// By group.
    partial: BTreeMap<usize, Partial>,
}

/// Groups that lanes belong to.
struct Groups {
    first: usize,
    elements: Range<usize>,
    /// All their lanes.
    lanes: Range<usize>,
}

impl<E: Elements> Reduction<E> {
    /// Without a code the elements are lanes by themselves.
    pub fn new(elements: E, code: Option<Code>) -> Self {
        Self { elements, code, partial: BTreeMap::new() }
    }

    /// Whether the elements are lanes by themselves.
    pub fn is_plain(&self) -> bool {
        self.code.is_none()
    }

    /// The groups at the start of a range of lanes: as many as are whole in it, up to a batch, or
    /// one that is not.
    fn groups(&self, code: Code, range: &Range<usize>) -> Groups {
        let (size, lanes) = code.group();
        let (length, all) = (self.elements.len(), self.len());
        let first = range.start / lanes;
        let mut end = (range.end / lanes).min(first + (BATCH / size).max(1)).max(first + 1);
        if range.start > first * lanes {
            end = first + 1;
        }
        Groups {
            first,
            elements: first * size..(end * size).min(length),
            lanes: first * lanes..(end * lanes).min(all),
        }
    }
}

impl<E: Elements> Data for Reduction<E> {
    fn dtype(&self) -> Dtype {
        self.code.map_or_else(|| self.elements.dtype(), |_| Dtype::I32)
    }
    fn len(&self) -> usize {
        let elements = self.elements.len();
        self.code.map_or(elements, |code| code.lanes(elements))
    }
    fn elements(&self) -> (Dtype, usize) {
        (E::Element::DTYPE, self.elements.len())
    }
    fn elements_in(&self, lanes: Range<usize>) -> Range<usize> {
        let Some(code) = self.code else { return lanes };
        let (elements, of_group) = code.group();
        let end = lanes.end.div_ceil(of_group) * elements;
        lanes.start / of_group * elements..end.min(self.elements.len())
    }
    fn exponents(&self, range: Range<usize>) -> Exponents {
        self.elements.exponents(range)
    }
    fn load(&self, mut range: Range<usize>, format: Option<Format<'_>>, mut out: &mut [u8]) {
        let Some(code) = self.code else { return self.elements.load(range, format, out) };
        let mut buffer = [E::Element::default(); BATCH];
        while !range.is_empty() {
            let Groups { elements, lanes, .. } = self.groups(code, &range);
            let x = &mut buffer[..elements.len()];
            self.elements.read(elements.start, x);
            let end = lanes.end.min(range.end);
            let part;
            (part, out) = out.split_at_mut((end - range.start) * 4);
            if part.len() == lanes.len() * 4 {
                code.encode(x, part);
            } else {
                let mut group = [0; GROUP_BYTES];
                code.encode(x, &mut group[..lanes.len() * 4]);
                part.copy_from_slice(&group[(range.start - lanes.start) * 4..][..part.len()]);
            }
            range.start = end;
        }
    }
    fn underflow(&self, range: Range<usize>, format: Format<'_>) -> Underflow {
        self.elements.underflow(range, format)
    }
    fn store(&mut self, mut range: Range<usize>, format: Option<Format<'_>>, mut sums: &[u8]) {
        let Some(code) = self.code else { return self.elements.store(range, format, sums) };
        let mut buffer = [E::Element::default(); BATCH];
        while !range.is_empty() {
            let Groups { first, elements, lanes } = self.groups(code, &range);
            let results = &mut buffer[..elements.len()];
            let end = lanes.end.min(range.end);
            let part;
            (part, sums) = sums.split_at((end - range.start) * 4);
            if part.len() == lanes.len() * 4 {
                code.decode(part, results);
                self.elements.write(elements.start, results);
            } else {
                let bytes = lanes.len() * 4;
                let partial = self
                    .partial
                    .entry(first)
                    .or_insert_with(|| Partial { sums: vec![0; bytes], missing: bytes });
                partial.sums[(range.start - lanes.start) * 4..][..part.len()].copy_from_slice(part);
                partial.missing -= part.len();
                if partial.missing == 0 {
                    code.decode(&partial.sums, results);
                    self.partial.remove(&first);
                    self.elements.write(elements.start, results);
                }
            }
            range.start = end;
        }
    }
    fn keep_own(&mut self) {
        self.elements.keep_own();
    }
    fn memory(&self) -> Memory {
        self.elements.memory()
    }
}

#[cfg(test)]
mod tests;
