//! Sums have the same bits, whatever an application has set in a thread's floating-point control
//! register.
#![cfg(target_arch = "x86_64")]

use half::f16;
use netsum_collective::call::Op;
use netsum_collective::numeric::block::Width;
use netsum_collective::numeric::layout::Layout;
use netsum_collective::numeric::number::Number;
use netsum_collective::numeric::quant::{Scale, bucket};
use netsum_collective::numeric::reference::{Reference, reference_sum};

const FLUSH_TO_ZERO: u32 = 1 << 15;
const DENORMALS_ARE_ZERO: u32 = 1 << 6;

/// Calls a function with these bits of MXCSR: rounding mode, and treatment of subnormal numbers.
fn with<T>(bits: u32, f: impl FnOnce() -> T) -> T {
    const MASK: u32 = 3 << 13 | FLUSH_TO_ZERO | DENORMALS_ARE_ZERO;
    let mut before = 0u32;
    // SAFETY: stores a register in memory of its size.
    unsafe { std::arch::asm!("stmxcsr [{}]", in(reg) &raw mut before) };
    let now = before & !MASK | bits;
    // SAFETY: exceptions stay masked, and what is read back is what was stored.
    unsafe { std::arch::asm!("ldmxcsr [{}]", in(reg) &raw const now) };
    let result = f();
    // SAFETY: as it was.
    unsafe { std::arch::asm!("ldmxcsr [{}]", in(reg) &raw const before) };
    result
}

/// All modes: to the nearest, down, up, towards zero, each with and without subnormal numbers.
fn modes() -> impl Iterator<Item = u32> {
    (0..16).map(|i| {
        (i & 3) << 13
            | if i & 4 != 0 { FLUSH_TO_ZERO } else { 0 }
            | if i & 8 != 0 { DENORMALS_ARE_ZERO } else { 0 }
    })
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// Elements of every magnitude: messages of one magnitude each, subnormal numbers in many.
fn elements(rank: u32) -> Vec<f32> {
    let mut state = 0x9e37_79b9u32.wrapping_mul(rank + 1);
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state
    };
    (0..20_000u32)
        .map(|i| {
            let top = i / 80;
            let exponent = top.saturating_sub(next() % 40).min(254);
            f32::from_bits(next() & 0x807f_ffff | exponent << 23)
        })
        .collect()
}

#[test]
fn results_do_not_depend_on_rounding_or_flush_to_zero() {
    let layout = Layout { message_size: 400, window: 2, rings: 1 };
    for ranks in [1, 2, 3, 8] {
        let all: Vec<_> = (0..ranks).map(elements).collect();
        let all: Vec<&[f32]> = all.iter().map(|x| &x[..]).collect();
        let right = bits(&reference_sum(&all, &layout));
        // The data has elements of each kind.
        let subnormal = right.iter().filter(|x| **x & 0x7f80_0000 == 0 && **x & 0x7f_ffff != 0);
        assert!(subnormal.count() > 100);
        for mode in modes() {
            let sum = bits(&with(mode, || reference_sum(&all, &layout)));
            let differs = sum.iter().zip(&right).position(|(a, b)| a != b);
            assert_eq!(differs, None, "{ranks} ranks, mode {mode:#x}");
        }
    }
}

#[test]
fn results_in_16_bits_do_not_depend_on_rounding_modes() {
    let layout = Layout { message_size: 8 << 10, window: 2, rings: 1 };
    let all: Vec<_> = (0..3).map(elements).collect();
    let all: Vec<&[f32]> = all.iter().map(|x| &x[..]).collect();
    let halves: Vec<Vec<f16>> =
        all.iter().map(|x| x.iter().map(|x| f16::from_f32(*x)).collect()).collect();
    let halves: Vec<&[f16]> = halves.iter().map(|x| &x[..]).collect();
    for op in [Op::Sum, Op::Average] {
        let reference = Reference { op, width: Some(Width::Half), ..Reference::new(&layout) };
        let results = || {
            let of_halves = reference.of(&halves).into_iter().map(|x| u32::from(x.to_bits()));
            (bits(&reference.of(&all)), of_halves.collect::<Vec<_>>())
        };
        let right = results();
        for mode in modes() {
            assert!(with(mode, results) == right, "{op}, mode {mode:#x}");
        }
    }
}

