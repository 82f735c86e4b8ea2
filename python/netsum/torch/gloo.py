"""Gloo's part of a group: what the network cannot do, for tensors of any strides."""

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
from .meeting import has_come
from .tensors import WIDENED, Memory

_SUM, _AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG
_NAMES = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
#: Messages of the default group have tags below; those of others have this bit, their group's number and a tag of 16 bits.
_OF_GROUPS = 1 << 30


def op_name(op: "dist.ReduceOp") -> str:
    return next((name for name in _NAMES if op == getattr(dist.ReduceOp, name, None)), str(op))


@lru_cache(maxsize=1)
def _devices(interfaces: str, address: str) -> list:
    """Shared by all groups: each has a thread of its own."""
    if interfaces:
        # The default device does not look at it.
        return [ProcessGroupGloo.create_device(interface=name) for name in interfaces.split(",")]
    if address:
        return [ProcessGroupGloo.create_device(hostname=address)]
    return [ProcessGroupGloo.create_default_device()]


class _Turn:
    """A call in line."""

    def __init__(self, call: "Callable[[ProcessGroupGloo], DistributedWork]", is_agreed: bool):
        self.call, self.is_agreed = call, is_agreed
        self.error: "Exception | None" = None
        self.over: torch.futures.Future = torch.futures.Future()


