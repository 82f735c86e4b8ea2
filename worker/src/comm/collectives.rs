//! Broadcast, gather and the others: each is one sum of all ranks, which the box does as it does an
//! all-reduce, or the ranks' ring.

use std::ops::{Deref, DerefMut};

use super::communicator::Communicator;
use super::pending::Pending;
use netsum_collective::call::{Collective, Op};
use netsum_collective::error::Error;
use netsum_collective::numeric::collectives::{Moved, Reduce, Route, Scatter};
use netsum_collective::numeric::element::{Dtype, Element, Slice, take_back};

fn divisor(op: Op, dtype: Dtype, ranks: u32) -> Result<u32, Error> {
    match (op, dtype) {
        (Op::Sum, _) => Ok(1),
        (Op::Average, Dtype::F32) => Ok(ranks),
        (Op::Average, _) => Err(Error::Argument(format!("{dtype}: only f32 has an average"))),
    }
}

/// All are in flight when the call returns, as with
/// [`all_reduce_async`](Communicator::all_reduce_async). All ranks must call with the same lengths,
/// roots and [`Op`]; where they do not, all get [`Error::Mismatch`], which names both calls.
///
/// Arrays of one operation share no memory, but in place: this rank's part of the longer one may be
/// just the other. Otherwise it is an [`Error::Argument`], and not started. Where a rank refuses a
/// call that others make, they get [`Error::Mismatch`], and the communicator is of no more use to
/// any; where all refuse it, it can still be used.
impl Communicator {
    /// Reduces in place, for all ranks where `root` is `None`, or for that rank: the others keep
    /// what they have.
    ///
    /// # Errors
    /// As [`all_reduce_async`](Self::all_reduce_async), and [`Error::Argument`].
    pub fn reduce_async<T: Element, B>(
        &mut self,
        data: B,
        op: Op,
        root: Option<u32>,
    ) -> Result<Pending<B>, Error>
    where
        B: DerefMut<Target = [T]> + Send + 'static,
    {
        let checked = root.map_or(Ok(()), |root| self.check_root(root));
        let divisor = checked.and_then(|()| divisor(op, T::DTYPE, self.ranks()));
        let keeps = root.is_none_or(|root| root == self.rank());
        let collective =
            root.map_or(Collective::AllReduce(op), |root| Collective::Reduce { op, root });
        self.start(collective, divisor.map(|divisor| Reduce { data, keeps, divisor }), |owned| {
            take_back(owned).map(|Reduce { data, .. }| data)
        })
    }

    /// Reduces `input`, and gives each rank one part of it: rank r the r-th.
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
        let scatter = checked.and_then(|()| divisor(op, T::DTYPE, self.ranks())).map(|divisor| {
            let start = self.rank() as usize * output.len();
            Scatter { input, output, start, divisor }
        });
        self.start(Collective::ReduceScatter(op), scatter, |owned| {
            take_back(owned).map(|Scatter { input, output, .. }| (input, output))
        })
    }

    /// Gives all ranks one rank's bytes.
    ///
    /// # Errors
    /// As [`all_reduce_async`](Self::all_reduce_async), and [`Error::Argument`].
    pub fn broadcast_async<B>(&mut self, data: B, root: u32) -> Result<Pending<B>, Error>
    where
        B: DerefMut<Target = [u8]> + Send + 'static,
    {
        let (checked, block) = (self.check_root(root), data.len());
        let route = Route::Broadcast { root: root as usize };
        let moved = checked.map(|()| self.moved([].as_slice(), data, route, block));
        self.start(Collective::Broadcast { root, block: block as u64 }, moved, |owned| {
            take_back(owned).map(|Moved::<&[u8], B> { output, .. }| output)
        })
    }

    /// Gives all ranks the bytes of all, one behind the other.
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
        let moved = checked.map(|()| self.moved(input, output, Route::AllGather, block));
        self.start(Collective::AllGather { block: block as u64 }, moved, |owned| {
            take_back(owned).map(|Moved { input, output, .. }| (input, output))
        })
    }

    /// Gives rank r the r-th part of each rank's bytes, one behind the other. As everything goes to
    /// everybody, it takes as many times as long as there are ranks as connections between them
    /// would: good for little.
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
        let moved = checked.map(|()| self.moved(input, output, Route::AllToAll, block));
        self.start(Collective::AllToAll { block: block as u64 }, moved, |owned| {
            take_back(owned).map(|Moved { input, output, .. }| (input, output))
        })
    }

    /// A [`barrier`](Self::barrier) that another rank may be waited for in.
    ///
    /// # Errors
    /// As [`all_reduce_async`](Self::all_reduce_async).
    pub fn barrier_async(&mut self) -> Result<Pending<Vec<i32>>, Error> {
        self.start(Collective::Barrier, Ok(Slice(vec![0])), |owned| {
            take_back(owned).map(|Slice(data)| data)
        })
    }

    fn moved<I, O>(&self, input: I, output: O, route: Route, block: usize) -> Moved<I, O> {
        let (rank, ranks) = (self.rank() as usize, self.ranks() as usize);
        Moved { input, output, route, block, rank, ranks }
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
                "{all} of {a} {unit} and {one} of {b}: the {all} must be {ranks} times as long, once for each rank"
            );
            return Err(Error::Argument(text));
        }
        Ok(())
    }
}
