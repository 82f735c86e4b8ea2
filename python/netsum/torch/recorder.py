"""A flight recorder of this process's collectives, in the form of PyTorch's own.

PyTorch's `torchfrtrace` compares the files of all ranks. Beside it: ranges for `torch.profiler`,
and a log of each collective with TORCH_DISTRIBUTED_DEBUG=DETAIL.
"""

import collections
import itertools
import logging
import os
import pickle
import sys
import threading
import time
from collections.abc import Sequence
from types import CodeType

import torch
import torch.distributed as dist

from .._netsum import __version__
from ..errors import ConfigError, MismatchError, RankDiedError, RankLeftError

log = logging.getLogger("netsum.torch")

#: The form of PyTorch's files: fields of an entry, and their meaning.
_VERSION = "2.10"
_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_FILES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
#: Entries, unless one of _SIZES is set.
_DEFAULT_SIZE = 2000
#: Callers of a collective that are recorded.
_FRAMES = 10
#: After these errors, a collective hangs at some rank.
_HANGS = (TimeoutError, RankDiedError, RankLeftError, MismatchError)


def _set(names: Sequence[str]) -> "tuple[str, str] | None":
    return next(((name, text) for name in names if (text := os.environ.get(name))), None)


class Group:
    """A group's ranks, and how many collectives it has called and completed."""

    def __init__(self, number: int, rank: int, ranks: Sequence[int]):
        self.number, self.rank, self.ranks = number, rank, list(ranks)
        # PyTorch names a group after it has created it.
        self.name, self.text = "0", "default_pg"
        self.called = self.completed = 0
        self.is_written = False


class Entry:
    """A collective. It ends when its results are there, or with an error."""

    __slots__ = (
        "number", "group", "sequence", "kind", "inputs", "outputs", "timeout", "thread", "frames",
        "created", "started", "completed", "error", "_range",
    )  # fmt: skip

    def __init__(
        self,
        group: Group,
        kind: str,
        inputs: "Sequence[torch.Tensor]",
        outputs: "Sequence[torch.Tensor]",
        timeout: float,
    ):
        self.group, self.kind, self.timeout = group, kind, timeout
        group.called += 1
        self.sequence, self.created = group.called, time.time_ns()
        self.inputs = [(tensor.shape, tensor.dtype) for tensor in inputs]
        is_same = outputs is inputs
        self.outputs = self.inputs if is_same else [(t.shape, t.dtype) for t in outputs]
        self.thread = threading.current_thread().name
        self.started: int | None = None
        self.completed: int | None = None
        #: The error's text, and the rank that it names.
        self.error: tuple[str, int | None] | None = None
        self.frames: list[tuple[CodeType, int]] = []
        self._range: torch.autograd.profiler.record_function | None = None
        if torch.autograd._profiler_enabled():
            self._range = torch.autograd.profiler.record_function(f"netsum:{kind.split()[0]}")
            self._range.__enter__()
        if log.isEnabledFor(logging.DEBUG) and dist.get_debug_level() == dist.DebugLevel.DETAIL:
            log.debug(
                "rank %d: %s number %d of group %s: input %s, output %s",
                *(group.rank, kind, self.sequence, group.name, _listed(self.inputs)),
                _listed(self.outputs),
            )

    def follows(self, future: torch.futures.Future) -> None:
        """The engine has it, and the future completes with it."""
        self.started = time.time_ns()
        if self._range is not None:
            self._range._call_end_callbacks_on_future(future)
            self._range = None

    def done(self) -> None:
        self.completed = time.time_ns()
        self.group.completed = max(self.group.completed, self.sequence)

    def failed(self, error: BaseException) -> None:
        """Writes the file, if the operation hangs at some rank."""
        # The error itself would keep the caller's frames, and their tensors.
        self.error = str(error), getattr(error, "rank", None)
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
        if isinstance(error, _HANGS) and not self.group.is_written and (file := _set(_FILES)):
            self.group.is_written = True
            path = f"{file[1]}{self.group.rank}"
            try:
                dump_flight_recorder(path)
            except OSError as why:
                log.warning("rank %d: flight recorder: %s: %s", self.group.rank, path, why)

    def as_dict(self, library: str) -> dict:
        is_over = self.completed is not None
        error = self.error
        sizes = {}
        for name, tensors in (("input", self.inputs), ("output", self.outputs)):
            sizes[f"{name}_sizes"] = [list(shape) for shape, _ in tensors]
            sizes[f"{name}_dtypes"] = [_dtype(dtype) for _, dtype in tensors]
        frames = [
            {"name": code.co_qualname, "filename": code.co_filename, "line": _line(code, at)}
            for code, at in self.frames
        ]
        fields = {
            "record_id": self.number,
            "pg_id": self.group.number,
            "process_group": (self.group.name, self.group.text),
            "thread_name": self.thread,
            "collective_seq_id": self.sequence,
            "p2p_seq_id": 0,
            "op_id": self.sequence,
            # Without the details of a call that Gloo will handle.
            "profiling_name": f"{library}:{self.kind.split()[0]}",
            "time_created_ns": self.created,
            **sizes,
            "state": "completed" if is_over else "started" if self.started else "scheduled",
            "time_discovered_started_ns": self.started,
            "time_discovered_completed_ns": self.completed,
            "retired": is_over or error is not None,
            "timeout_ms": round(self.timeout * 1000),
            "is_p2p": False,
            "frames": frames,
        }
        if self.completed is not None and self.started is not None:
            fields["duration_ms"] = (self.completed - self.started) / 1e6
        if error is not None:
            fields["error"], fields["missing_rank"] = error
        return fields