#[test]
fn results_of_operators_do_not_depend_on_rounding_or_flush_to_zero() {
    let x: Vec<f32> = elements(1);
    let x: Vec<f64> =
        x.iter().map(|x| f64::from_bits(u64::from(x.to_bits()) << 32 | 0x1234_5679)).collect();
    let all = || {
        x.windows(2).flat_map(|x| {
            let (a, b) = (x[0], x[1]);
            let singles = [a, b].map(|x| f32::from_bits((Number::to_bits(x) >> 32) as u32));
            let [c, d] = singles;
            let doubles = [a.add(b), a.multiply(b), a.divide(3), a.smaller(b)];
            let singles = [c.multiply(d), c.larger(d)].map(Number::to_bits);
            doubles.map(Number::to_bits).into_iter().chain(singles)
        })
    };
    let right: Vec<u64> = all().collect();
    for mode in modes() {
        assert!(with(mode, || all().eq(right.iter().copied())), "mode {mode:#x}");
    }
}

/// In the default mode, the result must be that of the processor's own conversion.
#[test]
fn restored_sums_are_rounded_as_the_processor_rounds() {
    for exponent in 0..=254u8 {
        for ranks in [1, 2, 64] {
            let scale = Scale::new(exponent, ranks, 31).expect("finite");
            let mut sums =
                vec![0, 1, -1, 3, i32::MAX, i32::MIN, i32::MIN + 1, 0x0100_0001, 0x0100_0003];
            sums.extend((0..200u32).map(|i| (i.wrapping_mul(0x9e37_79b9) as i32) >> (i % 31)));
            let bytes: Vec<u8> = sums.iter().flat_map(|x| x.to_le_bytes()).collect();
            let mut out = vec![0.0; sums.len()];
            scale.restore(&bytes, &mut out);
            let right: Vec<f32> =
                sums.iter().map(|x| (f64::from(*x) * scale.inverse()) as f32).collect();
            assert_eq!(bits(&out), bits(&right), "exponent {exponent}, {ranks} ranks");
        }
    }
    assert_eq!(bucket(&[f32::from_bits(1)]), 0);
}

/// The same for averages: in the default mode, the result must be that of the processor's own
/// division of a sum by a small number, to 53 bits.
#[test]
fn quotients_are_rounded_as_the_processor_rounds_in_every_mode() {
    let mut sums = vec![0, 1, -1, 3, i32::MAX, -i32::MAX, 0x0100_0001, 0x0100_0003];
    sums.extend(
        (0..400u32).map(|i| (i.wrapping_mul(0x9e37_79b9) as i32).max(-i32::MAX) >> (i % 31)),
    );
    // Halves, and their neighbours.
    sums.extend((0..200).map(|i| (1 << 24 | i) * 33));
    let bytes: Vec<u8> = sums.iter().flat_map(|x: &i32| x.to_le_bytes()).collect();
    for by in 2..=64 {
        for exponent in [0, 1, 2, 30, 127, 200, 253, 254] {
            let scale = Scale::new(exponent, by, 31).expect("finite");
            let quotient = |x: &i32| (f64::from(*x) / f64::from(by) * scale.inverse()) as f32;
            let right: Vec<f32> = sums.iter().map(quotient).collect();
            for mode in modes() {
                let mut out = vec![1.0; sums.len()];
                with(mode, || scale.average(&bytes, by, &mut out));
                let differs = bits(&out).iter().zip(bits(&right)).position(|(a, b)| *a != b);
                let shown = differs.map(|i| (sums[i], out[i], right[i]));
                assert_eq!(shown, None, "by {by}, exponent {exponent}, mode {mode:#x}");
            }
        }
    }
}
