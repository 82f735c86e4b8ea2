"""Data that moves as it is: broadcast, gather, scatter, all_to_all."""

import functools

import torch
import torch.distributed as dist

from .case import RANKS, all_equal, equal, same, topic
from .reductions import COMPLEX, FLOATS, WHOLE, short

case = topic("Broadcast, gather, scatter, all_to_all")

ALL_TYPES = (*FLOATS, *WHOLE, *COMPLEX, torch.bool)


def own(rank: int, dtype: torch.dtype = torch.float32, count: int = 3) -> torch.Tensor:
    """The tensor of a rank."""
    values = torch.arange(count) + 3 * rank
    return values % 2 == 0 if dtype == torch.bool else values.to(dtype)


def of_all(dtype: torch.dtype = torch.float32, count: int = 3) -> list[torch.Tensor]:
    return [own(rank, dtype, count) for rank in range(RANKS)]


def broadcast(dtype: torch.dtype) -> None:
    for root in range(RANKS):
        x = own(dist.get_rank(), dtype)
        dist.broadcast(x, root)
        equal(x, own(root, dtype))


def all_gather(dtype: torch.dtype) -> None:
    mine = own(dist.get_rank(), dtype)
    outs = [torch.empty_like(mine) for _ in range(RANKS)]
    dist.all_gather(outs, mine)
    all_equal(outs, of_all(dtype))


def all_gather_into_tensor(dtype: torch.dtype) -> None:
    mine = own(dist.get_rank(), dtype)
    out = torch.empty(3 * RANKS, dtype=dtype)
    dist.all_gather_into_tensor(out, mine)
    equal(out, torch.cat(of_all(dtype)))


