"""FSDP2, DTensor, DeviceMesh, tensor parallelism and checkpoints."""

import copy
import functools
import shutil
import tempfile

import torch
import torch.distributed as dist

from .case import RANKS, close, equal, here, same, topic
from .ddp import Net, batch, expected, train, trained, weights
from .reductions import RANK_SUM

case = topic("FSDP2, DTensor and DeviceMesh")


def mesh(
    *shape: int, names: tuple[str, ...] = ("rows", "columns")
) -> "torch.distributed.DeviceMesh":
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape or (RANKS,), mesh_dim_names=names[: len(shape or (1,))])


def sharded(model: torch.nn.Module, **more) -> torch.nn.Module:
    from torch.distributed.fsdp import fully_shard

    for layer in (model.first, *model.parts, model.last):
        fully_shard(layer, **more)
    return fully_shard(model, **more)


def whole(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.full_tensor().detach().flatten().float() for p in model.parameters()])


def fsdp(more: dict, **tolerance) -> None:
    model = sharded(Net(), **more)
    train(model)
    close(whole(model), expected(Net()), "weights", **tolerance)


def policy(**more) -> object:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return MixedPrecisionPolicy(**more)


for name, more in {
    "as it is": dict,
    "reshard_after_forward=False": lambda: {"reshard_after_forward": False},
    "reshard_after_forward=2": lambda: {"reshard_after_forward": 2},
    "a mesh of 2 x 2 (HSDP)": lambda: {"mesh": mesh(2, 2)},
}.items():
    case(f"FSDP2, {name}")(lambda more=more: fsdp(more()))
for name, more in {
    "parameters in bfloat16": {"param_dtype": torch.bfloat16},
    "parameters in bfloat16, sums in float32": {
        "param_dtype": torch.bfloat16,
        "reduce_dtype": torch.float32,
    },
    "sums in bfloat16": {"reduce_dtype": torch.bfloat16},
    "sums in float64": {"reduce_dtype": torch.float64},
}.items():
    case(f"FSDP2, mixed precision: {name}")(
        lambda more=more: fsdp({"mp_policy": policy(**more)}, atol=1e-2)
    )


@case("FSDP2, gradients of two batches, reduced once")
def accumulated() -> None:
    model, one = sharded(Net()), Net()
    for step in range(2):
        model.set_requires_gradient_sync(step == 1)
        model(batch(dist.get_rank(), step)).square().mean().backward()
        for rank in range(RANKS):
            (one(batch(rank, step)).square().mean() / RANKS).backward()
    for p, q in zip(model.parameters(), one.parameters(), strict=True):
        close(p.grad.full_tensor(), q.grad)


def divided(summing: bool) -> None:
    model, one = sharded(Net()), Net()
    for part in (model, model.first, model.last):
        part.set_gradient_divide_factor(8.0)
        if summing:
            part.set_force_sum_reduction_for_comms(True)
    model(batch(dist.get_rank())).square().mean().backward()
    for rank in range(RANKS):
        (one(batch(rank)).square().mean() / 8).backward()
    for p, q in zip(model.parameters(), one.parameters(), strict=True):
        close(p.grad.full_tensor(), q.grad)


case("FSDP2, gradients divided by another number")(functools.partial(divided, False))
case("FSDP2, gradients divided by another number, by sums alone", since=(2, 8))(
    functools.partial(divided, True)
)


@case("FSDP2, frozen parameters")
def frozen() -> None:
    model, one = Net(), Net()
    for some in (model, one):
        some.first.weight.requires_grad_(False)
    sharded(model)
    model(batch(dist.get_rank())).square().mean().backward()
    for rank in range(RANKS):
        (one(batch(rank)).square().mean() / RANKS).backward()
    same(model.first.weight.grad, None)
    close(model.last.weight.grad.full_tensor(), one.last.weight.grad)


@case("FSDP2, clip_grad_norm_")
def clipped() -> None:
    model, one = sharded(Net()), Net()
    model(batch(dist.get_rank())).square().mean().backward()
    for rank in range(RANKS):
        (one(batch(rank)).square().mean() / RANKS).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01).full_tensor()
    close(norm, torch.nn.utils.clip_grad_norm_(one.parameters(), 0.01))
    close(model.last.weight.grad.full_tensor(), one.last.weight.grad)


