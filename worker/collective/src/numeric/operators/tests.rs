use std::collections::VecDeque;

use half::{bf16, f16};
use proptest::prelude::*;

use super::*;
use crate::numeric::number::Bool8;

/// A job's messages: data message i goes to ring i mod `rings`, and each ring has `window` of them
/// in flight.
#[derive(Clone, Copy, Debug)]
struct Cut {
    step: usize,
    rings: usize,
    window: usize,
    /// Decides which ring goes on.
    order: u64,
}

/// Sums the ranks' lanes as the network does: messages of different rings overtake each other.
fn sum<E: Elements>(ranks: &mut [Reduction<E>], cut: Cut) {
    let len = ranks[0].len();
    let mut rings = vec![VecDeque::new(); cut.rings];
    for (i, start) in (0..len).step_by(cut.step).enumerate() {
        rings[i % cut.rings].push_back(start..(start + cut.step).min(len));
    }
    let mut flying = vec![VecDeque::new(); cut.rings];
    let mut order = cut.order;
    while rings.iter().any(|r| !r.is_empty()) || flying.iter().any(|f| !f.is_empty()) {
        order = order.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let ring = (order >> 33) as usize % cut.rings;
        while flying[ring].len() < cut.window {
            let Some(range) = rings[ring].pop_front() else { break };
            let mut sums = vec![0u32; range.len()];
            for rank in ranks.iter() {
                let mut lanes = vec![0xa5; range.len() * 4];
                rank.load(range.clone(), None, &mut lanes);
                for (sum, lane) in sums.iter_mut().zip(lanes.as_chunks().0) {
                    *sum = sum.wrapping_add(u32::from_le_bytes(*lane));
                }
            }
            flying[ring].push_back((range, sums));
        }
        if let Some((range, sums)) = flying[ring].pop_front() {
            let sums: Vec<u8> = sums.iter().flat_map(|sum| sum.to_le_bytes()).collect();
            ranks.iter_mut().for_each(|rank| rank.store(range.clone(), None, &sums));
        }
    }
    assert!(ranks.iter().all(|rank| rank.partial.is_empty()));
}

fn bits<T: Element>(x: &[T]) -> Vec<u64> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// All forms of an operation give `expected`.
fn check<T: Element>(op: Op, inputs: &[Vec<T>], expected: &[T], cut: Cut) {
    let ranks = inputs.len();
    let is_sealed = encoding(T::DTYPE, op) == Some(Encoding::Lanes);
    let code = |rank| Code::new::<T>(op, rank as u32, ranks as u32, is_sealed).unwrap();
    let name = format!("{op} of {}, {ranks} ranks, {cut:?}", T::DTYPE);
    assert!(code(0).is_some(), "{name}");
    let root = ranks / 2;
    let mut all: Vec<_> = (inputs.iter().enumerate())
        .map(|(rank, x)| {
            let elements = Reduce { data: x.clone(), keeps: rank != root, divisor: 1 };
            Reduction::new(elements, code(rank))
        })
        .collect();
    sum(&mut all, cut);
    for (rank, done) in all.iter().enumerate() {
        let right = if rank == root { &inputs[root] } else { expected };
        assert_eq!(bits(&done.elements.data), bits(right), "{name}: rank {rank}");
    }
    let part = expected.len() / ranks;
    let mut all: Vec<_> = (inputs.iter().enumerate())
        .map(|(rank, x)| {
            let (output, start) = (vec![T::default(); part], rank * part);
            let elements = Scatter { input: x.clone(), output, start, divisor: 1 };
            Reduction::new(elements, code(rank))
        })
        .collect();
    sum(&mut all, cut);
    for (rank, done) in all.iter().enumerate() {
        let right = &expected[rank * part..][..part];
        assert_eq!(bits(&done.elements.output), bits(right), "{name}: part {rank}");
    }
    let (first, second) = (expected.len() / 3, expected.len() / 2);
    let mut all: Vec<_> = (inputs.iter().enumerate())
        .map(|(rank, x)| {
            let tensors = vec![x[..first].to_vec(), x[first..second].to_vec(), x[second..].into()];
            Reduction::new(Slices::new(tensors), code(rank))
        })
        .collect();
    sum(&mut all, cut);
    for (rank, done) in all.iter().enumerate() {
        let tensors = done.elements.tensors.concat();
        assert_eq!(bits(&tensors), bits(expected), "{name}: tensors of rank {rank}");
    }
}

