"""Test cases for ranks of PyTorch: torchrun torch_cases.py NAME..."""

import contextlib
import functools
import logging
import os
import pickle
import signal
import sys
import threading
import time
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from cases import raises
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import netsum
import netsum.torch
from netsum.torch import tensors


TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
#: It was not looked at what is between 2.0, which has not all of this, and 2.7, which has.
NEW = TORCH >= (2, 7)
# Else the first bucket holds all of a model as small as these.
dist._DEFAULT_FIRST_BUCKET_BYTES = 40_000


class Net(torch.nn.Module):
    """A part that all ranks use, one for each rank, and one that no rank uses."""

    def __init__(self, parts=0):
        super().__init__()
        torch.manual_seed(7)
        self.first, self.last = torch.nn.Linear(50, 200), torch.nn.Linear(200, 10)
        self.parts = torch.nn.ModuleList(torch.nn.Linear(200, 200) for _ in range(parts))

    def forward(self, x, part=None):
        x = functional.relu(self.first(x.to(self.first.weight.dtype)))
        return self.last(x if part is None else functional.relu(self.parts[part](x)))


def batches(steps, seed=0):
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    return [torch.randn(16, 50, generator=generator) for _ in range(steps)]


def trained(comm, model, steps=6, lr=0.1, accumulate=1, parts=None, **more):
    """The weights after some steps: by the hook, or by torch.distributed without a communicator."""
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.05, **more)
    if comm:
        ddp.register_comm_hook(netsum.torch.HookState(comm, ddp), netsum.torch.comm_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for step, x in enumerate(batches(steps * accumulate)):
        last = (step + 1) % accumulate == 0
        with contextlib.nullcontext() if last else ddp.no_sync():
            out = ddp(x) if parts is None else ddp(x, parts(step))
            out.float().square().mean().backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def weights(model):
    return torch.cat([p.detach().flatten().float() for p in model.parameters()])


def same_everywhere(tensor):
    """Whether all ranks have the same bits."""
    sizes = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, tensor)
    return all(torch.equal(tensor.view(torch.int32), other.view(torch.int32)) for other in sizes)


def close(a, b):
    return torch.allclose(a, b, rtol=1e-4, atol=1e-6)


beside_gloo = None


@contextlib.contextmanager
def gloo():
    """A job of torch.distributed by Gloo, and a communicator; for all cases of a process."""
    global beside_gloo
    if not dist.is_initialized():
        dist.init_process_group("gloo")
        beside_gloo = netsum.init(timeout=20)
    yield beside_gloo
    dist.barrier()


def hook():
    with gloo() as comm:
        for more in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}):
            by_netsum = [trained(comm, Net(), **more) for _ in range(2)]
            by_gloo = trained(None, Net(), **more)
            assert not close(by_gloo, weights(Net())), "nothing was learnt"
            assert torch.equal(*by_netsum), "twice the same is not the same"
            assert same_everywhere(by_netsum[0]) and close(by_netsum[0], by_gloo), more


def beside():
    """The backward pass continues while buckets are in flight."""
    with gloo() as comm:
        model = torch.nn.Sequential(*(torch.nn.Linear(100, 100) for _ in range(10)))
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.05)
        flying = []

        found = []

        def hooked(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            flying.append(netsum.torch.comm_hook(state, bucket))
            found.append(sum(not future.done() for future in flying))
            return flying[-1]

        ddp.register_comm_hook(netsum.torch.HookState(comm, ddp), hooked)
        for turn in range(3):
            flying.clear()
            found.clear()
            dist.barrier()
            out = ddp(torch.ones(5, 100)).sum()
            if comm.rank == 1 and turn == 2:
                time.sleep(2)
            out.backward()
        # Rank 1 had not begun.
        assert len(found) > 4 and (comm.rank == 1 or found[-1] == len(found)), found


def integers():
    """Gradients that are whole numbers are summed exactly."""
    with gloo() as comm:
        found = []
        for hooked in (True, False):
            model = torch.nn.Linear(300, 100, bias=False)
            torch.nn.init.zeros_(model.weight)
            ddp = DistributedDataParallel(model, bucket_cap_mb=0.01)
            if hooked:
                ddp.register_comm_hook(netsum.torch.HookState(comm, ddp), netsum.torch.comm_hook)
            x = torch.arange(300.0).repeat(4, 1) + dist.get_rank() * 2
            ddp(x).sum().backward()
            found.append(model.weight.grad.clone())
        expected = 4 * (torch.arange(300.0) + dist.get_world_size() - 1)
        assert torch.equal(found[0], found[1]) and torch.equal(
            found[0], expected.expand(100, 300)
        ), found


def unused():
    """Parameters that only some ranks use, or none."""
    with gloo() as comm:
        ranks, rank = dist.get_world_size(), dist.get_rank()
        own = dict(parts=lambda step: (rank + step) % ranks, find_unused_parameters=True)
        by_netsum, by_gloo = (
            trained(comm, Net(ranks + 1), **own),
            trained(None, Net(ranks + 1), **own),
        )
        assert same_everywhere(by_netsum) and close(by_netsum, by_gloo)
        model = Net(ranks + 1)
        ddp = DistributedDataParallel(model, find_unused_parameters=True)
        ddp.register_comm_hook(netsum.torch.HookState(comm, ddp), netsum.torch.comm_hook)
        ddp(batches(1)[0], rank).sum().backward()
        assert all(p.grad is None for p in model.parts[ranks].parameters()), "nobody has used it"
        # Parameters that this rank has not used have the others' gradient.
        assert all(
            p.grad.abs().sum() > 0 for part in model.parts[:ranks] for p in part.parameters()
        )


def no_sync():
    """Gradients of several batches, summed once."""
    with gloo() as comm:
        more = dict(accumulate=3, steps=4)
        by_netsum, by_gloo = trained(comm, Net(), **more), trained(None, Net(), **more)
        assert same_everywhere(by_netsum) and close(by_netsum, by_gloo)
        before = comm.statistics()["all_reduces"]
        ddp = DistributedDataParallel(Net())
        ddp.register_comm_hook(netsum.torch.HookState(comm, ddp), netsum.torch.comm_hook)
        with ddp.no_sync():
            ddp(batches(1)[0]).sum().backward()
        assert comm.statistics()["all_reduces"] == before


def no_sync_unused():
    """A parameter that is used only within no_sync.

    PyTorch before 2.4 forgets it with any backend (pytorch#124193).
    """
    with gloo() as comm:
        ranks = dist.get_world_size()
        more = dict(accumulate=2, find_unused_parameters=True, parts=lambda step: step % 2)
        found = [trained(c, Net(ranks), steps=1, **more) for c in (comm, None)]
        assert close(*found), "not as by Gloo"
        print("SAME" if same_everywhere(found[0]) else "DIFFERENT", flush=True)


class Scaled(torch.nn.Module):
    """In 16 bits, which older PyTorch multiplies elements in alone."""

    def __init__(self, dtype):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3000, dtype=dtype))

    def forward(self, x):
        return (self.weight * x).sum()


