"""Functional collectives, those of autograd, and torch.compile."""

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist

from .case import RANKS, all_equal, close, equal, same, topic
from .moves import from_all, of_all, own, to_all
from .reductions import RANK_SUM, given, summed

case = topic("Functional collectives and torch.compile")


def calls() -> object:
    from torch.distributed import _functional_collectives

    return _functional_collectives


def reduced(op: str, right: Callable[[], torch.Tensor]) -> None:
    x = given()
    out = calls().all_reduce(x, op, dist.group.WORLD)
    equal(calls().wait_tensor(out), right())
    equal(x, given(), "the input")


for op, right in {
    "sum": lambda: summed(),
    "avg": lambda: summed() / RANKS,
    "max": lambda: given() - dist.get_rank() + RANKS - 1,
    "min": lambda: given() - dist.get_rank(),
}.items():
    case(f"functional all_reduce, {op}")(functools.partial(reduced, op, right))


@case("functional all_reduce: the tensor waits when it is read")
def waits() -> None:
    out = calls().all_reduce(given(), "sum", dist.group.WORLD)
    equal(out + 1, summed() + 1)


@case("functional all_reduce_coalesced")
def coalesced() -> None:
    outs = calls().all_reduce_coalesced([given(), given(count=3)], "sum", dist.group.WORLD)
    all_equal([calls().wait_tensor(out) for out in outs], [summed(), summed(count=3)])


@case("functional all_gather_tensor, by rows and by columns")
def gathered() -> None:
    x = own(dist.get_rank()).view(1, 3)
    for dim in range(2):
        out = calls().all_gather_tensor(x, dim, dist.group.WORLD)
        equal(calls().wait_tensor(out), torch.cat([one.view(1, 3) for one in of_all()], dim))


@case("functional all_gather_into_tensor_coalesced")
def gathered_coalesced() -> None:
    xs = [own(dist.get_rank()), own(dist.get_rank(), torch.int64)]
    outs = calls().all_gather_into_tensor_coalesced(xs, dist.group.WORLD)
    rights = [torch.cat(of_all()), torch.cat(of_all(torch.int64))]
    all_equal([calls().wait_tensor(out) for out in outs], rights)


@case("functional reduce_scatter_tensor, by rows and by columns, sum and avg")
def scattered() -> None:
    rank = dist.get_rank()
    x = torch.arange(64.0).view(8, 8) + rank
    for dim in range(2):
        for op, by in (("sum", 1), ("avg", RANKS)):
            out = calls().reduce_scatter_tensor(x, op, dim, dist.group.WORLD)
            total = torch.arange(64.0).view(8, 8) * RANKS + RANK_SUM
            equal(calls().wait_tensor(out), total.chunk(RANKS, dim)[rank].contiguous() / by)


@case("functional reduce_scatter_tensor_coalesced")
def scattered_coalesced() -> None:
    xs = [torch.ones(2 * RANKS), torch.ones(RANKS, dtype=torch.bfloat16)]
    outs = calls().reduce_scatter_tensor_coalesced(xs, "sum", [0, 0], dist.group.WORLD)
    rights = [torch.full((2,), 4.0), torch.full((1,), 4.0, dtype=torch.bfloat16)]
    all_equal([calls().wait_tensor(out) for out in outs], rights)


@case("functional all_to_all_single, parts of one size and of several")
def to_everyone() -> None:
    rank = dist.get_rank()
    out = calls().all_to_all_single(to_all(rank), None, None, dist.group.WORLD)
    equal(calls().wait_tensor(out), from_all(rank))
    given_sizes, taken = [other + 1 for other in range(RANKS)], [rank + 1] * RANKS
    x = torch.full((sum(given_sizes),), float(rank))
    out = calls().all_to_all_single(x, taken, given_sizes, dist.group.WORLD)
    equal(calls().wait_tensor(out), torch.arange(float(RANKS)).repeat_interleave(rank + 1))


@case("functional broadcast, and permute_tensor")
def broadcast() -> None:
    out = calls().broadcast(own(dist.get_rank()), 2, dist.group.WORLD)
    equal(calls().wait_tensor(out), own(2))
    out = calls().permute_tensor(own(dist.get_rank()), [1, 2, 3, 0], dist.group.WORLD)
    equal(calls().wait_tensor(out), own((dist.get_rank() - 1) % RANKS))


@case("functional calls in a group of two")
def in_two() -> None:
    group, _ = dist.new_subgroups(2)
    first = dist.get_rank() // 2 * 2
    out = calls().all_reduce(torch.full((3,), float(dist.get_rank())), "sum", group)
    equal(calls().wait_tensor(out), torch.full((3,), 2.0 * first + 1))


@case("functional calls that nobody waits for")
def unwaited() -> None:
    for _ in range(5):
        calls().all_reduce(torch.ones(100), "sum", dist.group.WORLD)
    x = given()
    dist.all_reduce(x)
    equal(x, summed())


