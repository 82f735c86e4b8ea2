//! Compares netsum's sums of floats, in 32 and in 16 bits, and sums of floats in rank order (as a
//! ring adds them), with exact sums: `cargo run --release -p netsum-collective --example accuracy`.
//! Prints the table of the book's page on limits.

use fastrand::Rng;
use netsum_collective::numeric::block::Width;
use netsum_collective::numeric::layout::Layout;
use netsum_collective::numeric::reference::Reference;

const LENGTH: usize = 1 << 16;
const RANKS: [usize; 3] = [4, 16, 64];
const LAYOUT: Layout = Layout { message_size: 64 << 10, window: 8, rings: 1 };

/// Box and Muller's.
fn normal(rng: &mut Rng) -> f64 {
    let (u, v) = (1.0 - rng.f64(), rng.f64());
    (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()
}

fn log_normal(rng: &mut Rng, sigma: f64) -> f64 {
    let magnitude = (sigma * normal(rng)).exp();
    if rng.bool() { magnitude } else { -magnitude }
}

/// An element of one rank.
type Distribution = fn(&mut Rng, usize) -> f64;

const DISTRIBUTIONS: [(&str, Distribution); 8] = [
    ("normal", |rng, _| normal(rng)),
    ("log-normal, sigma 1", |rng, _| log_normal(rng, 1.0)),
    ("log-normal, sigma 3", |rng, _| log_normal(rng, 3.0)),
    ("log-normal, sigma 5", |rng, _| log_normal(rng, 5.0)),
    ("768 of 0.1 (a layer norm), then 12,000 of 1e-10", |rng, i| {
        normal(rng) * if i % 12_768 < 768 { 0.1 } else { 1e-10 }
    }),
    ("1,024 of 0.1 in turn with 1,024 of 1e-10", |rng, i| {
        normal(rng) * if i / 1024 % 2 == 0 { 0.1 } else { 1e-10 }
    }),
    ("normal, every 16,384th times 1e8", |rng, i| {
        normal(rng) * if i % 16_384 == 0 { 1e8 } else { 1.0 }
    }),
    ("squares of log-normal, sigma 2", |rng, _| log_normal(rng, 2.0).powi(2)),
];

/// The nearest bfloat16, ties to even.
fn bf16(x: f32) -> f32 {
    let bits = x.to_bits();
    f32::from_bits((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff_0000)
}

/// In rank order, each partial sum rounded.
fn in_order(ranks: &[Vec<f32>], rounded: fn(f32) -> f32) -> Vec<f32> {
    let mut sum = vec![0.0; LENGTH];
    for x in ranks {
        sum.iter_mut().zip(x).for_each(|(sum, x)| *sum = rounded(*sum + rounded(*x)));
    }
    sum
}

/// The share of sums that are more than 1 % off, and of sums that are 0, in per cent.
fn errors(sum: &[f32], exact: &[f64]) -> String {
    let is_off =
        |(sum, exact): &(&f32, &f64)| (f64::from(**sum) - **exact).abs() > exact.abs() * 0.01;
    let off = sum.iter().zip(exact).filter(is_off).count();
    let zero = sum.iter().zip(exact).filter(|(sum, exact)| **sum == 0.0 && **exact != 0.0).count();
    let percent = |n: usize| match 100.0 * n as f64 / LENGTH as f64 {
        0.0 => "0".to_owned(),
        x if x < 0.1 => format!("{x:.3}"),
        x if x < 2.0 => format!("{x:.1}"),
        x => format!("{x:.0}"),
    };
    if zero == 0 { percent(off) } else { format!("{} ({})", percent(off), percent(zero)) }
}

fn main() {
    println!("| floats | ranks | 32 bits | 16 bits | f32 in order | bf16 in order |");
    println!("| --- | --- | --- | --- | --- | --- |");
    for (name, distribution) in DISTRIBUTIONS {
        for ranks in RANKS {
            let of_rank = |rank: usize| {
                let mut rng = Rng::with_seed(rank as u64);
                (0..LENGTH).map(|i| distribution(&mut rng, i) as f32).collect::<Vec<_>>()
            };
            let all: Vec<_> = (0..ranks).map(of_rank).collect();
            let parts: Vec<&[f32]> = all.iter().map(|x| &x[..]).collect();
            let exact: Vec<f64> =
                (0..LENGTH).map(|i| all.iter().map(|x| f64::from(x[i])).sum()).collect();
            let of = |width| Reference { width, ..Reference::new(&LAYOUT) }.of(&parts);
            println!(
                "| {name} | {ranks} | {} | {} | {} | {} |",
                errors(&of(Some(Width::Full)), &exact),
                errors(&of(Some(Width::Half)), &exact),
                errors(&in_order(&all, |x| x), &exact),
                errors(&in_order(&all, bf16), &exact),
            );
        }
    }
}
