"""DistributedDataParallel, and averages of models."""

import contextlib
import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from .case import RANKS, close, equal, mistake, same, topic

case = topic("DistributedDataParallel")


class Net(torch.nn.Module):
    """Two layers, and parts between them, of which a step may use one."""

    def __init__(self, parts: int = 0) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first, self.last = torch.nn.Linear(10, 20), torch.nn.Linear(20, 3)
        self.parts = torch.nn.ModuleList(torch.nn.Linear(20, 20) for _ in range(parts))

    def forward(self, x: torch.Tensor, part: int | None = None) -> torch.Tensor:
        x = functional.relu(self.first(x))
        return self.last(x if part is None else self.parts[part](x))


def batch(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(4, 10, generator=torch.Generator().manual_seed(100 * step + rank))


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten().float() for p in model.parameters()])


def gradients(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten().float() for p in model.parameters() if p.grad is not None])


def train(
    model: torch.nn.Module, steps: int = 4, part: Callable[[int], int | None] = lambda _: None
) -> None:
    """Some steps, with another batch at each rank."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        more = [one for one in [part(step)] if one is not None]
        model(batch(dist.get_rank(), step), *more).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def trained(ddp: torch.nn.Module, **more) -> torch.Tensor:
    """The weights after that."""
    train(ddp, **more)
    return weights(ddp)


def expected(
    model: torch.nn.Module, steps: int = 4, part: Callable[[int, int], int | None] = lambda *_: None
) -> torch.Tensor:
    """The same in one process, which has all batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        for rank in range(RANKS):
            more = [one for one in [part(rank, step)] if one is not None]
            (model(batch(rank, step), *more).square().mean() / RANKS).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def same_everywhere(x: torch.Tensor) -> None:
    others = [torch.empty_like(x) for _ in range(RANKS)]
    dist.all_gather(others, x)
    for rank, other in enumerate(others):
        equal(other, x, f"rank {rank}'s")


def checked(ddp: torch.nn.Module, **more) -> None:
    found = trained(ddp)
    close(found, expected(Net()), "weights", **more)
    same_everywhere(found)


for name, more in {
    "as it is": {},
    "many buckets": {"bucket_cap_mb": 0.0005},
    "find_unused_parameters": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
    "gradient_as_bucket_view": {"gradient_as_bucket_view": True},
    "static_graph and gradient_as_bucket_view": {
        "static_graph": True,
        "gradient_as_bucket_view": True,
    },
    "broadcast_buffers=False": {"broadcast_buffers": False},
}.items():
    case(f"DDP, {name}")(lambda more=more: checked(DistributedDataParallel(Net(), **more)))


@case("DDP, other weights at each rank: rank 0's are used")
def first_weights() -> None:
    model = Net()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(dist.get_rank())
    checked(DistributedDataParallel(model))


@case("DDP, init_sync=False")
def no_first_sync() -> None:
    checked(DistributedDataParallel(Net(), init_sync=False))


@case("DDP, unused parameters: another part at each rank")
def unused() -> None:
    rank = dist.get_rank()
    ddp = DistributedDataParallel(Net(RANKS + 1), find_unused_parameters=True)
    found = trained(ddp, part=lambda step: (rank + step) % RANKS)
    close(found, expected(Net(RANKS + 1), part=lambda r, step: (r + step) % RANKS))
    same_everywhere(found)


@case("DDP, unused parameters without find_unused_parameters")
def unused_refused() -> None:
    ddp = DistributedDataParallel(Net(2))
    ddp(batch(0), 0).sum().backward()
    mistake(ddp, batch(0), 1)


@case("DDP, no_sync: gradients of three batches")
def no_sync() -> None:
    ddp, whole = DistributedDataParallel(Net()), Net()
    for step in range(3):
        with ddp.no_sync() if step < 2 else contextlib.nullcontext():
            ddp(batch(dist.get_rank(), step)).square().mean().backward()
        for rank in range(RANKS):
            (whole(batch(rank, step)).square().mean() / RANKS).backward()
    close(gradients(ddp), gradients(whole))


def joined(throw: bool) -> None:
    """Rank r has r + 1 batches."""
    rank = dist.get_rank()
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    ddp = DistributedDataParallel(model)
    done = 0
    with ddp.join(divide_by_initial_world_size=False, throw_on_early_termination=throw):
        for _ in range(rank + 1):
            ddp.zero_grad()
            ddp(torch.full((1, 1), float(rank))).sum().backward()
            still = range(done, RANKS)
            equal(model.weight.grad, torch.full((1, 1), sum(still) / len(still)))
            done += 1


case("DDP, join: another number of batches at each rank")(functools.partial(joined, False))
case("DDP, join with throw_on_early_termination", alone=True, seconds=15)(
    functools.partial(joined, True)
)


@case("DDP, BatchNorm: rank 0's buffers are broadcast")
def buffers() -> None:
    ddp = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(10, 4), torch.nn.BatchNorm1d(4))
    )
    for step in range(3):
        ddp(batch(dist.get_rank(), step)).sum().backward()
    ddp(batch(0))
    same_everywhere(ddp.module[1].running_mean)
    same(int(ddp.module[1].num_batches_tracked), 4)


