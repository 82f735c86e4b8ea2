"""The backend "netsum" of torch.distributed: reductions in the network, and Gloo for the rest."""

import functools
import os
import warnings
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo, Work as DistributedWork

from .._netsum import Communicator, Work
from ..errors import ArgumentError, ConfigError, MismatchError
from .completion import Handle, all_of, completed, then
from .devices import NEWER, device_types, other_backend, refuse, take_devices
from .gloo import Abilities, Gloo, op_name
from .recorder import begun, recorder
from .rendezvous import apart, group_rendezvous, rendezvous
from .staging import Staging
from .tensors import PAIRS, REDUCED, Memory, Reduced, put, tag

_SUM = dist.ReduceOp.SUM
#: netsum's names of PyTorch's operators.
_OPS = {
    "SUM": "sum",
    "AVG": "avg",
    "MIN": "min",
    "MAX": "max",
    "PRODUCT": "prod",
    "BAND": "band",
    "BOR": "bor",
    "BXOR": "bxor",
}

#: Default groups of another backend that have a netsum group of all ranks.
_beside: "weakref.WeakSet[dist.ProcessGroup]" = weakref.WeakSet()


class DelegatedWarning(UserWarning):
    """Gloo handles a call that netsum cannot; the text names it."""


class ProcessGroup(dist.ProcessGroup):
    """A group that netsum serves; or one that Gloo serves, as all but the first without a box."""

    #: The communicators that exist, and this rank's address.
    connected: "weakref.WeakSet[Communicator]" = weakref.WeakSet()
    address = ""
    #: Whether all ranks of the first group know of a box.
    has_box = False
    warned: set[str] = set()
    staging: "Staging | None" = None

    def __init__(self, options, _more=None):
        #: Backends of others, by their types of devices.
        self.others: dict[str, object] = {}
        rank, size = options.group_rank, options.group_size
        super().__init__(rank, size)
        self._name = self._text = ""
        self._timeout = options.timeout.total_seconds()
        world = dist.group.WORLD if dist.is_initialized() else None
        store = apart(options.store, size)
        ranks = list(options.global_ranks_in_group)
        self.comm = self._communicator(store, world, ranks)
        self._record = recorder.group(rank, ranks or range(size)) if self.comm else None
        world_gloo = world.gloo if isinstance(world, ProcessGroup) else None
        agree = None
        if self.comm is not None:
            # A proxy, because the group refers to Gloo.
            agree = functools.partial(ProcessGroup._agree, weakref.proxy(self))
        address = ProcessGroup.address
        self.gloo = Gloo(store, rank, size, options.timeout, address, world_gloo, ranks, agree)

    def _communicator(
        self, store: "dist.Store", world: "dist.ProcessGroup | None", ranks: "list[int]"
    ) -> Communicator | None:
        """Connects the group's ranks; an empty list means all in their order.

        Operations of two groups must not mix, but a communicator has one order of operations. So
        each group but the first one of all ranks has a group of the job, if there is a box. The
        result must be the same at all ranks, and so must not depend on a rank's own past.
        """
        if world is not None:
            what = None
            if ranks and ranks != list(range(world.size())):
                what = "a group with another order of ranks"
                if self.size() < world.size():
                    what = f"a group of {self.size()} of {world.size()} ranks"
            elif isinstance(world, ProcessGroup) or world in _beside:
                what = "a second group of all ranks"
            if what is not None:
                if isinstance(world, ProcessGroup) and not world.has_box:
                    return _leave_to_gloo(what)
                rank, size = self.rank(), self.size()
                comm, why = group_rendezvous(store, rank, size, self._timeout)
                if comm is None:
                    return _leave_to_gloo(what, why)
                ProcessGroup.connected.add(comm)
                return comm
            _beside.add(world)
        # A model may keep destroyed groups alive.
        for comm in list(ProcessGroup.connected):
            comm.close()
        comm, ProcessGroup.address, self.has_box = rendezvous(
            store, self.rank(), self.size(), self._timeout
        )
        ProcessGroup.connected.add(comm)
        return comm

    def shutdown(self) -> None:
        """Newer PyTorch calls it in destroy_process_group."""
        if self.comm is not None:
            self.comm.close()

    abort = shutdown

    def getBackendName(self) -> str:
        return "netsum"

    # PyTorch's own class keeps these in C++ backends.

    def _get_backend(self, device: torch.device) -> "ProcessGroupGloo | Abilities":
        if (other := other_backend(self, torch.device(device).type)) is not None:
            return other
        return self.gloo.group if self.gloo.is_set_up else Abilities(self.gloo)

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout.total_seconds()
        self.gloo.set_timeout(timeout)

    def setGroupName(self, name: str) -> None:
        self._name = name
        if self._record is not None:
            self._record.name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, text: str) -> None:
        self._text = text
        if self._record is not None:
            self._record.text = text

    def getGroupDesc(self) -> str:
        return self._text

    def _reduces(
        self, kind: str, tensors: Sequence[torch.Tensor], op: "dist.ReduceOp"
    ) -> str | None:
        """netsum's name of the operation, if netsum handles it."""
        if self.comm is None:
            return None
        if any(tensor.layout != torch.strided for tensor in tensors):
            return _warn(f"{kind} of sparse tensors")
        dtypes = {tensor.dtype for tensor in tensors}
        dtype = next(iter(dtypes), torch.float32)
        if len(dtypes) > 1 or dtype not in (*REDUCED, *PAIRS):
            return _warn(f"{kind} of {', '.join(map(str, dtypes))}")
        name = _OPS.get(op_name(op))
        if name is None:
            return _warn(f"{kind} with {op_name(op)}")
        if dtype in PAIRS and name not in ("sum", "avg"):
            raise ArgumentError(f"{kind}: {op_name(op)} of {dtype}: must be SUM or AVG")
        return name

    def _reduced(self, tensor: torch.Tensor, name: str, kept: bool = True) -> Reduced:
        return Reduced(tensor, name, self.size(), kept)

    def _started(
        self,
        kind: str,
        start: Callable[[], Work],
        finish: Callable[[Work], list[torch.Tensor]],
        inputs: Sequence[torch.Tensor] = (),
        outputs: Sequence[torch.Tensor] = (),
    ) -> Handle:
        entry = begun(self._record, kind, inputs, outputs, self._timeout)

        def done(work: Work) -> list[torch.Tensor]:
            try:
                if not work.is_done():
                    raise TimeoutError(
                        f"{kind} has taken {self._timeout:g} s, the group's timeout: another rank "
                        "has not made the call, or is behind"
                    )
                results = finish(work)
            except BaseException as error:
                entry.failed(error)
                raise
            entry.done()
            return results

        try:
            work = start()
        except BaseException as error:
            entry.failed(error)
            raise
        handle = Handle().follow(lambda call: completed(self.comm, work, call, self._timeout), done)
        entry.follows(handle.get_future())
        return handle

    def _agree(self, what: str, sizes: Sequence[int]) -> Handle:
        """Completes when all ranks make the same call, which Gloo will handle.

        For all_to_all, `sizes` are how many elements this rank sends to each rank, followed by how
        many it receives from each.
        """
        number, given, ranks = (
            tag("gloo", what),
            torch.tensor(sizes, dtype=torch.int64),
            self.size(),
        )
        table = torch.zeros(ranks * len(sizes), dtype=torch.int64)
        if sizes:
            outputs, own = table.view(torch.uint8), given.view(torch.uint8)
            start = functools.partial(self.comm.all_gather_async, outputs, own, tag=number)
        else:
            start = functools.partial(self.comm.barrier_async, tag=number)

        def finish(work: Work) -> list[torch.Tensor]:
            try:
                work.wait()
            except MismatchError as error:
                raise MismatchError(f"{error}; this rank's call is {what}, by Gloo") from None
            if sizes:
                _crossing(table, ranks)
            return []

        return self._started(what, start, finish)

    def _root(self, kind: str, root: int) -> int:
        if not 0 <= root < self.size():
            raise ArgumentError(
                f"{kind}: root {root}: must be 0 to {self.size() - 1} with {self.size()} ranks"
            )
        return root

    # Reductions.

    def allreduce(self, tensors, opts=None):
        tensors, op = _listed(tensors), _option(opts, "reduceOp", _SUM)
        if not tensors:
            raise ArgumentError("all_reduce: no tensors")
        name = self._reduces("all_reduce", tensors, op)
        if name is None:
            return all_of([self.gloo.allreduce(tensor, op) for tensor in tensors], tensors)
        results = [self._reduced(tensor, name) for tensor in tensors]

        def start(one: Reduced) -> Handle:
            call = functools.partial(
                self.comm.all_reduce_async, one.given, one.op, tag=one.tag()
            )
            both = [one.tensor]
            return self._started("all_reduce", call, one.finished, both, both)

        return all_of([start(one) for one in results], tensors)

    def allreduce_coalesced(self, tensors, opts=None):
        return self.allreduce(tensors, opts)

    def reduce(self, tensors, opts=None, op=_SUM):
        tensor, op = _listed(tensors)[0], getattr(opts, "reduceOp", op)
        root = self._root("reduce", _option(opts, "rootRank", 0))
        name = self._reduces("reduce", [tensor], op)
        if name is None:
            return self.gloo.reduce(tensor, root, op)
        result = self._reduced(tensor, name, kept=self.rank() == root)
        call = functools.partial(
            self.comm.reduce_async, result.given, root, result.op, tag=result.tag()
        )
        both = [tensor]
        return self._started("reduce", call, result.finished, both, both)

    def _reduce_scatter_base(self, output, input, opts=None):
        op = _option(opts, "reduceOp", _SUM)
        if input.numel() != output.numel() * self.size():
            raise ArgumentError(
                f"reduce_scatter: an input of {input.numel()} elements and an output of "
                f"{output.numel()}: the input must be {self.size()} times as long, once for each "
                "rank"
            )
        _one_dtype("reduce_scatter", output, input)
        name = self._reduces("reduce_scatter", [output, input], op)
        if name is None:
            # Gloo's own has no AVG and, in older PyTorch, no operation at all.
            return self._part_of_all_reduce(output, input, [output.numel()] * self.size(), op)
        result, whole = self._reduced(output, name), self._reduced(input, name, kept=False)
        given, number = whole.given, result.tag()
        call = functools.partial(
            self.comm.reduce_scatter_async, result.given, given, result.op, tag=number
        )
        return self._started("reduce_scatter", call, result.finished, [input], [output])

    def _part_of_all_reduce(self, output, input, sizes, op):
        whole = Memory(input, written=False).flat.reshape(-1).clone()
        name = self._reduces("reduce_scatter", [output, input], op)
        if name is None:
            work = self.gloo.allreduce(whole, op, sizes)
        else:
            result = self._reduced(whole, name)
            call = functools.partial(
                self.comm.all_reduce_async, result.given, result.op, tag=result.tag(sizes)
            )
            work = self._started("reduce_scatter", call, result.finished, [input], [output])
        return then(work, lambda: [put(output, whole.split(sizes)[self.rank()])])

    def reduce_scatter(self, outputs, inputs, opts=None):
        output = outputs
        if not isinstance(outputs, torch.Tensor):
            output, inputs = outputs[0], inputs[0]
        _one_dtype("reduce_scatter", output, *inputs)
        sizes = [part.numel() for part in inputs]
        if len(sizes) != self.size() or sizes[self.rank()] != output.numel():
            raise ArgumentError(
                f"reduce_scatter: parts of {sizes} elements for {self.size()} ranks, and an output "
                f"of {output.numel()}: there must be a part for each rank, and this rank's part "
                "must be as long as the output"
            )
        whole = torch.cat([part.detach().reshape(-1) for part in inputs])
        if len(set(sizes)) == 1:
            return self._reduce_scatter_base(output, whole, opts)
        return self._part_of_all_reduce(output, whole, sizes, _option(opts, "reduceOp", _SUM))

    def reduce_scatter_tensor_coalesced(self, outputs, inputs, opts=None):
        pairs = zip(outputs, inputs, strict=True)
        return all_of([self._reduce_scatter_base(*pair, opts) for pair in pairs], outputs)

    # Collectives that move data.

    def broadcast(self, tensors, opts=None):
        tensors, root = _listed(tensors), self._root("broadcast", _option(opts, "rootRank", 0))
        if self.comm is None:
            return self.gloo.broadcast(tensors, root)
        memories = [Memory(tensor, written=self.rank() != root) for tensor in tensors]

        def start(memory: Memory) -> Handle:
            number = tag(memory.flat.dtype)
            call = functools.partial(
                self.comm.broadcast_async, memory.as_bytes(), root, tag=number
            )
            both = [memory.tensor]
            return self._started("broadcast", call, _finish([memory]), both, both)

        return all_of([start(memory) for memory in memories], tensors)

    def _allgather_base(self, output, input, opts=None):
        _one_dtype("all_gather", output, input)
        if output.numel() != input.numel() * self.size():
            raise ArgumentError(
                f"all_gather: an input of {input.numel()} elements and an output of "
                f"{output.numel()}: the output must be {self.size()} times as long, once for each "
                "rank"
            )
        if self.comm is None:
            whole = Memory(output)
            work = self.gloo.allgather(
                list(whole.flat.view(self.size(), input.numel())), input.reshape(-1)
            )
            return then(work, lambda: [whole.put()])
        whole, own = Memory(output), Memory(input, written=False)
        call = functools.partial(
            self.comm.all_gather_async, whole.as_bytes(), own.as_bytes(), tag=tag(output.dtype)
        )
        return self._started("all_gather", call, _finish([whole]), [input], [output])

    def allgather(self, outputs, inputs, opts=None):
        own = inputs
        if not isinstance(inputs, torch.Tensor):
            outputs, own = outputs[0], inputs[0]
        _one_dtype("all_gather", own, *outputs)
        if len(outputs) != self.size() or outputs[self.rank()].numel() != own.numel():
            raise ArgumentError(
                f"all_gather: outputs of {[output.numel() for output in outputs]} elements for "
                f"{self.size()} ranks, and an input of {own.numel()}: there must be an output for "
                "each rank, as long as that rank's input"
            )
        if len({output.numel() for output in outputs}) > 1:
            # The ranks' inputs have different sizes.
            put(outputs[self.rank()], own.detach())
            works = [self.broadcast([output], root) for root, output in enumerate(outputs)]
            return all_of(works, outputs)
        if self.comm is None:
            return self.gloo.allgather(outputs, own)
        whole = own.new_empty((len(outputs), own.numel()))
        work = self._allgather_base(whole, own)
        return then(work, lambda: _put_all(outputs, whole))

    def allgather_coalesced(self, output_lists, inputs, opts=None):
        by_tensor = [[outputs[i] for outputs in output_lists] for i in range(len(inputs))]
        pairs = zip(by_tensor, inputs, strict=True)
        return all_of([self.allgather([outputs], [own]) for outputs, own in pairs], inputs)

    def allgather_into_tensor_coalesced(self, outputs, inputs, opts=None):
        pairs = zip(outputs, inputs, strict=True)
        return all_of([self._allgather_base(*pair) for pair in pairs], outputs)

    def barrier(self, opts=None):
        if self.comm is None:
            return self.gloo.barrier()
        return self._started("barrier", self.comm.barrier_async, _finish([]))

    # Transfers between ranks.

    def alltoall_base(self, output, input, output_sizes, input_sizes, opts=None):
        _one_dtype("all_to_all", output, input)
        self._by_gloo("all_to_all")
        return self.gloo.alltoall_base(output, input, output_sizes, input_sizes)

    def alltoall(self, outputs, inputs, opts=None):
        if not len(outputs) == len(inputs) == self.size():
            raise ArgumentError(
                f"all_to_all: lists of {len(inputs)} and {len(outputs)} tensors for {self.size()} "
                "ranks: there must be a tensor for each rank"
            )
        _one_dtype("all_to_all", *outputs, *inputs)
        sizes = [output.numel() for output in outputs]
        whole = outputs[0].new_empty(sum(sizes))
        parts = torch.cat([part.detach().reshape(-1) for part in inputs])
        work = self.alltoall_base(whole, parts, sizes, [part.numel() for part in inputs])
        return then(work, lambda: _put_all(outputs, whole.split(sizes)))

    def gather(self, outputs, inputs, opts=None):
        self._by_gloo("gather")
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs] if outputs else [], [inputs]
        return self.gloo.gather(outputs, inputs, self._root("gather", _option(opts, "rootRank", 0)))

    def scatter(self, outputs, inputs, opts=None):
        self._by_gloo("scatter")
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs] if inputs else []
        return self.gloo.scatter(
            outputs, inputs, self._root("scatter", _option(opts, "rootRank", 0))
        )

    def send(self, tensors, to, tag=0):
        self._by_gloo("send")
        return self.gloo.send(_listed(tensors), to, tag)

    def recv(self, tensors, source, tag=0):
        self._by_gloo("recv")
        return self.gloo.recv(_listed(tensors), source, tag)

    def recv_anysource(self, tensors, tag=0):
        self._by_gloo("recv")
        return self.gloo.recv_anysource(_listed(tensors), tag)

    def monitored_barrier(self, timeout=None, wait_all_ranks=False):
        timeout = self.gloo.timeout if timeout is None else timeout
        self.gloo.monitored_barrier(timeout, wait_all_ranks)

    @property
    def _device_types(self) -> list[torch.device]:
        """PyTorch queries this before it calls monitored_barrier.

        A new group that has a device type is taken for one of C++'s backends.
        """
        is_registered = self in dist.distributed_c10d._world.pg_group_ranks
        return [torch.device("cpu")] if is_registered else []

    def split_group(self, *_ranks, **_more):
        raise ArgumentError(
            "split_group is not supported: use new_group to make a group of some of the ranks"
        )

    def _by_gloo(self, kind: str) -> None:
        if self.comm is not None:
            _warn(kind)