@case("functional calls with gradients: all_gather, reduce_scatter, all_to_all")
def gradients() -> None:
    rank = dist.get_rank()
    x = own(rank).requires_grad_()
    calls().all_gather_tensor_autograd(x, 0, dist.group.WORLD).sum().backward()
    equal(x.grad, torch.full((3,), float(RANKS)))
    x = torch.ones(RANKS, requires_grad=True)
    (
        calls().reduce_scatter_tensor_autograd(x, "sum", 0, dist.group.WORLD) * (rank + 1)
    ).sum().backward()
    equal(x.grad, torch.arange(1.0, RANKS + 1))
    x = torch.ones(RANKS, requires_grad=True)
    out = calls().all_to_all_single_autograd(x, [1] * RANKS, [1] * RANKS, dist.group.WORLD)
    (out * (rank + 1)).sum().backward()
    equal(x.grad, torch.arange(1.0, RANKS + 1))


def with_gradient(call: Callable[[torch.Tensor], torch.Tensor], right: Callable[[], float]) -> None:
    x = torch.full((RANKS,), 2.0, requires_grad=True)
    out = call(x)
    # The gradient of a sum alone has no memory of its own.
    (out * torch.ones(out.shape)).sum().backward()
    equal(x.grad, torch.full((RANKS,), float(right())))


def nn() -> object:
    import torch.distributed.nn

    return torch.distributed.nn


for name, (call, right) in {
    "all_reduce": (lambda x: nn().all_reduce(x), lambda: RANKS),
    "all_gather": (lambda x: torch.cat(nn().all_gather(x)), lambda: RANKS),
    "reduce_scatter": (
        lambda x: nn().reduce_scatter(torch.empty(1), list(x.chunk(RANKS))),
        lambda: 1,
    ),
    "broadcast": (lambda x: nn().broadcast(x, 1), lambda: RANKS if dist.get_rank() == 1 else 0),
    "all_to_all_single": (lambda x: nn().all_to_all_single(torch.empty(RANKS), x), lambda: 1),
    "gather": (lambda x: torch.cat(nn().gather(x, 0)), lambda: 1),
    "reduce": (lambda x: nn().reduce(x, 0), lambda: 1),
}.items():
    case(f"torch.distributed.nn.{name}, with its gradient")(
        functools.partial(with_gradient, call, right)
    )


# Compiled.


def compiled(
    call: Callable[[torch.Tensor], torch.Tensor], right: Callable[[], torch.Tensor], by: str
) -> None:
    torch._dynamo.reset()
    f = torch.compile(call, backend=by, fullgraph=True)
    for _ in range(2):
        equal(f(torch.full((8,), float(dist.get_rank()))), right())


def functional_sum(x: torch.Tensor) -> torch.Tensor:
    return calls().all_reduce(x * 2, "sum", dist.group.WORLD) + 1


def plain_sum(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    dist.all_reduce(y)
    return y + 1


def plain_gather(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty(8 * RANKS)
    dist.all_gather_into_tensor(out, x + 1)
    return out - 1


def plain_scatter(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty(2)
    dist.reduce_scatter_tensor(out, x + 1)
    return out


def all_sum() -> torch.Tensor:
    return torch.full((8,), 2.0 * RANK_SUM + 1)


for name, call, right, by in (
    ("a functional all_reduce", functional_sum, all_sum, "aot_eager"),
    ("all_reduce", plain_sum, all_sum, "aot_eager"),
    (
        "all_gather_into_tensor",
        plain_gather,
        lambda: torch.arange(4.0).repeat_interleave(8),
        "aot_eager",
    ),
    ("reduce_scatter_tensor", plain_scatter, lambda: torch.full((2,), 10.0), "aot_eager"),
    ("a functional all_reduce, by inductor", functional_sum, all_sum, "inductor"),
):
    case(f"torch.compile, {name}", seconds=60)(functools.partial(compiled, call, right, by))


@case("torch.compile of a DDP model", seconds=60)
def compiled_ddp() -> None:
    from torch.nn.parallel import DistributedDataParallel

    from .ddp import Net, expected, trained

    torch._dynamo.reset()
    ddp = torch.compile(DistributedDataParallel(Net()), backend="aot_eager")
    close(trained(ddp), expected(Net()))


@case("torch.compile of a model of FSDP2", seconds=60)
def compiled_fsdp() -> None:
    from .ddp import Net, expected, train
    from .sharded import sharded, whole

    torch._dynamo.reset()
    model = sharded(Net())
    train(torch.compile(model, backend="aot_eager"))
    close(whole(model), expected(Net()))


@case("torch.compile of DTensor's redistribute", seconds=60)
def compiled_dtensor() -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    from .sharded import mesh

    torch._dynamo.reset()
    over = mesh()

    def f(x: torch.Tensor) -> torch.Tensor:
        y = DTensor.from_local(x, over, [Shard(0)], run_check=False) * 2
        return y.redistribute(placements=[Replicate()]).to_local()

    out = torch.compile(f, backend="aot_eager", fullgraph=True)(own(dist.get_rank()))
    same(bool(torch.equal(out, torch.cat(of_all()) * 2)), True)