@case("FSDP2, unshard and reshard by hand, and prefetching")
def by_hand() -> None:
    model = sharded(Net())
    model.first.set_modules_to_forward_prefetch([model.last])
    handle = model.first.unshard(async_op=True)
    handle.wait()
    equal(model.first.weight.data, Net().first.weight.data)
    model.first.reshard()
    train(model)
    close(whole(model), expected(Net()))


@case("FSDP2, checkpointed activations")
def checkpointed() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = Net()
    model.first = checkpoint_wrapper(model.first)
    sharded(model)
    train(model)
    close(whole(model), expected(Net()))


@case("FSDP2, a shape that ranks do not divide, and a scalar")
def uneven() -> None:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(10, 5), torch.nn.PReLU(), torch.nn.Linear(5, 3))
    one = copy.deepcopy(model)
    fully_shard(model)
    train(model)
    close(whole(model), expected(one))


@case("FSDP2, full and sharded state dicts, and loading them")
def state_dicts() -> None:
    from torch.distributed.checkpoint import state_dict as states

    model = sharded(Net())
    full = states.get_model_state_dict(model, options=states.StateDictOptions(full_state_dict=True))
    equal(full["last.weight"], Net().last.weight.data)
    other = Net()
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    other = sharded(other)
    options = states.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    states.set_model_state_dict(other, full if dist.get_rank() == 0 else {}, options=options)
    equal(whole(other), whole(model))
    other.load_state_dict(model.state_dict())


@case("FSDP2, a checkpoint of model and optimizer, saved and loaded")
def checkpoint() -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    models = [sharded(Net()) for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in models]
    models[0](batch(dist.get_rank())).square().mean().backward()
    optimizers[0].step()
    model, optimizer = get_state_dict(models[0], optimizers[0])
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder[0])
    models[1](batch(0)).square().mean().backward()
    optimizers[1].step()
    model, optimizer = get_state_dict(models[1], optimizers[1])
    dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder[0])
    set_state_dict(models[1], optimizers[1], model_state_dict=model, optim_state_dict=optimizer)
    equal(whole(models[1]), whole(models[0]))
    steps = [next(iter(one.state.values()))["exp_avg"].full_tensor() for one in optimizers]
    equal(*steps)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])


@case("a checkpoint saved in the background (async_save)")
def async_saved() -> None:
    import torch.distributed.checkpoint as dcp

    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    group = dist.new_group(backend="gloo")
    model = sharded(Net())
    dcp.async_save(model.state_dict(), checkpoint_id=folder[0], process_group=group).result()
    other = sharded(Net())
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    state = other.state_dict()
    dcp.load(state, checkpoint_id=folder[0])
    other.load_state_dict(state)
    equal(whole(other), whole(model))


@case("FullyShardedDataParallel (FSDP1) on the CPU")
def fsdp1() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(Net(), device_id=torch.device("cpu"))
    train(model)
    with FullyShardedDataParallel.summon_full_params(model):
        close(weights(model), expected(Net()))


@case("replicate (composable DDP)")
def replicated() -> None:
    from torch.distributed._composable import replicate

    model = replicate(Net())
    close(trained(model), expected(Net()))


@case("tensor parallelism: columns, then rows")
def tensor_parallel() -> None:
    from torch.distributed.tensor import parallel

    torch.manual_seed(2)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
    one, x = copy.deepcopy(model), torch.randn(4, 8)
    plan = {"0": parallel.ColwiseParallel(), "2": parallel.RowwiseParallel()}
    parallel.parallelize_module(model, mesh(), plan)
    out, right = model(x), one(x)
    close(out, right)
    out.sum().backward()
    right.sum().backward()
    close(model[0].weight.grad.full_tensor(), one[0].weight.grad)


@case("tensor parallelism with parts of the sequence")
def sequence_parallel() -> None:
    from torch.distributed.tensor import Shard, parallel

    torch.manual_seed(2)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
    one, x = copy.deepcopy(model), torch.randn(8, 8)
    plan = {
        "0": parallel.ColwiseParallel(input_layouts=Shard(0)),
        "2": parallel.RowwiseParallel(output_layouts=Shard(0)),
    }
    parallel.parallelize_module(model, mesh(), plan)
    out = model(x.chunk(RANKS)[dist.get_rank()].contiguous())
    close(out, one(x).chunk(RANKS)[dist.get_rank()])


