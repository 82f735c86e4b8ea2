"""Messages between two ranks."""

import contextlib
import functools

import torch
import torch.distributed as dist

from .case import RANKS, all_equal, equal, here, same, topic
from .moves import own
from .reductions import RANK_SUM, short

case = topic("Messages between two ranks")


def around() -> tuple[int, int, int]:
    """This rank, the next and the one before."""
    rank = dist.get_rank()
    return rank, (rank + 1) % RANKS, (rank - 1) % RANKS


def sent(dtype: torch.dtype) -> None:
    rank = dist.get_rank()
    if rank == 0:
        dist.send(own(0, dtype), 3)
    elif rank == 3:
        x = torch.empty_like(own(0, dtype))
        same(dist.recv(x, 0), 0, "the sender")
        equal(x, own(0, dtype))


for dtype in (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.int64,
    torch.bool,
    torch.complex64,
):
    case(f"send and recv of {short(dtype)}")(functools.partial(sent, dtype))


@case("send and recv of a large tensor, of an empty one, and of a view")
def forms() -> None:
    rank = dist.get_rank()
    whole = torch.zeros(10)
    for make in (lambda: torch.empty(3_000_000), lambda: torch.empty(0), lambda: whole[2:5]):
        x = make().fill_(rank + 1)
        if rank == 1:
            dist.send(x, 2)
        elif rank == 2:
            dist.recv(x, 1)
            equal(x, torch.full(x.shape, 2.0))


@case("send of every second element")
def strided() -> None:
    rank = dist.get_rank()
    if rank == 0:
        with contextlib.suppress(RuntimeError):
            dist.send(torch.arange(6.0)[::2], 1)
            return
        # It was refused, which is as good: rank 1 waits for something.
        dist.send(torch.tensor([0.0, 2.0, 4.0]), 1)
    elif rank == 1:
        dist.recv(x := torch.empty(3), 0)
        equal(x, torch.tensor([0.0, 2, 4]))


@case("recv into every second element", alone=True)
def into_strided() -> None:
    rank = dist.get_rank()
    if rank == 0:
        # A backend that refuses recv never takes the message: nobody may wait for that.
        here.kept.append(dist.isend(torch.ones(3), 1))
    elif rank == 1:
        whole = torch.zeros(6)
        dist.recv(whole[::2], 0)
        equal(whole, torch.tensor([1.0, 0] * 3))


@case("isend and irecv around a ring")
def ring() -> None:
    rank, after, before = around()
    x = torch.empty(3)
    works = [dist.isend(own(rank), after), dist.irecv(x, before)]
    for work in works:
        work.wait()
    equal(x, own(before))


@case("tags: received in another order than sent")
def tags() -> None:
    rank = dist.get_rank()
    if rank == 0:
        works = [dist.isend(torch.full((2,), float(tag)), 1, tag=tag) for tag in (1, 2, 3)]
        for work in works:
            work.wait()
    elif rank == 1:
        for tag in (3, 1, 2):
            x = torch.empty(2)
            dist.recv(x, 0, tag=tag)
            equal(x, torch.full((2,), float(tag)))


@case("100 messages with one tag keep their order")
def order() -> None:
    rank, after, before = around()
    outs = [torch.empty(1) for _ in range(100)]
    works = [dist.irecv(x, before) for x in outs]
    works += [dist.isend(torch.tensor([float(i)]), after) for i in range(100)]
    for work in works:
        work.wait()
    equal(torch.cat(outs), torch.arange(100.0))


@case("recv from any rank")
def any_rank() -> None:
    rank = dist.get_rank()
    if rank == 0:
        got = {}
        for _ in range(RANKS - 1):
            x = torch.empty(1)
            sender = dist.recv(x)
            got[sender] = x.item()
        same(got, {1: 1.0, 2: 2.0, 3: 3.0})
    else:
        dist.send(torch.tensor([float(rank)]), 0)


@case("recv from any rank, with tags")
def any_rank_tags() -> None:
    rank = dist.get_rank()
    if rank == 0:
        for tag in (3, 2, 1):
            x = torch.empty(1)
            same(dist.recv(x, tag=tag), tag, "the sender")
    else:
        dist.send(torch.ones(1), 0, tag=rank)


@case("send_object_list and recv_object_list")
def objects() -> None:
    rank = dist.get_rank()
    given = ["text", {"a": 1}]
    if rank == 2:
        dist.send_object_list(given, 0)
    elif rank == 0:
        got = [None, None]
        same(dist.recv_object_list(got, 2), 2, "the sender")
        same(got, given)


