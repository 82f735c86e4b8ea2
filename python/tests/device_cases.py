"""Test cases for ranks whose tensors are a device's: torchrun device_cases.py NAME...

With NETSUM_TEST_DEVICE=cuda they are a GPU's, and else those of fake_device.
"""

import os
import sys
import threading

import fake_device
import torch
import torch.distributed as dist
from cases import raises
from torch.nn.parallel import DistributedDataParallel
from torch_cases import NEW, Net, backend, batches, close, delegated, gloo, weights

import netsum
import netsum.torch
from netsum.torch import staging

DEVICE = os.environ.get("NETSUM_TEST_DEVICE")
# Otherwise few of these tensors are cut.
staging.CHUNK = 8192
if not DEVICE:
    fake_device.install()


def on(tensor):
    """A copy of a tensor on the device."""
    if not DEVICE:
        return fake_device.tensor(tensor)
    module = staging.module_of(torch.device(DEVICE))
    device = torch.device(DEVICE, int(os.environ["LOCAL_RANK"]) % module.device_count())
    return tensor.to(device)


def collectives():
    """Each call, in the network and by Gloo; some in chunks, and some of several strides."""
    with backend() as caught:
        ranks, rank, op = dist.get_world_size(), dist.get_rank(), dist.ReduceOp
        scatter = getattr(dist, "reduce_scatter_tensor", None) or dist._reduce_scatter_base
        gather = getattr(dist, "all_gather_into_tensor", None) or dist._all_gather_base
        sum_of = ranks * (ranks + 1) // 2
        types = (torch.float32, torch.int64, *((torch.bfloat16, torch.bool) if NEW else ()))
        for group in (dist.group.WORLD, dist.new_group()):
            for dtype in types:
                base = torch.arange(10_000).remainder(7).to(dtype)
                for x in (on(base), on(base.view(100, 100).t()), on(base)[::2], on(base[:1])[0]):
                    want = x.cpu() if dtype == torch.bool else x.cpu() * ranks
                    dist.all_reduce(x, group=group)
                    assert torch.equal(x.cpu(), want), (dtype, x)
                x = on(base)
                if dtype != torch.bool:
                    x.mul_(rank + 1)
                dist.all_reduce(x, op.MAX, group=group)
                want = base if dtype == torch.bool else base * ranks
                assert torch.equal(x.cpu(), want), x
                x = on(base)
                if dtype != torch.bool:
                    dist.all_reduce(x, op.AVG, group=group)
                    assert torch.equal(x.cpu(), base), x
                    dist.reduce(x, 1, group=group)
                    assert torch.equal(x.cpu(), base * ranks if rank == 1 else base), x
                x = on(base if rank == 1 else torch.zeros_like(base))
                dist.broadcast(x, 1, group=group)
                assert torch.equal(x.cpu(), base), x
                out = on(torch.zeros(ranks, 5000, dtype=dtype))
                gather(out, on(base[rank:][:5000]), group=group)
                parts = [base[r:][:5000] for r in range(ranks)]
                assert torch.equal(out.cpu(), torch.stack(parts)), out
                outs = [on(torch.zeros(r + 1, dtype=dtype)) for r in range(ranks)]
                dist.all_gather(outs, on(base[: rank + 1]), group=group)
                assert all(torch.equal(x.cpu(), base[: len(x)]) for x in outs), outs
                outs = [on(torch.zeros(5000, dtype=dtype)) for r in range(ranks)]
                dist.all_gather(outs, on(base[rank:][:5000]), group=group)
                assert all(torch.equal(x.cpu(), part) for x, part in zip(outs, parts)), outs
                if dtype != torch.bool:
                    out = on(torch.zeros(5000, dtype=dtype))
                    scatter(out, on(torch.cat(parts)), group=group)
                    assert torch.equal(out.cpu(), parts[rank] * ranks), out
                    dist.reduce_scatter(out, [on(part) for part in parts], group=group)
                    assert torch.equal(out.cpu(), parts[rank] * ranks), out
            out = on(torch.zeros(ranks, dtype=torch.int64))
            dist.all_to_all_single(out, on(torch.arange(ranks) + 10 * rank), group=group)
            assert torch.equal(out.cpu(), torch.arange(ranks) * 10 + rank), out
            outs = [on(torch.zeros(1)) for _ in range(ranks)]
            given = [on(torch.full((1,), 10.0 * rank + r)) for r in range(ranks)]
            dist.all_to_all(outs, given, group=group)
            assert [x.item() for x in outs] == [10 * r + rank for r in range(ranks)], outs
            outs = [on(torch.zeros(2)) for _ in range(ranks)] if rank == 1 else None
            dist.gather(on(torch.full((2,), float(rank))), outs, 1, group=group)
            assert rank != 1 or [x[1].item() for x in outs] == list(range(ranks)), outs
            given = [on(torch.full((2,), float(r))) for r in range(ranks)] if rank == 0 else None
            dist.scatter(out := on(torch.zeros(2)), given, 0, group=group)
            assert out.tolist() == [rank, rank], out
            if rank == 0:
                dist.send(on(torch.ones(3, 2)).t(), 1, group=group)
            elif rank == 1:
                assert dist.recv(out := on(torch.zeros(2, 3)), None, group=group) == 0
                assert out.tolist() == [[1, 1, 1]] * 2, out
            dist.barrier(group=group)
            if DEVICE:  # the other's tensors cannot be sparse
                sparse = on(torch.sparse_coo_tensor([[rank]], [1.0], (ranks,)))
                dist.all_reduce(sparse, group=group)
                assert sparse.to_dense().tolist() == [1.0] * ranks, sparse
        x = [on(torch.full((3000,), float(rank + 1))) for _ in range(2)]
        dist.group.WORLD.allreduce_coalesced(x).wait()
        assert all((one.cpu() == sum_of).all() for one in x), x
        objects = [None] * ranks
        dist.all_gather_object(objects, rank)
        assert objects == list(range(ranks))
        said = {text.split(":")[0] for text in delegated(caught)}
        left = {"all_to_all", "gather", "scatter", "send", "recv", "all_reduce of sparse tensors"}
        assert said <= left | {"a second group of all ranks"}, said


