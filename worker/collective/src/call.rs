//! A rank's call. Two calls are the same operation only if all fields agree.

use std::fmt;

use crate::numeric::block::Width;

/// How all ranks' elements are reduced. Results are the same bits at all ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash)]
pub enum Op {
    /// Their sum; of integers modulo two to the power of their width, of bool the or.
    #[default]
    Sum,
    /// Their sum divided by the number of ranks; of floats only.
    Average,
    /// The smallest. A NaN at any rank is the result, and -0 is less than +0.
    Min,
    /// The largest, in the same order.
    Max,
    /// Their product; of integers modulo two to the power of their width, of floats rounded after
    /// each rank.
    Product,
    /// The bitwise and; of integers and bool.
    BitAnd,
    /// The bitwise or; of integers and bool.
    BitOr,
    /// The bitwise exclusive or; of integers and bool.
    BitXor,
}

impl Op {
    /// All, in the order of their codes.
    pub const ALL: [Self; 8] = [
        Self::Sum,
        Self::Average,
        Self::Min,
        Self::Max,
        Self::Product,
        Self::BitAnd,
        Self::BitOr,
        Self::BitXor,
    ];

    /// As in texts and Python: `sum`, `avg`, `min`, `max`, `prod`, `band`, `bor` or `bxor`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sum => "sum",
            Self::Average => "avg",
            Self::Min => "min",
            Self::Max => "max",
            Self::Product => "prod",
            Self::BitAnd => "band",
            Self::BitOr => "bor",
            Self::BitXor => "bxor",
        }
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A collective operation, with all that decides where elements go.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Collective {
    AllReduce(Op),
    Reduce {
        op: Op,
        root: u32,
    },
    ReduceScatter(Op),
    Broadcast {
        root: u32,
        /// Bytes that the root gives.
        block: u64,
    },
    AllGather {
        /// Bytes that each rank gives.
        block: u64,
    },
    AllToAll {
        /// Bytes that each rank gives each.
        block: u64,
    },
    Barrier,
    /// Stands for a call that its rank refused; keeps the ranks' calls in step.
    Refused,
}

/// Beside an encoded call's kind: floats travel in half a lane.
const IN_16_BITS: u32 = 1 << 8;

/// A rank's call for a collective.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct Call {
    pub collective: Collective,
    /// A number that must also agree, such as a hash of how the caller's tensors are laid out.
    pub tag: u32,
    /// How floats travel in a long operation; [`Width::Full`] for other data.
    pub width: Width,
}

impl From<Collective> for Call {
    fn from(collective: Collective) -> Self {
        Self { collective, tag: 0, width: Width::Full }
    }
}

impl Call {
    /// An ordinary sum.
    pub const SUM: Self =
        Self { collective: Collective::AllReduce(Op::Sum), tag: 0, width: Width::Full };

    /// Encodes the call as kind and width, operator, root, tag; and the block.
    pub fn words(self) -> ([u32; 4], u64) {
        let (kind, op, root, block) = match self.collective {
            Collective::AllReduce(op) => (0, op, 0, 0),
            Collective::Reduce { op, root } => (1, op, root, 0),
            Collective::ReduceScatter(op) => (2, op, 0, 0),
            Collective::Broadcast { root, block } => (3, Op::Sum, root, block),
            Collective::AllGather { block } => (4, Op::Sum, 0, block),
            Collective::AllToAll { block } => (5, Op::Sum, 0, block),
            Collective::Barrier => (6, Op::Sum, 0, 0),
            Collective::Refused => (7, Op::Sum, 0, 0),
        };
        let width = match self.width {
            Width::Full => 0,
            Width::Half => IN_16_BITS,
        };
        ([kind | width, op as u32, root, self.tag], block)
    }

    /// Decodes [`words`](Self::words); `None` if they are not valid.
    pub fn of_words([kind, op, root, tag]: [u32; 4], block: u64) -> Option<Self> {
        let op = *Op::ALL.get(op as usize)?;
        let width = if kind & IN_16_BITS == 0 { Width::Full } else { Width::Half };
        let collective = match kind & !IN_16_BITS {
            0 => Collective::AllReduce(op),
            1 => Collective::Reduce { op, root },
            2 => Collective::ReduceScatter(op),
            3 => Collective::Broadcast { root, block },
            4 => Collective::AllGather { block },
            5 => Collective::AllToAll { block },
            6 => Collective::Barrier,
            7 => Collective::Refused,
            _ => return None,
        };
        let call = Self { collective, tag, width };
        (call.words() == ([kind, op as u32, root, tag], block)).then_some(call)
    }
}
