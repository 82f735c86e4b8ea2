//! Inputs that follow from rank and index: every rank can compute all ranks' results.

use std::ops::Range;

use netsum_worker::half::{bf16, f16};
use netsum_worker::numeric::number::Number;
use netsum_worker::{Element, Layout, Op, Reference, Width};

use crate::command::Kind;

/// An element type with known inputs.
pub trait Input: Element {
    /// Rank `rank`'s element `i`.
    fn input(rank: u32, i: u64) -> Self;
}

/// A pseudorandom number (splitmix64).
fn mix(rank: u32, i: u64) -> u64 {
    let mut z = (i << 6 | u64::from(rank)).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

macro_rules! integers {
    ($($type:ty),*) => {$(
        impl Input for $type {
            fn input(rank: u32, i: u64) -> Self {
                mix(rank, i) as Self
            }
        }
    )*};
}

integers!(i8, u8, i16, u16, i32, u32, i64, u64);

impl Input for bool {
    /// Mostly true.
    fn input(rank: u32, i: u64) -> Self {
        !mix(rank, i).is_multiple_of(8)
    }
}

impl Input for f64 {
    fn input(rank: u32, i: u64) -> Self {
        (mix(rank, i) >> 11) as Self / (1u64 << 52) as Self - 1.0
    }
}

impl Input for f32 {
    /// Between -1 and 1; much smaller in some stretches, which gives messages different scales.
    fn input(rank: u32, i: u64) -> Self {
        let x = (mix(rank, i) >> 40) as f32 / (1u32 << 23) as f32 - 1.0;
        if i >> 12 & 3 == 3 { x * 1e-6 } else { x }
    }
}

impl Input for f16 {
    fn input(rank: u32, i: u64) -> Self {
        Self::from_f32(f32::input(rank, i))
    }
}

impl Input for bf16 {
    fn input(rank: u32, i: u64) -> Self {
        Self::from_f32(f32::input(rank, i))
    }
}

/// A rank's elements, which are reduced.
pub fn elements<T: Input>(rank: u32, range: Range<usize>) -> Vec<T> {
    (range.start as u64..range.end as u64).map(|i| T::input(rank, i)).collect()
}

/// A rank's bytes, which other ranks get.
pub fn bytes(rank: u32, range: Range<usize>) -> Vec<u8> {
    let words = range.start as u64 / 8..range.end.div_ceil(8) as u64;
    let bytes = words.flat_map(|i| mix(rank, i).to_le_bytes());
    bytes.skip(range.start % 8).take(range.len()).collect()
}

/// An operation of one size, as one rank calls it.
#[derive(Clone, Copy)]
pub struct RankCall {
    pub kind: Kind,
    pub rank: u32,
    pub ranks: u32,
    pub op: Op,
    pub root: u32,
    pub layout: Layout,
    /// Of floats, if not their own.
    pub width: Option<Width>,
    /// Elements; of one rank's part, if the command has parts.
    pub count: usize,
}

impl RankCall {
    /// How many reduced elements differ from those of one process; `operation` is its number.
    pub fn wrong_elements<T: Input>(&self, operation: u64, result: &[T]) -> u64 {
        if self.kind == Kind::Reduce && self.rank != self.root {
            return differing(result, &elements(self.rank, 0..self.count));
        }
        let (length, start) = match self.kind {
            Kind::ReduceScatter => {
                (self.count * self.ranks as usize, self.count * self.rank as usize)
            }
            _ => (self.count, 0),
        };
        let reference = Reference::new(&self.layout);
        let message = self.layout.elements(T::DTYPE, T::DTYPE.width(self.width)).unwrap_or(1);
        // Some messages at a time, to save memory. The last ones are not a small operation, whose
        // floats have another format.
        let part = (1usize << 20).next_multiple_of(message);
        let parts = (length / part).max(1);
        let mut wrong = 0;
        for n in 0..parts {
            let range = n * part..if n + 1 == parts { length } else { (n + 1) * part };
            let own = range.start.max(start)..range.end.min(start + self.count);
            if own.is_empty() {
                continue;
            }
            let inputs: Vec<Vec<T>> =
                (0..self.ranks).map(|rank| elements(rank, range.clone())).collect();
            let inputs: Vec<&[T]> = inputs.iter().map(|v| &v[..]).collect();
            let Self { op, width, .. } = *self;
            let reference = Reference { op, width, operation, start: range.start, ..reference };
            let expected = reference.of(&inputs);
            wrong += differing(
                &result[own.start - start..own.end - start],
                &expected[own.start - range.start..own.end - range.start],
            );
        }
        wrong
    }

    /// How many copied elements differ from what their rank gave.
    pub fn wrong_bytes(&self, result: &[u8], element: usize) -> u64 {
        let size = self.count * element;
        let wrong = result.chunks(size).zip(0..).map(|(block, from)| {
            let expected = match self.kind {
                Kind::Broadcast => bytes(self.root, 0..size),
                Kind::AllGather => bytes(from, 0..size),
                _ => bytes(from, self.rank as usize * size..(self.rank as usize + 1) * size),
            };
            let pairs = block.chunks(element).zip(expected.chunks(element));
            pairs.filter(|(a, b)| a != b).count() as u64
        });
        wrong.sum()
    }
}

fn differing<T: Input>(result: &[T], expected: &[T]) -> u64 {
    result
        .iter()
        .zip(expected)
        .filter(|(a, b)| Number::to_bits(**a) != Number::to_bits(**b))
        .count() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYOUT: Layout = Layout { message_size: 1000, window: 1, rings: 1 };
    const RANKS: u32 = 3;

    fn call(kind: Kind, rank: u32, count: usize) -> RankCall {
        let (op, root, ranks) = (Op::Sum, 1, RANKS);
        RankCall { kind, rank, ranks, op, root, layout: LAYOUT, width: None, count }
    }

    fn reduced(op: Op, length: usize, layout: &Layout) -> Vec<f32> {
        let inputs: Vec<Vec<f32>> = (0..RANKS).map(|r| elements(r, 0..length)).collect();
        let inputs: Vec<&[f32]> = inputs.iter().map(|v| &v[..]).collect();
        Reference { op, ..Reference::new(layout) }.of(&inputs)
    }

    /// Finds no element of a right result wrong, and then one that is negated.
    fn check(call: &RankCall, mut right: Vec<f32>) {
        assert_eq!(right.len(), call.count);
        assert_eq!(call.wrong_elements(1, &right), 0, "{:?} at rank {}", call.kind, call.rank);
        let last = right.last_mut().unwrap();
        *last = -*last;
        assert_eq!(call.wrong_elements(1, &right), 1, "{:?} at rank {}", call.kind, call.rank);
    }

    #[test]
    fn a_wrong_element_of_a_reduction_is_counted_and_right_ones_are_not() {
        for (message_size, count) in [(1000, (1 << 20) + 5000), (1 << 16, 1_062_565), (1000, 7)] {
            let layout = Layout { message_size, ..LAYOUT };
            for op in [Op::Sum, Op::Average] {
                let sum = reduced(op, count, &layout);
                let all_reduce = RankCall { op, layout, ..call(Kind::AllReduce, 0, count) };
                check(&all_reduce, sum.clone());
                check(&RankCall { kind: Kind::Reduce, rank: 1, ..all_reduce }, sum);
                check(&RankCall { kind: Kind::Reduce, ..all_reduce }, elements(0, 0..count));
            }
        }
        for count in [3, 400_000] {
            let sum = reduced(Op::Sum, 3 * count, &LAYOUT);
            for (rank, part) in (0..RANKS).zip(sum.chunks(count)) {
                check(&call(Kind::ReduceScatter, rank, count), part.to_vec());
            }
        }
    }

    #[test]
    fn a_wrong_element_of_a_copy_is_counted_and_right_ones_are_not() {
        let (count, element) = (5, 4);
        let size = count * element;
        // Blocks of each rank's data, by the number of the block.
        let block = |from: u32, n: usize| {
            bytes(from, 0..RANKS as usize * size)[n * size..][..size].to_vec()
        };
        for rank in 0..RANKS {
            let n = rank as usize;
            for (kind, mut result) in [
                (Kind::Broadcast, block(1, 0)),
                (Kind::AllGather, (0..RANKS).flat_map(|from| block(from, 0)).collect()),
                (Kind::AllToAll, (0..RANKS).flat_map(|from| block(from, n)).collect::<Vec<u8>>()),
            ] {
                let call = call(kind, rank, count);
                assert_eq!(call.wrong_bytes(&result, element), 0, "{kind:?} at rank {rank}");
                let at = result.len() - 2;
                result[at] ^= 1;
                assert_eq!(call.wrong_bytes(&result, element), 1, "{kind:?} at rank {rank}");
                // What was there before the operation is wrong, too.
                let nothing = vec![0; result.len()];
                assert_eq!(call.wrong_bytes(&nothing, element), (result.len() / element) as u64);
            }
        }
        assert!(bytes(0, 0..size) != bytes(1, 0..size));
        assert_eq!(bytes(2, 3..21), bytes(2, 0..40)[3..21]);
    }
}
