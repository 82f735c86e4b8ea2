"""Waits for operations in flight in a thread, not in autograd or the caller; and their handles."""

import atexit
import collections
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
from torch._C._distributed_c10d import Work as DistributedWork

from .._netsum import Communicator, Work

T = TypeVar("T")

#: How long a callback may take, in seconds, before another thread continues with the next one.
_PATIENCE = 0.005

_waiters: "weakref.WeakKeyDictionary[Communicator, _Waiter]" = weakref.WeakKeyDictionary()
_lock = threading.Lock()


class _Waiter:
    """Waits for the operations of one communicator in their order, and runs callbacks.

    One thread does it. A callback may itself wait for a later operation: meanwhile another thread
    continues.
    """

    def __init__(self) -> None:
        self.works: queue.SimpleQueue[tuple[Work, torch.futures.Future, float | None] | None] = (
            queue.SimpleQueue()
        )
        #: The operation whose callbacks run.
        self.called: torch.futures.Future | None = None
        self.look, self.is_over = threading.Event(), False
        self.lock = threading.Lock()
        self.threads: list[threading.Thread] = []
        self.next = self._start(self._wait)
        self._start(self._watch)

    def _start(self, target: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=target, name="netsum-torch", daemon=True)
        self.threads = [other for other in self.threads if other.is_alive()] + [thread]
        thread.start()
        return thread

    def put(self, work: Work, waited: torch.futures.Future, timeout: float | None) -> None:
        self.works.put((work, waited, None if timeout is None else time.monotonic() + timeout))
        if self.called is not None:
            self.look.set()

    def stop(self) -> None:
        self.works.put(None)
        self.look.set()

    def _wait(self) -> None:
        while (next_one := self.works.get()) is not None:
            work, waited, until = next_one
            try:
                work.wait(None if until is None else max(until - time.monotonic(), 0))
            except Exception:  # noqa: BLE001, S110: `finish` gets it from the work again
                pass
            self.called = waited
            if not self.works.empty():
                self.look.set()
            waited.set_result(None)
            with self.lock:
                if self.next is not threading.current_thread():
                    return
                self.called = None
            # Holds no tensor while it waits for the next one.
            del next_one, work, waited
        self.is_over = True
        self.look.set()

    def _watch(self) -> None:
        while True:
            self.look.wait()
            self.look.clear()
            if self.is_over:
                return
            called = self.called
            time.sleep(_PATIENCE)
            with self.lock:
                if called is not None and called is self.called and not self.works.empty():
                    self.called = None
                    self.next = self._start(self._wait)
            del called


def completed(
    comm: Communicator, work: Work, finish: Callable[[Work], T], timeout: "float | None" = None
) -> "torch.futures.Future[T]":
    """Calls `finish` when the work is done or the timeout is over, and returns its future.

    An exception of `finish` is the future's error.
    """
    with _lock:
        waiter = _waiters.get(comm)
        if waiter is None:
            waiter = _waiters[comm] = _Waiter()
            weakref.finalize(comm, waiter.stop)

    waited: torch.futures.Future = torch.futures.Future()
    # An exception that a callback raises is an error in C++, too; one that is set is only another
    # value there.
    future = waited.then(lambda _: finish(work))
    waiter.put(work, waited, timeout)
    return future


#: Before 2.7, PyTorch's C++ does not keep Python's subclasses of its classes alive
#: (pytorch#146376), and waits for them later. Newer ones do not keep them alive where
#: DistributedDataParallel's join() later waits for what ranks exchange, in few elements.
OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7)
_SMALL = 1024
_last: "collections.deque[Handle]" = collections.deque(maxlen=16)


class Handle(DistributedWork):
    """A call of torch.distributed in flight, whose `wait` raises its error.

    PyTorch's own class for futures does not raise it (2.15).
    """

    def __init__(self) -> None:
        super().__init__()
        self._over = threading.Event()
        self._error: BaseException | None = None
        self._future: torch.futures.Future = torch.futures.Future()

    def follow(
        self,
        then: "Callable[[Callable[[T], list[torch.Tensor]]], torch.futures.Future]",
        finish: "Callable[[T], list[torch.Tensor]]",
    ):
        """Completes when `finish` has been called, which `then` arranges."""

        def told(what: T) -> list[torch.Tensor]:
            try:
                results = finish(what)
                if OLD or sum(result.numel() for result in results) <= _SMALL:
                    _last.append(self)
                return results
            except BaseException as error:
                self._error = error
                raise
            finally:
                self._over.set()

        self._future = then(told)
        return self

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        """Waits. Ctrl-C ends it, unlike the wait for a future."""
        if not self._over.wait(timeout.total_seconds() or None):
            raise TimeoutError("the operation is still in flight")
        if self._error is not None:
            raise self._error
        # The future has its value a moment later, and C++ reads it without waiting.
        self._future.wait()
        return True

    def get_future(self) -> torch.futures.Future:
        return self._future

    def is_completed(self) -> bool:
        return self._over.is_set()

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[torch.Tensor]:
        return self._future.wait()

    def synchronize(self) -> None:
        self.wait()


def over(work: DistributedWork, future: torch.futures.Future) -> None:
    """Raises the error of an operation: in a future each error is a RuntimeError."""
    (work if isinstance(work, Handle) else future).wait()


def then(work: DistributedWork, finish: "Callable[[], list[torch.Tensor]]") -> Handle:
    """A handle that completes when another call has completed and `finish` has been called."""

    def done(future: torch.futures.Future) -> list[torch.Tensor]:
        over(work, future)
        return finish()

    return Handle().follow(work.get_future().then, done)


def all_of(works: Sequence[DistributedWork], results: Sequence[torch.Tensor]) -> DistributedWork:
    """A handle that completes when all of them have."""
    if len(works) == 1:
        return works[0]

    def done(future: torch.futures.Future) -> list[torch.Tensor]:
        for both in zip(works, future.wait(), strict=True):
            over(*both)
        return list(results)

    return Handle().follow(
        torch.futures.collect_all([work.get_future() for work in works]).then, done
    )


@atexit.register
def _stop() -> None:
    """Ends all threads before Python ends."""
    with _lock:
        waiters = list(_waiters.items())
    for comm, waiter in waiters:
        # Otherwise the thread waits until other ranks make the calls that are in flight.
        comm.close()
        waiter.stop()
    until = time.monotonic() + 5
    for _, waiter in waiters:
        for thread in waiter.threads:
            thread.join(max(until - time.monotonic(), 0))
