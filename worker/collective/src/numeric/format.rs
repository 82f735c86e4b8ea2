//! How the floats of a message become lanes.

use std::ops::Range;

use super::block::{Blocks, Width};
use super::limbs::Limbs;
use super::quant::Underflow;
use super::signs::Signs;

/// The format of a message's floats, the same at all ranks.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Format<'a> {
    /// A lane or half of one each, with a scale for each block.
    Blocks(Blocks<'a>),
    /// Several lanes each, for small operations.
    Limbs(Limbs),
}

impl Format<'_> {
    /// Bytes of an element.
    pub fn bytes(self) -> usize {
        match self {
            Self::Blocks(blocks) => blocks.bytes(),
            Self::Limbs(limbs) => limbs.lanes() * 4,
        }
    }

    /// Which lanes are signed.
    pub fn signs(self) -> Signs {
        match self {
            Self::Blocks(blocks) if blocks.bytes() == Width::Half.bytes() => Signs::Unsigned,
            Self::Blocks(_) => Signs::Signed,
            Self::Limbs(limbs) => limbs.signs(),
        }
    }

    /// The format of what follows a message's first elements.
    pub fn after(self, elements: usize) -> Self {
        match self {
            Self::Blocks(blocks) => Self::Blocks(blocks.after(elements)),
            Self::Limbs(_) => self,
        }
    }

    /// The format with which a rank writes its message that begins at element `start` of an
    /// operation.
    pub fn of_rank(self, rank: u32, operation: u64, start: usize) -> Self {
        match self {
            Self::Blocks(blocks) => Self::Blocks(blocks.of_rank(rank, operation, start)),
            Self::Limbs(_) => self,
        }
    }

    /// The format for one of several ranks whose elements a rank adds before it sends them: each
    /// rounds by other numbers.
    pub fn of_source(self, source: u32) -> Self {
        match self {
            Self::Blocks(blocks) => Self::Blocks(blocks.of_source(source)),
            Self::Limbs(_) => self,
        }
    }

    /// The first block of a message's `len` elements that has an infinity or a NaN and no room for
    /// them.
    pub fn non_finite(self, len: usize) -> Option<Range<usize>> {
        match self {
            Self::Blocks(blocks) => blocks.non_finite(len),
            Self::Limbs(_) => None,
        }
    }

    /// Writes elements as little-endian lanes.
    pub fn write(self, x: &[f32], out: &mut [u8]) {
        match self {
            Self::Blocks(blocks) => blocks.write(x, out),
            Self::Limbs(limbs) => limbs.write(x, out),
        }
    }

    /// Reads sums of lanes, divided by `by`, which is 1 to 64, and rounded once.
    pub fn read(self, sums: &[u8], by: u32, out: &mut [f32]) {
        match self {
            Self::Blocks(blocks) => blocks.read(sums, by, out),
            Self::Limbs(limbs) => limbs.read(sums, by, out),
        }
    }

    /// Counts the elements that are not zero, and those of them that become 0.
    pub fn underflow(self, x: &[f32]) -> Underflow {
        match self {
            Self::Blocks(blocks) => blocks.underflow(x),
            Self::Limbs(limbs) => limbs.underflow(x),
        }
    }
}
