//! Block floating point: each [`BLOCK`] floats of a message share a scale, a power of two, the same
//! at all ranks.
//!
//! The scale follows from the largest exponent over all ranks' floats of that block. Ranks add
//! exponents up like everything else, as counts of eight bits (at most 64 ranks): of its upper five
//! bits, of its lower three, and of blocks with an infinity or a NaN. Eight sets of counts of lower
//! bits are kept, by the upper bits modulo 8, so that ranks whose floats are smaller by up to 2^56
//! do not disturb. Beyond that the scale may be too coarse by up to 2^7.
//!
//! Floats in 16 bits are rounded stochastically (Gupta et al., "Deep Learning with Limited
//! Numerical Precision", ICML 2015): what is far below a block's largest float is kept on the
//! average, where rounding to the nearest would make it 0 in each step.

use std::ops::Range;
use std::str::FromStr;

use super::quant::{NON_FINITE, Scale, Underflow, mix};

/// Floats of a block; the last one of a message may be shorter.
pub const BLOCK: usize = 1024;

/// Lanes that a block's exponents take.
pub const EXPONENT_LANES: usize = 25;
pub const EXPONENT_BYTES: usize = EXPONENT_LANES * 4;

/// Values of the upper bits.
const UPPER: usize = 32;
/// Values of the lower bits.
const LOWER: usize = 8;
/// Sets of counts of lower bits.
const SETS: usize = 8;
/// Place of the count of ranks with an infinity or a NaN.
const NON_FINITE_COUNT: usize = UPPER + SETS * LOWER;

fn lower(upper: usize) -> Range<usize> {
    let start = UPPER + upper % SETS * LOWER;
    start..start + LOWER
}

/// One rank's counts for the largest biased exponent of its block.
pub fn write_exponent(bucket: u8, out: &mut [u8]) {
    out[..EXPONENT_BYTES].fill(0);
    if bucket == NON_FINITE {
        out[NON_FINITE_COUNT] = 1;
        return;
    }
    let (high, low) = (usize::from(bucket) / LOWER, usize::from(bucket) % LOWER);
    out[high] = 1;
    out[lower(high)][low] = 1;
}

/// The largest exponent of all ranks in summed counts, or a larger one.
pub fn read_exponent(counts: &[u8]) -> u8 {
    let highest = |counts: &[u8]| counts.iter().rposition(|count| *count != 0).unwrap_or(0);
    if counts[NON_FINITE_COUNT] != 0 {
        return NON_FINITE;
    }
    let high = highest(&counts[..UPPER]);
    ((high * LOWER + highest(&counts[lower(high)])) as u8).min(NON_FINITE - 1)
}

/// Whether summed counts are those of this many ranks, as far as their totals show it.
pub fn counts_all(counts: &[u8], ranks: u32) -> bool {
    let total = |of: &[u8]| of.iter().map(|count| u32::from(*count)).sum::<u32>();
    let of_each = [&counts[..UPPER], &counts[UPPER..NON_FINITE_COUNT]];
    of_each.iter().all(|of| total(of) + u32::from(counts[NON_FINITE_COUNT]) == ranks)
}

/// Bits of a float in a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash)]
pub enum Width {
    /// A lane.
    #[default]
    Full,
    /// Half a lane. A field is the integer plus 2^(15 - ceil(log2 N)), so it is positive, and N of
    /// them do not carry into the other half.
    Half,
}

impl FromStr for Width {
    type Err = String;

    /// Reads `32bit` or `16bit`.
    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "32bit" => Ok(Self::Full),
            "16bit" => Ok(Self::Half),
            _ => Err("must be 32bit or 16bit".to_owned()),
        }
    }
}

impl Width {
    pub const fn bytes(self) -> usize {
        match self {
            Self::Full => 4,
            Self::Half => 2,
        }
    }
}

/// The format of a message's floats, or of those behind its first ones.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Blocks<'a> {
    /// The largest biased exponent of each of the message's blocks; [`NON_FINITE`] for an infinity
    /// or a NaN.
    buckets: &'a [u8],
    width: Width,
    ranks: u32,
    /// Floats of the message that lie before.
    skipped: usize,
    /// Of the random numbers that round halves.
    seed: u32,
}

impl<'a> Blocks<'a> {
    pub fn new(buckets: &'a [u8], width: Width, ranks: u32) -> Self {
        Self { buckets, width, ranks, skipped: 0, seed: 0 }
    }

    /// The format of what follows some floats.
    pub fn after(self, floats: usize) -> Self {
        Self { skipped: self.skipped + floats, ..self }
    }

