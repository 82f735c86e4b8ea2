//! Broadcast, gather and other collectives. Each is one sum over all ranks. The box makes it as it
//! makes an all-reduce; the hosts' ring sends lanes only where they are needed.

use std::ops::{Deref, DerefMut};

use super::communicator::Communicator;
use super::pending::Pending;
use netsum_collective::call::{Collective, Op};
use netsum_collective::error::Error;
use netsum_collective::numeric::collectives::{ByteBlocks, Reduce, Route, Scatter};
use netsum_collective::numeric::element::{Element, Slice, Slices, into_data};
use netsum_collective::numeric::operators::{Code, Elements, Reduction};
use netsum_collective::report::Report;

fn reduction(op: Op, root: Option<u32>) -> Collective {
    root.map_or(Collective::AllReduce(op), |root| Collective::Reduce { op, root })
}

/// Operations are in flight when these methods return, as with
/// [`all_reduce_async`](Communicator::all_reduce_async). All ranks must call with the same lengths,
/// roots and [`Op`]; otherwise all get [`Error::Mismatch`], which names both calls.
///
/// A rank sends, of the D bytes that all lanes have, with N ranks:
///
/// | operation | through a box | over the hosts' ring |
/// | --- | --- | --- |
/// | all-reduce | D | 2 (N - 1) / N D |
/// | reduce, broadcast | D | D, or nothing |
/// | reduce-scatter, all-gather | D | (N - 1) / N D |
/// | all-to-all | D, N times what a rank gives | (N - 1) / 2N D |
///
/// Messages of a reduce-scatter that are in two ranks' parts cost as much as those of an
/// all-reduce, and messages of an all-to-all with several blocks as those of an all-gather. With a
/// secret (`NETSUM_SECRET`), all cost as much as an all-reduce over the hosts' ring.
///
/// Arrays of one operation must not share memory, except in place: the shorter array may be exactly
/// this rank's part of the longer one. Otherwise the call returns [`Error::Argument`] and is not
/// started. If a rank refuses a call that others make, these get [`Error::Mismatch`], and no rank
/// can use the communicator afterwards. If all ranks refuse it, they can still use it.
impl Communicator {
    /// Reduces in place, for all ranks if `root` is `None`, else for that rank only: the others'
    /// data is unchanged. All ranks that get the result get the same bits.
    ///
    /// Every [`Op`] is possible with every type, except averages of integers and bool, and bitwise
    /// operations on floats. With N ranks [`Op::Min`], [`Op::Max`], [`Op::Product`], and all
    /// operations on `f64`, take N times as many bytes as the elements have, and bitwise operations
    /// 32 / F, where F = 32 / bits of N, rounded down: see
    /// [`encoding`](crate::numeric::operators::encoding).
    ///
    /// # Errors
    /// As [`all_reduce_async`](Self::all_reduce_async), and [`Error::Argument`] where there is no
    /// such operation or root.
    pub fn reduce_async<T: Element, B>(
        &mut self,
        data: B,
        op: Op,
        root: Option<u32>,
    ) -> Result<Pending<B>, Error>
    where
        B: DerefMut<Target = [T]> + Send + 'static,
    {
        let collective = reduction(op, root);
        self.call_reduction_async(collective, self.reduced(data, op, root), |owned| {
            into_data(owned).map(|Reduction { elements: Reduce { data, .. }, .. }| data)
        })
    }

    /// As [`reduce_async`](Self::reduce_async), but waits for the result.
    ///
    /// # Errors
    /// As [`reduce_async`](Self::reduce_async). After an error some elements of the slice may be
    /// results already.
    pub fn reduce<T: Element>(
        &mut self,
        data: &mut [T],
        op: Op,
        root: Option<u32>,
    ) -> Result<Report, Error> {
        let data = self.reduced(data, op, root);
        self.call_reduction(reduction(op, root), data).1
    }

    /// As [`reduce_async`](Self::reduce_async) for all ranks, of several tensors as if they were
    /// concatenated.
    ///
    /// # Errors
    /// As [`reduce_async`](Self::reduce_async).
    pub fn reduce_many_async<T: Element, B>(
        &mut self,
        tensors: Vec<B>,
        op: Op,
    ) -> Result<Pending<Vec<B>>, Error>
    where
        B: DerefMut<Target = [T]> + Send + 'static,
    {
        let data = self.reduced_many(tensors, op);
        self.call_reduction_async(Collective::AllReduce(op), data, |owned| {
            into_data(owned).map(|Reduction { elements: Slices { tensors, .. }, .. }| tensors)
        })
    }

    /// Reduces `input`, and gives each rank one part of the result: rank r the r-th. Operations and
    /// types as of [`reduce_async`](Self::reduce_async).
    ///
    /// # Errors
    /// As [`all_reduce_async`](Self::all_reduce_async), and [`Error::Argument`] where the input is
    /// not as long as all outputs.
    pub fn reduce_scatter_async<T: Element, I, O>(
        &mut self,
        input: I,
        output: O,
        op: Op,
    ) -> Result<Pending<(I, O)>, Error>
    where
        I: Deref<Target = [T]> + Send + 'static,
        O: DerefMut<Target = [T]> + Send + 'static,
    {
        let checked = self.check_lengths("input", input.len(), "output", output.len(), "elements");
        let divisor = self.divisor(op);
        let scatter = checked.and_then(|()| {
            let start = self.rank() as usize * output.len();
            self.encoded(Scatter { input, output, start, divisor }, op)
        });
        self.call_async(Collective::ReduceScatter(op), scatter, |owned| {
            into_data(owned)
                .map(|Reduction { elements: Scatter { input, output, .. }, .. }| (input, output))
        })
    }

