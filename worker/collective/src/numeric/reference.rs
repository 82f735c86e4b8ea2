//! The result of an all-reduce, computed in one process.

use super::block::{EXPONENT_BYTES, Width, read_exponent, write_exponent};
use super::element::Element;
use super::format::Format;
use super::layout::{Layout, Plan};
use super::operators::{Encoding, encoding, unsupported};
use super::quant::Exponents;
use crate::call::Op;

/// An operation whose result is computed in one process, bit for bit: with the same formats and
/// rounding.
#[derive(Clone, Copy, Debug)]
pub struct Reference {
    pub op: Op,
    /// Of floats, if not their own.
    pub width: Option<Width>,
    /// The operation's number in its communicators, the first of which is 1: floats in 16 bits are
    /// rounded in each operation by other numbers.
    pub operation: u64,
    /// How many elements of the operation lie before the given ones: a multiple of a message's. Both
    /// together and the given ones alone are a long operation, or neither.
    pub start: usize,
    pub layout: Layout,
}

impl Reference {
    /// The sum over ranks with this layout.
    pub fn new(layout: &Layout) -> Self {
        let layout = Layout { rings: 1, ..*layout };
        Self { op: Op::Sum, width: None, operation: 1, start: 0, layout }
    }

    /// The result of all ranks' contributions, in the order of ranks. It matters only for `f64`,
    /// floats in 16 bits and products of floats.
    ///
    /// # Panics
    /// If there are no contributions, their lengths differ, the layout has no room for the type, or
    /// there is no such operation on it.
    pub fn of<T: Element>(&self, contributions: &[&[T]]) -> Vec<T> {
        let Self { op, operation, layout, .. } = *self;
        let width = T::DTYPE.width(self.width);
        let length = contributions.first().expect("at least one contribution").len();
        assert!(
            contributions.iter().all(|c| c.len() == length),
            "contributions of different lengths"
        );
        if encoding(T::DTYPE, op) != Some(Encoding::Lanes) {
            assert!(encoding(T::DTYPE, op).is_some(), "{}", unsupported(T::DTYPE, op));
            let of_all = |i: usize| in_order(op, contributions.iter().map(|c| c[i]));
            return (0..length).map(of_all).collect();
        }
        let plan =
            Plan::new(&layout, T::DTYPE, width, length).expect("a message has room for an element");
        let mut out = vec![T::default(); length];
        let (mut sums, mut one, mut buckets) = (Vec::new(), Vec::new(), Vec::new());
        let ranks = contributions.len() as u32;
        let divisor = if op == Op::Average { ranks } else { 1 };
        for i in 0..plan.data_messages(0) {
            let range = plan.range(0, i);
            let exponents = contributions.iter().map(|c| T::exponents(&c[range.clone()]));
            let exponents = exponents.reduce(Exponents::max).unwrap_or_default();
            buckets.clear();
            buckets.extend(plan.block_ranges(0, i).map(|block| {
                let mut counts = [0; EXPONENT_BYTES];
                for c in contributions {
                    let mut own = [0; EXPONENT_BYTES];
                    write_exponent(T::exponents(&c[block.clone()]).largest, &mut own);
                    add_lanes(&mut counts, &own);
                }
                read_exponent(&counts)
            }));
            let format = match plan.limb_format(exponents, ranks) {
                Some(limbs) => Some(Format::Limbs(limbs)),
                None => plan.block_format(&buckets, ranks).map(Format::Blocks),
            };
            let bytes = (range.len() * format.map_or(4, Format::bytes)).next_multiple_of(4);
            sums.clear();
            sums.resize(bytes, 0u8);
            one.clear();
            one.resize(bytes, 0u8);
            for (rank, c) in contributions.iter().enumerate() {
                let format =
                    format.map(|f| f.of_rank(rank as u32, operation, self.start + range.start));
                T::to_lanes(&c[range.clone()], format, &mut one);
                add_lanes(&mut sums, &one);
            }
            T::from_lanes(&sums, format, divisor, &mut out[range]);
        }
        out
    }
}

