//! Broadcast, gather and other collectives. Each is one sum over all ranks, made by the box or the
//! hosts' ring as an all-reduce is.

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

/// Operations are in flight when these methods return, as with
/// [`all_reduce_async`](Communicator::all_reduce_async). All ranks must call with the same lengths,
/// roots and [`Op`]; otherwise all get [`Error::Mismatch`], which names both calls.
///
/// Arrays of one operation must not share memory, except in place: the shorter array may be exactly
/// this rank's part of the longer one. Otherwise the call returns [`Error::Argument`] and is not
/// started. If a rank refuses a call that others make, these get [`Error::Mismatch`], and no rank
/// can use the communicator afterwards. If all ranks refuse it, they can still use it.
impl Communicator {
    /// Reduces in place, for all ranks if `root` is `None`, else for that rank only: the others'
    /// data is unchanged.
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
        self.call_async(
            collective,
            divisor.map(|divisor| Reduce { data, keeps, divisor }),
            |owned| take_back(owned).map(|Reduce { data, .. }| data),
        )
    }

    /// Reduces `input`, and gives each rank one part of the sum: rank r the r-th.
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
        self.call_async(Collective::ReduceScatter(op), scatter, |owned| {
            take_back(owned).map(|Scatter { input, output, .. }| (input, output))
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
        let moved = checked.map(|()| self.moved([].as_slice(), data, route, block));
        self.call_async(Collective::Broadcast { root, block: block as u64 }, moved, |owned| {
            take_back(owned).map(|Moved::<&[u8], B> { output, .. }| output)
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
        let moved = checked.map(|()| self.moved(input, output, Route::AllGather, block));
        self.call_async(Collective::AllGather { block: block as u64 }, moved, |owned| {
            take_back(owned).map(|Moved { input, output, .. }| (input, output))
        })
    }

    /// Gives rank r the concatenated r-th parts of each rank's bytes. All bytes go to all ranks, so
    /// with N ranks it takes N times as long as direct connections would: use it for little data.
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
        self.call_async(Collective::AllToAll { block: block as u64 }, moved, |owned| {
            take_back(owned).map(|Moved { input, output, .. }| (input, output))
        })
    }

    /// Starts a [`barrier`](Self::barrier), and returns a handle to wait for it.
    ///
    /// # Errors
    /// As [`all_reduce_async`](Self::all_reduce_async).
    pub fn barrier_async(&mut self) -> Result<Pending<Vec<i32>>, Error> {
        self.call_async(Collective::Barrier, Ok(Slice(vec![0])), |owned| {
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
                "{all} of {a} {unit} and {one} of {b}: the {all} must be {ranks} times as long, \
                 once for each rank"
            );
            return Err(Error::Argument(text));
        }
        Ok(())
    }
}