    /// Copies one rank's bytes to all ranks.
    ///
    /// # Errors
    /// As [`all_reduce_async`](Self::all_reduce_async), and [`Error::Argument`].
    pub fn broadcast_async<B>(&mut self, data: B, root: u32) -> Result<Pending<B>, Error>
    where
        B: DerefMut<Target = [u8]> + Send + 'static,
    {
        let (checked, block) = (self.check_root(root), data.len());
        let route = Route::Broadcast { root: root as usize };
        let moved = checked.map(|()| self.byte_blocks([].as_slice(), data, route, block));
        self.call_async(Collective::Broadcast { root, block: block as u64 }, moved, |owned| {
            into_data(owned).map(|ByteBlocks::<&[u8], B> { output, .. }| output)
        })
    }

    /// Gives all ranks the concatenated bytes of all ranks.
    ///
    /// # Errors
    /// As [`all_reduce_async`](Self::all_reduce_async), and [`Error::Argument`] where the output is
    /// not as long as all inputs.
    pub fn all_gather_async<I, O>(&mut self, input: I, output: O) -> Result<Pending<(I, O)>, Error>
    where
        I: Deref<Target = [u8]> + Send + 'static,
        O: DerefMut<Target = [u8]> + Send + 'static,
    {
        let block = input.len();
        let checked = self.check_lengths("output", output.len(), "input", block, "bytes");
        let moved = checked.map(|()| self.byte_blocks(input, output, Route::AllGather, block));
        self.call_async(Collective::AllGather { block: block as u64 }, moved, |owned| {
            into_data(owned).map(|ByteBlocks { input, output, .. }| (input, output))
        })
    }

    /// Gives rank r the concatenated r-th parts of each rank's bytes. With N ranks it takes up to N
    /// times as long as direct connections would, because a box gives all bytes to all ranks: use
    /// it for little data. Over the hosts' ring, ranks send N / 2 times as much as direct
    /// connections would, if parts are long.
    ///
    /// # Errors
    /// As [`all_reduce_async`](Self::all_reduce_async), and [`Error::Argument`] where the lengths
    /// differ, or are not one part for each rank.
    pub fn all_to_all_async<I, O>(&mut self, input: I, output: O) -> Result<Pending<(I, O)>, Error>
    where
        I: Deref<Target = [u8]> + Send + 'static,
        O: DerefMut<Target = [u8]> + Send + 'static,
    {
        let block = input.len() / self.ranks() as usize;
        let checked = self
            .check_lengths("input", input.len(), "each part", block, "bytes")
            .and_then(|()| self.check_lengths("output", output.len(), "each part", block, "bytes"));
        let moved = checked.map(|()| self.byte_blocks(input, output, Route::AllToAll, block));
        self.call_async(Collective::AllToAll { block: block as u64 }, moved, |owned| {
            into_data(owned).map(|ByteBlocks { input, output, .. }| (input, output))
        })
    }

    /// Starts a [`barrier`](Self::barrier), and returns a handle to wait for it.
    ///
    /// # Errors
    /// As [`all_reduce_async`](Self::all_reduce_async).
    pub fn barrier_async(&mut self) -> Result<Pending<Vec<i32>>, Error> {
        self.complete_hierarchical();
        self.call_async(Collective::Barrier, Ok(Slice(vec![0])), |owned| {
            into_data(owned).map(|Slice(data)| data)
        })
    }

    pub(super) fn reduced<T: Element, B: DerefMut<Target = [T]>>(
        &self,
        data: B,
        op: Op,
        root: Option<u32>,
    ) -> Result<Reduction<Reduce<B>>, Error> {
        root.map_or(Ok(()), |root| self.check_root(root))?;
        let keeps = root.is_none_or(|root| root == self.rank());
        self.encoded(Reduce { data, keeps, divisor: self.divisor(op) }, op)
    }

    pub(super) fn reduced_many<T: Element, B, S>(
        &self,
        tensors: S,
        op: Op,
    ) -> Result<Reduction<Slices<S>>, Error>
    where
        B: DerefMut<Target = [T]>,
        S: DerefMut<Target = [B]>,
    {
        let mut slices = Slices::new(tensors);
        slices.divisor = self.divisor(op);
        self.encoded(slices, op)
    }

    fn encoded<E: Elements>(&self, elements: E, op: Op) -> Result<Reduction<E>, Error> {
        let code = Code::new::<E::Element>(op, self.rank(), self.ranks(), self.is_sealed());
        code.map(|code| Reduction::new(elements, code)).map_err(Error::Argument)
    }

    fn divisor(&self, op: Op) -> u32 {
        if op == Op::Average { self.ranks() } else { 1 }
    }

    fn byte_blocks<I, O>(
        &self,
        input: I,
        output: O,
        route: Route,
        block: usize,
    ) -> ByteBlocks<I, O> {
        let (rank, ranks) = (self.rank() as usize, self.ranks() as usize);
        ByteBlocks { input, output, route, block, rank, ranks }
    }

    fn check_root(&self, root: u32) -> Result<(), Error> {
        let ranks = self.ranks();
        if root >= ranks {
            return Err(Error::Argument(format!(
                "root {root}: 0 to {} with {ranks} ranks",
                ranks - 1
            )));
        }
        Ok(())
    }

    fn check_lengths(
        &self,
        all: &str,
        a: usize,
        one: &str,
        b: usize,
        unit: &str,
    ) -> Result<(), Error> {
        let ranks = self.ranks();
        if Some(a) != b.checked_mul(ranks as usize) {
            let text = format!(
                "{all} of {a} {unit} and {one} of {b}: the {all} must be {ranks} times as long, \
                 once for each rank"
            );
            return Err(Error::Argument(text));
        }
        Ok(())
    }
}