/// The result of `all_reduce`, bit for bit. In operations of up to 4,096 `f32`, infinities and NaNs
/// follow IEEE 754; in longer ones all floats of a block in which any rank has one are NaN.
///
/// # Panics
/// As [`Reference::of`].
pub fn reference_sum<T: Element>(contributions: &[&[T]], layout: &Layout) -> Vec<T> {
    Reference::new(layout).of(contributions)
}

/// The result for one element, of all ranks' in their order.
fn in_order<T: Element>(op: Op, values: impl ExactSizeIterator<Item = T>) -> T {
    let bits = |f: fn(u64, u64) -> u64| move |a: T, b: T| T::of_bits(f(a.to_bits(), b.to_bits()));
    let ranks = values.len() as u32;
    let result = match op {
        Op::Sum | Op::Average => values.reduce(T::add),
        Op::Min => values.reduce(T::smaller),
        Op::Max => values.reduce(T::larger),
        Op::Product => values.reduce(T::multiply),
        Op::BitAnd => values.reduce(bits(|a, b| a & b)),
        Op::BitOr => values.reduce(bits(|a, b| a | b)),
        Op::BitXor => values.reduce(bits(|a, b| a ^ b)),
    };
    let result = result.expect("at least one contribution");
    if op == Op::Average { result.divide(ranks) } else { result }
}

/// Adds lanes to lanes, little-endian words, wrapping.
pub fn add_lanes(sums: &mut [u8], lanes: &[u8]) {
    for (sum, lane) in sums.as_chunks_mut::<4>().0.iter_mut().zip(lanes.as_chunks::<4>().0) {
        *sum = u32::from_le_bytes(*sum).wrapping_add(u32::from_le_bytes(*lane)).to_le_bytes();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LAYOUT: Layout = Layout { message_size: 360, window: 2, rings: 1 };

    #[test]
    fn integers_wrap() {
        let sum = reference_sum(&[&[i32::MAX, -1, 7][..], &[1, -2, 8], &[0, 3, 9]], &LAYOUT);
        assert_eq!(sum, [i32::MIN, 0, 24]);
        assert_eq!(reference_sum(&[&[200u8, 1], &[100, 2]], &LAYOUT), [44, 3]);
        assert_eq!(reference_sum(&[&[0.1f64], &[1e-17]], &LAYOUT), [0.1 + 1e-17]);
    }

    #[test]
    fn small_integers_as_floats_are_exact() {
        let a: Vec<f32> = (0..1000).map(|i| i as f32).collect();
        let b: Vec<f32> = (0..1000).map(|i| -2.0 * i as f32).collect();
        let sum = reference_sum(&[&a, &b], &LAYOUT);
        assert!(sum.iter().enumerate().all(|(i, x)| *x == -(i as f32)));
    }

    #[test]
    fn zeros_stay_zeros() {
        assert_eq!(reference_sum(&[&[0.0f32, -0.0][..], &[-0.0, -0.0]], &LAYOUT), [0.0, 0.0]);
    }

    proptest! {
        #[test]
        fn the_order_of_contributions_does_not_matter(
            x in prop::collection::vec(prop::collection::vec(any::<f32>().prop_filter("finite", |x| x.is_finite()), 20), 2..9),
            seed in any::<u64>(),
        ) {
            let mut order: Vec<usize> = (0..x.len()).collect();
            order.sort_by_key(|i| (seed.rotate_left(*i as u32 * 7)).wrapping_mul(0x9e37_79b9_7f4a_7c15));
            let straight: Vec<&[f32]> = x.iter().map(|c| &c[..]).collect();
            let shuffled: Vec<&[f32]> = order.iter().map(|i| &x[*i][..]).collect();
            let bits = |v: Vec<f32>| v.into_iter().map(f32::to_bits).collect::<Vec<_>>();
            prop_assert_eq!(bits(reference_sum(&straight, &LAYOUT)), bits(reference_sum(&shuffled, &LAYOUT)));
        }
    }
}