/// The elements of all ranks from random words, and the results by plain arithmetic.
fn fold<T: Element>(
    op: Op,
    (ranks, length): (usize, usize),
    words: &[u64],
    cut: Cut,
    of: impl Fn(u64) -> T,
    by: impl Fn(&[T]) -> T,
) {
    let input = |rank: usize| {
        let word = |i: usize| words[(rank * 31 + i * 7) % words.len()].rotate_left(i as u32);
        (0..length).map(|i| of(word(i))).collect::<Vec<T>>()
    };
    let inputs: Vec<_> = (0..ranks).map(input).collect();
    let column = |i: usize| inputs.iter().map(|x| x[i]).collect::<Vec<_>>();
    let expected: Vec<T> = (0..length).map(|i| by(&column(i))).collect();
    check(op, &inputs, &expected, cut);
}

macro_rules! integers {
    ($given:expr, $($type:ty),*) => {{
        let (size, words, cut) = $given;
        $({
            let of = |word: u64| word as $type;
            // Sealed where they are lanes otherwise.
            if encoding(<$type>::DTYPE, Op::Sum) != Some(Encoding::Lanes) || <$type>::BITS == 32 {
                let by = |x: &[$type]| x.iter().map(|x| *x as i128).sum::<i128>() as $type;
                fold(Op::Sum, size, words, cut, of, by);
            }
            fold(Op::Product, size, words, cut, of, |x| {
                x.iter().fold(1, |a: u64, b| a.wrapping_mul(*b as u64)) as $type
            });
            fold(Op::Min, size, words, cut, of, |x| *x.iter().min().unwrap());
            fold(Op::Max, size, words, cut, of, |x| *x.iter().max().unwrap());
            fold(Op::BitAnd, size, words, cut, of, |x| x.iter().fold(!0, |a, b| a & b));
            fold(Op::BitOr, size, words, cut, of, |x| x.iter().fold(0, |a, b| a | b));
            fold(Op::BitXor, size, words, cut, of, |x| x.iter().fold(0, |a, b| a ^ b));
        })*
    }};
}

macro_rules! floats {
    ($given:expr, $($type:ty),*) => {{
        let (size, words, cut) = $given;
        $({
            // Every eighth is special.
            let of = |word: u64| match word % 64 {
                0 => <$type>::NAN,
                1 => <$type>::INFINITY,
                2 => -<$type>::INFINITY,
                3 | 4 => 0.0,
                5 | 6 => -0.0,
                7 => <$type>::MAX,
                _ => (word as i64 >> 8) as $type / 1e12,
            };
            let plain = |x: $type| if x.is_nan() { <$type>::NAN } else { x };
            let extreme = |x: &[$type], sign: $type| {
                if x.iter().any(|x| x.is_nan()) {
                    return <$type>::NAN;
                }
                // Zeros of either sign compare as equal, and the later one wins.
                let mut x: Vec<_> = x.iter().map(|x| x * sign).collect();
                x.sort_by_key(|x| x.is_sign_positive());
                x.into_iter().reduce(|a, b| if b >= a { b } else { a }).unwrap() * sign
            };
            fold(Op::Product, size, words, cut, of, |x| {
                plain(x[1..].iter().fold(x[0], |a, b| plain(a * b)))
            });
            fold(Op::Min, size, words, cut, of, |x| extreme(x, -1.0));
            fold(Op::Max, size, words, cut, of, |x| extreme(x, 1.0));
            if <$type>::DTYPE == Dtype::F64 {
                let sum = |x: &[$type]| plain(x[1..].iter().fold(x[0], |a, b| plain(a + b)));
                fold(Op::Sum, size, words, cut, of, sum);
                let average = |x: &[$type]| plain(sum(x) / x.len() as $type);
                fold(Op::Average, size, words, cut, of, average);
            }
        })*
    }};
}

