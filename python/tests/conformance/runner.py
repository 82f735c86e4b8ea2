"""Runs cases in forked ranks. They start once, and again after a case that left them unusable."""

import contextlib
import faulthandler
import importlib
import multiprocessing
import multiprocessing.connection
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from .case import CASES, CRASH, HANG, KINDS, RANKS, RIGHT, SKIPPED, WRONG, Case, here, outcome

#: The group's timeout, longer than any case's: a case that hangs must not count as refused.
_GROUP = timedelta(seconds=300)
_BEGIN = 90

#: PyTorch imports them where they are first used: once here is enough for all ranks.
_USED = (
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed._composable",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
)

Outcome = tuple[str, str]


class Ranks:
    """Processes that have a default group of the backend, and wait for cases."""

    def __init__(
        self, backend: str, begins: bool = True, environment: dict[str, str] | None = None
    ) -> None:
        context = multiprocessing.get_context("fork")
        self.pipes: list[multiprocessing.connection.Connection] = []
        self.processes = []
        for rank in range(RANKS):
            ours, theirs = context.Pipe()
            arguments = (backend, rank, theirs, begins, environment or {})
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        port = self.pipes[0].recv()
        for pipe in self.pipes[1:]:
            pipe.send(port)
        self.begun = self.gather(_BEGIN)

    def gather(self, seconds: float) -> Outcome:
        """The worst outcome of the ranks."""
        until, found, waiting = time.monotonic() + seconds, [], list(self.pipes)
        while waiting:
            ready = multiprocessing.connection.wait(waiting, max(until - time.monotonic(), 0))
            if not ready:
                ranks = ", ".join(str(self.pipes.index(pipe)) for pipe in waiting)
                return HANG, f"not over after {seconds:g} s: ranks {ranks}"
            for pipe in ready:
                waiting.remove(pipe)
                try:
                    found.append(pipe.recv())
                except (EOFError, ConnectionError):
                    process = self.processes[self.pipes.index(pipe)]
                    process.join(5)
                    code = process.exitcode
                    how = signal.Signals(-code).name if code and code < 0 else f"exit code {code}"
                    return CRASH, f"rank {self.pipes.index(pipe)} ended: {how}"
        # Always the same one of several texts of one kind.
        return max(sorted(found), key=lambda one: KINDS.index(one[0]))

    def run(self, case: Case) -> Outcome:
        for pipe in self.pipes:
            with contextlib.suppress(BrokenPipeError):
                pipe.send(case.name)
        return self.gather(case.seconds)

    def show(self) -> None:
        """Print the stacks of the ranks on standard error."""
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)
                time.sleep(0.2)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        for pipe in self.pipes:
            pipe.close()


def _serve(
    backend: str,
    rank: int,
    pipe: multiprocessing.connection.Connection,
    begins: bool,
    more: dict[str, str],
) -> None:
    warnings.simplefilter("ignore")
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
    } | more
    if more:
        dist.set_debug_level_from_env()
    if backend == "netsum":
        import netsum.torch  # noqa: F401 registers it
    port = 0 if rank == 0 else pipe.recv()
    here.store = dist.TCPStore(
        "127.0.0.1", port, None, rank == 0, timedelta(seconds=30), wait_for_workers=False
    )
    here.backend, here.rank = backend, rank
    if rank == 0:
        pipe.send(here.store.port)
    begin = Case(
        "", "begin", (lambda: here.begin(timeout=_GROUP)) if begins else lambda: None, since=(1, 13)
    )
    pipe.send(outcome(begin))
    while True:
        try:
            name = pipe.recv()
        except EOFError:
            os._exit(0)
        random.seed(0)
        pipe.send(outcome(CASES[name]))


def run(
    backend: str, names: Iterable[str], verbose: bool = False
) -> Iterator[tuple[str, Outcome, float]]:
    """The outcome of each case, and how long it took.

    A case that hangs or crashes in ranks that have run other cases runs again in fresh ranks.
    That second outcome counts.
    """
    for module in _USED:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    ranks: Ranks | None = None
    environment = dict(os.environ)
    folder = tempfile.mkdtemp()
    for name in [name for name in os.environ if name.startswith("NETSUM_")]:
        del os.environ[name]
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    if backend == "gloo":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        for name in names:
            case, began = CASES[name], time.monotonic()
            if case.alone or case.begins:
                found = _apart(backend, case, verbose)
            else:
                if ranks is None:
                    ranks = Ranks(backend)
                found = ranks.run(case) if ranks.begun[0] == RIGHT else ranks.begun
                if found[0] not in (RIGHT, SKIPPED) and _left(ranks, found, verbose):
                    ranks.end()
                    ranks = None
                if found[0] in (HANG, CRASH):
                    before, found = found, _apart(backend, case, verbose)
                    if found[0] != before[0]:
                        print(f"{name}: among others {before}, alone {found}", file=sys.stderr)
            yield name, found, time.monotonic() - began
    finally:
        if ranks is not None:
            ranks.end()
        os.environ.clear()
        os.environ |= environment
        tempfile.tempdir = None
        shutil.rmtree(folder, ignore_errors=True)


def _left(ranks: Ranks, found: Outcome, verbose: bool) -> bool:
    """Whether a case has left its ranks unusable for others."""
    if found[0] in (HANG, CRASH):
        if verbose:
            ranks.show()
        return True
    return ranks.run(CASES["all_reduce, SUM of float32"])[0] != RIGHT


def _apart(backend: str, case: Case, verbose: bool) -> Outcome:
    ranks = Ranks(backend, not case.begins, case.environment)
    try:
        found = ranks.run(case) if ranks.begun[0] == RIGHT else ranks.begun
        if verbose and found[0] in (HANG, WRONG):
            ranks.show()
        return found
    finally:
        ranks.end()