_COLLECTIVES = (
    "allreduce",
    "reduce",
    "_reduce_scatter_base",
    "reduce_scatter",
    "broadcast",
    "_allgather_base",
    "allgather",
    "alltoall_base",
    "alltoall",
    "gather",
    "scatter",
)


def _secret() -> "str | None":
    """The variable that has sums sealed."""
    return next(filter(os.environ.get, ("NETSUM_SECRET", "NETSUM_SECRET_FILE")), None)


def _leave_to_gloo(what: str, why: str = "") -> None:
    """Leaves a group's sums to Gloo, but not if they are to be sealed."""
    if secret := _secret():
        why = why or "there is no box"
        raise ConfigError(f"{what}: Gloo would sum in clear, but {secret} is set: {why}")
    _warn(what, why)


def _warn(what: str, why: str = "") -> None:
    """Warns once of a call that Gloo handles."""
    if what not in ProcessGroup.warned:
        ProcessGroup.warned.add(what)
        text = f"{what}: Gloo does it, as the network cannot" + (f": {why}" if why else "")
        text += "; it is not sealed" if _secret() else ""
        warnings.warn(text, DelegatedWarning, stacklevel=1)


def _put_all(
    outputs: Sequence[torch.Tensor], parts: "Sequence[torch.Tensor] | torch.Tensor"
) -> list[torch.Tensor]:
    return [put(output, part) for output, part in zip(outputs, parts, strict=True)]


