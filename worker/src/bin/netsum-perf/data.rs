//! Inputs that follow from rank and index: every rank can compute all ranks' sum.

use netsum_worker::{Element, Layout, Width, reference_sum};

/// An element type with known inputs.
pub trait Input: Element {
    /// Rank `rank`'s element `i`.
    fn input(rank: u32, i: u64) -> Self;
    /// Whether two results have the same bits.
    fn same(self, other: Self) -> bool;
}

/// A pseudorandom number (splitmix64).
fn mix(rank: u32, i: u64) -> u64 {
    let mut z = (i << 6 | u64::from(rank)).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

impl Input for i32 {
    fn input(rank: u32, i: u64) -> Self {
        mix(rank, i) as i32
    }
    fn same(self, other: Self) -> bool {
        self == other
    }
}

impl Input for f32 {
    /// Between -1 and 1; much smaller in some stretches, which gives messages different scales.
    fn input(rank: u32, i: u64) -> Self {
        let x = (mix(rank, i) >> 40) as f32 / (1u32 << 23) as f32 - 1.0;
        if i >> 12 & 3 == 3 { x * 1e-6 } else { x }
    }
    fn same(self, other: Self) -> bool {
        self.to_bits() == other.to_bits()
    }
}

/// How many elements differ from the sum over all ranks' inputs.
pub fn wrong<T: Input>(result: &[T], ranks: u32, layout: &Layout) -> u64 {
    let message = layout.elements(T::DTYPE, Width::Full).unwrap_or(1);
    // Some messages at a time, to save memory. The last ones are not a small operation, whose floats
    // have another format.
    let part = (1usize << 20).next_multiple_of(message);
    let parts = (result.len() / part).max(1);
    let mut wrong = 0;
    for n in 0..parts {
        let end = if n + 1 == parts { result.len() } else { (n + 1) * part };
        let (start, result) = ((n * part) as u64, &result[n * part..end]);
        let inputs: Vec<Vec<T>> = (0..ranks)
            .map(|rank| (start..start + result.len() as u64).map(|i| T::input(rank, i)).collect())
            .collect();
        let inputs: Vec<&[T]> = inputs.iter().map(|v| &v[..]).collect();
        let expected = reference_sum(&inputs, layout);
        wrong += result.iter().zip(&expected).filter(|(a, b)| !a.same(**b)).count() as u64;
    }
    wrong
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_element_is_counted_and_right_ones_are_not() {
        for (message_size, length) in [(1000, (1 << 20) + 5000), (1 << 16, 1_062_565)] {
            let layout = Layout { message_size, window: 1, rings: 1 };
            let inputs: Vec<Vec<f32>> =
                (0..3).map(|r| (0..length).map(|i| f32::input(r, i)).collect()).collect();
            let inputs: Vec<&[f32]> = inputs.iter().map(|v| &v[..]).collect();
            let mut sum = reference_sum(&inputs, &layout);
            assert_eq!(wrong(&sum, 3, &layout), 0);
            sum[(1 << 20) + 77] = -sum[(1 << 20) + 77];
            assert_eq!(wrong(&sum, 3, &layout), 1);
        }
    }
}
