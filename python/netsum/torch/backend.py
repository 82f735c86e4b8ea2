"""The backend "netsum" of torch.distributed: sums in the network, and Gloo for what that cannot do."""

import collections
import os
import warnings
import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllreduceOptions,
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    ReduceOptions,
    Work as DistributedWork,
)

from .._netsum import Communicator, Work
from ..errors import ArgumentError
from .completion import Handle, completed
from .meeting import apart, meet
from .tensors import SUMMED, WIDENED, Sum, as_bytes, contiguous, put

_SUM, _AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG
_NAMES = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")

#: Before 2.7 PyTorch's C++ does not hold what Python has made of its classes (pytorch#146376), and waits for it later.
OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7)
_last: "collections.deque[Handle]" = collections.deque(maxlen=16)
#: Of groups of all ranks, by the default group of another backend.
_beside: "weakref.WeakKeyDictionary[dist.ProcessGroup, Communicator]" = weakref.WeakKeyDictionary()


class Delegated(UserWarning):
    """Gloo does what netsum cannot; the text says what."""


def _by_gloo(name: str) -> Callable[..., DistributedWork]:
    def call(self, *arguments):
        _tell(name)
        return getattr(self.gloo, name)(*arguments)

    return call


class ProcessGroup(dist.ProcessGroup):
    """All ranks, by netsum; or some of them, by Gloo."""

    #: That of all ranks, while somebody has it, and this rank's address.
    last: "weakref.ref[Communicator] | None" = None
    address = ""
    told: set[str] = set()

    def __init__(self, options, _more=None):
        rank, size = options.group_rank, options.group_size
        super().__init__(rank, size)
        self._name = self._text = ""
        self._timeout = options.timeout.total_seconds()
        self._is_default = not dist.is_initialized()
        store = apart(options.store, size)
        self.comm = self._communicator(store, options.global_ranks_in_group)
        gloo = ProcessGroupGloo._Options()
        gloo._timeout = options.timeout
        if interfaces := os.environ.get("GLOO_SOCKET_IFNAME"):
            # The default device does not look at it.
            gloo._devices = [ProcessGroupGloo.create_device(interface=name) for name in interfaces.split(",")]
        elif ProcessGroup.address:
            gloo._devices = [ProcessGroupGloo.create_device(hostname=ProcessGroup.address)]
        else:
            gloo._devices = [ProcessGroupGloo.create_default_device()]
        self.gloo = ProcessGroupGloo(PrefixStore("gloo", store), rank, size, gloo)

    def _communicator(self, store: "dist.Store", ranks: Sequence[int]) -> Communicator | None:
        """That of all ranks, if these are all, in their order; no ranks are all. What one rank does must not depend on its own past."""
        world = None if self._is_default else dist.group.WORLD
        if world is not None:
            if ranks and list(ranks) != list(range(world.size())):
                few = self.size() < world.size()
                return _tell(f"a group of {self.size()} of {world.size()} ranks" if few else "a group with another order of ranks")
            found = world.comm if isinstance(world, ProcessGroup) else _beside.get(world)
            if found is not None:
                return found
        # A model may hold a group that is destroyed.
        if last := ProcessGroup.last and ProcessGroup.last():
            last.close()
        comm, ProcessGroup.address = meet(store, self.rank(), self.size())
        ProcessGroup.last = weakref.ref(comm)
        if world is not None:
            _beside[world] = comm
        return comm

    def shutdown(self) -> None:
        """Newer PyTorch calls it in destroy_process_group. Other groups share the communicator."""
        if self._is_default:
            self.comm.close()

    abort = shutdown

    def getBackendName(self) -> str:
        return "netsum"

    # PyTorch's own keeps these in backends of C++.

    def _get_backend(self, device: torch.device) -> ProcessGroupGloo:
        return self.gloo

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, text: str) -> None:
        self._text = text

    def getGroupDesc(self) -> str:
        return self._text

    def _sums(self, kind: str, tensors: Sequence[torch.Tensor], op: "dist.ReduceOp") -> str | None:
        """netsum's name of the operation, if netsum does it."""
        if self.comm is None:
            return None
        if any(tensor.layout != torch.strided for tensor in tensors):
            return _tell(f"{kind} of sparse tensors")
        dtypes = {tensor.dtype for tensor in tensors}
        dtype = next(iter(dtypes), torch.float32)
        if len(dtypes) > 1 or (dtype not in SUMMED and dtype not in WIDENED):
            return _tell(f"{kind} of {', '.join(map(str, dtypes))}")
        if op == _SUM:
            return "sum"
        if op == _AVG:
            return "avg" if dtype.is_floating_point else _tell(f"{kind} of {dtype} with AVG")
        return _tell(f"{kind} with {next((name for name in _NAMES if op == getattr(dist.ReduceOp, name, None)), op)}")

    def _started(self, kind: str, work: Work, finish: Callable[[Work], list[torch.Tensor]]) -> Handle:
        def done(work: Work) -> list[torch.Tensor]:
            if not work.is_done():
                raise TimeoutError(
                    f"{kind} has taken {self._timeout:g} s, the group's timeout: another rank has not called for it, or is behind"
                )
            return finish(work)

        return _kept(Handle().follow(lambda told: completed(self.comm, work, told, self._timeout), done))

    # Sums.

    def allreduce(self, tensors, opts=None):
        opts = opts if opts is not None else AllreduceOptions()
        return self._allreduce(tensors, opts.reduceOp)

    def allreduce_coalesced(self, tensors, opts=None):
        return self._allreduce(tensors, opts.reduceOp if opts is not None else _SUM)

    def _allreduce(self, tensors, op):
        name = self._sums("all_reduce", tensors, op)
        if name is None:
            return _all([self._gloo_allreduce(tensor, op) for tensor in tensors], tensors)
        sums = [Sum(tensor) for tensor in tensors]
        works = [self.comm.all_reduce_async(one.summed, name) for one in sums]
        return _all([self._started("all_reduce", *both) for both in zip(works, [one.finished for one in sums], strict=True)], tensors)

    def _gloo_allreduce(self, tensor, op):
        opts = AllreduceOptions()
        opts.reduceOp = _SUM if op == _AVG else op
        work = self.gloo.allreduce([contiguous(tensor)], opts)
        return _then(work, lambda: [_divided(tensor, self.size())]) if op == _AVG else work

    def reduce(self, tensors, opts=None):
        opts = opts if opts is not None else ReduceOptions()
        op, root = opts.reduceOp, opts.rootRank
        name = self._sums("reduce", tensors, op)
        if name is None:
            plain = ReduceOptions()
            plain.rootRank, plain.reduceOp = root, _SUM if op == _AVG else op
            work = self.gloo.reduce([contiguous(tensors[0])], plain)
            return _then(work, lambda: [_divided(tensors[0], self.size())]) if op == _AVG and self.rank() == root else work
        result = Sum(tensors[0], kept=self.rank() == root)
        return self._started("reduce", self.comm.reduce_async(result.summed, root, name), result.finished)

    def _reduce_scatter_base(self, output, input, opts=None):
        op = opts.reduceOp if opts is not None else _SUM
        if input.numel() != output.numel() * self.size():
            raise ArgumentError(f"reduce_scatter: {input.numel()} elements for {self.size()} ranks, and {output.numel()} for each")
        _one_dtype("reduce_scatter", output, input)
        name = self._sums("reduce_scatter", [output, input], op)
        if name is None:
            # Gloo's own knows neither AVG nor, in older PyTorch, any operation.
            whole = input.detach().clone(memory_format=torch.contiguous_format)
            work = self._gloo_allreduce(whole, op)
            return _then(work, lambda: [put(output, whole.view(self.size(), -1)[self.rank()])])
        result, whole = Sum(output), Sum(input.contiguous())
        return self._started("reduce_scatter", self.comm.reduce_scatter_async(result.summed, whole.summed, name), result.finished)

    def reduce_scatter(self, outputs, inputs, opts=None):
        _one_dtype("reduce_scatter", *inputs[0])
        return self._reduce_scatter_base(outputs[0], torch.cat([part.detach().reshape(-1) for part in inputs[0]]), opts)

    def reduce_scatter_tensor_coalesced(self, outputs, inputs, opts=None):
        return _all([self._reduce_scatter_base(*both, opts) for both in zip(outputs, inputs, strict=True)], outputs)

    # What moves.

    def broadcast(self, tensors, opts=None):
        root = opts.rootRank if opts is not None else 0
        if self.comm is None:
            plain = BroadcastOptions()
            plain.rootRank = root
            return _all([self.gloo.broadcast([contiguous(tensor)], plain) for tensor in tensors], tensors)
        works = [self.comm.broadcast_async(as_bytes(tensor), root) for tensor in tensors]
        return _all([self._started("broadcast", work, _finish(tensor)) for work, tensor in zip(works, tensors, strict=True)], tensors)

    def _allgather_base(self, output, input, opts=None):
        _one_dtype("all_gather", output, input)
        if self.comm is None:
            parts = list(contiguous(output).view(self.size(), -1))
            return self.gloo.allgather([parts], [input.detach().reshape(-1)])
        work = self.comm.all_gather_async(as_bytes(output), as_bytes(input.contiguous()))
        return self._started("all_gather", work, _finish(output))

    def allgather(self, outputs, inputs, opts=None):
        outputs, own = outputs[0], inputs[0]
        _one_dtype("all_gather", own, *outputs)
        if self.comm is None:
            return self.gloo.allgather([outputs], [own.detach()])
        if any(output.numel() != own.numel() for output in outputs):
            raise ArgumentError("all_gather: tensors of several sizes; give them one size, or use broadcast for each")
        whole = own.new_empty((len(outputs), own.numel()))
        work = self._allgather_base(whole, own)
        return _then(work, lambda: [put(out, part) for out, part in zip(outputs, whole, strict=True)])

    def allgather_coalesced(self, output_lists, inputs, opts=None):
        by_tensor = [[outputs[i] for outputs in output_lists] for i in range(len(inputs))]
        return _all([self.allgather([outs], [own]) for outs, own in zip(by_tensor, inputs, strict=True)], inputs)

    def allgather_into_tensor_coalesced(self, outputs, inputs, opts=None):
        return _all([self._allgather_base(*both) for both in zip(outputs, inputs, strict=True)], outputs)

    def alltoall_base(self, output, input, output_sizes, input_sizes, opts=None):
        _one_dtype("all_to_all", output, input)
        # Where sizes are given, another rank's may differ though this one's are all the same.
        sized = bool(output_sizes or input_sizes)
        if sized and self.comm is not None:
            _tell("all_to_all of parts whose sizes are given")
        if sized or self.comm is None:
            return self.gloo.alltoall_base(contiguous(output), input.detach().contiguous(), output_sizes, input_sizes)
        return self._started("all_to_all", self.comm.all_to_all_async(as_bytes(output), as_bytes(input.contiguous())), _finish(output))

    def alltoall(self, outputs, inputs, opts=None):
        _one_dtype("all_to_all", *outputs, *inputs)
        sizes = [output.numel() for output in outputs]
        whole = outputs[0].new_empty(sum(sizes))
        parts = torch.cat([part.detach().reshape(-1) for part in inputs])
        work = self.alltoall_base(whole, parts, sizes, [part.numel() for part in inputs])
        return _then(work, lambda: [put(out, part) for out, part in zip(outputs, whole.split(sizes), strict=True)])

    def barrier(self, opts=None):
        if self.comm is None:
            return self.gloo.barrier()
        return self._started("barrier", self.comm.barrier_async(), _finish())

    # What a network that sums cannot do.

    gather, scatter, send, recv, recv_anysource = map(_by_gloo, ("gather", "scatter", "send", "recv", "recv_anysource"))

    # Newer names.
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    all_to_all_single = alltoall_base


