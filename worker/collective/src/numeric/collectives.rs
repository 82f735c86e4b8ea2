//! Collectives other than the sum in place. Each is one sum: of elements whose result goes to other
//! memory, or of bytes to which one rank contributes its data and all others zeros.

use std::ops::{Deref, DerefMut, Range};

use super::element::{Data, Dtype, Element, part_of};
use super::format::Format;
use super::memory::Memory;
use super::quant::{Exponents, Underflow};

/// A sum or average in place, which this rank may discard.
#[derive(Clone, Debug)]
pub struct Reduce<B> {
    pub data: B,
    /// Whether this rank keeps the sum.
    pub keeps: bool,
    /// 1, or for an average the number of ranks.
    pub divisor: u32,
}

impl<T: Element, B: DerefMut<Target = [T]>> Data for Reduce<B> {
    fn dtype(&self) -> Dtype {
        T::DTYPE
    }
    fn len(&self) -> usize {
        self.data.len()
    }
    fn exponents(&self, range: Range<usize>) -> Exponents {
        T::exponents(&self.data[range])
    }
    fn load(&self, range: Range<usize>, format: Option<Format<'_>>, out: &mut [u8]) {
        T::to_lanes(&self.data[range], format, out);
    }
    fn underflow(&self, range: Range<usize>, format: Format<'_>) -> Underflow {
        T::underflow(&self.data[range], format)
    }
    fn store(&mut self, range: Range<usize>, format: Option<Format<'_>>, sums: &[u8]) {
        if self.keeps {
            T::from_lanes(sums, format, self.divisor, &mut self.data[range]);
        }
    }
    fn memory(&self) -> Memory {
        Memory::default().with(&self.data, true)
    }
}

/// A sum of which each rank keeps one part; all parts have the same length.
pub struct Scatter<I, O> {
    pub input: I,
    /// This rank's part.
    pub output: O,
    /// Where it begins.
    pub start: usize,
    /// As in [`Reduce`].
    pub divisor: u32,
}

impl<T: Element, I: Deref<Target = [T]>, O: DerefMut<Target = [T]>> Data for Scatter<I, O> {
    fn dtype(&self) -> Dtype {
        T::DTYPE
    }
    fn len(&self) -> usize {
        self.input.len()
    }
    fn exponents(&self, range: Range<usize>) -> Exponents {
        T::exponents(&self.input[range])
    }
    fn load(&self, range: Range<usize>, format: Option<Format<'_>>, out: &mut [u8]) {
        T::to_lanes(&self.input[range], format, out);
    }
    fn underflow(&self, range: Range<usize>, format: Format<'_>) -> Underflow {
        T::underflow(&self.input[range], format)
    }
    fn keep_own(&mut self) {
        let part = self.start..self.start + self.output.len();
        self.output.copy_from_slice(&self.input[part]);
    }
    fn store(&mut self, range: Range<usize>, format: Option<Format<'_>>, sums: &[u8]) {
        let part = self.start..self.start + self.output.len();
        let (from, to) = (range.start.max(part.start), range.end.min(part.end));
        if from < to {
            let (bytes, format) = part_of(from - range.start..to - range.start, format);
            let out = &mut self.output[from - part.start..to - part.start];
            T::from_lanes(&sums[bytes], format, self.divisor, out);
        }
    }
    fn memory(&self) -> Memory {
        let part = self.start..self.start + self.output.len();
        Memory::default().with_input(&self.input, part, &self.output).with(&self.output, true)
    }
}

/// The route of bytes between ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Route {
    /// One rank to all.
    Broadcast { root: usize },
    /// Each to all.
    AllGather,
    /// Each one block to each.
    AllToAll,
}

/// Blocks of bytes that move between ranks. Each is a whole number of lanes, the last of which may
/// be padded.
pub struct ByteBlocks<I, O> {
    /// This rank's data; empty for a broadcast, which is in place.
    pub input: I,
    pub output: O,
    pub route: Route,
    /// Bytes of a block.
    pub block: usize,
    pub rank: usize,
    pub ranks: usize,
}

