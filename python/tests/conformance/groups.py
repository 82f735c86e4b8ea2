"""Process groups: some of the ranks, several at once, in other orders; barriers."""

import tempfile
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from .case import RANKS, all_equal, close, equal, here, mistake, same, topic
from .moves import of_all, own
from .reductions import RANK_SUM

case = topic("Groups and barriers")


def summed_in(group: "dist.ProcessGroup", ranks: list[int]) -> None:
    """All members of the group call it."""
    x = torch.full((5,), float(dist.get_rank()))
    dist.all_reduce(x, group=group)
    equal(x, torch.full((5,), float(sum(ranks))), f"sum in {ranks}")


@case("sums in a group of two")
def two() -> None:
    group = dist.new_group([1, 2])
    if dist.get_rank() in (1, 2):
        summed_in(group, [1, 2])
        x = torch.full((2,), dist.get_rank() + 1)
        dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group)
        equal(x, torch.full((2,), 3))


@case("AVG and bfloat16 in a group of three")
def three() -> None:
    group = dist.new_group([0, 1, 3])
    if dist.get_rank() != 2:
        x = torch.full((4,), dist.get_rank() + 1.0, dtype=torch.bfloat16)
        dist.all_reduce(x, group=group)
        equal(x, torch.full((4,), 7.0, dtype=torch.bfloat16))
        x = torch.full((4,), 3.0 * dist.get_rank())
        dist.all_reduce(x, op=dist.ReduceOp.AVG, group=group)
        equal(x, torch.full((4,), 4.0))


@case("sums in a group of one")
def one() -> None:
    groups = [dist.new_group([rank]) for rank in range(RANKS)]
    mine = groups[dist.get_rank()]
    summed_in(mine, [dist.get_rank()])
    dist.barrier(mine)


