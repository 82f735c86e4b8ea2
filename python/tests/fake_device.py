"""A device without hardware, behind the interface of torch.cuda.

Its tensors are the host's, of a subclass. What is done to them is queued on the current stream, and
done by a thread of the stream, in its order. `hold` stops all streams.
"""

import contextlib
import queue
import sys
import threading
import time
from typing import NamedTuple

import torch

#: Seconds before each copy.
DELAY = 0.0005
#: What has been done, in its order.
done = []
#: Sizes of pinned memory that was allocated.
allocated = []

_running = threading.Event()
_running.set()
_local = threading.local()


class Device(NamedTuple):
    type: str = "privateuseone"
    index: int = 0


class Event:
    def __init__(self):
        self.happened = None

    def record(self, stream=None):
        self.happened = threading.Event()
        (stream or current_stream()).put(self.happened.set)

    def wait(self, stream=None):
        (stream or current_stream()).wait_event(self)

    def query(self):
        return self.happened is None or self.happened.is_set()

    def synchronize(self):
        assert self.happened is None or self.happened.wait(60)


class Stream:
    def __init__(self, device=None):
        self.jobs, self.waits = queue.SimpleQueue(), False
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        while True:
            job = self.jobs.get()
            _running.wait()
            job()
            del job

    def put(self, job):
        self.jobs.put(job)

    def wait_event(self, event):
        happened = event.happened

        def wait():
            self.waits = True
            happened.wait(60)
            self.waits = False

        if happened is not None:
            self.put(wait)

    def synchronize(self):
        event = Event()
        event.record(self)
        event.synchronize()


_default = Stream()


def current_stream(device=None):
    return getattr(_local, "stream", _default)


@contextlib.contextmanager
def stream(one):
    before = current_stream()
    _local.stream = one
    try:
        yield
    finally:
        _local.stream = before


@contextlib.contextmanager
def hold():
    """Nothing is done meanwhile."""
    _running.clear()
    try:
        yield
    finally:
        _running.set()


def plain(value):
    if isinstance(value, Tensor):
        return value.as_subclass(torch.Tensor)
    if isinstance(value, (list, tuple)):
        return type(value)(plain(one) for one in value)
    return value


def _tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    return [x for one in value for x in _tensors(one)] if isinstance(value, (list, tuple)) else []


#: Calls that give what is in memory to the host.
_READS = {"cpu", "item", "tolist", "numpy", "equal", "allclose", "__bool__", "__repr__", "to_dense"}
_MAKES = {"new_empty", "empty_like", "new_zeros", "zeros_like"}


class Tensor(torch.Tensor):
    @property
    def device(self):
        return Device()

    def record_stream(self, stream):
        assert isinstance(stream, Stream)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}

        def call():
            with torch._C.DisableTorchFunction(), torch.no_grad():
                return func(*plain(args), **kwargs)

        if getattr(func, "__module__", None) == "torch.distributed.distributed_c10d":
            # Newer PyTorch asks here before it calls the group's method, which `install` wraps.
            with torch._C.DisableTorchFunction():
                return func(*args, **kwargs)
        if name in _READS:
            current_stream().synchronize()
            return call()
        if name == "as_subclass":
            with torch._C.DisableTorchFunction():
                return func(*args, **kwargs)
        if name == "copy_":
            into, what, *rest = args
            current_stream().put(lambda: _copy(into, what))
            if not isinstance(into, cls) and not (rest and rest[0]):
                current_stream().synchronize()
            return into
        if name.endswith("_") and not name.startswith("__") or name in ("__setitem__", "__iadd__"):
            current_stream().put(call)
            return args[0]
        result = call()
        if not isinstance(result, torch.Tensor):
            if isinstance(result, (tuple, list)):
                return type(result)(
                    one.as_subclass(cls) if isinstance(one, torch.Tensor) else one for one in result
                )
            return result
        if result.layout == torch.strided and name not in _MAKES:
            place = result.untyped_storage().data_ptr()
            same = [x for x in _tensors(args) if plain(x).untyped_storage().data_ptr() == place]
            if same and not isinstance(same[0], cls):
                return result
            if not same:
                current_stream().put(lambda: result.copy_(call()))
        return result.as_subclass(cls)


if not hasattr(torch.Tensor, "untyped_storage"):
    torch.Tensor.untyped_storage = torch.Tensor.storage


def _copy(into, what):
    time.sleep(DELAY)
    with torch._C.DisableTorchFunction():
        ways = isinstance(what, Tensor), isinstance(into, Tensor)
        into, what = plain(into), plain(what)
        with torch.inference_mode(into.is_inference()):
            into.copy_(what)
    if ways[0] != ways[1]:
        done.append(("out" if ways[0] else "back", into.flatten()[:1].tolist()))


def tensor(of):
    """A copy of a tensor on the device."""
    return of.detach().clone().as_subclass(Tensor)


def pinned(size):
    allocated.append(size)
    return torch.empty(size, dtype=torch.uint8)


def install():
    """Makes netsum take the device's tensors."""
    from netsum.torch import backend, devices, staging

    staging.module_of = lambda device: sys.modules[__name__]
    staging.pinned = pinned
    staging.future_of = lambda device: torch.futures.Future()
    if hasattr(getattr(torch._C, "_EnableTorchFunction", None), "__enter__"):
        for name in (*devices._USES, *devices._OTHERS, *devices.NEWER):
            call = getattr(backend.ProcessGroup, name)
            setattr(backend.ProcessGroup, name, _enabling(call))


def _enabling(call):
    def enabled(*arguments, **more):
        with torch._C._EnableTorchFunction():
            return call(*arguments, **more)

    return enabled