impl<I: Deref<Target = [u8]>, O: DerefMut<Target = [u8]>> ByteBlocks<I, O> {
    fn lanes(&self) -> usize {
        self.block.div_ceil(4)
    }

    /// Where a block of this rank's data is.
    fn given(&self, block: usize) -> Option<&[u8]> {
        let of = |at: usize| at * self.block..(at + 1) * self.block;
        match self.route {
            Route::Broadcast { root } => (root == self.rank).then(|| &self.output[of(0)]),
            Route::AllGather => (block == self.rank).then(|| &self.input[of(0)]),
            Route::AllToAll => {
                (block / self.ranks == self.rank).then(|| &self.input[of(block % self.ranks)])
            }
        }
    }

    /// Where a block of the result goes.
    fn output_block(&mut self, block: usize) -> Option<&mut [u8]> {
        let size = self.block;
        let of = |at: usize| at * size..(at + 1) * size;
        match self.route {
            Route::Broadcast { root } => (root != self.rank).then(|| &mut self.output[of(0)]),
            Route::AllGather => Some(&mut self.output[of(block)]),
            Route::AllToAll => {
                (block % self.ranks == self.rank).then(|| &mut self.output[of(block / self.ranks)])
            }
        }
    }

    /// Splits a range of lanes by blocks: block, bytes in it, and their place in the range.
    fn parts(
        &self,
        range: Range<usize>,
    ) -> impl Iterator<Item = (usize, Range<usize>, Range<usize>)> + use<I, O> {
        let (lanes, size) = (self.lanes().max(1), self.block);
        (range.start / lanes..range.end.div_ceil(lanes)).map(move |block| {
            let start = block * lanes;
            let (from, to) = (range.start.max(start), range.end.min(start + lanes));
            let bytes = (from - start) * 4..((to - start) * 4).min(size);
            let at = (from - range.start) * 4;
            let place = at..at + bytes.len();
            (block, bytes, place)
        })
    }
}

