//! The simulated ranks' data: slices of three types, and the sums that they should get.

use std::ops::Range;

use super::rng::Rng;
use crate::call::Op;
use crate::numeric::block::Width;
use crate::numeric::collectives::Reduce;
use crate::numeric::element::{Data, Dtype, Element};
use crate::numeric::format::Format;
use crate::numeric::layout::Layout;
use crate::numeric::operators::{Code, Reduction};
use crate::numeric::quant::{Exponents, Underflow};
use crate::numeric::reference::{Reference, reference_sum};

/// A slice of one of the types.
#[derive(Clone, Debug)]
pub(super) enum Vector {
    I(Vec<i32>),
    F(Vec<f32>),
    /// Floats in 16 bits each.
    Halves(Vec<f32>),
    /// Encoded: messages end within the lanes of an element.
    D(Reduction<Reduce<Vec<f64>>>),
}

impl Vector {
    pub fn bits(&self) -> Vec<u32> {
        match self {
            Self::I(x) => x.iter().map(|x| *x as u32).collect(),
            Self::F(x) | Self::Halves(x) => x.iter().map(|x| x.to_bits()).collect(),
            Self::D(x) => bits_of_doubles(&x.elements.data),
        }
    }

    pub fn ints(rank: u32, length: usize, salt: u64) -> Self {
        let mut rng = Rng::with_seed(salt << 8 | u64::from(rank));
        Self::I((0..length).map(|_| rng.u64(..) as i32).collect())
    }

    /// Integers whose sums do not wrap.
    pub fn small_ints(rank: u32, length: usize, salt: u64) -> Self {
        match Self::ints(rank, length, salt) {
            Self::I(x) => Self::I(x.iter().map(|x| x >> 6).collect()),
            other => other,
        }
    }

    /// Magnitudes differ from message to message and from rank to rank.
    pub fn floats(rank: u32, length: usize, salt: u64) -> Self {
        let mut rng = Rng::with_seed(salt << 8 | u64::from(rank) | 1 << 60);
        let x = (0..length).map(|i| {
            let x = (rng.u64(..) >> 40) as f32 / (1u32 << 23) as f32 - 1.0;
            x * [1.0, 1e-9, 3e7, 1e-39][(i / 97 + rank as usize) % 4]
        });
        Self::F(x.collect())
    }

    pub fn doubles(rank: u32, ranks: u32, length: usize, salt: u64) -> Self {
        let mut rng = Rng::with_seed(salt << 8 | u64::from(rank) | 1 << 61);
        let data = (0..length).map(|_| rng.u64(..) as f64 / 3e10).collect();
        let code = Code::new::<f64>(Op::Sum, rank, ranks, false).expect("f64 has a sum");
        Self::D(Reduction::new(Reduce { data, keeps: true, divisor: 1 }, code))
    }

    /// The same floats in 16 bits each.
    pub fn halves(self) -> Self {
        match self {
            Self::F(x) => Self::Halves(x),
            other => other,
        }
    }

    pub fn width(&self) -> Width {
        if matches!(self, Self::Halves(_)) { Width::Half } else { Width::Full }
    }

    /// The sum that every rank should get, as bits.
    #[cfg(test)]
    pub fn sum(layout: &Layout, of: &[Self]) -> Vec<u32> {
        Self::sum_in(1, layout, of)
    }

    /// The sum that every rank should get in a session's operation of this number.
    pub fn sum_in(operation: usize, layout: &Layout, of: &[Self]) -> Vec<u32> {
        let (mut i, mut f, mut d) = (Vec::new(), Vec::new(), Vec::new());
        for v in of {
            match v {
                Self::I(x) => i.push(&x[..]),
                Self::F(x) | Self::Halves(x) => f.push(&x[..]),
                Self::D(x) => d.push(&x.elements.data[..]),
            }
        }
        if !d.is_empty() {
            bits_of_doubles(&reference_sum(&d, layout))
        } else if f.is_empty() {
            Self::I(reference_sum(&i, layout)).bits()
        } else {
            let (width, operation) = (Some(of[0].width()), operation as u64);
            Self::F(Reference { width, operation, ..Reference::new(layout) }.of(&f)).bits()
        }
    }
}

fn bits_of_doubles(x: &[f64]) -> Vec<u32> {
    x.iter().flat_map(|x| [x.to_bits() as u32, (x.to_bits() >> 32) as u32]).collect()
}

impl Data for Vector {
    fn dtype(&self) -> Dtype {
        match self {
            Self::I(_) => Dtype::I32,
            Self::F(_) | Self::Halves(_) => Dtype::F32,
            Self::D(x) => x.dtype(),
        }
    }
    fn len(&self) -> usize {
        match self {
            Self::I(x) => x.len(),
            Self::F(x) | Self::Halves(x) => x.len(),
            Self::D(x) => x.len(),
        }
    }
    fn elements(&self) -> (Dtype, usize) {
        match self {
            Self::D(x) => x.elements(),
            _ => (self.dtype(), self.len()),
        }
    }
    fn exponents(&self, range: Range<usize>) -> Exponents {
        match self {
            Self::I(x) => i32::exponents(&x[range]),
            Self::F(x) | Self::Halves(x) => f32::exponents(&x[range]),
            Self::D(x) => x.exponents(range),
        }
    }
    fn load(&self, range: Range<usize>, format: Option<Format<'_>>, out: &mut [u8]) {
        match self {
            Self::I(x) => i32::to_lanes(&x[range], format, out),
            Self::F(x) | Self::Halves(x) => f32::to_lanes(&x[range], format, out),
            Self::D(x) => x.load(range, format, out),
        }
    }
    fn underflow(&self, range: Range<usize>, format: Format<'_>) -> Underflow {
        match self {
            Self::I(x) => i32::underflow(&x[range], format),
            Self::F(x) | Self::Halves(x) => f32::underflow(&x[range], format),
            Self::D(x) => x.underflow(range, format),
        }
    }
    fn store(&mut self, range: Range<usize>, format: Option<Format<'_>>, sums: &[u8]) {
        match self {
            Self::I(x) => i32::from_lanes(sums, format, 1, &mut x[range]),
            Self::F(x) | Self::Halves(x) => f32::from_lanes(sums, format, 1, &mut x[range]),
            Self::D(x) => x.store(range, format, sums),
        }
    }
}
