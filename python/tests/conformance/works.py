"""Calls in flight: works and their futures; timeouts."""

import functools
import gc
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from .case import RANKS, all_equal, equal, here, mistake, same, topic
from .moves import of_all, own
from .reductions import RANK_SUM, given, summed

case = topic("Calls in flight, and timeouts")


@case("is_completed and is_success after wait, and wait twice")
def twice() -> None:
    x = given()
    work = dist.all_reduce(x, async_op=True)
    same(bool(work.wait()), True)
    same(bool(work.wait()), True)
    same(work.is_completed(), True, "is_completed")
    same(work.is_success(), True, "is_success")
    equal(x, summed())


@case("is_completed becomes true without a wait")
def polled() -> None:
    x = given()
    work = dist.all_reduce(x, async_op=True)
    while not work.is_completed():
        time.sleep(0.001)
    equal(x, summed())


@case("is_completed is false while a rank has not called")
def pending() -> None:
    group = dist.new_group()
    works = []
    if dist.get_rank() != 1:
        works.append(dist.all_reduce(torch.ones(2), group=group, async_op=True))
        same(works[0].is_completed(), False)
    # By messages, as another collective would be behind the sum.
    if dist.get_rank() == 0:
        dist.send(torch.ones(1), 1)
    elif dist.get_rank() == 1:
        dist.recv(torch.ones(1), 0)
        works.append(dist.all_reduce(torch.ones(2), group=group, async_op=True))
    works[0].wait()


@case("wait with a timeout, of a call that is over in time")
def in_time() -> None:
    x = given()
    same(bool(dist.all_reduce(x, async_op=True).wait(timedelta(seconds=5))), True)
    equal(x, summed())


@case("exception() of a call that went well")
def no_exception() -> None:
    work = dist.all_reduce(given(), async_op=True)
    work.wait()
    same(work.exception(), None)


@case("get_future: its value is the tensors")
def future() -> None:
    x = given()
    value = dist.all_reduce(x, async_op=True).get_future().wait()
    equal(value[0], summed())
    same(value[0].data_ptr(), x.data_ptr(), "memory")


@case("get_future of each other collective")
def futures() -> None:
    rank = dist.get_rank()
    out, part, outs = torch.empty(3 * RANKS), torch.empty(3), [torch.empty(3) for _ in range(RANKS)]
    works = [
        dist.broadcast(x := own(rank), 1, async_op=True),
        dist.all_gather(outs, own(rank), async_op=True),
        dist.all_gather_into_tensor(out, own(rank), async_op=True),
        dist.reduce_scatter_tensor(part, torch.ones(3 * RANKS), async_op=True),
        dist.reduce(torch.ones(2), 0, async_op=True),
        dist.barrier(async_op=True),
    ]
    for work in works:
        work.get_future().wait()
    equal(x, own(1))
    all_equal(outs, of_all())
    equal(out, torch.cat(of_all()))
    equal(part, torch.full((3,), float(RANKS)))


@case("then: a chain of callbacks")
def chain() -> None:
    future = dist.all_reduce(given(), async_op=True).get_future()
    halved = future.then(lambda done: done.value()[0] / 2).then(lambda done: done.value() + 1)
    equal(halved.wait(), summed() / 2 + 1)


@case("a callback that begins a call and waits for it")
def nested() -> None:
    def again(done: torch.futures.Future) -> torch.Tensor:
        x = done.value()[0]
        dist.all_reduce(x)
        return x

    # Two callbacks of one rank come in one order: that of the calls.
    future = dist.all_reduce(given(), async_op=True).get_future().then(again)
    equal(future.wait(), summed() * RANKS)


@case("a callback that raises")
def raises() -> None:
    def wrong(_: torch.futures.Future) -> None:
        raise ValueError("the callback's own")

    mistake(dist.all_reduce(given(), async_op=True).get_future().then(wrong).wait)


@case("collect_all of 20 futures, of sums and gathers")
def collected() -> None:
    tensors = [given(count=i + 1) for i in range(10)]
    outs = [torch.empty(3 * RANKS) for _ in range(10)]
    works = [dist.all_reduce(x, async_op=True) for x in tensors]
    works += [dist.all_gather_into_tensor(out, own(dist.get_rank()), async_op=True) for out in outs]
    torch.futures.wait_all([work.get_future() for work in works])
    all_equal(tensors, [summed(count=i + 1) for i in range(10)])
    all_equal(outs, [torch.cat(of_all())] * 10)


@case("works awaited in reverse")
def backwards() -> None:
    tensors = [given(count=10 * i + 1) for i in range(20)]
    works = [dist.all_reduce(x, async_op=True) for x in tensors]
    for work in reversed(works):
        work.wait()
    all_equal(tensors, [summed(count=10 * i + 1) for i in range(20)])


@case("a work that is awaited in another thread")
def elsewhere() -> None:
    x = given()
    work = dist.all_reduce(x, async_op=True)
    thread = threading.Thread(target=work.wait)
    thread.start()
    thread.join()
    equal(x, summed())