def averaged(comm, dtype):
    model = Scaled(dtype)
    ddp = DistributedDataParallel(model)
    if comm:
        ddp.register_comm_hook(netsum.torch.HookState(comm, ddp), netsum.torch.comm_hook)
    ranks = dist.get_world_size()
    ddp(torch.full((3000,), 1 + dist.get_rank() / 64, dtype=dtype)).backward()
    mean = torch.tensor(1 + (ranks - 1) / 128, dtype=dtype)
    assert (model.weight.grad == mean).all() and model.weight.grad.dtype == dtype, model.weight.grad


def half():
    """Gradients of 16 bits, few of which are as exact as those of 32."""
    with gloo() as comm:
        averaged(comm, torch.float16)
        bytes_sent = lambda: sum(comm.statistics()[way] for way in ("box_bytes", "ring_bytes"))
        before = bytes_sent()
        halves = ((torch.bfloat16, None), (torch.float16, None), (torch.float32, "16bit"))
        for dtype, wire in halves:
            for op in ("sum", "avg"):
                x = torch.linspace(-1, 1, 20_000).to(dtype)
                expected = x.float() * (comm.ranks if op == "sum" else 1)
                comm.all_reduce(x, op, wire=wire)
                error = (x.float() - expected).abs().max().item()
                assert error < comm.ranks / 128, (dtype, op, error)
        took = bytes_sent() - before
        assert took < 6 * 20_000 * 2 * 2.2, took
        sent = []
        for wire in (None, "16bit"):
            ddp = DistributedDataParallel(torch.nn.Linear(200, 200))
            ddp.register_comm_hook(netsum.torch.HookState(comm, ddp, wire), netsum.torch.comm_hook)
            before = bytes_sent()
            ddp(torch.linspace(0, 1, 200)).sum().backward()
            sent.append(bytes_sent() - before)
        assert sent[1] < 0.6 * sent[0], sent
        raises(netsum.ArgumentError, "must be 32bit or 16bit", netsum.torch.HookState, comm, ddp, "8bit")
        if NEW:  # older Gloo cannot broadcast the weights
            averaged(comm, torch.bfloat16)


def half_by_backend():
    with backend() as caught:
        averaged(None, torch.float16)
        averaged(None, torch.bfloat16)
        comm = dist.group.WORLD.comm
        sent = []
        # PyTorch refuses bf16_compress_hook without NCCL.
        for hook in (None, default_hooks.fp16_compress_hook):
            ddp = DistributedDataParallel(torch.nn.Linear(200, 200))
            if hook:
                ddp.register_comm_hook(None, hook)
            before = sum(comm.statistics()[way] for way in ("box_bytes", "ring_bytes"))
            ddp(torch.linspace(0, 1, 200)).sum().backward()
            sent.append(sum(comm.statistics()[way] for way in ("box_bytes", "ring_bytes")) - before)
            weight = torch.linspace(0, 1, 200).expand(200, 200)
            assert torch.allclose(ddp.module.weight.grad, weight, atol=1 / 128), hook
        assert sent[1] < 0.6 * sent[0], sent
        assert not delegated(caught), delegated(caught)


def not_finite():
    """An infinity at one rank is a NaN at all ranks, and training continues."""
    warnings.simplefilter("error")
    with gloo() as comm:
        ddp = DistributedDataParallel(Net())
        ddp.register_comm_hook(netsum.torch.HookState(comm, ddp), netsum.torch.comm_hook)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss = ddp(batches(1)[0]).sum()
            (loss * (torch.inf if comm.rank == 1 else 1.0)).backward()
        assert any("NaN at all ranks" in str(w.message) for w in caught), caught
        assert all(p.grad.isnan().all() for p in ddp.parameters())
        ddp.zero_grad()
        ddp(batches(1)[0]).sum().backward()
        assert all(p.grad.isfinite().all() for p in ddp.parameters())
        if hasattr(torch.amp, "GradScaler"):
            optimizer, before = torch.optim.SGD(ddp.parameters(), lr=0.1), weights(ddp)
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
            for scale, moves in ((torch.inf if comm.rank == 1 else 1.0, False), (1.0, True)):
                optimizer.zero_grad()
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    scaler.scale(ddp(batches(1)[0]).mean() * scale).backward()
                scaler.step(optimizer)
                scaler.update()
                assert torch.equal(weights(ddp), before) != moves, (
                    "a step that should be left out, or not"
                )


def workers():
    """Processes that are forked to load data leave the communicator alone."""
    with gloo() as comm:
        ddp = DistributedDataParallel(torch.nn.Linear(10, 2))
        ddp.register_comm_hook(netsum.torch.HookState(comm, ddp), netsum.torch.comm_hook)
        data = torch.utils.data.TensorDataset(torch.randn(40, 10))
        for _ in range(2):
            for (x,) in torch.utils.data.DataLoader(
                data, batch_size=10, num_workers=2, multiprocessing_context="fork"
            ):
                ddp(x).sum().backward()
        assert same_everywhere(ddp.module.weight.grad)


def refused():
    """Errors of what cannot be summed say what to do."""
    dist.init_process_group("gloo")

    def step(comm, model):
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(netsum.torch.HookState(comm, ddp), netsum.torch.comm_hook)
        ddp(torch.zeros(1, 50, dtype=next(model.parameters()).dtype)).sum().backward()

    raises(netsum.ArgumentError, "netsum.init()", step, None, torch.nn.Linear(50, 2))
    with netsum.init() as comm:
        whole = torch.ones(1, dtype=torch.int32)
        raises(netsum.ArgumentError, "model.float()", netsum.torch.hook._check, whole)
        step(comm, torch.nn.Linear(50, 2).double())
    with netsum.init(
        rank=0, ranks=1, peers=[f"127.200.{os.getpid() >> 8 & 255}.{os.getpid() & 255}"]
    ) as alone:
        raises(netsum.ConfigError, "netsum has rank 0 of 1", step, alone, torch.nn.Linear(50, 2))
    dist.barrier()


def dies():
    """The rank that died is named, in the training and after."""
    dist.init_process_group("gloo")
    comm = netsum.init(timeout=4)
    ddp = DistributedDataParallel(Net())
    ddp.register_comm_hook(netsum.torch.HookState(comm, ddp), netsum.torch.comm_hook)
    for x in batches(2):  # in the second, DDP rebuilds its buckets by Gloo
        ddp(x).sum().backward()
    if comm.rank == 1:
        os._exit(0)
    raises(RuntimeError, "rank 1 died", lambda: ddp(batches(1)[0]).sum().backward())
    raises(netsum.RankDiedError, "rank 1", comm.barrier)
    print("NAMED", flush=True)
    os._exit(0)  # Gloo waits for the one that died


