"""A rank on a job's box with groups: python torch_groups.py INIT_METHOD RANK RANKS.

It prints a line and waits for one where the test looks at the box.
"""

import gc
import sys
import warnings

import torch
import torch.distributed as dist

import netsum
import netsum.torch

warnings.simplefilter("error", netsum.torch.DelegatedWarning)
NEW = hasattr(dist, "init_device_mesh")
LEN = 20_000


def told(word):
    print(word, flush=True)
    sys.stdin.readline()


def mesh():
    """This rank's row and column of 2 x 2 ranks, and their ranks."""
    row, column = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
    if NEW:
        both = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        return (both.get_group("shard"), row), (both.get_group("replicate"), column), both
    groups = {tuple(ranks): dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])}
    return (groups[tuple(row)], row), (groups[tuple(column)], column), None


def summed(group, members):
    x = torch.full((LEN,), 2.0**rank)
    dist.all_reduce(x, group=group)
    assert (x == sum(2.0**member for member in members)).all(), x


def sharded_step(row, column):
    """A gradient's way in HSDP: scattered in the row, summed in the column, gathered in the row."""
    whole, part = torch.arange(LEN, dtype=torch.float32) + rank, torch.empty(LEN // 2)
    alongside = torch.ones(LEN)
    work = dist.all_reduce(alongside, async_op=True)
    row._reduce_scatter_base(part, whole).wait()
    dist.all_reduce(part, group=column)
    gathered = torch.empty(LEN)
    row._allgather_base(gathered, part).wait()
    work.wait()
    expected = torch.arange(LEN, dtype=torch.float32) * ranks + sum(range(ranks))
    assert torch.allclose(gathered, expected), gathered
    assert (alongside == ranks).all()


def fully_sharded(both):
    """FSDP2 over the mesh trains as one process with all the data does."""
    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:
        return
    torch.manual_seed(1)
    model, alone = torch.nn.Linear(16, 8), torch.nn.Linear(16, 8)
    alone.load_state_dict(model.state_dict())
    data = torch.randn(4, 5, 16)
    fully_shard(model, mesh=both)
    for net, own in ((model, data[rank]), (alone, data.reshape(-1, 16))):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            net(own).square().mean().backward()
            optimizer.step()
    assert torch.allclose(model.weight.full_tensor(), alone.weight, atol=1e-5)


rank, ranks = map(int, sys.argv[2:])
dist.init_process_group("netsum", init_method=sys.argv[1], rank=rank, world_size=ranks)
everyone = list(range(ranks))
(row, in_row), (column, in_column), both = mesh()
again, alone = dist.new_group(), [dist.new_group([member]) for member in everyone][rank]
for group, members in (
    (row, in_row),
    (None, everyone),
    (column, in_column),
    (again, everyone),
    (alone, [rank]),
):
    summed(group, members)
    if len(members) > 1:
        mode = (group or dist.group.WORLD).comm.mode
        assert mode == "box", (members, mode)
sharded_step(row, column)
if NEW:
    fully_sharded(both)
    pair = dist.new_group(in_row, use_local_synchronization=True)
    summed(pair, in_row)
    dist.destroy_process_group(pair)
    del pair
told("summed")
for group in (row, column, again, alone):
    dist.destroy_process_group(group)
del row, column, again, alone, both, group
gc.collect()
told("destroyed")
summed(None, everyone)
dist.destroy_process_group()