class Gloo:
    """Gloo for the ranks of a group. It is set up at the first call of a collective, for it costs threads and sockets.

    Setting up waits for all ranks, and those may call first in another group. So another thread does it, and calls wait in line.
    Messages between two ranks have no such moment, as the others do not call: `world`, which is set up, carries them.

    Gloo takes one call for another where the ranks' calls differ: their numbers are wrong, or the process ends. Where there is `agree`,
    a call waits in line until it says that all ranks call for the same.
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
        self.store, self.rank, self.size, self.timeout, self.address = store, rank, size, timeout, address
        self.world, self.ranks, self._agree = world, list(ranks) or list(range(size)), agree
        self._lock = threading.Lock()
        self._line: "collections.deque[_Turn]" = collections.deque()
        self._is_begun = False
        self._monitored = 0
        #: Why the ranks have begun other calls than each other.
        self._broken: "Exception | None" = None
        # A store's connection waits for one thing at a time, and older stores have no other.
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
        except Exception as raised:  # noqa: BLE001: each of those in line raises it
            group, error = None, raised
        with self._lock:
            self._group, self._is_begun = group, group is not None
            failed = list(self._line) if error is not None else []
            if failed:
                self._line.clear()
        for turn in failed:
            turn.over.set_exception(error)
        self._go()

    def _call(self, call: "Callable[[ProcessGroupGloo], DistributedWork]", what: str, sizes: Sequence[int] = ()) -> DistributedWork:
        """Begins a call behind those in line. `what` and `sizes` are for `agree`."""
        agreed = None if self._agree is None else self._agree(what, sizes)
        with self._lock:
            if self._group is not None and agreed is None and not self._line:
                return call(self._group)
            turn = _Turn(call, agreed is None)
            self._line.append(turn)
            if self._group is None and not self._is_begun:
                self._is_begun = True
                threading.Thread(target=self._set_up, name="netsum-gloo", daemon=True).start()
        handle = Handle().follow(turn.over.then, lambda future: future.wait())

        def done(future: torch.futures.Future) -> None:
            try:
                over(agreed, future)
            except Exception as raised:  # noqa: BLE001: the caller's
                turn.error = raised
            turn.is_agreed = True
            self._go()

        if agreed is not None:
            agreed.get_future().then(done)
        return handle

    def _go(self) -> None:
        """Begins what is at the head of the line, as far as it may begin."""
        begun = []
        with self._lock:
            while self._group is not None and self._line and self._line[0].is_agreed:
                turn = self._line.popleft()
                try:
                    if turn.error is not None:
                        # A mistake is one at all ranks, and none has begun.
                        self._broken = self._broken or (None if isinstance(turn.error, ArgumentError) else turn.error)
                        raise turn.error
                    if self._broken is not None:
                        raise Error(f"Gloo cannot be used any more, as the ranks did not agree on an earlier call: {self._broken}")
                    try:
                        begun.append((turn, turn.call(self._group)))
                    except Exception as raised:
                        # The others may have begun.
                        self._broken = raised if self._agree is not None else None
                        raise
                except Exception as raised:  # noqa: BLE001: the caller's
                    turn.error = raised
                    begun.append((turn, None))
        # Without the lock, as callbacks may call. The last one first: a callback may wait for what
        # is behind it.
        for turn, work in reversed(begun):
            if work is not None:
                work.get_future().then(lambda future, turn=turn: _settle(turn.over, future))
            else:
                turn.over.set_exception(turn.error)

    @property
    def is_set_up(self) -> bool:
        return self._group is not None

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout
        if self._group is not None:
            self._group._set_default_timeout(timeout)

    @property
    def group(self) -> ProcessGroupGloo:
        """Itself, once it is set up."""
        if self._group is None:
            self.barrier().wait()
        return self._group

    # Collectives.

    def allreduce(self, tensor: torch.Tensor, op: "dist.ReduceOp", parts: Sequence[int] = ()) -> DistributedWork:
        """`parts`: what the sum is cut into, of a reduce_scatter."""
        # What runs when Gloo is done must not hold it: its threads cannot end themselves.
        size, opts = self.size, AllreduceOptions()
        opts.reduceOp = _SUM if op == _AVG else op
        what = f"all_reduce ({op_name(op)}) of {_elements(tensor)}"
        if parts:
            what = f"reduce_scatter ({op_name(op)}) of parts of {list(parts)}, {_elements(tensor)}"
        if tensor.layout != torch.strided:
            work = self._call(lambda gloo: gloo.allreduce([tensor], opts), what)
            return then(work, lambda: [_divided(tensor, size)]) if op == _AVG else work
        memory = Memory(tensor, _wide(tensor.dtype) if op == _AVG else None)
        work = self._call(lambda gloo: gloo.allreduce([memory.flat], opts), what)
        if op == _AVG:
            return then(work, lambda: [_divided(memory.flat, size), memory.put()][1:])
        return _put(work, [memory])

    def reduce(self, tensor: torch.Tensor, root: int, op: "dist.ReduceOp") -> DistributedWork:
        opts = ReduceOptions()
        opts.rootRank, opts.reduceOp = root, _SUM if op == _AVG else op
        memory = Memory(tensor, _wide(tensor.dtype) if op == _AVG else None, written=self.rank == root)
        what = f"reduce ({op_name(op)}) to rank {root} of {_elements(tensor)}"
        work = self._call(lambda gloo: gloo.reduce([memory.flat], opts), what)
        if self.rank != root:
            return work
        size = self.size
        return then(work, lambda: [_divided(memory.flat, size) if op == _AVG else memory.flat, memory.put()][1:])

    def broadcast(self, tensors: Sequence[torch.Tensor], root: int) -> DistributedWork:
        opts = BroadcastOptions()
        opts.rootRank = root
        memories = [Memory(tensor, written=self.rank != root) for tensor in tensors]

        def start(memory: Memory) -> DistributedWork:
            what = f"broadcast from rank {root} of {_elements(memory.flat)}"
            return _put(self._call(lambda gloo: gloo.broadcast([memory.flat], opts), what), [memory])

        return all_of([start(memory) for memory in memories], tensors)

    def allgather(self, outputs: Sequence[torch.Tensor], own: torch.Tensor) -> DistributedWork:
        memories = [Memory(output) for output in outputs]
        flat, own = [[memory.line for memory in memories]], [_given(own).view(-1)]
        work = self._call(lambda gloo: gloo.allgather(flat, own), f"all_gather of {_elements(own[0])}")
        return _put(work, memories)

    def alltoall_base(self, output, input, output_sizes, input_sizes) -> DistributedWork:
        memory, given = Memory(output), _given(input)
        taken, sent = self._parts("output", output, output_sizes), self._parts("input", input, input_sizes)

        def start(gloo: ProcessGroupGloo) -> DistributedWork:
            return gloo.alltoall_base(memory.flat, given, output_sizes, input_sizes)

        return _put(self._call(start, f"all_to_all of {given.dtype}", sent + taken), [memory])

    def _parts(self, name: str, tensor: torch.Tensor, sizes: Sequence[int]) -> list[int]:
        """How many elements go to each rank, or come from it."""
        rows = tensor.shape[0] if tensor.dim() else 0
        if not sizes and rows % self.size == 0:
            sizes = [rows // self.size] * self.size
        if len(sizes) != self.size or sum(sizes) != rows or min(sizes) < 0:
            raise ArgumentError(
                f"all_to_all: the {name} has {rows} rows, in parts of {list(sizes)} for {self.size} ranks: there must be a part for each "
                "rank, and the parts must come to all rows; without sizes the ranks must divide the rows"
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

    def _listed(self, kind: str, listed: Sequence[torch.Tensor], own: torch.Tensor, root: int) -> None:
        """The root alone has a list: a tensor for each rank, like its own."""
        expected = [_elements(own)] * self.size if self.rank == root else []
        if (found := [_elements(tensor) for tensor in listed]) != expected:
            raise ArgumentError(
                f"{kind}: rank {self.rank} has a list of [{', '.join(found)}] beside {_elements(own)}: the root, rank {root} of "
                f"{self.size}, and no other, must have a list of a tensor for each rank, like the one beside it"
            )

    def barrier(self) -> DistributedWork:
        return self._call(ProcessGroupGloo.barrier, "barrier")

    def monitored_barrier(self, timeout: timedelta, wait_all_ranks: bool) -> None:
        """By the store: Gloo's own needs all ranks to set it up, and the one that does not come is to be named.

        Where Gloo is set up already, it does it: older stores cannot be used after a wait that was in vain.
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
                raise Error(f"monitored_barrier: rank 0 has not said within {seconds:g} s that all ranks have come")
            return
        missing = []
        for rank in range(1, self.size):
            if not has_come(self.store, f"{key}/{rank}", until):
                missing.append(rank)
                if not wait_all_ranks:
                    break
        if missing:
            raise Error(f"monitored_barrier: rank {', '.join(map(str, missing))} has not come within {seconds:g} s")
        self.store.set(key, "")

    # Between two ranks.

    def send(self, tensors: Sequence[torch.Tensor], to: int, tag: int) -> DistributedWork:
        self._check("send to", to)
        carrier, ranks, tag = self._carrier(tag)
        return Message(carrier.send([_given(tensor) for tensor in tensors], ranks[to], tag), [], ranks, self.timeout)

    def recv(self, tensors: Sequence[torch.Tensor], source: int, tag: int) -> DistributedWork:
        self._check("recv from", source)
        carrier, ranks, tag = self._carrier(tag)
        memories = [Memory(tensor) for tensor in tensors]
        return Message(carrier.recv([memory.flat for memory in memories], ranks[source], tag), memories, ranks, self.timeout)

    def recv_anysource(self, tensors: Sequence[torch.Tensor], tag: int) -> DistributedWork:
        carrier, ranks, tag = self._carrier(tag)
        memories = [Memory(tensor) for tensor in tensors]
        return Message(carrier.recv_anysource([memory.flat for memory in memories], tag), memories, ranks, self.timeout)

    def _check(self, call: str, rank: int) -> None:
        if not 0 <= rank < self.size or rank == self.rank:
            raise ArgumentError(f"{call} rank {rank}: another one of 0 to {self.size - 1}")

    def _carrier(self, tag: int) -> "tuple[ProcessGroupGloo, list[int], int]":
        """Who carries messages between ranks, what it calls them, and the tag, which is the group's own."""
        if self.world is None:
            if tag >= _OF_GROUPS:
                raise ArgumentError(f"tag {tag}: 0 to {_OF_GROUPS - 1}")
            return self.group, list(range(self.size)), tag
        if not 0 <= tag < 1 << 16:
            raise ArgumentError(f"tag {tag}: 0 to 65535 in a group that is not the default one")
        return self.world.group, self.ranks, _OF_GROUPS | self._number << 16 | tag

    @cached_property
    def _number(self) -> int:
        """No other group of the job has it: the first rank that asks draws it for all."""
        if self.store.add("number/asked", 1) == 1:
            number = self.world.store.add("groups", 1)
            self.store.set("number", str(number))
        number = int(self.store.get("number"))
        if number >= 1 << 14:
            raise ArgumentError("more than 16,383 groups in which ranks send each other messages")
        return number


