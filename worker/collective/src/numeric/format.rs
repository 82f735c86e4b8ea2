//! How the floats of a message become lanes.

use super::limbs::Limbs;
use super::quant::{Scale, Underflow};

/// The format of a message's floats, the same at all ranks.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Format {
    /// One lane each, with one scale.
    Scaled(Scale),
    /// Several lanes each, for small operations.
    Limbs(Limbs),
}

impl Format {
    /// Lanes of an element.
    pub fn lanes(self) -> usize {
        match self {
            Self::Scaled(_) => 1,
            Self::Limbs(limbs) => limbs.lanes(),
        }
    }

    /// Writes elements as lanes, little-endian words.
    pub fn write(self, x: &[f32], out: &mut [u8]) {
        match self {
            Self::Scaled(scale) => scale.quantise(x, out),
            Self::Limbs(limbs) => limbs.write(x, out),
        }
    }

    /// Reads sums of lanes, divided by `by`, which is 1 to 64, and rounded once.
    pub fn read(self, sums: &[u8], by: u32, out: &mut [f32]) {
        match self {
            Self::Scaled(scale) if by == 1 => scale.restore(sums, out),
            Self::Scaled(scale) => scale.average(sums, by, out),
            Self::Limbs(limbs) => limbs.read(sums, by, out),
        }
    }

    /// Counts the elements that are not zero, and those of them that become 0.
    pub fn underflow(self, x: &[f32]) -> Underflow {
        match self {
            Self::Scaled(scale) => scale.underflow(x),
            Self::Limbs(limbs) => limbs.underflow(x),
        }
    }
}