impl<I: Deref<Target = [u8]>, O: DerefMut<Target = [u8]>> Data for ByteBlocks<I, O> {
    fn dtype(&self) -> Dtype {
        Dtype::I32
    }
    fn len(&self) -> usize {
        let blocks = match self.route {
            Route::Broadcast { .. } => 1,
            Route::AllGather => self.ranks,
            Route::AllToAll => self.ranks * self.ranks,
        };
        blocks * self.lanes()
    }
    fn exponents(&self, _: Range<usize>) -> Exponents {
        Exponents::default()
    }
    fn load(&self, range: Range<usize>, _: Option<Format<'_>>, out: &mut [u8]) {
        out.fill(0);
        for (block, bytes, place) in self.parts(range) {
            if let Some(given) = self.given(block) {
                out[place].copy_from_slice(&given[bytes]);
            }
        }
    }
    fn underflow(&self, _: Range<usize>, _: Format<'_>) -> Underflow {
        Underflow::default()
    }
    fn keep_own(&mut self) {
        let mut lanes = vec![0; self.len() * 4];
        self.load(0..self.len(), None, &mut lanes);
        self.store(0..self.len(), None, &lanes);
    }
    fn store(&mut self, range: Range<usize>, _: Option<Format<'_>>, sums: &[u8]) {
        for (block, bytes, place) in self.parts(range) {
            if let Some(block_out) = self.output_block(block) {
                block_out[bytes].copy_from_slice(&sums[place]);
            }
        }
    }
    fn memory(&self) -> Memory {
        let own = match self.route {
            Route::AllGather => self.rank * self.block..(self.rank + 1) * self.block,
            Route::Broadcast { .. } | Route::AllToAll => 0..0,
        };
        let input =
            Memory::default().with_input(&self.input, 0..self.input.len(), &self.output[own]);
        input.with(&self.output, true)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::block::{Blocks, Width};
    use super::super::reference::add_lanes;
    use super::*;

    /// Otherwise one rank refuses an operation that another one starts.
    #[test]
    fn all_ranks_find_the_same_collisions() {
        for rank in 0..2 {
            let sum = Reduce { data: vec![0.0f32; 4], keeps: rank == 0, divisor: 1 };
            assert!(sum.memory().collides(&sum.memory()), "reduce at rank {rank}");
            let route = Route::Broadcast { root: 0 };
            let moved =
                ByteBlocks { input: vec![], output: vec![0; 16], route, block: 16, rank, ranks: 2 };
            assert!(moved.memory().collides(&moved.memory()), "broadcast at rank {rank}");
        }
    }

    /// Also where the sum is beyond the largest float, or needs more bits than a float has.
    #[test]
    fn the_average_of_the_same_finite_float_is_that_float() {
        for ranks in 2..=64 {
            let x = [f32::MAX, -f32::MAX, 3e38, 1.0, 0.1, f32::MIN_POSITIVE, 0.0];
            for x in x.map(|x| [x]) {
                let buckets = [f32::exponents(&x).largest];
                let scale = Some(Format::Blocks(Blocks::new(&buckets, Width::Full, ranks)));
                let mut data = Reduce { data: x.to_vec(), keeps: true, divisor: ranks };
                let (mut lanes, mut sums) = ([0; 4], [0; 4]);
                data.load(0..1, scale, &mut lanes);
                (0..ranks).for_each(|_| add_lanes(&mut sums, &lanes));
                data.store(0..1, scale, &sums);
                assert_eq!(data.data, x, "{ranks} ranks");
            }
        }
    }

    /// Sums bytes as lanes, in ranges of any length.
    fn sum(ranks: &mut [ByteBlocks<Vec<u8>, Vec<u8>>], step: usize) {
        let len = ranks[0].len();
        for start in (0..len).step_by(step) {
            let range = start..(start + step).min(len);
            let mut total = vec![0u32; range.len()];
            for rank in ranks.iter() {
                let mut lanes = vec![0xa5; range.len() * 4];
                rank.load(range.clone(), None, &mut lanes);
                for (t, lane) in total.iter_mut().zip(lanes.as_chunks::<4>().0) {
                    *t = t.wrapping_add(u32::from_le_bytes(*lane));
                }
            }
            let sums: Vec<u8> = total.iter().flat_map(|t| t.to_le_bytes()).collect();
            ranks.iter_mut().for_each(|rank| rank.store(range.clone(), None, &sums));
        }
    }

    proptest! {
        #[test]
        fn bytes_arrive_where_they_belong(ranks in 1usize..5, block in 0usize..23, step in 1usize..9, root in 0usize..5) {
            let byte = |from: usize, to: usize, i: usize| (from * 71 + to * 37 + i * 3 + 200) as u8;
            let root = root % ranks;
            let make = |route| move |rank| {
                let (given, taken) = match route {
                    Route::Broadcast { .. } => (0, 1),
                    Route::AllGather => (1, ranks),
                    Route::AllToAll => (ranks, ranks),
                };
                let blocks = |n: usize| (0..n).flat_map(|to| (0..block).map(move |i| byte(rank, to, i)));
                let output = if matches!(route, Route::Broadcast { .. }) { blocks(1).collect() } else { vec![9; taken * block] };
                ByteBlocks { input: blocks(given).collect(), output, route, block, rank, ranks }
            };
            for route in [Route::Broadcast { root }, Route::AllGather, Route::AllToAll] {
                let mut all: Vec<_> = (0..ranks).map(make(route)).collect();
                sum(&mut all, step);
                for (rank, moved) in all.iter().enumerate() {
                    for (at, got) in moved.output.chunks(block.max(1)).enumerate() {
                        let (from, to) = match route {
                            Route::Broadcast { root } => (root, 0),
                            Route::AllGather => (at, 0),
                            Route::AllToAll => (at, rank),
                        };
                        let wanted: Vec<u8> = (0..block).map(|i| byte(from, to, i)).collect();
                        prop_assert_eq!(got, &wanted[..], "{:?} at rank {}", route, rank);
                    }
                }
            }
        }
    }
}
