"""Gloo's part of a group: calls that netsum cannot handle, for tensors of any strides."""

import collections
import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cached_property, lru_cache

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllreduceOptions,
    BroadcastOptions,
    GatherOptions,
    PrefixStore,
    ProcessGroupGloo,
    ReduceOptions,
    ScatterOptions,
    Work as DistributedWork,
)

from ..errors import ArgumentError, Error
from .completion import Handle, all_of, over, then
from .rendezvous import has_come
from .tensors import Memory, divided

_SUM, _AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG
_NAMES = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
#: Messages of the default group have tags below this; those of other groups have this bit, their
#: group's number and a tag of 16 bits.
_OF_GROUPS = 1 << 30


def op_name(op: "dist.ReduceOp") -> str:
    return next((name for name in _NAMES if op == getattr(dist.ReduceOp, name, None)), str(op))


@lru_cache(maxsize=1)
def _devices(interfaces: str, address: str) -> list:
    """Shared by all groups: each device has a thread."""
    if interfaces:
        # The default device ignores the variable.
        return [ProcessGroupGloo.create_device(interface=name) for name in interfaces.split(",")]
    if address:
        return [ProcessGroupGloo.create_device(hostname=address)]
    return [ProcessGroupGloo.create_default_device()]


class _Queued:
    """A queued call."""

    def __init__(self, call: "Callable[[ProcessGroupGloo], DistributedWork]", is_agreed: bool):
        self.call, self.is_agreed = call, is_agreed
        self.error: "Exception | None" = None
        self.over: torch.futures.Future = torch.futures.Future()


