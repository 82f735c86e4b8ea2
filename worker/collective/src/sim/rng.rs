//! The source of randomness: a seed replays a case.

pub(super) use fastrand::Rng;

pub(super) trait Random {
    /// True `ppm` times in a million.
    fn chance(&mut self, ppm: u32) -> bool;

    /// One of several.
    fn pick<T: Copy>(&mut self, of: &[T]) -> T;
}

impl Random for Rng {
    fn chance(&mut self, ppm: u32) -> bool {
        ppm != 0 && self.u32(..1_000_000) < ppm
    }

    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.usize(..of.len())]
    }
}