@case("DDP, SyncBatchNorm on the CPU")
def sync_batch_norm() -> None:
    model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(
        torch.nn.Sequential(torch.nn.Linear(10, 4), torch.nn.BatchNorm1d(4))
    )
    mistake(lambda: DistributedDataParallel(model)(batch(dist.get_rank())))


class Parts(torch.nn.Module):
    """Parameters of several types."""

    def __init__(self, dtypes: list[torch.dtype]) -> None:
        super().__init__()
        self.parts = torch.nn.ParameterList(
            torch.nn.Parameter(torch.ones(50, dtype=d)) for d in dtypes
        )

    def forward(self, x: float) -> torch.Tensor:
        return sum((part * x).sum().abs().double() for part in self.parts)


def types(dtypes: list[torch.dtype]) -> None:
    ddp = DistributedDataParallel(Parts(dtypes))
    ddp(2.0 * dist.get_rank()).backward()
    for part in ddp.module.parts:
        equal(part.grad, torch.full((50,), 3.0, dtype=part.dtype), str(part.dtype))


for dtypes in (
    [torch.float64],
    [torch.bfloat16],
    [torch.float16],
    [torch.complex64],
    [torch.float32, torch.bfloat16, torch.float64],
):
    names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    case(f"DDP, parameters of {names}")(functools.partial(types, dtypes))


def hooked(name: str, state: Callable[[], object] = lambda: None, **more) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import (
        debugging_hooks,
        default_hooks,
        optimizer_overlap_hooks,
        post_localSGD_hook,
        powerSGD_hook,
        quantization_hooks,
    )

    modules = (
        default_hooks,
        powerSGD_hook,
        quantization_hooks,
        post_localSGD_hook,
        debugging_hooks,
        optimizer_overlap_hooks,
    )
    hook = next(getattr(module, name) for module in modules if hasattr(module, name))
    ddp = DistributedDataParallel(Net())
    ddp.register_comm_hook(state(), hook)
    checked(ddp, **more)


case("DDP, allreduce_hook")(functools.partial(hooked, "allreduce_hook"))
for name in ("fp16_compress_hook", "bf16_compress_hook"):
    case(f"DDP, {name}")(functools.partial(hooked, name, atol=5e-3))


@case("DDP, powerSGD_hook")
def power_sgd() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    def state() -> object:
        return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=3, start_powerSGD_iter=2)

    hooked("powerSGD_hook", state, atol=5e-2)


@case("DDP, post_localSGD_hook in subgroups")
def local_sgd() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook

    group, _ = dist.new_subgroups(2)

    def state() -> object:
        return post_localSGD_hook.PostLocalSGDState(None, group, start_localSGD_iter=100)

    hooked("post_localSGD_hook", state)


@case("DDP, quantization_pertensor_hook")
def quantized() -> None:
    hooked("quantization_pertensor_hook", lambda: dist.group.WORLD, atol=5e-2)


@case("DDP, a hook that divides before and squares after")
def own_hook() -> None:
    def hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        work = dist.all_reduce(bucket.buffer().div_(RANKS), async_op=True)
        return work.get_future().then(lambda done: done.value()[0].square())

    model = torch.nn.Linear(1, 1, bias=False)
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, hook)
    ddp(torch.full((1, 1), 2.0 * dist.get_rank())).sum().backward()
    equal(model.weight.grad, torch.tensor([[9.0]]))


@case("DDP, a hook for buffers")
def buffer_hook() -> None:
    def hook(ddp: DistributedDataParallel, buffers: dict[str, torch.Tensor]) -> list:
        return [
            dist.all_reduce(buffer, op=dist.ReduceOp.MAX, async_op=True).get_future()
            for buffer in buffers.values()
            if buffer.is_floating_point()
        ]

    model = torch.nn.Linear(1, 1, bias=False)
    model.register_buffer("seen", torch.zeros(1))
    ddp = DistributedDataParallel(model)
    ddp._register_buffer_comm_hook(ddp, hook)
    model.seen.fill_(dist.get_rank())
    ddp(torch.ones(1, 1)).sum().backward()
    equal(model.seen, torch.full((1,), RANKS - 1.0))


@case("DDP, an optimizer's step in the backward pass")
def fused_optimizer() -> None:
    ddp = DistributedDataParallel(Net())
    ddp._register_fused_optim(torch.optim.SGD, lr=0.1)
    for step in range(4):
        ddp(batch(dist.get_rank(), step)).square().mean().backward()
        ddp.zero_grad()
    close(weights(ddp), expected(Net()))


@case("DDP, sparse gradients of an embedding")
def sparse() -> None:
    model = torch.nn.EmbeddingBag(6, 2, sparse=True, mode="sum")
    ddp = DistributedDataParallel(model)
    ddp(torch.tensor([[dist.get_rank(), 5]])).sum().backward()
    rows = torch.tensor([0.25, 0.25, 0.25, 0.25, 0, 1])
    equal(model.weight.grad.to_dense(), rows.view(-1, 1).expand(6, 2).contiguous())