class Gloo:
    """Gloo for the ranks of a group.

    It is set up at the first collective, because it costs threads and sockets. Setting up waits for
    all ranks, which may first call in another group. So another thread does it, and calls wait in a
    queue. Messages between two ranks cannot wait for this, as the other ranks do not call: `world`,
    which is set up already, carries them.

    If the ranks' calls differ, Gloo returns wrong numbers, or the process crashes. With `agree`, a
    call waits in the queue until all ranks have made the same call.
    """

    def __init__(
        self,
        store: "dist.Store",
        rank: int,
        size: int,
        timeout: timedelta,
        address: str,
        world: "Gloo | None",
        ranks: "Sequence[int]",
        agree: "Callable[[str, Sequence[int]], Handle] | None",
    ):
        self.store, self.rank, self.size, self.timeout, self.address = (
            store,
            rank,
            size,
            timeout,
            address,
        )
        self.world, self.ranks, self._agree = world, list(ranks) or list(range(size)), agree
        self._lock = threading.Lock()
        self._queue: "collections.deque[_Queued]" = collections.deque()
        self._is_begun = False
        self._monitored = 0
        #: Why the ranks have started different calls.
        self._broken: "Exception | None" = None
        # A store's connection waits for one key at a time, and older stores cannot be cloned.
        at_once = world is None or not hasattr(store, "clone")
        self._group = self._make(store) if at_once else None

    def _make(self, store: "dist.Store") -> ProcessGroupGloo:
        options = ProcessGroupGloo._Options()
        options._timeout = self.timeout
        options._devices = _devices(os.environ.get("GLOO_SOCKET_IFNAME", ""), self.address)
        return ProcessGroupGloo(PrefixStore("gloo", store), self.rank, self.size, options)

    def _set_up(self) -> None:
        try:
            group, error = self._make(self.store.clone()), None
        except Exception as raised:  # noqa: BLE001: each queued call raises it
            group, error = None, raised
        with self._lock:
            self._group, self._is_begun = group, group is not None
            failed = list(self._queue) if error is not None else []
            if failed:
                self._queue.clear()
        for queued in failed:
            queued.over.set_exception(error)
        self._go()

    def _call(
        self,
        call: "Callable[[ProcessGroupGloo], DistributedWork]",
        what: str,
        sizes: Sequence[int] = (),
    ) -> DistributedWork:
        """Starts a call after the queued ones. `what` and `sizes` are for `agree`."""
        agreed = None if self._agree is None else self._agree(what, sizes)
        with self._lock:
            if self._group is not None and agreed is None and not self._queue:
                return call(self._group)
            queued = _Queued(call, agreed is None)
            self._queue.append(queued)
            if self._group is None and not self._is_begun:
                self._is_begun = True
                threading.Thread(target=self._set_up, name="netsum-gloo", daemon=True).start()
        handle = Handle().follow(queued.over.then, lambda future: future.wait())

        def done(future: torch.futures.Future) -> None:
            try:
                over(agreed, future)
            except Exception as raised:  # noqa: BLE001: the caller's
                queued.error = raised
            queued.is_agreed = True
            self._go()

        if agreed is not None:
            agreed.get_future().then(done)
        return handle

    def _go(self) -> None:
        """Starts calls at the head of the queue that may start."""
        begun = []
        with self._lock:
            while self._group is not None and self._queue and self._queue[0].is_agreed:
                queued = self._queue.popleft()
                try:
                    if queued.error is not None:
                        # An ArgumentError is raised at all ranks, and none has started the call.
                        if not isinstance(queued.error, ArgumentError):
                            self._broken = self._broken or queued.error
                        raise queued.error
                    if self._broken is not None:
                        raise Error(
                            "Gloo cannot be used in this group after the ranks' calls differed: "
                            f"{self._broken}"
                        )
                    try:
                        begun.append((queued, queued.call(self._group)))
                    except Exception as raised:
                        # Other ranks may have started the call.
                        self._broken = raised if self._agree is not None else None
                        raise
                except Exception as raised:  # noqa: BLE001: the caller's
                    queued.error = raised
                    begun.append((queued, None))
        # Without the lock, as callbacks may make calls. The last one first: a callback may wait for
        # a later call.
        for queued, work in reversed(begun):
            if work is not None:
                work.get_future().then(lambda future, queued=queued: _settle(queued.over, future))
            else:
                queued.over.set_exception(queued.error)

    @property
    def is_set_up(self) -> bool:
        return self._group is not None

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout
        if self._group is not None:
            self._group._set_default_timeout(timeout)

    @property
    def group(self) -> ProcessGroupGloo:
        """Gloo's group, once it is set up."""
        if self._group is None:
            self.barrier().wait()
        return self._group

    # Collectives.

    def allreduce(
        self, tensor: torch.Tensor, op: "dist.ReduceOp", parts: Sequence[int] = ()
    ) -> DistributedWork:
        """`parts` are the sizes of a reduce_scatter's parts."""
        # Callbacks of Gloo must not refer to it: its threads cannot end themselves.
        size, opts = self.size, AllreduceOptions()
        opts.reduceOp = _SUM if op == _AVG else op
        what = f"all_reduce ({op_name(op)}) of {_elements(tensor)}"
        if parts:
            sizes = list(parts)
            what = f"reduce_scatter ({op_name(op)}) of parts of {sizes}, {_elements(tensor)}"
        if tensor.layout != torch.strided:
            work = self._call(lambda gloo: gloo.allreduce([tensor], opts), what)
            return then(work, lambda: [divided(tensor, size)]) if op == _AVG else work
        memory = Memory(tensor, _wide(tensor.dtype) if op == _AVG else None)
        work = self._call(lambda gloo: gloo.allreduce([memory.flat], opts), what)
        if op == _AVG:
            return then(work, lambda: [divided(memory.flat, size), memory.put()][1:])
        return _put(work, [memory])

    def reduce(self, tensor: torch.Tensor, root: int, op: "dist.ReduceOp") -> DistributedWork:
        opts = ReduceOptions()
        opts.rootRank, opts.reduceOp = root, _SUM if op == _AVG else op
        dtype = _wide(tensor.dtype) if op == _AVG else None
        memory = Memory(tensor, dtype, written=self.rank == root)
        what = f"reduce ({op_name(op)}) to rank {root} of {_elements(tensor)}"
        work = self._call(lambda gloo: gloo.reduce([memory.flat], opts), what)
        if self.rank != root:
            return work
        size = self.size

        def finish() -> list[torch.Tensor]:
            if op == _AVG:
                divided(memory.flat, size)
            return [memory.put()]

        return then(work, finish)

    def broadcast(self, tensors: Sequence[torch.Tensor], root: int) -> DistributedWork:
        opts = BroadcastOptions()
        opts.rootRank = root
        memories = [Memory(tensor, written=self.rank != root) for tensor in tensors]

        def start(memory: Memory) -> DistributedWork:
            what = f"broadcast from rank {root} of {_elements(memory.flat)}"
            return _put(
                self._call(lambda gloo: gloo.broadcast([memory.flat], opts), what), [memory]
            )

        return all_of([start(memory) for memory in memories], tensors)

    def allgather(self, outputs: Sequence[torch.Tensor], own: torch.Tensor) -> DistributedWork:
        memories = [Memory(output) for output in outputs]
        flat, own = [[memory.line for memory in memories]], [_given(own).view(-1)]
        what = f"all_gather of {_elements(own[0])}"
        return _put(self._call(lambda gloo: gloo.allgather(flat, own), what), memories)

    def alltoall_base(self, output, input, output_sizes, input_sizes) -> DistributedWork:
        memory, given = Memory(output), _given(input)
        taken = self._parts("output", output, output_sizes)
        sent = self._parts("input", input, input_sizes)

        def start(gloo: ProcessGroupGloo) -> DistributedWork:
            return gloo.alltoall_base(memory.flat, given, output_sizes, input_sizes)

        return _put(self._call(start, f"all_to_all of {given.dtype}", sent + taken), [memory])

    def _parts(self, name: str, tensor: torch.Tensor, sizes: Sequence[int]) -> list[int]:
        """How many elements are sent to each rank, or received from it."""
        rows = tensor.shape[0] if tensor.dim() else 0
        if not sizes and rows % self.size == 0:
            sizes = [rows // self.size] * self.size
        if len(sizes) != self.size or sum(sizes) != rows or min(sizes) < 0:
            raise ArgumentError(
                f"all_to_all: the {name} has {rows} rows, in parts of {list(sizes)} for "
                f"{self.size} ranks: there must be a part for each rank, and the parts must come "
                "to all rows; without sizes the number of ranks must divide the rows"
            )
        row = tensor.numel() // rows if rows else 0
        return [size * row for size in sizes]

    def gather(self, outputs, inputs, root: int) -> DistributedWork:
        opts = GatherOptions()
        opts.rootRank = root
        self._listed("gather", outputs[0] if outputs else [], inputs[0], root)
        memories = [Memory(output) for output in outputs[0]] if outputs else []
        flat = [[memory.line for memory in memories]] if outputs else []
        given = [_given(tensor).view(-1) for tensor in inputs]
        what = f"gather at rank {root} of {_elements(inputs[0])} of each rank"
        return _put(self._call(lambda gloo: gloo.gather(flat, given, opts), what), memories)

    def scatter(self, outputs, inputs, root: int) -> DistributedWork:
        opts = ScatterOptions()
        opts.rootRank = root
        self._listed("scatter", inputs[0] if inputs else [], outputs[0], root)
        memories = [Memory(output) for output in outputs]
        given = [[_given(tensor).view(-1) for tensor in inputs[0]]] if inputs else []
        flat = [memory.line for memory in memories]
        what = f"scatter by rank {root} of {_elements(outputs[0])} to each rank"
        return _put(self._call(lambda gloo: gloo.scatter(flat, given, opts), what), memories)

    def _listed(
        self, kind: str, listed: Sequence[torch.Tensor], own: torch.Tensor, root: int
    ) -> None:
        """Checks that only the root has a list: a tensor for each rank, like its own."""
        expected = [_elements(own)] * self.size if self.rank == root else []
        if (found := [_elements(tensor) for tensor in listed]) != expected:
            raise ArgumentError(
                f"{kind}: rank {self.rank} has a list of [{', '.join(found)}] beside "
                f"{_elements(own)}: only the root, rank {root} of {self.size}, must have a list, "
                "of a tensor for each rank, like the one beside it"
            )

    def barrier(self) -> DistributedWork:
        return self._call(ProcessGroupGloo.barrier, "barrier")

    def monitored_barrier(self, timeout: timedelta, wait_all_ranks: bool) -> None:
        """Uses the store: setting Gloo up needs all ranks, but the missing rank is to be named.

        If Gloo is set up already, it is used: older stores cannot be used after a failed wait.
        """
        if not hasattr(self.store, "clone"):
            self._group.monitored_barrier(timeout, wait_all_ranks)
            return
        number, self._monitored = self._monitored, self._monitored + 1
        seconds, key = timeout.total_seconds(), f"monitored/{number}"
        until = time.monotonic() + seconds
        if self.rank > 0:
            self.store.set(f"{key}/{self.rank}", "")
            if not has_come(self.store, key, until):
                raise Error(
                    f"monitored_barrier: rank 0 has not reported within {seconds:g} s that all "
                    "ranks have called it"
                )
            return
        missing = []
        for rank in range(1, self.size):
            if not has_come(self.store, f"{key}/{rank}", until):
                missing.append(rank)
                if not wait_all_ranks:
                    break
        if missing:
            ranks = ", ".join(map(str, missing))
            raise Error(f"monitored_barrier: rank {ranks} has not called it within {seconds:g} s")
        self.store.set(key, "")

    # Between two ranks.

    def send(self, tensors: Sequence[torch.Tensor], to: int, tag: int) -> DistributedWork:
        self._check("send to", to)
        carrier, ranks, tag = self._carrier(tag)
        given = [Memory(tensor, written=False).to_host().flat for tensor in tensors]
        work = carrier.send(given, ranks[to], tag)
        return Message(work, [], ranks, self.timeout)

    def recv(self, tensors: Sequence[torch.Tensor], source: int, tag: int) -> DistributedWork:
        self._check("recv from", source)
        carrier, ranks, tag = self._carrier(tag)
        memories = [Memory(tensor).to_host() for tensor in tensors]
        work = carrier.recv([memory.flat for memory in memories], ranks[source], tag)
        return Message(work, memories, ranks, self.timeout)

    def recv_anysource(self, tensors: Sequence[torch.Tensor], tag: int) -> DistributedWork:
        carrier, ranks, tag = self._carrier(tag)
        memories = [Memory(tensor).to_host() for tensor in tensors]
        work = carrier.recv_anysource([memory.flat for memory in memories], tag)
        return Message(work, memories, ranks, self.timeout)

    def _check(self, call: str, rank: int) -> None:
        if not 0 <= rank < self.size or rank == self.rank:
            raise ArgumentError(
                f"{call} rank {rank}: must be another rank from 0 to {self.size - 1}"
            )

    def _carrier(self, tag: int) -> "tuple[ProcessGroupGloo, list[int], int]":
        """The group that carries messages, its numbers of the ranks, and this group's own tag."""
        if self.world is None:
            if tag >= _OF_GROUPS:
                raise ArgumentError(f"tag {tag}: 0 to {_OF_GROUPS - 1}")
            return self.group, list(range(self.size)), tag
        if not 0 <= tag < 1 << 16:
            raise ArgumentError(f"tag {tag}: must be 0 to 65535, except in the default group")
        return self.world.group, self.ranks, _OF_GROUPS | self._number << 16 | tag

    @cached_property
    def _number(self) -> int:
        """The group's number, which no other group of the job has; its first caller draws it."""
        if self.store.add("number/asked", 1) == 1:
            number = self.world.store.add("groups", 1)
            self.store.set("number", str(number))
        number = int(self.store.get("number"))
        if number >= 1 << 14:
            raise ArgumentError("more than 16,383 groups in which ranks send each other messages")
        return number


class Abilities:
    """Answers PyTorch's queries of abilities for a Gloo group that is not set up.

    Setting it up would wait for other ranks, which may not call.
    """

    def __init__(self, gloo: Gloo):
        self._gloo = gloo

    def __getattr__(self, name: str):
        is_asked = name.lstrip("_").startswith("supports_")
        return getattr((self._gloo.world if is_asked else self._gloo).group, name)


class Message(DistributedWork):
    """A message in flight, with the timeout of its own group, not of the group that carries it."""

    def __init__(
        self,
        work: DistributedWork,
        memories: Sequence[Memory],
        ranks: Sequence[int],
        timeout: timedelta,
    ):
        super().__init__()
        self._work, self._memories, self._ranks, self._timeout = work, memories, ranks, timeout

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        waited = self._work.wait(timeout or self._timeout)
        for memory in self._memories:
            memory.put()
        return waited

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def is_success(self) -> bool:
        return self._work.is_success()

    def exception(self):
        return self._work.exception()

    def result(self) -> list[torch.Tensor]:
        return [memory.tensor for memory in self._memories]

    def source_rank(self) -> int:
        return self._ranks.index(self._work._source_rank())

    _source_rank = source_rank

    def synchronize(self) -> None:
        self.wait()


def _settle(over: torch.futures.Future, done: torch.futures.Future) -> None:
    try:
        over.set_result(done.wait())
    except Exception as raised:  # noqa: BLE001: the caller's
        over.set_exception(raised)


def _given(tensor: torch.Tensor) -> torch.Tensor:
    return Memory(tensor, written=False).flat


def _elements(tensor: torch.Tensor) -> str:
    """Describes a tensor by properties that Gloo does not compare."""
    if tensor.layout != torch.strided:
        return f"{tensor.dtype}, {tensor.layout}"
    return f"{tensor.numel()} elements of {tensor.dtype}"


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The type in which an average is computed: the sum may be too large for the tensor's own."""
    if dtype.is_floating_point:
        return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    return dtype if dtype.is_complex or dtype == torch.bool else torch.int64


def _put(work: DistributedWork, memories: Sequence[Memory]) -> DistributedWork:
    """Completes when results have been copied back."""
    if not any(memory.is_copy for memory in memories):
        return work
    return then(work, lambda: [memory.put() for memory in memories])