def dies_in_backend():
    """The rank that died is named, to who waits, to a future, and in DistributedDataParallel."""
    os.environ["NETSUM_TIMEOUT"] = "4"
    dist.init_process_group("netsum")
    ddp = DistributedDataParallel(Net())
    for x in batches(2):
        ddp(x).sum().backward()
    if dist.get_rank() == 1:
        os._exit(0)
    works = [dist.all_reduce(torch.ones(5), async_op=True) for _ in range(2)]
    for work in works:
        assert raises(netsum.RankDiedError, "rank 1 died", work.wait).rank == 1
        assert work.is_completed() and not work.is_success()
        raises(RuntimeError, "rank 1 died", work.get_future().wait)
    raises(netsum.RankDiedError, "rank 1 died", dist.broadcast, torch.ones(5), 0)
    raises(RuntimeError, "rank 1 died", lambda: ddp(batches(1)[0]).sum().backward())
    print("NAMED", flush=True)
    os._exit(0)  # Gloo waits for the one that died


def recorded():
    """The flight recorder has each collective of netsum's group, with its size and state."""
    with backend():
        ranks = dist.get_world_size()
        dist.all_reduce(torch.ones(3, 4))
        dist.broadcast(torch.ones(5, dtype=torch.int32), 0)
        whole = torch.zeros(2 * ranks)
        dist.all_gather_into_tensor(whole, torch.ones(2))
        dist.barrier()
        dist.all_reduce(torch.ones(7), async_op=True).wait()
        dist.all_reduce(torch.ones(2), group=dist.new_group())
        dump = netsum.torch.dump_flight_recorder()
        entries = dump["entries"]
        names = [entry["profiling_name"] for entry in entries]
        kinds = ["all_reduce", "broadcast", "all_gather", "barrier", "all_reduce"]
        assert names == [f"netsum:{kind}" for kind in kinds], names
        assert entries[0]["input_sizes"] == entries[0]["output_sizes"] == [[3, 4]], entries[0]
        assert entries[1]["input_dtypes"] == ["int32"], entries[1]
        assert (entries[2]["input_sizes"], entries[2]["output_sizes"]) == ([[2]], [[2 * ranks]])
        numbers = [entry["collective_seq_id"] for entry in entries]
        assert numbers == list(range(1, 6)), numbers
        for entry in entries:
            assert entry["state"] == "completed" and entry["retired"] and "error" not in entry
            created, over = entry["time_created_ns"], entry["time_discovered_completed_ns"]
            assert created <= entry["time_discovered_started_ns"] <= over, entry
            assert entry["timeout_ms"] == 1_800_000, entry
            assert any(frame["name"] == "recorded" for frame in entry["frames"]), entry["frames"]
        name, text = entries[0]["process_group"]
        group = {"name": name, "desc": text, "ranks": str(list(range(ranks)))}
        assert dump["pg_config"] == {name: group}, dump["pg_config"]
        assert dump["pg_status"]["0"]["last_completed_collective"] == 5, dump["pg_status"]


def arrive(place):
    """Waits until all ranks are here: on a busy machine they load PyTorch in different times."""
    file = f"{os.environ['TMPDIR']}/{place}"
    open(f"{file}{os.environ['RANK']}", "w").close()
    while not all(os.path.exists(f"{file}{n}") for n in range(int(os.environ["WORLD_SIZE"]))):
        time.sleep(0.01)


def recorded_failure():
    """The file that is written by itself names the dead rank, and what the others did not call."""
    os.environ["NETSUM_TIMEOUT"] = "4"
    dist.init_process_group("netsum")
    dist.all_reduce(torch.ones(5))
    if dist.get_rank() == 1:
        os._exit(0)
    works = [dist.all_reduce(torch.ones(n), async_op=True) for n in (6, 7)]
    raises(netsum.RankDiedError, "rank 1 died", works[0].wait)
    with open(f"{os.environ['TORCH_FR_DUMP_TEMP_FILE']}{dist.get_rank()}", "rb") as file:
        dump = pickle.load(file)
    states = [entry["state"] for entry in dump["entries"]]
    assert states == ["completed", "started", "started"], states
    failed = dump["entries"][1]
    assert failed["missing_rank"] == 1 and "rank 1 died" in failed["error"], failed
    assert failed["retired"] and not dump["entries"][2]["retired"]
    print("WRITTEN", flush=True)
    os._exit(0)  # Gloo waits for the one that died


def recorded_timeout():
    """All ranks write their file: one for its timeout, the other for the call that differs."""
    arrive("loaded")
    timeout = timedelta(seconds=2)
    dist.init_process_group("netsum", timeout=timeout)
    dist.all_reduce(torch.ones(5))
    if dist.get_rank() == 0:
        raises(TimeoutError, "all_reduce has taken 2 s", dist.all_reduce, torch.ones(6))
    else:
        time.sleep(3)
        file = f"{os.environ['TORCH_FR_DUMP_TEMP_FILE']}1"
        netsum.torch.dump_flight_recorder(file)
    print("WRITTEN", flush=True)
    os._exit(0)


def detailed():
    """TORCH_DISTRIBUTED_DEBUG=DETAIL logs each collective, and changes nothing else."""
    said = []

    class Kept(logging.Handler):
        def emit(self, record):
            said.append(record.getMessage())

    log = logging.getLogger("netsum.torch")
    log.addHandler(Kept())
    log.setLevel(logging.DEBUG)
    with backend():
        rank = dist.get_rank()
        dist.all_reduce(torch.ones(3, 4))
        found = trained(None, Net())
        assert same_everywhere(found)
        dist.all_reduce(x := torch.ones(2), group=dist.new_group())
        assert (x == dist.get_world_size()).all()
        assert any(
            text.startswith(f"rank {rank}: all_reduce number ")
            and text.endswith("input float32[3, 4], output float32[3, 4]")
            for text in said
        ), said
        assert len(said) == len(netsum.torch.dump_flight_recorder()["entries"]), said


def profiled():
    """torch.profiler shows each collective, until its results are there."""
    with backend():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            if dist.get_rank() == 0:
                work = dist.all_reduce(torch.ones(1000), async_op=True)
                arrive("begun")
            else:
                arrive("begun")
                time.sleep(0.2)
                work = dist.all_reduce(torch.ones(1000), async_op=True)
            work.wait()
            # The range of the first is over when the second is.
            dist.barrier()
            dist.barrier()
        found = {event.key: event for event in profile.key_averages()}
        assert {"netsum:all_reduce", "netsum:barrier"} <= set(found), sorted(found)
        took = found["netsum:all_reduce"].cpu_time_total / 1e6
        assert dist.get_rank() > 0 or took > 0.15, took