def in_flight():
    """Many calls at once: a device's, the host's, and barriers, in the order of the calls."""
    with backend():
        ranks, before = dist.get_world_size(), threading.active_count()
        given, works = [], []
        for i in range(60):
            x = torch.full((100 * i,), float(i))
            given.append(x if i % 3 == 0 else on(x))
            if i % 3:
                given[-1].add_(1)
            works.append(dist.all_reduce(given[-1], async_op=True))
            if i % 20 == 7:
                works.append(dist.barrier(async_op=True))
        for work in reversed(works):
            work.wait()
        for i, x in enumerate(given):
            assert (x.cpu() == ranks * (i + (i % 3 > 0))).all(), (i, x)
        # The wait of a stream, and then of the next one.
        x = on(torch.ones(5000))
        for _ in range(10):
            work = dist.all_reduce(x, async_op=True)
            work.wait()
            x.div_(ranks).add_(1)
        assert (x.cpu() == 11).all(), x
        work = dist.all_reduce(on(torch.ones(5000)), async_op=True)
        told = work.get_future().then(lambda future: future.value()[0].shape)
        assert told.wait() == (5000,)
        assert threading.active_count() < before + 12, threading.enumerate()


def mistaken():
    """Ranks that call for different things: the error reaches the one who waits."""
    dist.init_process_group("netsum")
    rank = dist.get_rank()
    raises(netsum.ArgumentError, "several elements", dist.all_reduce, on(torch.zeros(1)).expand(3))
    dist.all_reduce(x := on(torch.ones(3)))
    assert (x.cpu() == 2).all(), x
    # The first chunks alone are the same.
    x = on(torch.ones(4096 if rank else 10_000))
    raises(netsum.MismatchError, "all ranks must call for the same", dist.all_reduce, x)
    assert (x.cpu()[-1] == 1).all(), x


def dies():
    """The rank that died is named."""
    os.environ["NETSUM_TIMEOUT"] = "4"
    dist.init_process_group("netsum")
    dist.barrier()
    if dist.get_rank() == 1:
        os._exit(0)
    works = [dist.all_reduce(on(torch.ones(5000)), async_op=True) for _ in range(2)]
    for work in works:
        assert raises(netsum.RankDiedError, "rank 1 died", work.wait).rank == 1
        raises(RuntimeError, "rank 1 died", work.get_future().wait)
    print("NAMED", flush=True)
    os._exit(0)  # Gloo waits for the one that died


class Bucket:
    def __init__(self, gradient):
        self.gradient = gradient

    def buffer(self):
        return self.gradient


def hook():
    """The hook averages a device's buckets."""
    with gloo() as comm:
        state = netsum.torch.HookState(comm, DistributedDataParallel(torch.nn.Linear(2, 2)))
        given = [on(torch.full((3000,), float(i + comm.rank))) for i in range(5)]
        futures = [netsum.torch.comm_hook(state, Bucket(x)) for x in given]
        for i, (x, future) in enumerate(zip(given, futures)):
            assert future.wait() is x
            if not DEVICE:
                # Only PyTorch's own futures make streams wait.
                state.staging.streams[x.device].back.synchronize()
            assert (x.cpu() == i + (comm.ranks - 1) / 2).all(), x


def other_backends():
    """A backend for the host's tensors and another for a device's."""
    kind = DEVICE or fake_device.Device().type
    name = "nccl" if kind == "cuda" else "gloo"
    both = f"{kind}:netsum,cpu:netsum", f"cpu:netsum,{kind}:{name}", f"{kind}:{name},cpu:netsum"
    for config in both:
        dist.init_process_group(config)
        ranks, comm = dist.get_world_size(), dist.group.WORLD.comm
        for place, counts in ((lambda x: x, 1), (on, name not in config)):
            before = comm.statistics()["all_reduces"]
            dist.all_reduce(x := place(torch.ones(300)))
            assert (x.cpu() == ranks).all(), x
            outs = [place(torch.zeros(3)) for _ in range(ranks)]
            dist.all_gather(outs, place(torch.ones(3)))
            assert all((x.cpu() == 1).all() for x in outs), outs
            assert (comm.statistics()["all_reduces"] > before) == bool(counts), config
        dist.barrier()
        comm = None
        dist.destroy_process_group()


def trains():
    """DistributedDataParallel on a device, by the backend and by the hook, as on the host."""
    with backend():
        comm = dist.group.WORLD.comm
        found = []
        for place, hooked in ((torch.nn.Module.cpu, False), (on, False), (on, True)):
            ddp = DistributedDataParallel(place(Net()), bucket_cap_mb=0.05)
            if hooked:
                state = netsum.torch.HookState(comm, ddp)
                ddp.register_comm_hook(state, netsum.torch.comm_hook)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
            for x in batches(6):
                ddp(x.to(ddp.module.first.weight.device)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append(weights(ddp.module).cpu())
        assert close(found[0], found[1]) and close(found[0], found[2]), found


if __name__ == "__main__":
    for name in sys.argv[1:]:
        globals()[name]()
    if dist.is_initialized():
        dist.destroy_process_group()