class Abilities:
    """Stands in for a group of Gloo's that is not set up where PyTorch asks what it can do: other ranks may not call."""

    def __init__(self, gloo: Gloo):
        self._gloo = gloo

    def __getattr__(self, name: str):
        is_asked = name.lstrip("_").startswith("supports_")
        return getattr((self._gloo.world if is_asked else self._gloo).group, name)


class Message(DistributedWork):
    """A message on its way from a tensor, or into one. It has the time of its own group, not that of the carrier."""

    def __init__(self, work: DistributedWork, memories: Sequence[Memory], ranks: Sequence[int], timeout: timedelta):
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
    """What Gloo takes no notice of."""
    if tensor.layout != torch.strided:
        return f"{tensor.dtype}, {tensor.layout}"
    return f"{tensor.numel()} elements of {tensor.dtype}"


def _wide(dtype: torch.dtype) -> torch.dtype:
    """In which a sum is divided: an average must not be lost where the sum is too large."""
    if dtype.is_floating_point:
        return torch.float32 if dtype in WIDENED else dtype
    return dtype if dtype.is_complex or dtype == torch.bool else torch.int64


def _put(work: DistributedWork, memories: Sequence[Memory]) -> DistributedWork:
    """Is over when the results are where they belong."""
    if not any(memory.is_copy for memory in memories):
        return work
    return then(work, lambda: [memory.put() for memory in memories])


def _divided(tensor: torch.Tensor, ranks: int) -> torch.Tensor:
    with torch.inference_mode(tensor.is_inference()):
        return tensor.detach().div_(ranks, rounding_mode=None if tensor.is_floating_point() or tensor.is_complex() else "trunc")