@contextlib.contextmanager
def backend(name="netsum"):
    """A job of torch.distributed by netsum, for all cases of a process; and what it warns of."""
    if not dist.is_initialized():
        dist.init_process_group(name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught
    dist.barrier()


def sealed_groups():
    """With a secret, a group that Gloo would sum in clear is an error, and the job goes on."""
    with backend():
        raises(netsum.ConfigError, "Gloo would sum in clear", dist.new_group)
        dist.all_reduce(x := torch.ones(5))
        assert (x == dist.get_world_size()).all()


def delegated(caught):
    return [str(w.message) for w in caught if w.category is netsum.torch.DelegatedWarning]


def trains():
    """DistributedDataParallel over the backend, with and without a look for unused parameters."""
    with backend() as caught:
        assert dist.get_backend() == "netsum"
        found = [trained(None, Net()) for _ in range(2)]
        assert torch.equal(*found) and same_everywhere(found[0])
        other = dist.new_group(backend="gloo")
        by_gloo = trained(None, Net(), process_group=other)
        assert close(found[0], by_gloo) and not close(by_gloo, weights(Net()))
        ranks, rank = dist.get_world_size(), dist.get_rank()
        own = dict(parts=lambda step: (rank + step) % ranks, find_unused_parameters=True)
        assert close(
            trained(None, Net(ranks + 1), **own),
            trained(None, Net(ranks + 1), process_group=other, **own),
        )
        assert not delegated(caught), delegated(caught)


def collectives():
    """Each call that the network does, against what it must come to."""
    with backend() as caught:
        ranks, rank = dist.get_world_size(), dist.get_rank()
        others = ranks * (ranks - 1) // 2
        for dtype in (torch.float32, torch.int32, torch.bfloat16, torch.float16):
            x = torch.arange(1000).remainder(64).to(dtype).reshape(10, 100) + rank
            expected = (torch.arange(1000).remainder(64).to(dtype) * ranks + others).reshape(
                10, 100
            )
            dist.all_reduce(x)
            assert torch.equal(x, expected), x
            x = torch.full((7,), rank + 1).to(dtype)
            dist.reduce(x, 1)
            assert (x == (others + ranks if rank == 1 else rank + 1)).all(), x
            part, whole = (
                torch.zeros(50, dtype=dtype),
                torch.arange(50 * ranks).remainder(32).to(dtype),
            )
            reduce_scatter = (
                getattr(dist, "reduce_scatter_tensor", None) or dist._reduce_scatter_base
            )
            reduce_scatter(part, whole)
            assert torch.equal(part, whole[50 * rank :][:50] * ranks), part
            dist.reduce_scatter(part, [w.clone() for w in whole.view(ranks, 50)])
            assert torch.equal(part, whole[50 * rank :][:50] * ranks), part
        x = torch.full((3,), float(rank))
        dist.all_reduce(x, op=dist.ReduceOp.AVG)
        assert (x == others / ranks).all()
        scalar = torch.tensor(float(rank), requires_grad=True)
        dist.all_reduce(scalar)
        assert scalar.item() == others
        works = [dist.all_reduce(torch.full((1000,), float(i)), async_op=True) for i in range(100)]
        assert all(
            (work.wait(), work.result()[0])[1].eq(i * ranks).all() for i, work in enumerate(works)
        )
        for dtype in (
            torch.float64,
            torch.int64,
            torch.bool,
            torch.uint8,
            torch.bfloat16,
            torch.complex64,
        ):
            x = (torch.arange(6) % (rank + 2)).to(dtype).reshape(2, 3)
            expected = (torch.arange(6) % 3).to(dtype).reshape(2, 3)
            dist.broadcast(x, 1)
            assert torch.equal(x, expected), x
            parts = [torch.zeros(2, dtype=dtype) for _ in range(ranks)]
            dist.all_gather(parts, torch.full((2,), rank % 2).to(dtype))
            assert all(
                (part == torch.tensor(r % 2).to(dtype)).all() for r, part in enumerate(parts)
            ), parts
        out, own = torch.zeros(ranks, 2), torch.full((2,), float(rank))
        all_gather = getattr(dist, "all_gather_into_tensor", None) or dist._all_gather_base
        all_gather(out, own)
        assert torch.equal(out, torch.arange(float(ranks)).repeat_interleave(2).view(ranks, 2)), out
        out = torch.zeros(ranks, dtype=torch.int64)
        dist.all_to_all_single(out, torch.arange(ranks) + 10 * rank)
        assert torch.equal(out, torch.arange(ranks) * 10 + rank), out
        objects = [None] * ranks
        dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank})
        assert [o["rank"] for o in objects] == list(range(ranks))
        objects = [{"a": 1} if rank == 0 else None]
        dist.broadcast_object_list(objects, 0)
        assert objects == [{"a": 1}]
        everyone = dist.new_group()
        x = torch.ones(3)
        dist.all_reduce(x, group=everyone)
        assert (x == ranks).all()
        said = {text.split(":")[0] for text in delegated(caught)}
        assert said == {"all_to_all", "a second group of all ranks"}, said
        y = torch.full((4,), torch.inf if rank == 0 else 1.0)
        dist.all_reduce(y)
        assert y.isposinf().all()


def nested():
    """A callback waits for other operations: for those it begins, and for those behind its own."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

    with backend():
        ranks = dist.get_world_size()
        model = Net()
        ddp = DistributedDataParallel(model, bucket_cap_mb=100)
        state = power.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, power.powerSGD_hook)
        for x in batches(6):
            ddp(x).square().mean().backward()
        assert same_everywhere(torch.cat([p.grad.flatten() for p in model.parameters()]))
        first = dist.all_reduce(torch.ones(3), async_op=True)
        later = [dist.all_reduce(torch.full((3,), float(i)), async_op=True) for i in range(5)]
        waited = first.get_future().then(
            lambda _: [work.get_future().wait()[0][0].item() for work in later]
        )
        assert waited.wait() == [float(i * ranks) for i in range(5)]
        # Each within another.
        order = []

        def deeper(depth):
            order.append(depth)
            if depth < 5:
                dist.all_reduce(torch.ones(3), async_op=True).get_future().then(
                    lambda _: deeper(depth + 1)
                ).wait()

        deeper(0)
        assert order == list(range(6))
        # One after the other, where none waits.
        order.clear()
        works = [dist.all_reduce(torch.ones(3), async_op=True) for _ in range(50)]
        ends = [
            work.get_future().then(lambda _, i=i: order.append(i)) for i, work in enumerate(works)
        ]
        torch.futures.wait_all(ends)
        assert sorted(order) == list(range(50))


def again():
    """Jobs end and start again in one store, also with fewer ranks.

    A model still refers to the first job's group.
    """
    rank, held = int(os.environ["RANK"]), []
    # PyTorch 1.13 itself takes no store twice. Where it is called by the same name, netsum must not
    # read what another job has said.
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["NETSUM_TEST_PORT"]), None, rank == 0
    )
    dist.distributed_c10d._store_based_barrier = lambda *_, **more: None
    for size in (3, 3, 2, 2):
        if rank < size:
            dist.init_process_group("netsum", store=store, rank=rank, world_size=size)
            held.append(DistributedDataParallel(Net()))
            for x in batches(2):
                held[-1](x).sum().backward()
            assert same_everywhere(held[-1].module.first.weight.grad)
            x = torch.eye(3).to_sparse()  # Gloo's
            dist.all_reduce(x)
            assert torch.equal(x.to_dense(), torch.eye(3) * size), x
            comm = dist.group.WORLD.comm
            dist.destroy_process_group()
            if NEW:
                raises(netsum.ClosedError, "", comm.barrier)
            comm = None
    store.set(f"done/{rank}", "")
    for other in range(3):
        store.get(f"done/{other}")


def among_gloo():
    """Groups by netsum where the default group is Gloo's: what a rank does is not of its past."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kept = None
        for ranks in ([0, 1], [1, 2], [0, 1, 2], [0, 1, 2], [0, 2]):
            group = dist.new_group(ranks, backend="netsum")
            x = torch.ones(5)
            if rank in ranks:
                dist.all_reduce(x, group=group)
                assert (x == len(ranks)).all(), (ranks, x)
                assert (group.comm is not None) == (len(ranks) == 3 and kept is None), ranks
                # Not held by this rank alone.
                kept = group if len(ranks) == 3 and rank == 0 else kept or len(ranks) == 3 or None
        said = [text.split(":")[0] for text in delegated(caught)]
        assert sorted(said) == ["a group of 2 of 3 ranks", "a second group of all ranks"], said
    del kept