def to_all(rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Two elements for each rank."""
    values = torch.arange(2 * RANKS) + 10 * rank
    return values % 3 == 0 if dtype == torch.bool else values.to(dtype)


def from_all(rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.cat([to_all(other, dtype)[2 * rank :][:2] for other in range(RANKS)])


def all_to_all_single(dtype: torch.dtype) -> None:
    out = torch.empty(2 * RANKS, dtype=dtype)
    dist.all_to_all_single(out, to_all(dist.get_rank(), dtype))
    equal(out, from_all(dist.get_rank(), dtype))


for dtype in ALL_TYPES:
    case(f"broadcast of {short(dtype)}, each rank the root")(functools.partial(broadcast, dtype))
for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64):
    case(f"all_gather of {short(dtype)}")(functools.partial(all_gather, dtype))
    case(f"all_gather_into_tensor of {short(dtype)}")(
        functools.partial(all_gather_into_tensor, dtype)
    )
for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
    case(f"all_to_all_single of {short(dtype)}")(functools.partial(all_to_all_single, dtype))


@case("broadcast of a scalar, of an empty tensor, and of channels_last")
def broadcast_forms() -> None:
    for make in (
        lambda: torch.tensor(0.0),
        lambda: torch.empty(0),
        lambda: torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last),
    ):
        x = make().fill_(dist.get_rank())
        dist.broadcast(x, 1)
        equal(x, torch.ones(x.shape))


@case("broadcast of every second element")
def broadcast_strided() -> None:
    whole = torch.full((6,), float(dist.get_rank()))
    dist.broadcast(whole[::2], 3)
    equal(whole[::2], torch.full((3,), 3.0))
    equal(whole[1::2], torch.full((3,), float(dist.get_rank())), "what is between")


@case("broadcast of a parameter, and of a tensor of inference mode")
def broadcast_parameter() -> None:
    x = torch.nn.Parameter(own(dist.get_rank()))
    dist.broadcast(x, 2)
    equal(x.data, own(2))
    with torch.inference_mode():
        y = own(dist.get_rank())
        dist.broadcast(y, 2)
    equal(y, own(2))


@case("broadcast, 100 of them in flight, by all roots")
def broadcasts() -> None:
    tensors = [torch.full((i + 1,), float(dist.get_rank())) for i in range(100)]
    works = [dist.broadcast(x, i % RANKS, async_op=True) for i, x in enumerate(tensors)]
    for work in works:
        work.wait()
    all_equal(tensors, [torch.full((i + 1,), float(i % RANKS)) for i in range(100)])


@case("_broadcast_coalesced, as DistributedDataParallel does")
def broadcast_coalesced() -> None:
    tensors = [own(dist.get_rank(), dtype) for dtype in (torch.float32, torch.int64, torch.float32)]
    dist._broadcast_coalesced(dist.group.WORLD, tensors, 1 << 20, 1)
    all_equal(tensors, [own(1), own(1, torch.int64), own(1)])


@case("all_gather of a scalar, of empty tensors, and into views")
def all_gather_forms() -> None:
    rank = dist.get_rank()
    outs = [torch.tensor(-1.0) for _ in range(RANKS)]
    dist.all_gather(outs, torch.tensor(float(rank)))
    all_equal(outs, [torch.tensor(float(r)) for r in range(RANKS)])
    dist.all_gather([torch.empty(0) for _ in range(RANKS)], torch.empty(0))
    whole = torch.zeros(RANKS, 5)
    dist.all_gather([row[1:4] for row in whole], own(rank))
    equal(whole[:, 1:4], torch.stack(of_all()))
    same(float(whole[:, ::4].sum()), 0.0, "what is beside the views")


@case("all_gather of a transposed tensor, which needs a gradient")
def all_gather_transposed() -> None:
    x = torch.arange(6.0).view(2, 3).t().add(dist.get_rank()).requires_grad_()
    outs = [torch.empty(3, 2) for _ in range(RANKS)]
    dist.all_gather(outs, x)
    all_equal(outs, [torch.arange(6.0).view(2, 3).t() + r for r in range(RANKS)])


@case("all_gather into transposed tensors")
def all_gather_into_transposed() -> None:
    outs = [torch.empty(2, 3).t() for _ in range(RANKS)]
    dist.all_gather(outs, torch.arange(6.0).view(3, 2) + dist.get_rank())
    all_equal(outs, [torch.arange(6.0).view(3, 2) + r for r in range(RANKS)])


@case("all_gather of tensors of several sizes")
def all_gather_uneven() -> None:
    rank = dist.get_rank()
    outs = [torch.empty(r + 1) for r in range(RANKS)]
    dist.all_gather(outs, torch.full((rank + 1,), float(rank)))
    all_equal(outs, [torch.full((r + 1,), float(r)) for r in range(RANKS)])


@case("all_gather_into_tensor, async, and from its own output")
def all_gather_in_place() -> None:
    whole = torch.zeros(RANKS * 3)
    mine = whole.chunk(RANKS)[dist.get_rank()].copy_(own(dist.get_rank()))
    dist.all_gather_into_tensor(whole, mine, async_op=True).wait()
    equal(whole, torch.cat(of_all()))


@case("all_gather_into_tensor of stacked parts")
def all_gather_stacked() -> None:
    whole = torch.zeros(RANKS, 3)
    dist.all_gather_into_tensor(whole, own(dist.get_rank()))
    equal(whole, torch.stack(of_all()))


@case("all_gather_into_tensor in a coalescing manager")
def all_gather_managed() -> None:
    outs = [torch.empty(RANKS * 3) for _ in range(2)]
    with dist._coalescing_manager():
        for by, out in enumerate(outs):
            dist.all_gather_into_tensor(out, own(dist.get_rank()) + by)
    all_equal(outs, [torch.cat(of_all()) + by for by in range(2)])


@case("all_gather_coalesced")
def all_gather_coalesced() -> None:
    outs = [[torch.empty(3), torch.empty(2, dtype=torch.int64)] for _ in range(RANKS)]
    rank = dist.get_rank()
    dist.all_gather_coalesced(outs, [own(rank), own(rank, torch.int64, 2)])
    for r, both in enumerate(outs):
        all_equal(both, [own(r), own(r, torch.int64, 2)])


@case("gather and gather_object, each rank the root")
def gather() -> None:
    rank = dist.get_rank()
    for root in range(RANKS):
        outs = [torch.empty(3) for _ in range(RANKS)] if rank == root else None
        dist.gather(own(rank), outs, dst=root)
        all_equal(outs or [], of_all() if rank == root else [])
        objects = [None] * RANKS if rank == root else None
        dist.gather_object({"rank": rank}, objects, dst=root)
        same(objects, [{"rank": r} for r in range(RANKS)] if rank == root else None)


@case("gather of bool and bfloat16, async")
def gather_types() -> None:
    rank = dist.get_rank()
    for dtype in (torch.bool, torch.bfloat16):
        outs = [torch.empty(3, dtype=dtype) for _ in range(RANKS)] if rank == 1 else None
        dist.gather(own(rank, dtype), outs, dst=1, async_op=True).wait()
        all_equal(outs or [], of_all(dtype) if rank == 1 else [])


@case("scatter and scatter_object_list, each rank the root")
def scatter() -> None:
    rank = dist.get_rank()
    for root in range(RANKS):
        out = torch.empty(3)
        dist.scatter(out, of_all() if rank == root else None, src=root)
        equal(out, own(rank))
        got = [None]
        given = [f"for {r}" for r in range(RANKS)] if rank == root else None
        dist.scatter_object_list(got, given, src=root)
        same(got, [f"for {rank}"])


@case("scatter of complex64 and bool, async")
def scatter_types() -> None:
    rank = dist.get_rank()
    for dtype in (torch.complex64, torch.bool):
        out = torch.empty(3, dtype=dtype)
        dist.scatter(out, of_all(dtype) if rank == 2 else None, src=2, async_op=True).wait()
        equal(out, own(rank, dtype))


@case("gather and scatter, the root's tensors of another shape, and calls behind them")
def other_shapes() -> None:
    rank = dist.get_rank()
    for factor in (1, 10):
        outs = [torch.empty(6) for _ in range(RANKS)] if rank == 0 else None
        dist.gather(factor * own(rank, count=6).view(2, 3), outs, dst=0, async_op=True).wait()
        all_equal(outs or [], [factor * x for x in of_all(count=6)] if rank == 0 else [])
        out = torch.empty(2, 3)
        given = [factor * x for x in of_all(count=6)] if rank == 0 else None
        dist.scatter(out, given, src=0, async_op=True).wait()
        equal(out, factor * own(rank, count=6).view(2, 3))


def second(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, as every second element of another tensor."""
    return torch.stack([x, x - 100], dim=-1)[..., 0]


@case("gather and all_gather of every second element")
def gather_strided() -> None:
    rank = dist.get_rank()
    outs = [torch.empty(3) for _ in range(RANKS)]
    dist.all_gather(outs, second(own(rank)))
    all_equal(outs, of_all())
    outs = [torch.empty(3) for _ in range(RANKS)] if rank == 1 else None
    dist.gather(second(own(rank)), outs, dst=1)
    all_equal(outs or [], of_all() if rank == 1 else [])


@case("gather into every second element")
def gather_into_strided() -> None:
    outs = [second(torch.zeros(3)) for _ in range(RANKS)] if dist.get_rank() == 0 else None
    dist.gather(own(dist.get_rank()), outs, dst=0)
    all_equal(outs or [], of_all() if outs else [])


@case("scatter of every second element, and of expanded tensors")
def scatter_strided() -> None:
    rank, out = dist.get_rank(), torch.empty(3)
    dist.scatter(out, [second(x) for x in of_all()] if rank == 0 else None, src=0)
    equal(out, own(rank))
    parts = [torch.full((1,), float(r)).expand(3) for r in range(RANKS)]
    dist.scatter(out, parts if rank == 0 else None, src=0)
    equal(out, torch.full((3,), float(rank)))


@case("scatter into every second element")
def scatter_into_strided() -> None:
    out = second(torch.zeros(3))
    dist.scatter(out, of_all() if dist.get_rank() == 0 else None, src=0)
    equal(out, own(dist.get_rank()))


@case("all_to_all of every second element")
def all_to_all_strided() -> None:
    rank = dist.get_rank()
    outs = [torch.empty(2) for _ in range(RANKS)]
    dist.all_to_all(outs, [second(part) for part in to_all(rank).chunk(RANKS)])
    equal(torch.cat(outs), from_all(rank))


@case("broadcast_object_list")
def broadcast_objects() -> None:
    given = ["text", {"a": [1, 2]}, torch.ones(2)]
    got = given if dist.get_rank() == 1 else [None] * 3
    dist.broadcast_object_list(got, src=1)
    same(got[:2], given[:2])
    equal(got[2], given[2])


@case("all_gather_object, of objects of several sizes")
def all_gather_objects() -> None:
    got = [None] * RANKS
    dist.all_gather_object(got, "x" * (1000 * dist.get_rank()))
    same([len(one) for one in got], [1000 * rank for rank in range(RANKS)])


@case("all_to_all_single of parts of several sizes, and of none")
def all_to_all_uneven() -> None:
    rank = dist.get_rank()
    given, taken = [other for other in range(RANKS)], [rank] * RANKS
    out = torch.empty(sum(taken))
    dist.all_to_all_single(out, torch.full((sum(given),), float(rank)), taken, given)
    equal(out, torch.arange(float(RANKS)).repeat_interleave(rank))


@case("all_to_all_single of rows, of empty tensors, and async")
def all_to_all_rows() -> None:
    rank = dist.get_rank()
    out = torch.empty(2 * RANKS, 3)
    rows = to_all(rank).view(-1, 1).expand(-1, 3)
    dist.all_to_all_single(out, rows.contiguous(), async_op=True).wait()
    equal(out, from_all(rank).view(-1, 1).repeat(1, 3))
    dist.all_to_all_single(torch.empty(0), torch.empty(0))


@case("all_to_all_single of a transposed input")
def all_to_all_transposed() -> None:
    rank = dist.get_rank()
    out = torch.empty(2 * RANKS)
    both = torch.stack([to_all(rank), to_all(rank)], dim=1)
    dist.all_to_all_single(out, both[:, 0])
    equal(out, from_all(rank))


@case("all_to_all of a list")
def all_to_all() -> None:
    rank = dist.get_rank()
    outs = [torch.empty(2) for _ in range(RANKS)]
    dist.all_to_all(outs, list(to_all(rank).chunk(RANKS)))
    equal(torch.cat(outs), from_all(rank))


@case("all_to_all of a list of several sizes, and int64")
def all_to_all_lists() -> None:
    rank = dist.get_rank()
    outs = [torch.empty(rank + 1, dtype=torch.int64) for _ in range(RANKS)]
    dist.all_to_all(outs, [torch.full((other + 1,), rank) for other in range(RANKS)])
    all_equal(outs, [torch.full((rank + 1,), other) for other in range(RANKS)])


@case("all_to_all of lists of matrices")
def all_to_all_matrices() -> None:
    rank = dist.get_rank()
    outs = [torch.empty(2, 3) for _ in range(RANKS)]
    dist.all_to_all(outs, [torch.full((2, 3), float(10 * rank + other)) for other in range(RANKS)])
    all_equal(outs, [torch.full((2, 3), float(10 * other + rank)) for other in range(RANKS)])
