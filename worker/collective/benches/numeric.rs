//! Compares what a rank does to every byte of a message with a copy: `cargo xtask bench numeric`.
//! All data is in the second-level cache, as messages are.

use divan::counter::BytesCount;
use divan::{Bencher, black_box};
use netsum_collective::buffer::Buffer;
use netsum_collective::numeric::block::{BLOCK, Blocks, EXPONENT_BYTES, Width, write_exponent};
use netsum_collective::numeric::limbs::Limbs;
use netsum_collective::numeric::quant::{Scale, bucket, check_sums, exponents};
use netsum_collective::numeric::signs::Signs;
use netsum_collective::seal::{Exchange, GroupKey, Seal, Secret, Share, TAG_BYTES};
use zeroize::Zeroizing;

const LEN: usize = 64 << 10;

fn main() {
    divan::main();
}

fn floats() -> Vec<f32> {
    (0..LEN as u32 / 4).map(|i| (i.wrapping_mul(0x9e37_79b9) as i32) as f32 * 1e-12).collect()
}

fn scale(x: &[f32]) -> Scale {
    Scale::new(bucket(x), 4, 31).expect("all are finite")
}

#[divan::bench]
fn copy(b: Bencher<'_, '_>) {
    let (from, mut to) = (vec![7u8; LEN], vec![0u8; LEN]);
    b.counter(BytesCount::new(LEN))
        .bench_local(|| black_box(&mut to).copy_from_slice(black_box(&from)));
}

#[divan::bench]
fn largest_exponent(b: Bencher<'_, '_>) {
    let x = floats();
    b.counter(BytesCount::new(LEN)).bench_local(|| bucket(black_box(&x)));
}

#[divan::bench]
fn quantise(b: Bencher<'_, '_>) {
    let (x, mut out) = (floats(), vec![0; LEN]);
    let scale = scale(&x);
    b.counter(BytesCount::new(LEN))
        .bench_local(|| scale.quantise(black_box(&x), black_box(&mut out)));
}

/// As in a long operation: each block with a scale of its own, in 32 or 16 bits.
#[divan::bench(args = [Width::Full, Width::Half])]
fn write_blocks(b: Bencher<'_, '_>, width: Width) {
    let x = floats();
    let buckets: Vec<u8> = x.chunks(BLOCK).map(bucket).collect();
    let (blocks, mut out) = (Blocks::new(&buckets, width, 4), vec![0; LEN]);
    b.counter(BytesCount::new(LEN))
        .bench_local(|| blocks.write(black_box(&x), black_box(&mut out)));
}

#[divan::bench(args = [Width::Full, Width::Half])]
fn read_blocks(b: Bencher<'_, '_>, width: Width) {
    let mut x = floats();
    let buckets: Vec<u8> = x.chunks(BLOCK).map(bucket).collect();
    let (blocks, mut sums) = (Blocks::new(&buckets, width, 4), vec![0; LEN]);
    blocks.write(&x, &mut sums);
    b.counter(BytesCount::new(LEN))
        .bench_local(|| blocks.read(black_box(&sums), 1, black_box(&mut x)));
}

/// The exponents of all blocks, as counts.
#[divan::bench]
fn block_exponents(b: Bencher<'_, '_>) {
    let (x, mut out) = (floats(), vec![0; LEN / 4 / BLOCK * EXPONENT_BYTES]);
    b.counter(BytesCount::new(LEN)).bench_local(|| {
        for (x, out) in black_box(&x).chunks(BLOCK).zip(out.chunks_mut(EXPONENT_BYTES)) {
            write_exponent(bucket(x), out);
        }
        black_box(&out);
    });
}

/// As two limbs each, as in an operation of 4,096 floats.
#[divan::bench]
fn write_limbs(b: Bencher<'_, '_>) {
    let x = &floats()[..4096];
    let (limbs, mut out) = (Limbs::new(2, exponents(x), 4), vec![0; 4096 * 8]);
    b.counter(BytesCount::new(4096 * 4usize))
        .bench_local(|| limbs.write(black_box(x), black_box(&mut out)));
}

