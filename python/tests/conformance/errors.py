"""Mistaken calls: each must be refused with an error that names the mistake."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from .case import RANKS, mistake, topic

case = topic("Mistaken calls")

LISTED = [torch.zeros(2) for _ in range(RANKS)]


def mixed() -> list[torch.Tensor]:
    return [torch.zeros(2), *(torch.zeros(2, dtype=torch.float64) for _ in range(RANKS - 1))]


def few() -> list[torch.Tensor]:
    return [torch.zeros(2) for _ in range(RANKS - 1)]


def of(dtype: torch.dtype, count: int = 2) -> torch.Tensor:
    return torch.zeros(count, dtype=dtype)


MISTAKES: dict[str, Callable[[], object]] = {
    "all_reduce of a list": lambda: dist.all_reduce(LISTED),
    "all_reduce of a number": lambda: dist.all_reduce(1.0),
    "all_reduce of a tensor without memory (meta)": lambda: dist.all_reduce(
        torch.empty(2, device="meta")
    ),
    "all_reduce, MAX of complex64": lambda: dist.all_reduce(
        of(torch.complex64), op=dist.ReduceOp.MAX
    ),
    "all_reduce, PRODUCT of complex64": lambda: dist.all_reduce(
        of(torch.complex64), op=dist.ReduceOp.PRODUCT
    ),
    "all_reduce, BAND of float32": lambda: dist.all_reduce(torch.ones(2), op=dist.ReduceOp.BAND),
    "all_reduce, BXOR of bfloat16": lambda: dist.all_reduce(
        of(torch.bfloat16), op=dist.ReduceOp.BXOR
    ),
    "all_reduce, an operation that is a text": lambda: dist.all_reduce(torch.ones(2), op="sum"),
    "all_reduce, MAX of a sparse tensor": lambda: dist.all_reduce(
        torch.eye(3).to_sparse(), op=dist.ReduceOp.MAX
    ),
    "all_reduce_coalesced of two types": lambda: dist.all_reduce_coalesced(mixed()),
    "all_reduce_coalesced of an empty list": lambda: dist.all_reduce_coalesced([]),
    "reduce to rank 4 of 4": lambda: dist.reduce(torch.ones(2), RANKS),
    "reduce to rank -1": lambda: dist.reduce(torch.ones(2), -1),
    "broadcast from rank 4 of 4": lambda: dist.broadcast(torch.ones(2), RANKS),
    "broadcast from rank -1": lambda: dist.broadcast(torch.ones(2), -1),
    "broadcast of a sparse tensor": lambda: dist.broadcast(torch.eye(3).to_sparse(), 0),
    "all_gather into two types": lambda: dist.all_gather(mixed(), torch.zeros(2)),
    "all_gather of another type than the output's": lambda: dist.all_gather(
        [torch.zeros(2) for _ in range(RANKS)], of(torch.float16)
    ),
    "all_gather into three of four": lambda: dist.all_gather(few(), torch.zeros(2)),
    "all_gather into tensors that are too large": lambda: dist.all_gather(
        [torch.zeros(3) for _ in range(RANKS)], torch.zeros(2)
    ),
    "all_gather of a sparse tensor": lambda: dist.all_gather(
        [torch.eye(3).to_sparse() for _ in range(RANKS)], torch.eye(3).to_sparse()
    ),
    "all_gather_into_tensor, an output that is too small": lambda: dist.all_gather_into_tensor(
        torch.zeros(RANKS), torch.zeros(2)
    ),
    "all_gather_into_tensor of another type": lambda: dist.all_gather_into_tensor(
        torch.zeros(2 * RANKS), of(torch.int32)
    ),
    "reduce_scatter_tensor, an input that is too small": lambda: dist.reduce_scatter_tensor(
        torch.zeros(2), torch.zeros(RANKS)
    ),
    "reduce_scatter_tensor of another type": lambda: dist.reduce_scatter_tensor(
        torch.zeros(2), of(torch.int32, 2 * RANKS)
    ),
    "reduce_scatter of three of four": lambda: dist.reduce_scatter(torch.zeros(2), few()),
    "reduce_scatter of two types": lambda: dist.reduce_scatter(torch.zeros(2), mixed()),
    "gather without a list at the root": lambda: dist.gather(
        torch.zeros(2), None, dst=dist.get_rank()
    ),
    "gather with a list at another rank": lambda: dist.gather(
        torch.zeros(2), few(), dst=(dist.get_rank() + 1) % RANKS
    ),
    "scatter without a list at the root": lambda: dist.scatter(
        torch.zeros(2), None, src=dist.get_rank()
    ),
    "scatter with a list at another rank": lambda: dist.scatter(
        torch.zeros(2), few(), src=(dist.get_rank() + 1) % RANKS
    ),
    "scatter of two types": lambda: dist.scatter(torch.zeros(2), mixed(), src=dist.get_rank()),
    "all_to_all of three of four": lambda: dist.all_to_all(few(), few()),
    "all_to_all of two types": lambda: dist.all_to_all(
        [torch.zeros(2) for _ in range(RANKS)], mixed()
    ),
    "all_to_all_single of another type": lambda: dist.all_to_all_single(
        torch.zeros(RANKS), of(torch.float64, RANKS)
    ),
    "all_to_all_single of a size that ranks do not divide": lambda: dist.all_to_all_single(
        torch.zeros(5), torch.zeros(5)
    ),
    "all_to_all_single, parts that are more than there is": lambda: dist.all_to_all_single(
        torch.zeros(RANKS), torch.zeros(RANKS), [1] * RANKS, [2] * RANKS
    ),
    "all_to_all_single, three parts of four": lambda: dist.all_to_all_single(
        torch.zeros(3), torch.zeros(3), [1] * 3, [1] * 3
    ),
    "send to itself": lambda: dist.send(torch.ones(2), dist.get_rank()),
    "isend of a sparse tensor": lambda: dist.isend(
        torch.eye(3).to_sparse(), (dist.get_rank() + 1) % RANKS
    ),
    "batch_isend_irecv with another operation": lambda: dist.batch_isend_irecv(
        [dist.P2POp(dist.broadcast, torch.ones(2), 0)]
    ),
    "new_group with rank 4 of 4": lambda: dist.new_group([0, RANKS]),
    "new_group with one rank twice": lambda: dist.new_group([0, 0]),
    "init_process_group a second time": lambda: dist.init_process_group("gloo"),
}
# They are refused before anything is sent, which keeps other cases unaffected.
for name, call in MISTAKES.items():
    case(name)(lambda call=call: mistake(call))


# A backend may wait for a rank that does not exist, or crash.
for name, call in {
    "send to rank 4 of 4": lambda: dist.send(torch.ones(2), RANKS),
    "recv from rank 4 of 4": lambda: dist.recv(torch.ones(2), RANKS),
    "recv from rank -1": lambda: dist.recv(torch.ones(2), -1),
}.items():
    case(name, alone=True, seconds=5)(lambda call=call: mistake(call))


# Ranks that do not agree.


@case("all_reduce of another size at each rank", alone=True, seconds=8)
def sizes() -> None:
    mistake(dist.all_reduce, torch.ones(100 + dist.get_rank()))


@case("all_reduce of another type at each rank", alone=True, seconds=8)
def types() -> None:
    mistake(
        dist.all_reduce, torch.ones(100, dtype=torch.float32 if dist.get_rank() else torch.int32)
    )


@case("another collective at each rank", alone=True, seconds=8)
def calls() -> None:
    if dist.get_rank() % 2:
        mistake(dist.all_reduce, torch.ones(100))
    mistake(dist.broadcast, torch.ones(100), 0)


@case("broadcast with another root at each rank", alone=True, seconds=8)
def roots() -> None:
    mistake(dist.broadcast, torch.ones(100), dist.get_rank())


@case("all_gather_into_tensor of another size at each rank", alone=True, seconds=8)
def gathered_sizes() -> None:
    count = 100 + dist.get_rank()
    mistake(dist.all_gather_into_tensor, torch.ones(RANKS * count), torch.ones(count))


def listed(root: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor] | None:
    return [of(dtype) for _ in range(RANKS)] if dist.get_rank() == root else None


def rows(count: int, dtype: torch.dtype = torch.float32) -> None:
    dist.all_to_all_single(of(dtype, count), of(dtype, count))


def expanded() -> torch.Tensor:
    one = of(torch.float64, 1)
    return one.expand(4) if dist.get_rank() == 1 else one.repeat(4)


MAX, MIN, SUM = dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.SUM
I64, F64 = torch.int64, torch.float64

# Calls that differ between ranks, some of which netsum passes to Gloo. `odd` is set at one rank.
for name, call in {
    "all_reduce of float32 at one rank, of float64 at others": lambda odd: dist.all_reduce(
        of(F64 if odd else torch.float32)
    ),
    "all_reduce, SUM at one rank, MAX at others": lambda odd: dist.all_reduce(
        of(F64), MAX if odd else SUM
    ),
    "all_reduce, SUM of float32 at one rank, MAX at others": lambda odd: dist.all_reduce(
        torch.ones(2), MAX if odd else SUM
    ),
    "all_reduce, MIN of float64 at one rank, MAX at others": lambda odd: dist.all_reduce(
        of(F64), MAX if odd else MIN
    ),
    "all_reduce of float64 at one rank, of int64 at others": lambda odd: dist.all_reduce(
        of(I64 if odd else F64)
    ),
    "all_reduce of float64, another size at each rank": lambda _: dist.all_reduce(
        of(F64, 100 + dist.get_rank())
    ),
    "all_reduce of a sparse tensor at one rank": lambda odd: dist.all_reduce(
        torch.eye(3) if odd else torch.eye(3).to_sparse()
    ),
    "all_reduce of float64, expanded at one rank": lambda _: dist.all_reduce(expanded()),
    "float32 and then float64 at one rank, the other way at others": lambda odd: [
        work.wait()
        for work in [
            dist.all_reduce(of(dtype), async_op=True)
            for dtype in ((F64, torch.float32) if odd else (torch.float32, F64))
        ]
    ],
    "reduce of float64 to another root at each rank": lambda _: dist.reduce(
        of(F64), dist.get_rank()
    ),
    "reduce of float64 at one rank, all_reduce at others": lambda odd: (
        dist.all_reduce(of(F64)) if odd else dist.reduce(of(F64), 0)
    ),
    "reduce_scatter_tensor of float64, another size at each rank": lambda _: (
        dist.reduce_scatter_tensor(
            of(F64, 1 + dist.get_rank()), of(F64, RANKS * (1 + dist.get_rank()))
        )
    ),
    "reduce_scatter of float64, other parts at each rank": lambda _: dist.reduce_scatter(
        of(F64), [of(F64, 2 if rank == dist.get_rank() else 1) for rank in range(RANKS)]
    ),
    "all_to_all_single of another size at each rank": lambda _: rows(RANKS * (1 + dist.get_rank())),
    "all_to_all_single of another type at each rank": lambda odd: rows(RANKS, I64 if odd else F64),
    "all_to_all_single, a part that another rank does not take": lambda odd: dist.all_to_all_single(
        of(F64, RANKS), of(F64, RANKS), [1] * RANKS, [1] * RANKS if odd else [2, 0, 1, 1]
    ),
    "all_to_all_single, parts that are too few at one rank": lambda odd: dist.all_to_all_single(
        of(F64, RANKS), of(F64, RANKS), [1] * RANKS if odd else [1] * (RANKS - 1), [1] * RANKS
    ),
    "gather of another type at each rank": lambda odd: dist.gather(
        of(I64 if odd else F64), listed(0, F64), 0
    ),
    "gather of another size at each rank": lambda _: dist.gather(
        torch.ones(2 + dist.get_rank()), listed(0), 0
    ),
    "gather with another root at each rank": lambda _: dist.gather(
        torch.ones(2), listed(dist.get_rank()), dist.get_rank()
    ),
    "gather at one rank, barrier at others": lambda odd: (
        dist.barrier() if odd else dist.gather(torch.ones(2), listed(0), 0)
    ),
    "scatter of another type at each rank": lambda odd: dist.scatter(
        of(I64 if odd else F64), listed(0, F64), 0
    ),
    "scatter of another size at each rank": lambda _: dist.scatter(
        torch.ones(2 + dist.get_rank()), listed(0), 0
    ),
    "scatter of a list of several sizes": lambda odd: dist.scatter(
        torch.ones(2), None if odd else [torch.ones(2 + i) for i in range(RANKS)], 0
    ),
}.items():
    case(name, alone=True, seconds=8)(lambda call=call: mistake(call, dist.get_rank() > 0))


@case("recv into a tensor that is smaller than what is sent", alone=True, seconds=8)
def small() -> None:
    if dist.get_rank() == 0:
        dist.isend(torch.ones(100), 1)
        dist.recv(torch.ones(1), 1)
    elif dist.get_rank() == 1:
        try:
            mistake(dist.recv, torch.ones(10), 0)
        finally:
            dist.send(torch.ones(1), 0)