@case("all calls that move data in a group of two")
def moves_in_two() -> None:
    group, rank = dist.new_group([1, 3]), dist.get_rank()
    if rank not in (1, 3):
        return
    both, mine = [own(1), own(3)], own(rank)
    outs = [torch.empty(3) for _ in range(2)]
    dist.all_gather(outs, mine, group=group)
    all_equal(outs, both)
    x = mine.clone()
    dist.broadcast(x, 3, group=group)
    equal(x, own(3))
    dist.broadcast(x.copy_(mine), group=group, group_src=0)
    equal(x, own(1))
    dist.gather(mine, outs if rank == 3 else None, dst=3, group=group)
    dist.scatter(x, both if rank == 1 else None, src=1, group=group)
    equal(x, mine)
    out, whole = torch.empty(2), torch.arange(4.0) + rank
    dist.reduce_scatter_tensor(out, whole, group=group)
    equal(out, torch.arange(4.0).view(2, 2)[rank // 2] * 2 + 4)
    dist.all_to_all_single(whole, torch.arange(4.0) + 10 * rank, group=group)
    equal(whole, torch.cat([torch.arange(4.0).view(2, 2)[rank // 2] + 10 * r for r in (1, 3)]))
    objects = [None, None]
    dist.all_gather_object(objects, rank, group=group)
    same(objects, [1, 3])


@case("a group of all ranks")
def everyone() -> None:
    group = dist.new_group()
    summed_in(group, list(range(RANKS)))
    same(dist.get_process_group_ranks(group), list(range(RANKS)))


@case("two groups of all ranks, used by turns")
def turns() -> None:
    groups = [dist.new_group(), dist.new_group()]
    for _ in range(3):
        for group in (*groups, None):
            summed_in(group, list(range(RANKS)))


@case("two groups of all ranks, whose works are awaited in reverse")
def reversed_works() -> None:
    groups = [dist.new_group(), dist.new_group()]
    tensors = [torch.full((100,), float(dist.get_rank())) for _ in range(4)]
    works = [dist.all_reduce(x, group=groups[i % 2], async_op=True) for i, x in enumerate(tensors)]
    for work in reversed(works):
        work.wait()
    all_equal(tensors, [torch.full((100,), float(RANK_SUM))] * 4)


@case("two groups of all ranks, called in another order at each rank, async")
def crossed() -> None:
    groups = [dist.new_group(), dist.new_group()]
    tensors = [torch.full((100,), dist.get_rank() * (i + 1.0)) for i in range(2)]
    order = (0, 1) if dist.get_rank() % 2 == 0 else (1, 0)
    works = [dist.all_reduce(tensors[i], group=groups[i], async_op=True) for i in order]
    for work in works:
        work.wait()
    all_equal(tensors, [torch.full((100,), RANK_SUM * (i + 1.0)) for i in range(2)])


@case("groups of all ranks, each called by a thread of its own")
def threads() -> None:
    groups = [dist.new_group() for _ in range(2)]
    found: dict[int, list[torch.Tensor]] = {}

    def call(number: int) -> None:
        found[number] = [torch.full((10,), dist.get_rank() * (number + 1.0)) for _ in range(5)]
        for x in found[number]:
            dist.all_reduce(x, group=groups[number])

    # Odd ranks begin with the other group: its threads must meet the right ones all the same.
    order = (0, 1) if dist.get_rank() % 2 == 0 else (1, 0)
    started = [threading.Thread(target=call, args=[number]) for number in order]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    for number in range(2):
        all_equal(found[number], [torch.full((10,), RANK_SUM * (number + 1.0))] * 5)


@case("overlapping groups, in flight at the same time")
def overlapping() -> None:
    rank = dist.get_rank()
    members = [[0, 1], [1, 2], [2, 3], [0, 3]]
    groups = [dist.new_group(ranks) for ranks in members]
    x = {i: torch.full((5,), float(rank)) for i, ranks in enumerate(members) if rank in ranks}
    works = [dist.all_reduce(x[i], group=groups[i], async_op=True) for i in x]
    for work in works:
        work.wait()
    for i in x:
        equal(x[i], torch.full((5,), float(sum(members[i]))))


@case("a group whose ranks are given in reverse")
def reversed_ranks() -> None:
    group = dist.new_group([3, 2, 1, 0])
    same(dist.get_group_rank(group, 3), 3, "sorted rank of 3")
    summed_in(group, list(range(RANKS)))


@case("a group whose ranks are given in reverse and not sorted", since=(2, 12))
def unsorted_ranks() -> None:
    group = dist.new_group([3, 2, 1, 0], sort_ranks=False)
    same(dist.get_group_rank(group, 3), 0, "rank of 3")
    outs = [torch.empty(3) for _ in range(RANKS)]
    dist.all_gather(outs, own(dist.get_rank()), group=group)
    all_equal(outs, list(reversed(of_all())))
    summed_in(group, list(range(RANKS)))


@case("new_subgroups of two")
def subgroups() -> None:
    mine, _ = dist.new_subgroups(2)
    first = dist.get_rank() // 2 * 2
    summed_in(mine, [first, first + 1])


@case("new_subgroups_by_enumeration")
def enumerated() -> None:
    mine, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    summed_in(mine, [dist.get_rank() % 2, dist.get_rank() % 2 + 2])


@case("new_subgroups of three of four ranks")
def bad_subgroups() -> None:
    mistake(dist.new_subgroups, 3)


# PyTorch counts the group at its members alone, and names later ones by the count.
@case("new_group whose members alone call it (use_local_synchronization)", alone=True)
def local() -> None:
    if dist.get_rank() in (0, 3):
        summed_in(dist.new_group([0, 3], use_local_synchronization=True), [0, 3])


@case("split_group", since=(2, 10))
def split() -> None:
    group = dist.split_group(split_ranks=[[0, 1], [2, 3]])
    first = dist.get_rank() // 2 * 2
    summed_in(group, [first, first + 1])


@case("a group of Gloo's beside")
def beside() -> None:
    group = dist.new_group(backend="gloo")
    summed_in(group, list(range(RANKS)))
    same(dist.get_backend(group), "gloo")
    summed_in(None, list(range(RANKS)))


@case("a group that is destroyed and made again, beside others")
def destroyed() -> None:
    for _ in range(3):
        group = dist.new_group()
        summed_in(group, list(range(RANKS)))
        dist.destroy_process_group(group)
        summed_in(None, list(range(RANKS)))


@case("a group's backend, ranks, size and names")
def facts() -> None:
    group = dist.new_group([1, 2, 3])
    same(dist.get_backend(), here.backend)
    same((dist.get_world_size(), dist.get_rank()), (RANKS, here.rank))
    if dist.get_rank() > 0:
        same(dist.get_process_group_ranks(group), [1, 2, 3])
        same(group.size(), 3)
        same(dist.get_rank(group), dist.get_rank() - 1)
        same(dist.get_global_rank(group, 2), 3)
        same(bool(group.group_name), True, "a name")
        same(group.name(), here.backend, "the backend's name")
    else:
        same(dist.get_rank(group), -1)


@case("methods of the group itself: allreduce, broadcast, allgather, barrier")
def methods() -> None:
    group = dist.group.WORLD
    x = torch.full((3,), float(dist.get_rank()))
    group.allreduce([x]).wait()
    equal(x, torch.full((3,), float(RANK_SUM)))
    group.allreduce(x.fill_(1.0)).wait()
    equal(x, torch.full((3,), 4.0))
    group.broadcast(y := own(dist.get_rank()), 2).wait()
    equal(y, own(2))
    outs = [[torch.empty(3) for _ in range(RANKS)]]
    group.allgather(outs, [own(dist.get_rank())]).wait()
    all_equal(outs[0], of_all())
    group.barrier().wait()


@case("a group is found by its name")
def named() -> None:
    group = dist.new_group()
    found = dist.distributed_c10d._resolve_process_group(group.group_name)
    summed_in(found, list(range(RANKS)))


@case("barrier: no rank returns before the last one calls")
def barrier() -> None:
    store, rank = here.store, dist.get_rank()
    for turn in range(3):
        if rank == turn:
            time.sleep(0.1)
        store.add(f"barrier {turn}", 1)
        dist.barrier()
        same(store.add(f"barrier {turn}", 0), RANKS, "ranks that have come")
        dist.barrier()


@case("barrier, async, and in a group of two")
def barrier_two() -> None:
    dist.barrier(async_op=True).wait()
    group = dist.new_group([0, 2])
    if dist.get_rank() in (0, 2):
        dist.barrier(group=group)


@case("barrier is behind the sums that are in flight")
def barrier_after() -> None:
    x = torch.full((100_000,), float(dist.get_rank()))
    work = dist.all_reduce(x, async_op=True)
    dist.barrier()
    work.wait()
    equal(x, torch.full((100_000,), float(RANK_SUM)))


@case("monitored_barrier")
def monitored() -> None:
    dist.monitored_barrier(timeout=timedelta(seconds=5))
    dist.monitored_barrier(timeout=timedelta(seconds=5), wait_all_ranks=True)


@case("monitored_barrier in a group of two")
def monitored_two() -> None:
    group = dist.new_group([1, 3])
    if dist.get_rank() in (1, 3):
        dist.monitored_barrier(group, timeout=timedelta(seconds=5))


@case("destroy_process_group and init_process_group, three times", begins=True)
def again() -> None:
    for _ in range(3):
        here.begin()
        summed_in(None, list(range(RANKS)))
        dist.barrier()
        dist.destroy_process_group()


@case("init_process_group with a FileStore", begins=True)
def by_file() -> None:
    if here.rank == 0:
        here.store.set("path", f"{tempfile.mkdtemp()}/store")
    store = dist.FileStore(here.store.get("path").decode(), RANKS)
    dist.init_process_group(here.backend, store=store, rank=here.rank, world_size=RANKS)
    summed_in(None, list(range(RANKS)))


@case("a job of one rank", begins=True)
def alone() -> None:
    if here.rank > 0:
        return
    here.begin(ranks=1)
    x = torch.arange(3.0)
    dist.all_reduce(x)
    equal(x, torch.arange(3.0))
    dist.all_gather_into_tensor(x, torch.ones(3))
    dist.reduce_scatter_tensor(x, torch.full((3,), 2.0), op=dist.ReduceOp.AVG)
    dist.barrier()
    equal(x, torch.full((3,), 2.0))


@case("cpu:BACKEND as the name of the backend", begins=True)
def by_device() -> None:
    here.begin(f"cpu:{here.backend}")
    summed_in(None, list(range(RANKS)))
    dist.barrier()


@case(
    "TORCH_DISTRIBUTED_DEBUG=DETAIL", alone=True, environment={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
)
def detail() -> None:
    summed_in(None, list(range(RANKS)))
    outs = [torch.empty(3) for _ in range(RANKS)]
    dist.all_gather(outs, own(dist.get_rank()))
    all_equal(outs, of_all())
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1, bias=False))
    model(own(dist.get_rank())).sum().backward()
    close(model.module.weight.grad[0], torch.stack(of_all()).mean(0))
    dist.barrier()