@case("FSDP2 and tensor parallelism over a mesh of 2 x 2")
def two_dimensions() -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import parallel

    torch.manual_seed(2)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
    one, both = copy.deepcopy(model), mesh(2, 2)
    plan = {"0": parallel.ColwiseParallel(), "2": parallel.RowwiseParallel()}
    parallel.parallelize_module(model, both["columns"], plan)
    fully_shard(model, mesh=both["rows"])
    row = both["rows"].get_local_rank()
    inputs = [torch.randn(4, 8) for _ in range(2)]
    model(inputs[row]).square().mean().backward()
    for x in inputs:
        (one(x).square().mean() / 2).backward()
    for p, q in zip(model.parameters(), one.parameters(), strict=True):
        close(p.grad.full_tensor(), q.grad)


# DTensor.


def redistributed(
    names: list[str], shape: tuple[int, ...], over: tuple[int, ...] = (RANKS,)
) -> None:
    """From these placements to each other: the whole stays what it is."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    kinds = {"S0": Shard(0), "S1": Shard(1), "R": Replicate()}
    full = torch.arange(float(torch.Size(shape).numel())).view(shape)
    x = distribute_tensor(full, mesh(*over), [kinds[name] for name in names])
    for kind in kinds.values():
        equal(x.redistribute(placements=[kind] * len(over)).full_tensor(), full)


for names, shape in ((["S0"], (8, 4)), (["S1"], (4, 8)), (["R"], (4, 4)), (["S0"], (5, 3))):
    title = f"DTensor, {names[0]} of {shape[0]} x {shape[1]} to S0, S1 and R"
    case(title)(functools.partial(redistributed, names, shape))
case("DTensor, a mesh of 2 x 2: S0, S1 to all others")(
    functools.partial(redistributed, ["S0", "S1"], (8, 8), (2, 2))
)


@case("DTensor, Partial to S0, S1 and R")
def partial() -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    part = torch.arange(30.0).view(5, 6) + dist.get_rank()
    total = torch.arange(30.0).view(5, 6) * RANKS + RANK_SUM
    for kind in (Shard(0), Shard(1), Replicate()):
        x = DTensor.from_local(part, mesh(), [Partial()])
        equal(x.redistribute(placements=[kind]).full_tensor(), total)


@case("DTensor, Partial with avg, max and min")
def partials() -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate

    for name, right in (("avg", RANK_SUM / RANKS), ("max", 3.0), ("min", 0.0), ("sum", 6.0)):
        x = DTensor.from_local(torch.full((3,), float(dist.get_rank())), mesh(), [Partial(name)])
        equal(x.redistribute(placements=[Replicate()]).to_local(), torch.full((3,), right), name)


@case("DTensor, products, sums and gradients")
def arithmetic() -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    torch.manual_seed(4)
    a, b = torch.randn(8, 6), torch.randn(6, 4)
    for first, second in ((Shard(0), Replicate()), (Shard(1), Shard(0))):
        x = distribute_tensor(a, mesh(), [first]).requires_grad_()
        y = distribute_tensor(b, mesh(), [second])
        z = (x @ y).redistribute(placements=[Replicate()])
        close(z.to_local(), a @ b, atol=1e-5)
        z.sum().backward()
        close(x.grad.full_tensor(), torch.ones(8, 4) @ b.t(), atol=1e-5)


@case("DTensor, types: bfloat16, float64, int64, bool")
def dtypes() -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    for dtype in (torch.bfloat16, torch.float64, torch.int64, torch.bool):
        full = (torch.arange(12) % 2).to(dtype).view(6, 2)
        equal(distribute_tensor(full, mesh(), [Shard(0)]).full_tensor(), full, str(dtype))


@case("DeviceMesh: dimensions, groups, slices and a flat one")
def meshes() -> None:
    both = mesh(2, 2)
    rank = dist.get_rank()
    for name, members in (
        ("rows", [rank % 2, rank % 2 + 2]),
        ("columns", [rank // 2 * 2, rank // 2 * 2 + 1]),
    ):
        x = torch.full((2,), float(rank))
        dist.all_reduce(x, group=both.get_group(name))
        equal(x, torch.full((2,), float(sum(members))), name)
        same(both[name].size(), 2)
    same(list(both.get_coordinate()), [rank // 2, rank % 2])
    flat = both["rows", "columns"]._flatten("flat")
    x = torch.full((2,), float(rank))
    dist.all_reduce(x, group=flat.get_group())
    equal(x, torch.full((2,), float(RANK_SUM)))


@case("DeviceMesh.from_group")
def mesh_of_group() -> None:
    from torch.distributed.device_mesh import DeviceMesh

    found = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    same(found.size(), RANKS)
    same(dist.get_backend(found.get_group()), here.backend)