@case("DDP, parameters that it is told to leave")
def ignored() -> None:
    model = Net()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["last.weight"])
    ddp = DistributedDataParallel(model)
    ddp(batch(dist.get_rank())).square().mean().backward()
    same_everywhere(model.first.weight.grad)
    equal(model.last.weight.grad, _of_rank(dist.get_rank(), "last.weight"))


def _of_rank(rank: int, name: str) -> torch.Tensor:
    model = Net()
    model(batch(rank)).square().mean().backward()
    return model.get_parameter(name).grad


@case("DDP, a part of the parameters frozen")
def frozen() -> None:
    model, whole = Net(), Net()
    for one in (model, whole):
        one.first.weight.requires_grad_(False)
    ddp = DistributedDataParallel(model)
    ddp(batch(dist.get_rank())).square().mean().backward()
    for rank in range(RANKS):
        (whole(batch(rank)).square().mean() / RANKS).backward()
    close(gradients(ddp), gradients(whole))


@case("DDP, checkpointed activations, and one layer used twice")
def checkpointed() -> None:
    from torch.utils.checkpoint import checkpoint

    class Twice(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                x = checkpoint(
                    lambda y: functional.relu(self.first(y))[:, :10], x, use_reentrant=False
                )
            return self.last(torch.cat([x, x], 1))

    ddp = DistributedDataParallel(Twice(), static_graph=True)
    found = trained(ddp)
    close(found, expected(Twice()))


@case("DDP in a group of two, beside another")
def in_subgroups() -> None:
    group, _ = dist.new_subgroups(2)
    first = dist.get_rank() // 2 * 2
    model = torch.nn.Linear(1, 1, bias=False)
    ddp = DistributedDataParallel(model, process_group=group)
    ddp(torch.full((1, 1), float(dist.get_rank()))).sum().backward()
    equal(model.weight.grad, torch.full((1, 1), first + 0.5))


@case("DDP with a DeviceMesh")
def mesh() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    checked(DistributedDataParallel(Net(), device_mesh=init_device_mesh("cpu", (RANKS,))))


@case("DDP, another number of parameters at each rank", alone=True)
def counts() -> None:
    mistake(
        DistributedDataParallel,
        torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(1 + dist.get_rank()))),
    )


@case("DDP, a GradScaler skips the step where one rank has an infinity")
def scaler() -> None:
    ddp = DistributedDataParallel(Net())
    optimizer, before = torch.optim.SGD(ddp.parameters(), lr=0.1), weights(ddp).clone()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for scale, moves in ((torch.inf if dist.get_rank() == 1 else 1.0, False), (1.0, True)):
        optimizer.zero_grad()
        scaler.scale(ddp(batch(dist.get_rank())).square().mean() * scale).backward()
        scaler.step(optimizer)
        scaler.update()
        same(torch.equal(weights(ddp), before), not moves, "the weights stay")


@case("DDP under autocast to bfloat16")
def autocast() -> None:
    ddp = DistributedDataParallel(Net())
    with torch.autocast("cpu", torch.bfloat16):
        loss = ddp(batch(dist.get_rank())).float().square().mean()
    loss.backward()
    same_everywhere(gradients(ddp))


@case("DDP, its data for logs")
def logged() -> None:
    ddp = DistributedDataParallel(Net())
    ddp(batch(0)).sum().backward()
    same(ddp._get_ddp_logging_data()["world_size"], RANKS)


@case("ZeroRedundancyOptimizer, and its state at rank 0")
def zero() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    ddp = DistributedDataParallel(Net())
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, momentum=0.0)
    for step in range(4):
        ddp(batch(dist.get_rank(), step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    close(weights(ddp), expected(Net()))
    optimizer.consolidate_state_dict(0)
    if dist.get_rank() == 0:
        same(len(optimizer.state_dict()["param_groups"]), 1)


@case("PeriodicModelAverager")
def averager() -> None:
    from torch.distributed.algorithms.model_averaging import averagers

    model = torch.nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(dist.get_rank())
    # Parameters without a gradient are left alone.
    model(torch.ones(1, 1)).backward()
    averagers.PeriodicModelAverager(period=1).average_parameters(list(model.parameters()))
    equal(model.weight.data, torch.full((1, 1), 1.5))


@case("clip_grad_norm_ after DDP's backward pass")
def clipped() -> None:
    ddp = DistributedDataParallel(Net())
    ddp(batch(dist.get_rank())).square().mean().backward()
    norm = torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.01)
    same_everywhere(norm.view(1))
    close(gradients(ddp).norm(), torch.tensor(0.01), rtol=1e-2)


@case("DistributedSampler gives each rank its part")
def sampler() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(8.0))
    mine = list(torch.utils.data.DistributedSampler(data, shuffle=False))
    found: list = [None] * RANKS
    dist.all_gather_object(found, mine)
    same(sorted(sum(found, [])), list(range(8)))