def mistaken():
    """Calls that cannot be right are refused, and others leave what is not theirs alone."""
    with backend():
        ranks, rank = dist.get_world_size(), dist.get_rank()
        x = torch.full((4,), torch.inf if rank == 1 else 1.0)
        before = x.clone()
        for dtype in (torch.float32, torch.bfloat16):
            y = x.to(dtype)
            dist.reduce(y, 0)
            assert y.isposinf().all() if rank == 0 else torch.equal(y, before.to(dtype)), y
        all_gather = getattr(dist, "all_gather_into_tensor", None) or dist._all_gather_base
        whole = torch.zeros(3 * ranks)
        for out in (whole.int(), torch.zeros(3 * ranks // 2, dtype=torch.float64)):
            raises(netsum.ArgumentError, "torch.float32", all_gather, out, torch.ones(3))
        group = dist.group.WORLD
        raises(
            netsum.ArgumentError,
            "of one type",
            group.allgather,
            [[whole[:3].int()] * ranks],
            [torch.ones(3)],
        )
        raises(netsum.ArgumentError, "of one type", group.alltoall_base, whole.int(), whole, [], [])
        raises(
            netsum.ArgumentError,
            "of one type",
            group.alltoall,
            list(whole.int().chunk(ranks)),
            list(whole.chunk(ranks)),
        )
        raises(
            netsum.ArgumentError,
            "of one type",
            group._reduce_scatter_base,
            torch.zeros(3).int(),
            whole,
        )
        raises(netsum.ArgumentError, "x.to_dense()", dist.broadcast, torch.ones(3).to_sparse(), 0)
        # One element of many, and tensors of inference.
        x = torch.full((1, 2), float(rank))[:, 0]
        dist.broadcast(x, 1)
        assert x == 1
        parts = [torch.zeros(1, 2)[:, 1] for _ in range(ranks)]
        dist.all_gather(parts, torch.full((1, 2), float(rank))[:, 0])
        assert torch.equal(torch.cat(parts), torch.arange(float(ranks))), parts
        with torch.inference_mode():
            for dtype in (torch.bfloat16, torch.float32, torch.float64):
                x = torch.ones(4, dtype=dtype)
                dist.all_reduce(x)
                assert (x == ranks).all(), x
                dist.all_reduce(x, op=dist.ReduceOp.AVG)
                assert (x == ranks).all(), x
            dist.reduce_scatter(
                part := torch.zeros(2, dtype=torch.float64),
                [torch.ones(2, dtype=torch.float64)] * ranks,
            )
            assert (part == ranks).all(), part
            parts = list(torch.zeros(ranks, 3))
            dist.all_gather(parts, torch.ones(3))
            assert torch.cat(parts).eq(1).all(), parts
            x = torch.full((4,), torch.inf)
            dist.all_reduce(x)
            assert x.isposinf().all(), x


def sparse():
    """Gloo sums sparse tensors, also in DistributedDataParallel."""
    with backend() as caught:
        ranks, rank = dist.get_world_size(), dist.get_rank()
        x = torch.sparse_coo_tensor([[rank, ranks]], [1.0, 2.0], (ranks + 1,))
        dist.all_reduce(x)
        assert torch.equal(x.to_dense(), torch.tensor([1.0] * ranks + [2.0 * ranks])), x
        dist.all_reduce(x, op=dist.ReduceOp.AVG)
        assert torch.equal(x.to_dense(), torch.tensor([1.0] * ranks + [2.0 * ranks])), x
        model = torch.nn.Embedding(10, 4, sparse=True)
        torch.nn.init.ones_(model.weight)
        ddp = DistributedDataParallel(model)
        ddp(torch.tensor([rank, 9])).sum().backward()
        expected = torch.zeros(10, 4)
        expected[:ranks] = 1 / ranks
        expected[9] = 1
        assert close(model.weight.grad.to_dense(), expected), model.weight.grad
        assert delegated(caught) == [
            "all_reduce of sparse tensors: Gloo does it, as the network cannot"
        ], delegated(caught)


def timed():
    """An operation that a rank does not call ends at the group's timeout, and completes later."""
    arrive("loaded")
    dist.init_process_group("netsum", timeout=timedelta(seconds=3))
    x, comm = torch.ones(5), dist.group.WORLD.comm
    ddp = DistributedDataParallel(Net())
    comm.barrier()
    if dist.get_rank() == 0:
        work = dist.all_reduce(x, async_op=True)
        raises(TimeoutError, "still in flight", work.wait, timedelta(seconds=0.1))
        raises(TimeoutError, "all_reduce has taken 3 s", work.wait)
        raises(RuntimeError, "all_reduce has taken 3 s", work.get_future().wait)
        raises(
            RuntimeError, "all_reduce has taken 3 s", lambda: ddp(batches(1)[0]).sum().backward()
        )
    else:
        time.sleep(12)
        dist.all_reduce(x)
        ddp(batches(1)[0]).sum().backward()
    comm.barrier()
    assert (x == 2).all(), x
    dist.all_reduce(x)
    assert (x == 4).all(), x


def interrupted():
    """Ctrl-C ends a wait for a rank that is elsewhere, and then the process."""
    dist.init_process_group("netsum")
    pids = [None] * 2
    dist.all_gather_object(pids, os.getpid())
    if dist.get_rank() == 0:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        raises(KeyboardInterrupt, "", dist.barrier)
        sys.exit()
    until = time.monotonic() + 8
    while runs(pids[0]):
        assert time.monotonic() < until, "rank 0 is still there"
        time.sleep(0.1)
    print("ENDED", flush=True)


def runs(pid):
    """Whether a process has not ended, be its end asked for or not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def by_compilers():
    """What torch.compile and DTensor call."""
    from torch.distributed import _functional_collectives as calls

    ranks, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    whole = torch.arange(2.0 * ranks)
    for given, expected in (
        (calls.all_reduce(torch.ones(4), "avg", group), torch.ones(4)),
        (
            calls.all_reduce_coalesced([torch.ones(4), torch.ones(2)], "sum", group)[1],
            torch.full((2,), float(ranks)),
        ),
        (calls.reduce_scatter_tensor(whole, "sum", 0, group), whole[2 * rank :][:2] * ranks),
        (
            calls.all_gather_tensor(torch.full((2,), float(rank)), 0, group),
            torch.arange(float(ranks)).repeat_interleave(2),
        ),
        (
            calls.all_to_all_single(torch.arange(float(ranks)), None, None, group),
            torch.full((ranks,), float(rank)),
        ),
        (calls.broadcast(torch.full((3,), float(rank)), 1, group), torch.ones(3)),
    ):
        assert torch.equal(calls.wait_tensor(given), expected), (given, expected)


def operators():
    """Reductions of all types with all operators, none of them by Gloo."""
    with backend() as caught:
        ranks, rank, op = dist.get_world_size(), dist.get_rank(), dist.ReduceOp
        scatter = getattr(dist, "reduce_scatter_tensor", None) or dist._reduce_scatter_base
        for dtype in tensors.REDUCED:
            is_bool, is_float = dtype == torch.bool, dtype.is_floating_point
            folds = {
                op.SUM: torch.logical_or if is_bool else torch.add,
                op.PRODUCT: torch.logical_and if is_bool else torch.mul,
                op.MIN: torch.logical_and if is_bool else torch.minimum,
                op.MAX: torch.logical_or if is_bool else torch.maximum,
            }
            if not is_float:
                folds |= {
                    op.BAND: torch.bitwise_and,
                    op.BOR: torch.bitwise_or,
                    op.BXOR: torch.bitwise_xor,
                }
            kind = torch.bool if is_bool else torch.float64 if is_float else torch.int64
            for by, fold in folds.items():
                # Small numbers, which all types have; more signs where there are any.
                all_values = [
                    torch.tensor([r + 1, 4 - r, 2, r % 2, 3]).to(kind) for r in range(ranks)
                ]
                expected = functools.reduce(fold, all_values).to(dtype)
                own = all_values[rank].to(dtype)
                dist.all_reduce(x := own.clone(), by)
                assert equal(x, expected), (dtype, by, x, expected)
                dist.reduce(x := own.clone(), 1, by)
                assert equal(x, expected if rank == 1 else own), (dtype, by, x)
                scatter(x := own.clone(), torch.cat([own] * ranks), by)
                assert equal(x, expected), (dtype, by, x, expected)
                # Parts of several sizes.
                x = torch.zeros(rank + 1).to(dtype)
                dist.reduce_scatter(x, [own[:1].expand(r + 1).clone() for r in range(ranks)], by)
                assert equal(x, expected[:1].expand(rank + 1)), (dtype, by, x, expected)
            if not is_bool:
                x = torch.full((3,), 24).to(dtype)
                dist.all_reduce(x, op.AVG)
                assert (x.double() == 24).all(), (dtype, x)
        x = torch.full((3,), 100, dtype=torch.int8)  # the sum is too large for it
        dist.all_reduce(x, op.AVG)
        assert (x == 100).all(), x
        x = torch.tensor(-7 if rank == 0 else 0, dtype=torch.int64)
        dist.all_reduce(x, op.AVG)
        assert x == -(7 // ranks), x
        part = torch.zeros(2, dtype=torch.float64)
        scatter(part, torch.arange(2.0 * ranks, dtype=torch.float64) + rank, op=op.AVG)
        right = torch.arange(2.0, dtype=torch.float64) + 2 * rank + (ranks - 1) / 2
        assert torch.equal(part, right), part
        for dtype in tensors.PAIRS:
            x = torch.tensor([1 + 2j, -3j], dtype=dtype)
            dist.all_reduce(x)
            assert torch.equal(x, torch.tensor([1 + 2j, -3j], dtype=dtype) * ranks), x
            x = torch.tensor([[1 + 2j], [rank * 1j]], dtype=dtype).t()
            dist.all_reduce(x, op.AVG)
            assert torch.equal(x, torch.tensor([[1 + 2j, (ranks - 1) / 2 * 1j]], dtype=dtype)), x
        raises(RuntimeError, "", dist.all_reduce, torch.ones(2), op.BAND)
        raises(RuntimeError, "", dist.all_reduce, torch.tensor([True]), op.AVG)
        # Numbers, of which one makes the result everywhere.
        x = torch.tensor([torch.nan if rank == 1 else 1.0, -0.0 if rank else 0.0] * 3000)
        dist.all_reduce(x, op.MIN)
        assert x[::2].isnan().all() and x[1::2].signbit().all(), x
        assert not delegated(caught), delegated(caught)


def equal(x, y):
    """As numbers: older PyTorch cannot compare some types."""
    return x.dtype == y.dtype and torch.equal(x.double(), y.double())


def by_gloo():
    """Gloo handles other calls, with one warning each."""
    with backend() as caught:
        ranks, rank = dist.get_world_size(), dist.get_rank()
        for _ in range(2):
            if rank == 0:
                dist.send(torch.ones(3), 1)
            elif rank == 1:
                dist.recv(x := torch.zeros(3), 0)
                assert (x == 1).all()
            parts = list(torch.zeros(ranks).chunk(ranks))
            dist.all_to_all(parts, list((torch.arange(float(ranks)) + 10 * rank).chunk(ranks)))
            assert torch.equal(torch.cat(parts), torch.arange(float(ranks)) * 10 + rank), parts
            # Rank 0's parts are all of one size, and the others' are not.
            sent, got = ([2 + (rank > 0 and other > 0) for other in range(ranks)] for _ in range(2))
            out = torch.zeros(sum(got))
            dist.all_to_all_single(out, torch.full((sum(sent),), float(rank)), got, sent)
            assert torch.equal(
                out, torch.arange(float(ranks)).repeat_interleave(torch.tensor(got))
            ), out
            out, sizes = torch.zeros(ranks * (rank + 1)), [r + 1 for r in range(ranks)]
            dist.all_to_all_single(
                out, torch.full((sum(sizes),), float(rank)), [rank + 1] * ranks, sizes
            )
            assert torch.equal(out, torch.arange(float(ranks)).repeat_interleave(rank + 1)), out
        there = torch.zeros(3)
        ops = [(dist.isend, torch.full((3,), float(rank)), 1), (dist.irecv, there, -1)]
        for work in dist.batch_isend_irecv(
            [dist.P2POp(op, x, (rank + by) % ranks) for op, x, by in ops]
        ):
            work.wait()
        assert (there == (rank - 1) % ranks).all(), there
        if NEW:
            by_compilers()
        some = dist.new_group([0, 1])
        x = torch.full((3,), float(rank))
        if rank < 2:
            dist.all_reduce(x, group=some)
            assert (x == 1).all()
            dist.all_reduce(x, op=dist.ReduceOp.AVG, group=some)
            assert (x == 1).all(), x
        said = delegated(caught)
        assert len(said) == len(set(said)), said
        for words in (
            "all_to_all",
            "send",
            "recv",
        ):
            assert sum(words in text for text in said) == 1, (words, said)
        assert rank > 1 or any("a group of 2 of" in text for text in said) or ranks == 2, said


def hook_of_a_subgroup():
    """Two halves of the ranks train separately: the hook, which sums over all ranks, is refused."""
    dist.init_process_group("gloo")
    with netsum.init() as comm:
        rank = dist.get_rank()
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        other_order = dist.new_group([3, 2, 1, 0])
        ddp = DistributedDataParallel(
            torch.nn.Linear(3, 1, bias=False), process_group=groups[rank // 2]
        )
        raises(
            netsum.ConfigError,
            "the model's group has 2 of 4 ranks",
            netsum.torch.HookState,
            comm,
            ddp,
        )
        ddp.register_comm_hook(comm, netsum.torch.comm_hook)
        out = ddp(torch.full((1, 3), 1.0 if rank < 2 else 1000.0)).sum()
        raises(RuntimeError, "HookState(netsum.init(), model)", out.backward)
        raises(
            netsum.ArgumentError,
            "instead of a DistributedDataParallel",
            netsum.torch.HookState,
            comm,
            ddp.module,
        )
        if dist.get_rank(other_order) != rank:
            ddp = DistributedDataParallel(torch.nn.Linear(3, 1), process_group=other_order)
            raises(netsum.ConfigError, "another order", netsum.torch.HookState, comm, ddp)
        dist.barrier()


def apart():
    """Operations and messages of two groups do not mix, whatever the order of the calls is."""
    with backend():
        ranks, rank = dist.get_world_size(), dist.get_rank()
        groups = [
            dist.group.WORLD,
            dist.new_group(),
            dist.new_group(list(range(ranks))),
            dist.new_group([0, 1]),
        ]
        for turn in range(3):
            calls = [
                (i, torch.full((3,), 10.0**i * (rank + 1)), group)
                for i, group in enumerate(groups)
                if i < 3 or rank < 2
            ]
            works = [
                (i, x, dist.all_reduce(x, group=group, async_op=True))
                for i, x, group in calls[:: 1 if (rank + turn) % 2 else -1]
            ]
            for i, x, work in works:
                work.wait()
                of = 2 if i == 3 else ranks
                assert (x == 10.0**i * of * (of + 1) / 2).all(), (i, x)
        # Only two of all ranks call, before anything else in that group; the messages are received
        # in another order.
        for group in (
            dist.new_group(),
            dist.new_group(list(range(ranks))[::-1]),
            dist.new_group([0, 1]),
        ):
            if rank == 0:
                # Gloo's send is over when somebody receives.
                sent = [
                    dist.isend(torch.full((4,), value), 1, group=to)
                    for to, value in ((dist.group.WORLD, 1.0), (group, 2.0))
                ]
                for work in sent:
                    work.wait()
            elif rank == 1:
                for source, value in ((group, 2.0), (dist.group.WORLD, 1.0)):
                    x = torch.zeros(4, 2)[:, 0]
                    assert dist.recv(x, None if value == 2.0 else 0, group=source) == 0
                    assert (x == value).all(), x
        raises(
            netsum.ArgumentError, f"to rank {rank}", dist.group.WORLD.send, [torch.ones(1)], rank
        )
        raises(netsum.ArgumentError, "from rank -1", dist.group.WORLD.recv, [torch.ones(1)], -1)


def strided():
    """Tensors that are not contiguous, in every call, by netsum and by Gloo.

    The results are right, and memory beside them does not change.
    """
    with backend():
        ranks, rank = dist.get_world_size(), dist.get_rank()
        for group in (dist.group.WORLD, dist.new_group()):
            # Gloo in older PyTorch knows no bfloat16.
            for dtype in (torch.float32, torch.float64, *([torch.bfloat16] if NEW else [])):
                base = torch.arange(16.0, dtype=dtype).view(2, 4, 2)

                def made(fill=None):
                    """Views: a column, a transposed matrix, channels last; some at one rank."""
                    whole = base.clone() if fill is None else torch.full_like(base, fill)
                    image = torch.empty(1, 2, 2, 2, dtype=dtype).contiguous(
                        memory_format=torch.channels_last
                    )
                    image.copy_(whole.view(2, 2, 2, 2)[:1])
                    flat = image.contiguous() if rank == 1 else image
                    return [
                        (whole[0, :, 0], whole),
                        (whole[0].t(), whole),
                        (flat, flat),
                        (whole[1] if rank else whole[1].t().contiguous().t(), whole),
                    ]

                for i in range(4):
                    x = made()[i][0]
                    want = x.clone().contiguous()

                    def empty(i=i):
                        return made(0.0)[i][0]

                    x, whole = made()[i]
                    before = whole.clone()
                    dist.all_reduce(x, group=group)
                    assert torch.equal(x, want * ranks), (i, x)
                    x.copy_(want)
                    assert torch.equal(whole, before), "what is beside it has changed"
                    dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group)
                    assert torch.equal(x, want), (i, x)
                    dist.reduce(x, 0, group=group)
                    assert rank > 0 or torch.equal(x, want * ranks), (i, x)
                    x = made()[i][0] if rank == 0 else empty()
                    dist.broadcast(x, 0, group=group)
                    assert torch.equal(x, want), (i, x)
                    parts = [empty() for _ in range(ranks)]
                    dist.all_gather(parts, made()[i][0], group=group)
                    assert all(torch.equal(part, want) for part in parts), (i, parts)
                    out = empty()
                    dist.reduce_scatter(out, [made()[i][0] for _ in range(ranks)], group=group)
                    assert torch.equal(out, want * ranks), (i, out)
                    parts = [empty() for _ in range(ranks)]
                    dist.all_to_all(parts, [made()[i][0] for _ in range(ranks)], group=group)
                    assert all(torch.equal(part, want) for part in parts), (i, parts)
                    parts = [empty() for _ in range(ranks)] if rank == 1 else None
                    dist.gather(made()[i][0], parts, 1, group=group)
                    assert rank != 1 or all(torch.equal(part, want) for part in parts), (i, parts)
                    out = empty()
                    dist.scatter(
                        out,
                        [made()[i][0] for _ in range(ranks)] if rank == 0 else None,
                        0,
                        group=group,
                    )
                    assert torch.equal(out, want), (i, out)
                    if rank == 0:
                        dist.send(made()[i][0], 1, group=group)
                    elif rank == 1:
                        dist.recv(out := empty(), 0, group=group)
                        assert torch.equal(out, want), (i, out)
        raises(
            netsum.ArgumentError,
            "several elements at one place",
            dist.all_reduce,
            torch.zeros(1).expand(3),
        )


def uneven():
    """Lists whose tensors have sizes of their own, and lists that are wrong."""
    with backend():
        ranks, rank = dist.get_world_size(), dist.get_rank()
        for group in (dist.group.WORLD, dist.new_group()):
            for dtype in (torch.float32, torch.int64):
                parts = [torch.zeros(r + 1, dtype=dtype) for r in range(ranks)]
                dist.all_gather(parts, torch.full((rank + 1,), rank, dtype=dtype), group=group)
                assert all((part == r).all() for r, part in enumerate(parts)), parts
                out = torch.zeros(rank + 1, dtype=dtype)
                dist.reduce_scatter(
                    out,
                    [torch.full((r + 1,), r + rank, dtype=dtype) for r in range(ranks)],
                    group=group,
                )
                assert (out == ranks * rank + ranks * (ranks - 1) // 2).all(), out
        group = dist.group.WORLD
        raises(
            netsum.ArgumentError,
            "must be as long as",
            group.reduce_scatter,
            [torch.zeros(2)],
            [[torch.zeros(1)] * ranks],
        )
        raises(
            netsum.ArgumentError,
            "a part for each rank",
            group.reduce_scatter,
            [torch.zeros(1)],
            [[torch.zeros(1)] * (ranks + 1)],
        )
        raises(
            netsum.ArgumentError,
            "as long as that rank's input",
            group.allgather,
            [[torch.zeros(2)] * ranks],
            [torch.zeros(1)],
        )
        raises(netsum.ArgumentError, "root 9: must be 0 to", group.broadcast, torch.zeros(1), 9)
        # The group's own methods.
        group.broadcast(x := torch.full((2,), float(rank)), 1).wait()
        group.allreduce(y := torch.ones(2), dist.ReduceOp.MAX).wait()
        assert (x == 1).all() and (y == 1).all()
        if TORCH >= (2, 15):  # 2.7 has it for Gloo alone
            dist.monitored_barrier()


def differ():
    """Ranks that call for different things: an error at all that names both, and no numbers."""
    dist.init_process_group("netsum")
    rank, f = dist.get_rank(), torch.float32
    one, other = (
        (
            lambda: dist.broadcast(torch.ones(4), 0),
            lambda: dist.broadcast(torch.ones(4, dtype=torch.int32), 0),
        ),
        (
            lambda: dist.all_reduce(torch.ones(4)),
            lambda: dist.all_reduce(torch.ones(4, dtype=torch.bfloat16)),
        ),
        (lambda: dist.broadcast(torch.ones(4), 0), lambda: dist.broadcast(torch.ones(4), 1)),
        (
            lambda: dist.reduce_scatter(
                torch.ones(1 + rank), [torch.ones(1), torch.ones(2, dtype=f)]
            ),
            lambda: dist.reduce_scatter(torch.ones(1), [torch.ones(2), torch.ones(1)]),
        ),
    )[int(os.environ["NETSUM_TEST_CASE"])]
    raises(netsum.MismatchError, "all ranks must call for the same", one if rank == 0 else other)


def refused_alone():
    """A rank alone whose call cannot be right: no rank waits, or gets a number."""
    with contextlib.ExitStack() as ends:
        ends.enter_context(backend())
        ranks, rank = dist.get_world_size(), dist.get_rank()
        own = torch.zeros(3)
        # At all ranks: nothing is lost by it.
        for sizes in ([2, 4], [3], [3, 3, 3]):
            raises(
                netsum.ArgumentError,
                "parts of",
                dist.reduce_scatter,
                own,
                [torch.ones(size) for size in sizes],
            )
        dist.all_reduce(x := torch.ones(3))
        assert (x == ranks).all(), x
        parts = [torch.ones(3), torch.ones(3 + rank)]
        kind, text = (
            (netsum.ArgumentError, "parts of [3, 4]")
            if rank == 1
            else (netsum.MismatchError, "its own call returned an error")
        )
        raises(kind, text, dist.reduce_scatter, own, parts)
        raises(netsum.Error, "", dist.all_reduce, own)
        ends.pop_all()


def joined():
    """Ranks with other numbers of batches: PyTorch asks later what they have told each other."""
    with backend():
        ranks, rank = dist.get_world_size(), dist.get_rank()
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.ones_(model.weight)
        ddp = DistributedDataParallel(model)
        with ddp.join(divide_by_initial_world_size=False):
            for done in range(rank + 1):
                ddp.zero_grad()
                ddp(torch.full((1, 1), float(rank))).sum().backward()
                still = range(done, ranks)
                assert model.weight.grad == sum(still) / len(still), (done, model.weight.grad)


def many_groups():
    """Groups that nobody uses, or that are destroyed, leave nothing behind."""
    with backend():

        def held():
            return (
                len(os.listdir("/proc/self/fd")),
                threading.active_count(),
                len(os.listdir("/proc/self/task")),
            )

        for i in range(200):
            group = dist.new_group()
            if i % 50 == 0:
                dist.all_reduce(x := torch.ones(3, dtype=torch.float64), group=group)
                assert (x == dist.get_world_size()).all()
            dist.destroy_process_group(group)
            del group
            if i == 20:
                before = held()
        until = time.monotonic() + 10
        while any(now > then + 3 for now, then in zip(held(), before)):
            assert time.monotonic() < until, (before, held())
            time.sleep(0.05)


def compiled():
    """torch.compile of DistributedDataParallel, as without it."""
    with backend():
        plain = trained(None, Net())
        ddp = torch.compile(DistributedDataParallel(Net(), bucket_cap_mb=0.05), backend="aot_eager")
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for x in batches(6):
            ddp(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert close(weights(ddp), plain) and same_everywhere(weights(ddp))


def without_a_box():
    """Nobody has told the ranks where anything is: they tell one another."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dist.init_process_group("cpu:netsum" if TORCH >= (2, 0) else "netsum")
    said = [str(w.message) for w in caught if w.category is netsum.NoBoxWarning]
    assert len(said) == (dist.get_rank() == 0), said
    assert all("NETSUM_CONTROLLER" in text and "127." in text for text in said), said
    x = torch.ones(1000)
    dist.all_reduce(x)
    assert (x == dist.get_world_size()).all()


def warning_is_an_error():
    """Only rank 0 warns; where that is an error, none is left waiting."""
    warnings.simplefilter("error", netsum.NoBoxWarning)
    raises(netsum.NoBoxWarning, "no box", dist.init_process_group, "netsum")


def some_know():
    """A rank that knows of a box, and one that does not."""
    if os.environ["RANK"] == "1":
        os.environ["NETSUM_CONTROLLER"] = "127.0.0.1:1"
    raises(
        netsum.ConfigError,
        "rank 1 knows of a box and rank 0 does not",
        dist.init_process_group,
        "netsum",
    )


def sharded():
    """FSDP2: weights in parts, gathered and reduced by netsum."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    def train(group):
        from torch.distributed.device_mesh import DeviceMesh

        mesh = DeviceMesh.from_group(group, "cpu") if group else None
        model = Net(1)
        for layer in (model.first, model.parts[0], model.last):
            fully_shard(layer, **({"mesh": mesh} if mesh else {}))
        fully_shard(model, **({"mesh": mesh} if mesh else {}))
        assert isinstance(model.first.weight, DTensor)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x in batches(5):
            model(x, 0).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return torch.cat([p.full_tensor().detach().flatten() for p in model.parameters()])

    with backend("cpu:netsum") as caught:
        found = [train(None) for _ in range(2)]
        assert torch.equal(*found) and same_everywhere(found[0])
        assert not delegated(caught), delegated(caught)
        whole = trained(None, Net(1), steps=5, parts=lambda _: 0)
        assert close(found[0], whole) and not close(whole, weights(Net(1)))


if __name__ == "__main__":
    for name in sys.argv[1:]:
        globals()[name]()
    if dist.is_initialized():
        dist.destroy_process_group()
