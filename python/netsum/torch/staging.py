"""Calls for tensors of a device, such as a GPU, through pinned memory of the host.

A call for a device's tensors becomes the same call for copies of them:

- The caller records an event on its current stream, and queues the call. It does not wait.
- A thread copies the inputs on a side stream, waits for that, and starts the calls in their order.
- When a call is done, its outputs are copied back on another side stream. The handle's `wait` makes
  the caller's current stream wait for that, as for NCCL. The host waits until the call is done, as
  for Gloo.

Large tensors are cut into chunks, each with a call of its own, so that copies and calls overlap.
"""

import atexit
import collections
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from types import ModuleType

import torch
from torch._C._distributed_c10d import Work as DistributedWork

from ..errors import ArgumentError
from .completion import Handle, over
from .tensors import Memory, cut, put

#: Bytes of a chunk, the same at all ranks: 0.2 ms over PCIe 4.0 with 16 lanes, and 3.4 ms at
#: 10 Gb/s, which is far above what a further operation costs.
CHUNK = 4 << 20
#: Elements that a chunk is a multiple of: netsum's blocks.
_BLOCK = 1024
#: Bytes of pinned memory, used or kept, unless a single call needs more.
LIMIT = 256 << 20


def is_on_device(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "cpu"


def module_of(device: torch.device) -> ModuleType:
    """PyTorch's module for a type of devices."""
    found = getattr(torch, device.type, None)
    if not hasattr(found, "Stream") or not hasattr(found, "Event"):
        raise ArgumentError(
            f"a tensor on {device}: PyTorch has no streams for it: pass x.cpu() and copy the "
            "result back"
        )
    return found


def pinned(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def future_of(device: torch.device) -> torch.futures.Future:
    """A future whose callbacks and waiting streams run after the stream that completes it."""
    return torch.futures.Future(devices=[device])


def tensors_in(value: object) -> "Iterator[torch.Tensor]":
    """The tensors of an argument, which may be a list, or a list of lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from tensors_in(one)


def _replaced(value: object, tensors: "Iterator[torch.Tensor]") -> object:
    if isinstance(value, torch.Tensor):
        return next(tensors)
    if isinstance(value, (list, tuple)):
        return [_replaced(one, tensors) for one in value]
    return value


class Pool:
    """Pinned memory, kept by size: powers of two."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit, self.used, self.kept = limit, 0, 0
        self.free: "dict[int, collections.deque]" = collections.defaultdict(collections.deque)
        self.changed = threading.Condition()

    @staticmethod
    def size(count: int) -> int:
        return 1 << max(12, (count - 1).bit_length())

    def take(self, counts: Sequence[int], waits: bool) -> "list[torch.Tensor] | None":
        """Memory for all of them. Without room, waits for what is used, or returns None.

        What is larger than the limit is used alone.
        """
        sizes = [self.size(count) for count in counts]
        with self.changed:
            while self.used and self.used + sum(sizes) > self.limit:
                if not waits:
                    return None
                self.changed.wait()
            self.used += sum(sizes)
        try:
            return [self._one(size) for size in sizes]
        except BaseException:
            with self.changed:
                self.used -= sum(sizes)
                self.changed.notify_all()
            raise

    def _one(self, size: int) -> torch.Tensor:
        with self.changed:
            found = self.free[size].popleft() if self.free[size] else None
            self.kept -= size if found else 0
            if found is None and self.used + self.kept > self.limit:
                # Memory of other sizes makes room.
                self.free.clear()
                self.kept = 0
        if found is None:
            return pinned(size)
        memory, copied = found
        if copied is not None:
            copied.synchronize()
        return memory

    def give(self, memories: "Sequence[torch.Tensor]", copied: object, is_kept: bool) -> None:
        """Takes memory back, which may be used again when the event has happened."""
        with self.changed:
            for memory in memories:
                size = memory.numel()
                self.used -= size
                # PyTorch frees what is dropped when its copies are done.
                if is_kept and self.used + self.kept + size <= self.limit:
                    self.kept += size
                    self.free[size].append((memory, copied))
            self.changed.notify_all()


class Streams:
    """The side streams of a device, to the host and back."""

    def __init__(self, device: torch.device, module: ModuleType):
        self.device, self.module = device, module
        self.out, self.back = module.Stream(device), module.Stream(device)

    def event(self, stream: object) -> object:
        """An event after what the stream has to do. To wait for it takes no processor."""
        try:
            event = self.module.Event(blocking=True)
        except TypeError:
            event = self.module.Event()
        event.record(stream)
        return event

    def copy(self, stream: object, into: torch.Tensor, what: torch.Tensor) -> None:
        with self.module.stream(stream):
            put(into, what, non_blocking=True)
        (into if is_on_device(into) else what).record_stream(stream)


class Staged(Handle):
    """A call in flight whose results a device's stream copies back."""

    streams: "Streams | None" = None
    event: object = None

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        super().wait(timeout)
        if self.streams is not None:
            device = self.streams.device
            self.streams.module.current_stream(device).wait_event(self.event)
        return True


class _Job:
    """A call for a device's tensors, in one part or more."""

    def __init__(self, streams: "Streams | None", results: "list[torch.Tensor]"):
        self.streams, self.results = streams, results
        self.ready = None
        self.copies: "list[Memory]" = []
        self.left, self.is_over, self.error = 0, False, None
        self.lock = threading.Lock()
        self.source = torch.futures.Future() if streams is None else future_of(streams.device)
        self.handle = Staged()
        self.handle.follow(self.source.then, self._result)

    def _result(self, _: torch.futures.Future) -> list[torch.Tensor]:
        if self.error is not None:
            raise self.error
        return self.results

    def done(self, error: "BaseException | None" = None) -> None:
        """A part is done, or has failed: the first error ends the job."""
        with self.lock:
            self.left -= 1
            if self.is_over or (error is None and self.left > 0):
                return
            self.is_over, self.error = True, error
        streams = self.streams
        if streams is None:
            self.source.set_result(self.results)
            return
        try:
            with streams.module.stream(streams.back):
                for memory in self.copies if error is None else []:
                    memory.put(non_blocking=True)
                    memory.flat.record_stream(streams.back)
                self.handle.streams, self.handle.event = streams, streams.event(streams.back)
                self.source.set_result(self.results)
        except Exception as raised:  # noqa: BLE001: the caller's
            # After some errors a device does nothing more; the caller must not wait for it.
            self.error, self.handle.streams = self.error or raised, None
            if not self.source.done():
                self.source.set_exception(self.error)


class _Part:
    """A call for some columns of the tensors, on copies in the host's memory."""

    def __init__(self, job: _Job, call: "Callable[..., DistributedWork]", number: tuple):
        self.job, self.call, self.number = job, call, number
        #: Views of a device's tensors, and whether they are read and written.
        self.views: "list[tuple[torch.Tensor, str]]" = []
        self.memories: "list[torch.Tensor]" = []
        self.hosts: "list[torch.Tensor]" = []
        self.copied = None

    def copy_out(self, pool: Pool, waits: bool) -> bool:
        """Starts the copies of what is read; returns False if there is no memory for them."""
        streams = self.job.streams
        if streams is None:
            self.hosts = [view for view, _ in self.views]
            return True
        with streams.module.stream(streams.out):
            return self._copy_out(streams, pool, waits)

    def _copy_out(self, streams: Streams, pool: Pool, waits: bool) -> bool:
        views = [view for view, _ in self.views if is_on_device(view)]
        counts = [view.numel() * view.element_size() for view in views if _is_strided(view)]
        memories = pool.take(counts, waits) if counts else []
        if memories is None:
            return False
        self.memories, left = memories, iter(memories)
        streams.out.wait_event(self.job.ready)
        for view, use in self.views:
            if not is_on_device(view):
                self.hosts.append(view)
            elif not _is_strided(view):
                self.hosts.append(view.cpu())
            else:
                count = view.numel() * view.element_size()
                self.hosts.append(next(left)[:count].view(view.dtype).view(view.shape))
                if "r" in use:
                    streams.copy(streams.out, self.hosts[-1], view)
        self.copied = streams.event(streams.out)
        return True

    def start(self, pool: Pool) -> None:
        if self.copied is not None:
            self.copied.synchronize()
        cut.number = self.number
        try:
            work = self.call(iter(self.hosts))
        finally:
            cut.number = ()

        def done(future: torch.futures.Future) -> None:
            try:
                over(work, future)
            except Exception as error:  # noqa: BLE001: the caller's
                self.end(pool, error)
            else:
                self.end(pool)

        work.get_future().then(done)

    def end(self, pool: Pool, error: "BaseException | None" = None) -> None:
        """Starts the copies of what was written, if there is no error."""
        streams, copied = self.job.streams, None
        try:
            for host, (view, use) in zip(self.hosts, self.views) if error is None else ():
                if "w" in use and is_on_device(view):
                    streams.copy(streams.back, view, host)
            if self.memories:
                copied = streams.event(streams.back)
        except Exception as raised:  # noqa: BLE001: the caller's
            error = raised
        # An operation that has failed here may still write to it.
        pool.give(self.memories, copied, is_kept=error is None)
        self.views, self.hosts, self.memories = [], [], []
        self.job.done(error)


def _is_strided(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided


class Staging:
    """Calls for a device's tensors, which one thread starts in the order in which they are queued.

    The thread ends with its owner. `refuse` tells other ranks of a call that is not made here.
    """

    def __init__(self, owner: object, refuse: "Callable[[BaseException], None]"):
        self.pool, self.refuse = Pool(), refuse
        self.streams: "dict[torch.device, Streams]" = {}
        self.queue: "queue.SimpleQueue[list[_Part] | None]" = queue.SimpleQueue()
        self.lock, self.waiting = threading.Lock(), 0
        self.thread = threading.Thread(target=self._work, name="netsum-staging", daemon=True)
        self.thread.start()
        weakref.finalize(owner, self.queue.put, None)
        _all.add(self)

    def needs(self, arguments: Sequence[object]) -> bool:
        """Whether a call must be queued: for its tensors, or because others are waiting."""
        if threading.current_thread() is self.thread:
            return False
        return self.waiting > 0 or any(map(is_on_device, tensors_in(arguments)))

    def run(
        self,
        call: "Callable[..., DistributedWork]",
        arguments: Sequence[object],
        uses: Sequence[str],
        rows: Sequence[int] = (),
    ) -> Staged:
        """Queues a call.

        `uses` is for each of the first arguments whether its tensors are read (r) and written (w).
        With `rows` the call may be cut: into how many rows the argument's tensor is divided, of
        which each chunk has some columns.
        """
        uses = uses[: len(arguments)]
        given = [list(tensors_in(argument)) for argument in arguments[: len(uses)]]
        devices = {tensor.device for tensor in sum(given, []) if is_on_device(tensor)}
        if len(devices) > 1:
            raise ArgumentError(
                f"tensors on {', '.join(sorted(map(str, devices)))}: must be on one device"
            )
        streams = self._streams(devices.pop()) if devices else None
        written = [tensor for one, use in zip(given, uses) if "w" in use for tensor in one]
        job, parts = _Job(streams, written or sum(given, [])), []
        if rows == (1,) and len(given[0]) > 1:
            calls = [([tensor], *arguments[1:]) for tensor in given[0]]
        else:
            calls = [arguments]
        for one in calls:
            parts += self._parts(job, call, one, uses, rows)
        if streams is not None:
            current = streams.module.current_stream(streams.device)
            job.ready = streams.event(current)
        job.left = len(parts)
        if not parts:
            job.left = 1
            job.done()
            return job.handle
        with self.lock:
            self.waiting += 1
            self.queue.put(parts)
        return job.handle

    def _streams(self, device: torch.device) -> Streams:
        if device not in self.streams:
            self.streams[device] = Streams(device, module_of(device))
        return self.streams[device]

    def _parts(
        self,
        job: _Job,
        call: "Callable[..., DistributedWork]",
        arguments: Sequence[object],
        uses: Sequence[str],
        rows: Sequence[int],
    ) -> "Iterator[_Part]":
        def made(hosts: "Iterator[torch.Tensor]") -> DistributedWork:
            count = len(uses)
            return call(*(_replaced(one, hosts) for one in arguments[:count]), *arguments[count:])

        flat: "list[tuple[torch.Tensor, str]]" = []
        for argument, use in zip(arguments, uses):
            for tensor in tensors_in(argument):
                if is_on_device(tensor) and _is_strided(tensor):
                    memory = Memory(tensor, written="w" in use)
                    if "w" in use and memory.is_copy:
                        job.copies.append(memory)
                    tensor = memory.flat
                flat.append((tensor, use))
        columns, chunk = _cut(job, flat, rows)
        for start in range(0, max(columns, 1), chunk):
            end = min(start + chunk, columns)
            is_whole = start == 0 and end == columns
            part = _Part(job, made, () if is_whole else (columns, start))
            part.views = flat
            if not is_whole:
                part.views = [
                    (tensor.view(count, -1)[:, start:end].squeeze(0), use)
                    for (tensor, use), count in zip(flat, rows)
                ]
            yield part

    def _work(self) -> None:
        while (parts := self.queue.get()) is not None:
            copying = None
            # One part is copied while the one before it is started.
            for part in parts:
                try:
                    if not part.copy_out(self.pool, waits=copying is None):
                        self._start(copying)
                        copying = None
                        part.copy_out(self.pool, waits=True)
                except Exception as error:  # noqa: BLE001: the caller's
                    if copying is not None:
                        self._start(copying)
                        copying = None
                    self._failed(part, error)
                    continue
                if copying is not None:
                    self._start(copying)
                copying = part
            if copying is not None:
                self._start(copying)
            with self.lock:
                self.waiting -= 1
            del parts, part, copying

    def _start(self, part: _Part) -> None:
        try:
            part.start(self.pool)
        except Exception as error:  # noqa: BLE001: the caller's
            self._failed(part, error)

    def _failed(self, part: _Part, error: Exception) -> None:
        try:
            self.refuse(error)
        finally:
            part.end(self.pool, error)


def _cut(
    job: _Job, flat: "Sequence[tuple[torch.Tensor, str]]", rows: Sequence[int]
) -> "tuple[int, int]":
    """How many columns a call's tensors have, and a chunk; one for a call that is not cut."""
    is_cut = job.streams is not None and rows and len(rows) == len(flat)
    if not is_cut or not all(is_on_device(tensor) and _is_strided(tensor) for tensor, _ in flat):
        return 1, 1
    columns = {tensor.numel() / count for (tensor, _), count in zip(flat, rows)}
    # The call itself refuses tensors that do not fit.
    if len(columns) > 1 or len({tensor.dtype for tensor, _ in flat}) > 1:
        return 1, 1
    chunk = CHUNK // (flat[0][0].element_size() * max(rows))
    return int(columns.pop()), max(chunk // _BLOCK, 1) * _BLOCK


_all: "weakref.WeakSet[Staging]" = weakref.WeakSet()


@atexit.register
def _stop() -> None:
    """Ends all threads before Python ends."""
    every = list(_all)
    for staging in every:
        staging.queue.put(None)
    until = time.monotonic() + 5
    for staging in every:
        staging.thread.join(max(until - time.monotonic(), 0))
