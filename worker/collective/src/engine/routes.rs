//! How far the hosts' ring carries the lanes of each message. All ranks find the same, from the
//! operation's descriptor.
//!
//! | operation | a message's data goes |
//! | --- | --- |
//! | reduce | to the root |
//! | reduce-scatter | to the rank whose part it is, or to all if it is in two parts |
//! | broadcast, all-gather | from the rank that gives it to all |
//! | all-to-all | from one rank to another, or to all if the message has several blocks |
//! | all others | around twice, as an all-reduce |
//!
//! So every message has a rank that gets all of its lanes, and can verify them. The others verify
//! the message's identity, and that all ranks take part. They use its exponents, of which they
//! check the totals of counts: that finds any single one that has changed.
//!
//! An all-to-all stays with the box while this sums: the window, the kept messages and the fallback
//! know one way of summing at a time.
//!
//! In a sealed session all messages go around twice: each rank that takes the pads off needs all
//! lanes.

use std::ops::Range;

use super::Engine;
use super::operation::Operation;
use crate::call::Collective;
use crate::numeric::element::Data;
use crate::numeric::layout::{CHECK_BYTES, Message};
use crate::reduction::Chain;

impl Engine {
    /// The chains of a message of `len` bytes.
    pub(super) fn chains(
        &self,
        op: &Operation,
        data: &dyn Data,
        message: &Message,
        len: usize,
    ) -> Vec<Chain> {
        let head = CHECK_BYTES + message.exponent_bytes;
        match &message.data {
            Some((_, range)) if self.seal.is_none() && len > head => {
                self.chains_of(op, data, range.clone(), head..len).unwrap_or_default()
            }
            _ => Vec::new(),
        }
    }

    /// Chains of some lanes or floats, which are these bytes of a message.
    fn chains_of(
        &self,
        op: &Operation,
        data: &dyn Data,
        range: Range<usize>,
        bytes: Range<usize>,
    ) -> Option<Vec<Chain>> {
        let (ranks, last) = (self.member.ranks, range.end - 1);
        let between = |from, to, bytes| Chain::between(from, to, ranks, bytes);
        // Each rank gives as many lanes.
        let from_each = |lanes: usize| {
            let from = range.start / lanes..=last / lanes;
            let chains = from.map(|rank| {
                let from = self.place_of(rank as u32)?;
                let start = (rank * lanes).max(range.start) - range.start;
                let end = ((rank + 1) * lanes).min(range.end) - range.start;
                let place = bytes.start + start * 4..bytes.start + end * 4;
                Some(between(from, (from + ranks - 1) % ranks, place))
            });
            chains.collect()
        };
        match op.descriptor.call.collective {
            Collective::AllReduce(_) | Collective::Barrier | Collective::Refused => None,
            Collective::Reduce { root, .. } => {
                Some(vec![Chain::to(self.place_of(root)?, ranks, bytes)])
            }
            Collective::ReduceScatter(_) => {
                let part = op.descriptor.length / u64::from(ranks);
                let elements = data.elements_in(range);
                let [first, last] =
                    [elements.start, elements.end - 1].map(|at| (at as u64).checked_div(part));
                let to = self.place_of(first.filter(|_| first == last)? as u32)?;
                Some(vec![Chain::to(to, ranks, bytes)])
            }
            Collective::Broadcast { root, .. } => {
                let from = self.place_of(root)?;
                Some(vec![between(from, (from + ranks - 1) % ranks, bytes)])
            }
            Collective::AllGather { block } => from_each(block.div_ceil(4) as usize),
            Collective::AllToAll { block } => {
                let (lanes, n) = (block.div_ceil(4) as usize, ranks as usize);
                let number = range.start / lanes;
                if number != last / lanes {
                    return from_each(lanes * n);
                }
                let [from, to] = [number / n, number % n].map(|rank| self.place_of(rank as u32));
                Some(vec![between(from?, to?, bytes)])
            }
        }
    }
}