macro_rules! halves {
    ($given:expr, $($type:ty),*) => {{
        let (size, words, cut) = $given;
        $({
            let of = |word: u64| match word % 64 {
                0 => <$type>::NAN,
                1 => <$type>::INFINITY,
                _ => <$type>::from_f32((word as i64 >> 40) as f32 / 1e5),
            };
            let is_nan = |x: &[$type]| x.iter().any(|x| x.is_nan());
            let total = |a: &&$type, b: &&$type| a.total_cmp(b);
            let or_nan = |x: &[$type], other: Option<&$type>| {
                if is_nan(x) { <$type>::NAN } else { *other.unwrap() }
            };
            fold(Op::Min, size, words, cut, of, |x| or_nan(x, x.iter().min_by(total)));
            fold(Op::Max, size, words, cut, of, |x| or_nan(x, x.iter().max_by(total)));
            fold(Op::Product, size, words, cut, of, |x| {
                let times = |a: $type, b: &$type| {
                    let product = a.to_f32() * b.to_f32();
                    if product.is_nan() { <$type>::NAN } else { <$type>::from_f32(product) }
                };
                x[1..].iter().fold(x[0], times)
            });
        })*
    }};
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn every_rank_gets_the_result(
        (ranks, length) in (1usize..=64, 0usize..150),
        words in prop::collection::vec(any::<u64>(), 40..90),
        (step, rings, window, order) in (1usize..400, 1usize..4, 1usize..4, any::<u64>()),
    ) {
        let length = length.min(2000 / ranks);
        let given = ((ranks, length), &words[..], Cut { step, rings, window, order });
        integers!(given, i8, u8, i16, u16, i32, u32, i64, u64);
        floats!(given, f32, f64);
        halves!(given, f16, bf16);
        let (size, words, cut) = given;
        for op in [Op::Sum, Op::Max, Op::BitOr] {
            fold(op, size, words, cut, |word| word.is_multiple_of(3), |x| x.contains(&true));
        }
        for op in [Op::Product, Op::Min, Op::BitAnd] {
            fold(op, size, words, cut, |word| word % 8 > 0, |x| !x.contains(&false));
        }
        let odd = |x: &[bool]| x.iter().filter(|x| **x).count() % 2 == 1;
        fold(Op::BitXor, size, words, cut, |word| word.is_multiple_of(2), odd);
        let byte = |word: u64| Bool8(if word.is_multiple_of(3) { word as u8 | 2 } else { 0 });
        fold(Op::Sum, size, words, cut, byte, |x| Bool8(x.iter().any(|x| x.0 > 0).into()));
    }
}

#[test]
fn all_types_have_all_operations_that_suit_them() {
    for dtype in Dtype::ALL {
        let is_float = matches!(dtype, Dtype::F16 | Dtype::Bf16 | Dtype::F32 | Dtype::F64);
        for op in Op::ALL {
            let is_supported = match op {
                Op::Average => is_float,
                Op::BitAnd | Op::BitOr | Op::BitXor => !is_float,
                _ => true,
            };
            assert_eq!(encoding(dtype, op).is_some(), is_supported, "{op} of {dtype}");
        }
    }
    let text = Code::new::<i32>(Op::Average, 0, 2, false).unwrap_err();
    assert_eq!(text, "avg of i32: only floats have an average");
    let text = Code::new::<f64>(Op::BitXor, 0, 2, false).unwrap_err();
    assert_eq!(text, "bxor of f64: only integers and bool have bitwise operations");
}

#[test]
fn lanes_cost_what_the_book_says() {
    let lanes = |code: Option<Code>, n| code.map_or(n, |code| code.lanes(n));
    let code = |op| Code::new::<i32>(op, 0, 4, false).unwrap();
    assert_eq!(lanes(code(Op::Min), 1000), 4000);
    assert_eq!(lanes(code(Op::BitAnd), 1000), 3200);
    assert_eq!(lanes(Code::new::<u8>(Op::Sum, 0, 4, false).unwrap(), 1000), 500);
    assert_eq!(lanes(Code::new::<i64>(Op::Sum, 0, 4, false).unwrap(), 1000), 3000);
    assert_eq!(lanes(Code::new::<u8>(Op::Max, 0, 4, false).unwrap(), 1000), 1000);
    assert_eq!(lanes(Code::new::<bool>(Op::BitOr, 0, 4, false).unwrap(), 1000), 100);
    assert_eq!(lanes(Code::new::<f64>(Op::Sum, 0, 64, false).unwrap(), 1), 128);
}

/// A job of one rank leaves its data as it is, whatever bits it has.
#[test]
fn a_single_rank_keeps_its_own() {
    let data = vec![f64::from_bits(0x7ff8_0000_0000_0123), -0.0];
    let elements = Reduce { data: data.clone(), keeps: true, divisor: 1 };
    let mut one = Reduction::new(elements, Code::new::<f64>(Op::Min, 0, 1, false).unwrap());
    one.keep_own();
    assert_eq!(bits(&one.elements.data), bits(&data));
}
