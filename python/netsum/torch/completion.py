"""Who waits for operations in flight, so that neither autograd nor the caller does; and what the caller gets."""

import atexit
import queue
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
from torch._C._distributed_c10d import Work as DistributedWork

from .._netsum import Communicator, Work

T = TypeVar("T")

_waiters: "weakref.WeakKeyDictionary[Communicator, _Waiter]" = weakref.WeakKeyDictionary()
_lock = threading.Lock()


class _Waiter:
    """A thread that waits for the operations of one communicator, in their order, which is that in which they end."""

    def __init__(self) -> None:
        self.works: queue.SimpleQueue[tuple[Work, torch.futures.Future] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=_wait, args=(self.works,), name="netsum-torch", daemon=True)
        self.thread.start()

    def stop(self) -> None:
        self.works.put(None)


def _wait(works: "queue.SimpleQueue[tuple[Work, torch.futures.Future] | None]") -> None:
    while (next_one := works.get()) is not None:
        work, waited = next_one
        try:
            work.wait()
        except Exception:  # noqa: BLE001, S110: whoever holds the future asks the work again
            pass
        waited.set_result(None)
        # Holds no tensor while it waits for the next one.
        del next_one, work, waited


def completed(comm: Communicator, work: Work, finish: Callable[[Work], T]) -> "torch.futures.Future[T]":
    """The future of what `finish` makes of the work once that is done. What it raises is the future's error."""
    with _lock:
        waiter = _waiters.get(comm)
        if waiter is None:
            waiter = _waiters[comm] = _Waiter()
            weakref.finalize(comm, waiter.stop)
    waited: torch.futures.Future = torch.futures.Future()
    # An exception that a callback raises is an error in C++, too; one that is set is only another value there.
    future = waited.then(lambda _: finish(work))
    waiter.works.put((work, waited))
    return future


class Handle(DistributedWork):
    """A call of torch.distributed in flight: what goes wrong, `wait` raises. PyTorch's own, made of a future, does not (2.15)."""

    def __init__(self) -> None:
        super().__init__()
        self._over = threading.Event()
        self._error: BaseException | None = None
        self._future: torch.futures.Future = torch.futures.Future()

    def follow(self, then: "Callable[[Callable[[T], list[torch.Tensor]]], torch.futures.Future]", finish: "Callable[[T], list[torch.Tensor]]"):
        """Is over when `finish` has been called, by what `then` hands it to."""

        def told(what: T) -> list[torch.Tensor]:
            try:
                return finish(what)
            except BaseException as error:
                self._error = error
                raise
            finally:
                self._over.set()

        self._future = then(told)
        return self

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        """Ctrl-C ends it, unlike the wait for a future."""
        if not self._over.wait(timeout.total_seconds() or None):
            raise TimeoutError("the operation is still in flight")
        if self._error is not None:
            raise self._error
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


@atexit.register
def _stop() -> None:
    """No thread may still be here when Python goes."""
    with _lock:
        waiters = list(_waiters.values())
    for waiter in waiters:
        waiter.stop()
    for waiter in waiters:
        waiter.thread.join()
