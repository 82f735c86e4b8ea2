//! Data that ranks reduce in tests: computed from rank and seed, and so known to the test.

/// Lanes of a rank: arbitrary bits whose sums wrap.
pub fn ints(rank: u32, seed: u64, len: usize) -> Vec<i32> {
    let mut rng = generator(rank, seed);
    (0..len).map(|_| rng.i32(..)).collect()
}

/// Numbers of a rank that resemble gradients: both signs, magnitudes from 2^-12 to 2^4, some zeros.
pub fn floats(rank: u32, seed: u64, len: usize) -> Vec<f32> {
    let mut rng = generator(rank, seed);
    (0..len)
        .map(|_| {
            let bits = rng.u64(..);
            if bits.is_multiple_of(17) {
                return 0.0;
            }
            // A signed 25-bit integer times 2^-24 is within -1 to 1.
            let fraction = (bits >> 39) as i32 - (1 << 24);
            fraction as f32 * 2f32.powi(-24) * 2f32.powi((bits >> 8) as i32 % 17 - 12)
        })
        .collect()
}

fn generator(rank: u32, seed: u64) -> fastrand::Rng {
    fastrand::Rng::with_seed(seed ^ u64::from(rank) << 48)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_depends_on_rank_and_seed_and_on_nothing_else() {
        assert_eq!(ints(1, 2, 100), ints(1, 2, 100));
        assert_ne!(ints(1, 2, 100), ints(2, 2, 100));
        assert_ne!(ints(1, 2, 100), ints(1, 3, 100));
        let floats = floats(0, 0, 10_000);
        assert!(floats.iter().all(|x| x.is_finite() && x.abs() <= 32.0));
        assert!(floats.iter().any(|x| *x < -0.5) && floats.iter().any(|x| *x > 0.5));
        assert!(floats.contains(&0.0));
    }
}