#[divan::bench(args = [1, 4])]
fn read_limbs(b: Bencher<'_, '_>, by: u32) {
    let x = &floats()[..4096];
    let (limbs, mut sums) = (Limbs::new(2, exponents(x), 4), vec![0; 4096 * 8]);
    limbs.write(x, &mut sums);
    let mut out = vec![0f32; 4096];
    b.counter(BytesCount::new(4096 * 4usize))
        .bench_local(|| limbs.read(black_box(&sums), by, black_box(&mut out)));
}

/// Floats that become 0.
#[divan::bench]
fn underflow(b: Bencher<'_, '_>) {
    let x = floats();
    let scale = scale(&x);
    b.counter(BytesCount::new(LEN)).bench_local(|| scale.underflow(black_box(&x)));
}

#[divan::bench]
fn restore(b: Bencher<'_, '_>) {
    let (mut x, mut lanes) = (floats(), vec![0; LEN]);
    let scale = scale(&x);
    scale.quantise(&x, &mut lanes);
    b.counter(BytesCount::new(LEN))
        .bench_local(|| scale.restore(black_box(&lanes), black_box(&mut x)));
}

/// Averages of three.
#[divan::bench]
fn average(b: Bencher<'_, '_>) {
    let (mut x, mut lanes) = (floats(), vec![0; LEN]);
    let scale = scale(&x);
    scale.quantise(&x, &mut lanes);
    b.counter(BytesCount::new(LEN))
        .bench_local(|| scale.average(black_box(&lanes), black_box(3), black_box(&mut x)));
}

#[divan::bench]
fn check_lanes(b: Bencher<'_, '_>) {
    let lanes: Vec<u8> =
        (0..LEN as u32).map(|i| (i.wrapping_mul(0x9e37_79b9) >> 24) as u8).collect();
    b.counter(BytesCount::new(LEN)).bench_local(|| check_sums(black_box(&lanes)));
}

#[divan::bench]
fn crc(b: Bencher<'_, '_>) {
    let bytes = vec![7u8; LEN];
    b.counter(BytesCount::new(LEN)).bench_local(|| crc32fast::hash(black_box(&bytes)));
}

/// As in packets of a path MTU.
#[divan::bench]
fn crc_of_packets(b: Bencher<'_, '_>) {
    let bytes = vec![7u8; LEN];
    let all = || black_box(&bytes).chunks(2048).map(crc32fast::hash).fold(0, |a, c| a ^ c);
    b.counter(BytesCount::new(LEN)).bench_local(all);
}

fn seal() -> Seal {
    let secret = Secret::new("a secret of benchmarks").expect("it is long enough");
    let share = Share::new(secret, &[], &Zeroizing::new([2; 64]));
    let exchange = Exchange::new(share, &[], 1);
    exchange.seal(
        &[[1; 32], [2; 32], [3; 32], [4; 32]],
        &GroupKey::new([5; 32]),
        (1, LEN + TAG_BYTES),
    )
}

/// Tag and two pads of a message, as at all ranks but the first.
#[divan::bench]
fn seal_message(b: Bencher<'_, '_>) {
    let (mut seal, mut message) = (seal(), Buffer::from(vec![7; LEN]));
    let mut number = 0;
    b.counter(BytesCount::new(LEN)).bench_local(|| {
        message.resize(LEN);
        seal.close((0, number), 0, (0, Signs::Signed), black_box(&mut message));
        number += 1;
    });
}

/// The pad of a sum, and its tag.
#[divan::bench]
fn open_sum(b: Bencher<'_, '_>) {
    let (seal, mut sum) = (seal(), vec![7; LEN + TAG_BYTES]);
    b.counter(BytesCount::new(LEN)).bench_local(|| {
        seal.open((0, 0), black_box(&mut sum));
        // One that is not refused by its size alone.
        let tag = &[0; TAG_BYTES];
        black_box(seal.is_right((0, 0), tag, &sum[..LEN], (0, Signs::Signed)))
    });
}