@case("batch_isend_irecv around a ring")
def batch() -> None:
    rank, after, before = around()
    x = torch.empty(3)
    ops = [dist.P2POp(dist.isend, own(rank), after), dist.P2POp(dist.irecv, x, before)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    equal(x, own(before))


@case("batch_isend_irecv with all others, with tags")
def batch_all() -> None:
    rank = dist.get_rank()
    others = [other for other in range(RANKS) if other != rank]
    outs = [torch.empty(3) for _ in others]
    ops = [
        dist.P2POp(dist.irecv, x, other, tag=other) for x, other in zip(outs, others, strict=True)
    ]
    ops += [dist.P2POp(dist.isend, own(rank), other, tag=rank) for other in others]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    all_equal(outs, [own(other) for other in others])


@case("batch_isend_irecv between two ranks, which others do not call")
def batch_two() -> None:
    rank = dist.get_rank()
    if rank in (1, 3):
        x = torch.empty(3)
        ops = [dist.P2POp(dist.irecv, x, 4 - rank), dist.P2POp(dist.isend, own(rank), 4 - rank)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        equal(x, own(4 - rank))


@case("send by the rank in a group")
def group_rank() -> None:
    group = dist.new_group([1, 3])
    rank = dist.get_rank()
    if rank == 1:
        dist.send(own(1), group=group, group_dst=1)
    elif rank == 3:
        x = torch.empty(3)
        dist.recv(x, group=group, group_src=0)
        equal(x, own(1))


@case("messages of two groups with one tag, received in another order than sent")
def two_groups() -> None:
    groups, rank = [dist.new_group(), dist.new_group()], dist.get_rank()
    if rank == 0:
        works = [dist.isend(torch.full((2,), float(i)), 1, group=groups[i]) for i in range(2)]
        for work in works:
            work.wait()
    elif rank == 1:
        for i in (1, 0):
            dist.recv(x := torch.empty(2), 0, group=groups[i])
            equal(x, torch.full((2,), float(i)), f"group {i}")


@case("messages with large tags, beside those of groups")
def large_tags() -> None:
    groups, rank = [dist.new_group() for _ in range(3)], dist.get_rank()
    # Tags of the default group, like those that contain a group's number and tag.
    large = [number << 16 | 5 for number in range(1, 200)]
    if rank == 0:
        works = [dist.isend(torch.full((1,), float(tag)), 1, tag=tag) for tag in large]
        works += [dist.isend(torch.full((1,), 5.0), 1, tag=5, group=group) for group in groups]
        for work in works:
            work.wait()
    elif rank == 1:
        for group in groups:
            dist.recv(x := torch.empty(1), 0, tag=5, group=group)
            equal(x, torch.full((1,), 5.0), "of a group")
        for tag in large:
            dist.recv(x := torch.empty(1), 0, tag=tag)
            equal(x, torch.full((1,), float(tag)), "of the default group")


@case("batch_isend_irecv between two ranks of a group of three", seconds=10)
def batch_of_two() -> None:
    group, rank = dist.new_group([0, 1, 2]), dist.get_rank()
    if rank < 2:
        x = torch.empty(3)
        calls = [(dist.isend, own(rank)), (dist.irecv, x)]
        for work in dist.batch_isend_irecv([dist.P2POp(op, y, 1 - rank, group) for op, y in calls]):
            work.wait()
        equal(x, own(1 - rank))


@case("recv from any rank of a group of two")
def any_rank_of_two() -> None:
    group, rank = dist.new_group([1, 2]), dist.get_rank()
    if rank in (0, 2):
        # Rank 0's is for another group.
        works = [dist.isend(torch.full((1,), float(rank)), 1, group=group if rank == 2 else None)]
    elif rank == 1:
        x = torch.empty(1)
        same(dist.recv(x, group=group), 2, "the sender")
        equal(x, torch.full((1,), 2.0))
        dist.recv(x, 0)
        works = []
    if rank < 3:
        for work in works:
            work.wait()


@case("messages while sums are in flight")
def beside_sums() -> None:
    rank, after, before = around()
    sums = [torch.full((1000,), float(rank)) for _ in range(5)]
    works = [dist.all_reduce(x, async_op=True) for x in sums]
    x = torch.empty(3)
    works += [dist.isend(own(rank), after), dist.irecv(x, before)]
    works += [dist.all_reduce(sums[0].new_ones(3), async_op=True)]
    for work in works:
        work.wait()
    equal(x, own(before))
    all_equal(sums, [torch.full((1000,), float(RANK_SUM))] * 5)


@case("a pipeline by hand: activations forward, gradients back")
def pipeline() -> None:
    rank = dist.get_rank()
    weight = torch.full((1,), rank + 1.0, requires_grad=True)
    inputs, outputs = [], []
    for number in range(6):
        x = torch.full((4,), float(number))
        if rank > 0:
            dist.recv(x, rank - 1)
        inputs.append(x.requires_grad_())
        outputs.append(x * weight)
        if rank < RANKS - 1:
            dist.send(outputs[-1].detach(), rank + 1)
    for x, out in zip(inputs, outputs, strict=True):
        gradient = torch.ones(4)
        if rank < RANKS - 1:
            dist.recv(gradient, rank + 1)
        out.backward(gradient)
        if rank > 0:
            dist.send(x.grad, rank - 1)
    product = 24.0
    equal(weight.grad, torch.tensor([4 * sum(range(6)) * product / (rank + 1)]))


def scheduled(name: str) -> None:
    from torch.distributed import pipelining

    rank = dist.get_rank()
    torch.manual_seed(3)
    layers = [torch.nn.Linear(8, 8) for _ in range(RANKS)]
    x, target = torch.randn(8, 8), torch.randn(8, 8)
    stage = pipelining.PipelineStage(layers[rank], rank, RANKS, torch.device("cpu"))
    schedule = getattr(pipelining, name)(stage, 4, loss_fn=torch.nn.functional.mse_loss)
    if rank == 0:
        schedule.step(x)
    elif rank == RANKS - 1:
        schedule.step(target=target)
    else:
        schedule.step()
    whole = [torch.nn.Linear(8, 8) for _ in range(RANKS)]
    for one, other in zip(whole, layers, strict=True):
        one.load_state_dict(other.state_dict())
    torch.nn.functional.mse_loss(torch.nn.Sequential(*whole)(x), target).backward()
    for one, other in zip(layers[rank].parameters(), whole[rank].parameters(), strict=True):
        if not torch.allclose(one.grad, other.grad, atol=1e-5):
            equal(one.grad, other.grad)


for name in ("ScheduleGPipe", "Schedule1F1B"):
    case(f"torch.distributed.pipelining, {name}")(functools.partial(scheduled, name))