def _listed(tensors: "torch.Tensor | Sequence[torch.Tensor]") -> Sequence[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def _option(opts, name: str, default):
    """An option, from PyTorch's options or as an argument of the group's own methods."""
    return default if opts is None else getattr(opts, name, opts)


def _one_dtype(kind: str, first: torch.Tensor, *others: torch.Tensor) -> None:
    """Refuses different types, whose bytes would be misread."""
    if other := next((other.dtype for other in others if other.dtype != first.dtype), None):
        raise ArgumentError(f"{kind}: tensors of {first.dtype} and {other}: must be of one type")


def _crossing(table: torch.Tensor, ranks: int) -> None:
    """Checks that each rank receives as many elements as others send to it."""
    sent, taken = table.view(ranks, 2, -1).transpose(0, 1)
    for i, j in (sent != taken.t()).nonzero().tolist()[:1]:
        raise ArgumentError(
            f"all_to_all: rank {i} sends {sent[i, j]} elements to rank {j}, which takes "
            f"{taken[j, i]}: nothing has been sent"
        )


def _finish(results: Sequence[Memory]) -> Callable[[Work], list[torch.Tensor]]:
    def finish(work: Work) -> list[torch.Tensor]:
        work.wait()
        return [result.put() for result in results]

    return finish


def _tell_refusals(group: type) -> None:
    """Makes a collective that one rank refuses a MismatchError at the others, instead of a hang.

    If all ranks refuse theirs, it has no effect.
    """

    def telling(call: Callable) -> Callable:
        @functools.wraps(call)
        def told(self, *arguments, **more):
            try:
                return call(self, *arguments, **more)
            except Exception as error:
                refuse(self, error)
                raise

        return told

    for name in _COLLECTIVES:
        setattr(group, name, telling(getattr(group, name)))


def _untraced(group: type) -> None:
    """Keeps torch.compile from tracing methods that C++ calls: it cannot trace groups."""
    untraced = getattr(torch, "_disable_dynamo", None)
    for name, method in list(vars(group).items()):
        is_public = name.islower() and name[0] != "_"
        is_call = name in ("_allgather_base", "_reduce_scatter_base") or is_public
        if untraced is not None and is_call and callable(method):
            setattr(group, name, untraced(method))


def register() -> None:
    """Registers the backend for init_process_group("netsum")."""
    _tell_refusals(ProcessGroup)
    take_devices(ProcessGroup)
    # What is refused before it is queued.
    _tell_refusals(ProcessGroup)
    _untraced(ProcessGroup)
    for newer, name in NEWER.items():
        setattr(ProcessGroup, newer, getattr(ProcessGroup, name))
    has_devices = "devices" in dist.Backend.register_backend.__code__.co_varnames
    more = {"devices": ["cpu"]} if has_devices else {}
    dist.Backend.register_backend("netsum", ProcessGroup, extended_api=True, **more)
    if has_devices:
        # As an argument, it would make netsum the default for devices that have none yet.
        dist.Backend.backend_capability["netsum"] = device_types()