def _tell(what: str) -> None:
    """Says once what Gloo does."""
    if what not in ProcessGroup.told:
        ProcessGroup.told.add(what)
        warnings.warn(f"{what}: Gloo does it, as the network cannot", Delegated, stacklevel=1)


def _one_dtype(kind: str, first: torch.Tensor, *others: torch.Tensor) -> None:
    """Else bytes are taken for what they are not."""
    if other := next((other.dtype for other in others if other.dtype != first.dtype), None):
        raise ArgumentError(f"{kind}: tensors of {first.dtype} and {other}; they must be of one type")


def _divided(tensor: torch.Tensor, ranks: int) -> torch.Tensor:
    with torch.inference_mode(tensor.is_inference()):
        return tensor.detach().div_(ranks, rounding_mode=None if tensor.is_floating_point() or tensor.is_complex() else "trunc")


def _finish(*results: torch.Tensor) -> Callable[[Work], list[torch.Tensor]]:
    def finish(work: Work) -> list[torch.Tensor]:
        work.wait()
        return list(results)

    return finish


def _kept(handle: Handle) -> Handle:
    if OLD:
        _last.append(handle)
    return handle


def _then(work: DistributedWork, finish: Callable[[], list[torch.Tensor]]) -> Handle:
    def done(future: torch.futures.Future) -> list[torch.Tensor]:
        future.wait()
        return finish()

    return _kept(Handle().follow(work.get_future().then, done))


def _all(works: Sequence[DistributedWork], results: Sequence[torch.Tensor]) -> DistributedWork:
    """That of all of them."""
    if len(works) == 1:
        return works[0]

    def done(future: torch.futures.Future) -> list[torch.Tensor]:
        for one in future.wait():
            one.wait()
        return list(results)

    return _kept(Handle().follow(torch.futures.collect_all([work.get_future() for work in works]).then, done))


def register() -> None:
    """Makes init_process_group("netsum") known."""
    more = {"devices": ["cpu"]} if "devices" in dist.Backend.register_backend.__code__.co_varnames else {}
    dist.Backend.register_backend("netsum", ProcessGroup, extended_api=True, **more)