@case("wait lets other threads run Python")
def lets_run() -> None:
    group = dist.new_group()
    ran = threading.Event()
    if dist.get_rank() == 0:
        # It calls only when a thread of rank 1, which waits, has run.
        dist.recv(torch.ones(1), 1)
        dist.all_reduce(torch.ones(2), group=group)
    else:

        def run() -> None:
            if dist.get_rank() == 1:
                dist.send(torch.ones(1), 0)
            ran.set()

        threading.Thread(target=run).start()
        dist.all_reduce(torch.ones(2), group=group)
        same(ran.wait(5), True, "the thread has run")


@case("works and tensors that are dropped in flight")
def dropped() -> None:
    for _ in range(20):
        dist.all_reduce(torch.ones(1000), async_op=True)
    gc.collect()
    x = given()
    dist.all_reduce(x)
    equal(x, summed())


@case("a sum that begins in the backward pass")
def in_backward() -> None:
    x = torch.ones(3, requires_grad=True)

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.clone()
        dist.all_reduce(total)
        return total

    x.register_hook(hook)
    (x * (dist.get_rank() + 1.0)).sum().backward()
    equal(x.grad, torch.full((3,), float(RANK_SUM + RANKS)))


# Timeouts: rank 1 does not call, and the others must get an error.


def told(call: Callable[[], None]) -> None:
    """Let the others call. Rank 1 stays until they are done, as its end would be another error."""
    try:
        if here.rank != 1:
            call()
    finally:
        here.store.add("told", 1)
        while here.store.add("told", 0) < RANKS:
            time.sleep(0.01)


def late(call: Callable[["dist.ProcessGroup"], None], ranks: list[int] | None = None) -> None:
    group = dist.new_group(ranks, timeout=timedelta(seconds=2))
    dist.barrier()
    told(lambda: mistake(call, group) if ranks is None or dist.get_rank() in ranks else None)


for name, call in {
    "all_reduce": lambda group: dist.all_reduce(torch.ones(2), group=group),
    "broadcast from the one that does not call": lambda group: dist.broadcast(
        torch.ones(2), 1, group=group
    ),
    "all_gather_into_tensor": lambda group: dist.all_gather_into_tensor(
        torch.ones(8), torch.ones(2), group=group
    ),
    "reduce_scatter_tensor": lambda group: dist.reduce_scatter_tensor(
        torch.ones(2), torch.ones(8), group=group
    ),
    "barrier": lambda group: dist.barrier(group=group),
    "recv": lambda group: dist.recv(torch.ones(2), 1, group=group),
    "the future of all_reduce": lambda group: (
        dist.all_reduce(torch.ones(2), group=group, async_op=True).get_future().wait()
    ),
}.items():
    case(f"the group's timeout of 2 s: {name}", alone=True)(functools.partial(late, call))


@case("the group's timeout of 2 s: all_reduce in a group of two", alone=True)
def late_two() -> None:
    late(lambda group: dist.all_reduce(torch.ones(2), group=group), [0, 1])


@case("after the group's timeout of 2 s, other groups work", alone=True)
def late_others() -> None:
    group = dist.new_group(timeout=timedelta(seconds=2))
    dist.barrier()

    def call() -> None:
        try:
            dist.all_reduce(torch.ones(2), group=group)
        except Exception:  # noqa: BLE001, S110 other cases look at it
            pass

    told(call)
    x = given()
    dist.all_reduce(x)
    equal(x, summed())


@case("wait with a timeout of 0.5 s", alone=True)
def wait_timeout() -> None:
    dist.barrier()
    told(
        lambda: mistake(dist.all_reduce(torch.ones(2), async_op=True).wait, timedelta(seconds=0.5))
    )


@case("monitored_barrier names the rank that does not come", alone=True)
def monitored_missing() -> None:
    dist.barrier()

    def call() -> None:
        if dist.get_rank() == 0:
            mistake(dist.monitored_barrier, timeout=timedelta(seconds=1))
        try:
            dist.monitored_barrier(timeout=timedelta(seconds=2))
        except RuntimeError:
            # Rank 0 tells them, or nobody does.
            pass

    told(call)


@case("monitored_barrier of a new group names the rank that does not come", alone=True, seconds=10)
def monitored_missing_in_group() -> None:
    group = dist.new_group([0, 1, 2])

    def call() -> None:
        if dist.get_rank() == 0:
            mistake(dist.monitored_barrier, group, timeout=timedelta(seconds=1))

    told(call)


@case("the default group's timeout of 2 s: all_reduce of float64", begins=True, seconds=15)
def late_double() -> None:
    here.begin(timeout=timedelta(seconds=2))
    dist.barrier()
    told(lambda: mistake(dist.all_reduce, torch.ones(2, dtype=torch.float64)))


@case("set_timeout of 2 s: all_reduce", alone=True, since=(2, 15), seconds=10)
def set_late() -> None:
    dist.set_timeout(timedelta(seconds=2))
    dist.barrier()
    told(lambda: mistake(dist.all_reduce, torch.ones(2)))


@case("a rank that has destroyed its group: all_reduce of float64", alone=True, seconds=20)
def left() -> None:
    dist.barrier()
    if dist.get_rank() == 1:
        dist.destroy_process_group()
    told(lambda: mistake(dist.all_reduce, torch.ones(2, dtype=torch.float64)))


@case("init_process_group(timeout=3 s) where a rank does not come", begins=True, seconds=15)
def nobody_comes() -> None:
    told(lambda: mistake(here.begin, timeout=timedelta(seconds=3)))