    /// The format with which a rank writes its message that begins at element `start` of an
    /// operation. Halves are rounded stochastically: each rank rounds each element of each
    /// operation by another number, the same in every run.
    pub fn of_rank(self, rank: u32, operation: u64, start: usize) -> Self {
        let seed = mix(mix(mix(rank) ^ operation as u32) ^ start as u32);
        Self { seed, ..self }
    }

    /// The format of one of the ranks whose floats a rank writes as one message. Source 0 has that
    /// of a rank.
    pub fn of_source(self, source: u32) -> Self {
        Self { seed: self.seed ^ mix(source), ..self }
    }

    pub const fn bytes(self) -> usize {
        self.width.bytes()
    }

    /// The first block with an infinity or a NaN, as a range of the message's `len` floats.
    pub fn non_finite(self, len: usize) -> Option<Range<usize>> {
        let block = self.buckets.iter().position(|bucket| *bucket == NON_FINITE)?;
        Some(block * BLOCK..((block + 1) * BLOCK).min(len))
    }

    /// Cuts `len` floats by blocks, with the scale of each.
    fn parts(self, len: usize) -> impl Iterator<Item = (Option<Scale>, Range<usize>)> + use<'a> {
        let Self { buckets, width, ranks, skipped, .. } = self;
        (skipped / BLOCK..(skipped + len).div_ceil(BLOCK)).map(move |block| {
            let start = (block * BLOCK).max(skipped) - skipped;
            let end = ((block + 1) * BLOCK - skipped).min(len);
            let bucket = buckets.get(block).copied().unwrap_or(NON_FINITE);
            (Scale::new(bucket, ranks, width.bytes() as i32 * 8 - 1), start..end)
        })
    }

    /// Writes floats as lanes or halves of lanes, little-endian.
    pub fn write(self, x: &[f32], out: &mut [u8]) {
        for (scale, part) in self.parts(x.len()) {
            let out = &mut out[part.start * self.bytes()..part.end * self.bytes()];
            match (scale, self.width) {
                (None, _) => out.fill(0),
                (Some(scale), Width::Full) => scale.quantise(&x[part], out),
                (Some(scale), Width::Half) => {
                    let mut words = [0; BLOCK * 4];
                    let words = &mut words[..part.len() * 4];
                    let seed = self.seed.wrapping_add((self.skipped + part.start) as u32);
                    scale.quantise_stochastically(&x[part], seed, words);
                    let bias = scale.limit + 1;
                    for (out, word) in out.as_chunks_mut().0.iter_mut().zip(words.as_chunks().0) {
                        *out = ((i32::from_le_bytes(*word) + bias) as u16).to_le_bytes();
                    }
                }
            }
        }
    }

    /// Reads sums, divided by `by`, which is 1 to 64, and rounded once. Blocks with an infinity or
    /// a NaN become NaN.
    pub fn read(self, sums: &[u8], by: u32, out: &mut [f32]) {
        for (scale, part) in self.parts(out.len()) {
            let sums = &sums[part.start * self.bytes()..part.end * self.bytes()];
            let out = &mut out[part];
            let Some(scale) = scale else {
                out.fill(f32::NAN);
                continue;
            };
            let mut words = [0; BLOCK * 4];
            let sums = match self.width {
                Width::Full => sums,
                Width::Half => {
                    let words = &mut words[..out.len() * 4];
                    let bias = (scale.limit + 1) * self.ranks as i32;
                    for (word, sum) in words.as_chunks_mut().0.iter_mut().zip(sums.as_chunks().0) {
                        *word = (i32::from(u16::from_le_bytes(*sum)) - bias).to_le_bytes();
                    }
                    words
                }
            };
            match by {
                1 => scale.restore(sums, out),
                by => scale.average(sums, by, out),
            }
        }
    }

    /// Counts the finite floats that are not zero, and those of them that become 0. Halves are kept
    /// on the average, and not counted.
    pub fn underflow(self, x: &[f32]) -> Underflow {
        let mut all = Underflow::default();
        if self.width == Width::Half {
            return all;
        }
        for (scale, part) in self.parts(x.len()) {
            if let Some(scale) = scale {
                all += scale.underflow(&x[part]);
            }
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::quant::bucket;
    use super::super::reference::add_lanes;
    use super::*;

    fn agreed(buckets: impl IntoIterator<Item = u8>) -> u8 {
        let mut sum = [0; EXPONENT_BYTES];
        for bucket in buckets {
            let mut counts = [0xa5; EXPONENT_BYTES];
            write_exponent(bucket, &mut counts);
            add_lanes(&mut sum, &counts);
        }
        read_exponent(&sum)
    }

    #[test]
    fn no_infinity_is_read_where_none_was_written() {
        for other in 0..NON_FINITE {
            assert_eq!(agreed([254, other]), 254);
        }
        assert_eq!(agreed([0, NON_FINITE, 254]), NON_FINITE);
        assert_eq!(agreed([NON_FINITE; 64]), NON_FINITE);
    }

    /// As ranks and a box do it, from any place in a message.
    fn sum(ranks: &[Vec<f32>], width: Width, skipped: usize, by: u32) -> Vec<f32> {
        let len = ranks[0].len();
        let blocks = |x: &[f32]| x.chunks(BLOCK).map(bucket).collect::<Vec<_>>();
        let of_ranks: Vec<_> = ranks.iter().map(|x| blocks(x)).collect();
        let buckets: Vec<u8> = (0..len.div_ceil(BLOCK))
            .map(|block| agreed(of_ranks.iter().map(|buckets| buckets[block])))
            .collect();
        let format = Blocks::new(&buckets, width, ranks.len() as u32).after(skipped);
        let mut sums = vec![0; ((len - skipped) * width.bytes()).next_multiple_of(4)];
        for x in ranks {
            let mut lanes = vec![0; sums.len()];
            format.write(&x[skipped..], &mut lanes);
            add_lanes(&mut sums, &lanes);
        }
        let mut out = vec![7.0; len - skipped];
        format.read(&sums, by, &mut out);
        out
    }

    #[test]
    fn small_floats_of_other_blocks_are_kept() {
        let x: Vec<f32> = (0..3000).map(|i| [1e-1, 1e-10, 1e20][i / BLOCK]).collect();
        for width in [Width::Full, Width::Half] {
            let sums = sum(&vec![x.clone(); 4], width, 0, 4);
            let bound = if width == Width::Full { 1e-7 } else { 1.0 / 4096.0 };
            assert!(x.iter().zip(&sums).all(|(x, sum)| (sum / x - 1.0).abs() < bound), "{width:?}");
        }
    }

    #[test]
    fn a_nan_fills_its_block_alone() {
        let mut x = vec![1.5f32; 2500];
        x[1100] = f32::NEG_INFINITY;
        for width in [Width::Full, Width::Half] {
            let sums = sum(&[x.clone(), vec![1.5; 2500]], width, 0, 1);
            let is_nan = |i: usize| (BLOCK..2 * BLOCK).contains(&i);
            assert!(sums.iter().enumerate().all(|(i, sum)| sum.is_nan() == is_nan(i)));
            assert!(sums[2 * BLOCK..].iter().all(|sum| *sum == 3.0));
        }
    }

    /// Nearest rounding would make all but the first zero.
    #[test]
    fn small_halves_are_kept_on_the_average() {
        let mut x = vec![1e-5f32; BLOCK];
        x[0] = 1.0;
        let (buckets, operations) = ([bucket(&x)], 1000);
        let mut means = vec![0.0; BLOCK];
        let mut sums = vec![0.0; BLOCK];
        let mut lanes = vec![0; BLOCK * 2];
        for operation in 0..operations {
            let format = Blocks::new(&buckets, Width::Half, 1).of_rank(0, operation, 0);
            format.write(&x, &mut lanes);
            format.read(&lanes, 1, &mut sums);
            means.iter_mut().zip(&sums).for_each(|(mean, sum)| *mean += sum / operations as f32);
        }
        let all = means[1..].iter().sum::<f32>() / (BLOCK - 1) as f32;
        assert!((all / 1e-5 - 1.0).abs() < 0.02, "{all:e}");
        let counted = |width| Blocks::new(&buckets, width, 1).underflow(&x).zeroed;
        assert_eq!((counted(Width::Half), counted(Width::Full)), (0, 0));
        x[1] = 1e-12;
        let counted = |width| Blocks::new(&buckets, width, 1).underflow(&x).zeroed;
        assert_eq!((counted(Width::Half), counted(Width::Full)), (0, 1));
        // Steps of 2^-14: one of six elements of each operation, and of six operations of each.
        assert!(means[1..].iter().all(|mean| (mean / 1e-5 - 1.0).abs() < 0.4), "{means:?}");
    }

    /// Otherwise the errors of all ranks would add up.
    #[test]
    fn ranks_round_independently() {
        let (ranks, x) = (64u32, vec![0.3f32; BLOCK]);
        // Steps of 1.
        let buckets = [126 + 9];
        let mut sums = vec![0; BLOCK * 2];
        for rank in 0..ranks {
            let mut lanes = vec![0; BLOCK * 2];
            Blocks::new(&buckets, Width::Half, ranks).of_rank(rank, 1, 0).write(&x, &mut lanes);
            add_lanes(&mut sums, &lanes);
        }
        let mut out = vec![0.0; BLOCK];
        Blocks::new(&buckets, Width::Half, ranks).read(&sums, 1, &mut out);
        // A standard deviation is 3.7.
        assert!(out.iter().all(|sum| (sum - 19.2).abs() < 22.0), "{out:?}");
        let mean = out.iter().sum::<f32>() / BLOCK as f32;
        assert!((mean - 19.2).abs() < 0.7, "{mean}");
    }

    #[test]
    fn the_largest_halves_of_all_ranks_do_not_carry() {
        for ranks in [1, 2, 3, 4, 5, 33, 64] {
            for x in [f32::MAX, -f32::MAX, 1.999_999_9, f32::MIN_POSITIVE, f32::from_bits(1)] {
                let sums = sum(&vec![vec![x, -x, 0.0]; ranks], Width::Half, 0, ranks as u32);
                let step = x.abs().max(f32::MIN_POSITIVE)
                    / f32::from(1u16 << (14 - ranks.next_power_of_two().ilog2()));
                assert!((sums[0] - x).abs() <= step, "{ranks} ranks, {x:e}: {:e}", sums[0]);
                assert!((sums[1] + x).abs() <= step, "{ranks} ranks, {x:e}: {:e}", sums[1]);
                assert_eq!(sums[2], 0.0, "{ranks} ranks, {x:e}");
            }
        }
    }

    fn floats(len: usize) -> impl Strategy<Value = Vec<f32>> {
        (0i32..250, 1u32..60, any::<u32>()).prop_map(move |(top, spread, seed)| {
            let number = |i: u32| {
                let bits = (i ^ seed).wrapping_mul(0x9e37_79b9) ^ (i ^ seed) >> 7;
                let exponent = (top - (bits >> 9 & 0xff) as i32 % spread as i32).max(0);
                f32::from_bits(bits & 0x807f_ffff | (exponent as u32) << 23)
            };
            (0..len as u32).map(number).collect()
        })
    }

    proptest! {
        /// The largest exponent is never missed. It is exact where others are not far below.
        #[test]
        fn exponents_are_those_of_all_ranks(buckets in prop::collection::vec(0u8..255, 1..65)) {
            let largest = *buckets.iter().max().unwrap();
            let agreed = agreed(buckets.iter().copied());
            prop_assert!(agreed >= largest && agreed - largest < 8);
            let is_near = |bucket: &u8| {
                largest - bucket <= 56 || !(largest / 8 - bucket / 8).is_multiple_of(8)
            };
            if buckets.iter().all(is_near) {
                prop_assert_eq!(agreed, largest);
            }
        }

        /// Sums err by half a step for each rank, of the block's own scale, and by the last
        /// rounding; also behind any first part of a message.
        #[test]
        fn the_error_is_bounded_by_the_blocks_largest(
            ranks in prop::collection::vec(floats(2100), 1..6),
            half in any::<bool>(),
            skipped in 0usize..2100,
        ) {
            let width = if half { Width::Half } else { Width::Full };
            let sums = sum(&ranks, width, skipped, 1);
            let whole = sum(&ranks, width, 0, 1);
            prop_assert_eq!(
                sums.iter().map(|x| x.to_bits()).collect::<Vec<_>>(),
                whole[skipped..].iter().map(|x| x.to_bits()).collect::<Vec<_>>()
            );
            for (i, sum) in whole.iter().enumerate() {
                let block = i / BLOCK * BLOCK..((i / BLOCK + 1) * BLOCK).min(2100);
                let largest = agreed(ranks.iter().map(|x| bucket(&x[block.clone()])));
                let scale = Scale::new(largest, ranks.len() as u32, width.bytes() as i32 * 8 - 1);
                let step = scale.unwrap().inverse();
                let exact: f64 = ranks.iter().map(|x| f64::from(x[i])).sum();
                let bound = ranks.len() as f64 * step + f64::from(f32::EPSILON) * exact.abs()
                    + f64::from(f32::MIN_POSITIVE) * 1e-7;
                prop_assert!((f64::from(*sum) - exact).abs() <= bound, "{sum} {exact} {bound}");
            }
        }
    }
}