class _Recorder:
    """The last entries of all groups."""

    def __init__(self) -> None:
        #: `None` before the first group, and if it is turned off.
        self.entries: collections.deque[Entry] | None = None
        self.groups: list[Group] = []
        self.numbers = itertools.count()

    def group(self, rank: int, ranks: Sequence[int]) -> Group:
        if not self.groups and (size := _size()):
            self.entries = collections.deque(maxlen=size)
        self.groups.append(Group(len(self.groups), rank, ranks))
        return self.groups[-1]

    def put(self, entry: Entry) -> None:
        if self.entries is None:
            return
        frame = sys._getframe(2)
        while frame is not None and len(entry.frames) < _FRAMES:
            entry.frames.append((frame.f_code, frame.f_lasti))
            frame = frame.f_back
        entry.number = next(self.numbers)
        self.entries.append(entry)


recorder = _Recorder()


def _size() -> int:
    name, text = _set(_SIZES) or ("", str(_DEFAULT_SIZE))
    if not text.isdecimal():
        raise ConfigError(f"{name}={text}: must be a number of entries, 0 for no flight recorder")
    return int(text)


def begun(
    group: Group,
    kind: str,
    inputs: "Sequence[torch.Tensor]",
    outputs: "Sequence[torch.Tensor]",
    timeout: float,
) -> Entry:
    """A collective that is about to start; `timeout` in seconds."""
    entry = Entry(group, kind, inputs, outputs, timeout)
    recorder.put(entry)
    return entry


def dump_flight_recorder(path: "str | os.PathLike[str] | None" = None) -> dict:
    """This process's last collectives in netsum's groups; written to `path`, if that is given.

    The fields are those of PyTorch's flight recorder. A collective that failed also has its `error`
    and the `missing_rank`, if that is known. In the file, names begin with "nccl:", because
    `torchfrtrace` reads no others.
    """
    if path is not None:
        with open(path, "wb") as file:
            file.write(pickle.dumps(_dump("nccl")))
    return _dump("netsum")


def _dump(library: str) -> dict:
    groups = recorder.groups
    entries = list(recorder.entries or ())
    return {
        "version": _VERSION,
        "comm_lib_version": f"netsum {__version__}",
        "pg_config": {
            group.name: {"name": group.name, "desc": group.text, "ranks": str(group.ranks)}
            for group in groups
        },
        "pg_status": {
            str(group.number): {
                "last_enqueued_collective": group.called,
                "last_started_collective": group.called,
                "last_completed_collective": group.completed,
            }
            for group in groups
        },
        "entries": [entry.as_dict(library) for entry in entries],
    }


def _line(code: CodeType, at: int) -> int:
    lines = (line for first, end, line in code.co_lines() if first <= at < end)
    return next(lines, None) or code.co_firstlineno


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _listed(tensors: "Sequence[tuple[torch.Size, torch.dtype]]") -> str:
    return ", ".join(f"{_dtype(dtype)}{list(shape)}" for shape, dtype in tensors) or "-"
