"""Cases, and how one comes to its outcome."""

import dataclasses
import re
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

TORCH = tuple(int(number) for number in re.findall(r"\d+", torch.__version__)[:2])

#: Cases need this version or later. The table is of 2.15, with which they were tried.
OLDEST = (2, 7)

#: From good to bad. The outcome of a case is the worst of its ranks'.
RIGHT, SKIPPED, REFUSED, DIFFERS, WRONG, HANG, CRASH = KINDS = (
    "right",
    "skipped",
    "refused",
    "differs",
    "wrong",
    "hang",
    "crash",
)
#: Errors that a bug raises, not a check: they do not name the caller's mistake.
ACCIDENTS = ("AttributeError", "IndexError", "KeyError", "NameError", "UnboundLocalError")
#: The number of processes.
RANKS = 4


class Wrong(Exception):
    """A result is not what it must be."""


class Skipped(Exception):
    """The text says why."""


@dataclasses.dataclass
class Case:
    topic: str
    name: str
    call: Callable[[], None]
    #: The first version of PyTorch that has the calls of the case.
    since: tuple[int, int] = OLDEST
    #: How long it may take.
    seconds: float = 90
    #: Whether it leaves ranks behind that other cases cannot use.
    alone: bool = False
    #: Whether it begins the default group by itself.
    begins: bool = False
    #: Why netsum's numbers may differ from Gloo's: the book says so, too.
    differs: str = ""
    environment: dict[str, str] = dataclasses.field(default_factory=dict)


CASES: dict[str, Case] = {}


def topic(title: str) -> Callable[..., Callable]:
    """The decorator for cases of one topic."""

    def case(name: str, **more) -> Callable:
        def add(call: Callable[[], None]) -> Callable[[], None]:
            if name in CASES:
                raise ValueError(f"two cases are named {name}")
            CASES[name] = Case(title, name, call, **more)
            return call

        return add

    return case


@dataclasses.dataclass
class Place:
    """The place of this rank, for cases that begin a group by themselves."""

    backend: str = ""
    rank: int = 0
    store: "dist.Store | None" = None
    groups: int = 0
    #: Works that must outlive their case.
    kept: list[object] = dataclasses.field(default_factory=list)

    def begin(self, backend: str | None = None, ranks: int = RANKS, **more) -> None:
        """Begin the default group, over a part of the store that no other has."""
        self.groups += 1
        store = dist.PrefixStore(f"group {self.groups}", self.store)
        name = backend or self.backend
        dist.init_process_group(name, store=store, rank=self.rank, world_size=ranks, **more)


here = Place()


def equal(got: torch.Tensor, expected: torch.Tensor, what: str = "result") -> None:
    """The same type, shape and numbers."""
    if got.dtype != expected.dtype or got.shape != expected.shape:
        raise Wrong(f"{what}: {form(got)}, not {form(expected)}")
    if not torch.equal(got, expected):
        raise Wrong(f"{what}: {unlike(got, expected, got != expected)}")


def close(got: torch.Tensor, expected: torch.Tensor, what: str = "result", **more) -> None:
    if got.shape != expected.shape:
        raise Wrong(f"{what}: {form(got)}, not {form(expected)}")
    more = {"rtol": 1e-4, "atol": 1e-6} | more
    near = torch.isclose(got.float(), expected.float(), **more)
    if not near.all():
        raise Wrong(f"{what}: {unlike(got, expected, ~near)}")


def same(got: object, expected: object, what: str = "result") -> None:
    if got != expected:
        raise Wrong(f"{what}: {got}, not {expected}")


def all_equal(got: Iterable[torch.Tensor], expected: Iterable[torch.Tensor]) -> None:
    for number, (one, other) in enumerate(zip(got, expected, strict=True)):
        equal(one, other, f"tensor {number}")


def form(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} of {tuple(tensor.shape)}"


def unlike(got: torch.Tensor, expected: torch.Tensor, where: torch.Tensor) -> str:
    """The first element that is not right."""
    first = int(where.flatten().nonzero()[0])
    one, other = (x.detach().flatten()[first].item() for x in (got, expected))
    return (
        f"element {first} is {one:g}, not {other:g}"
        if isinstance(one, float)
        else f"element {first} is {one}, not {other}"
    )


def mistake(call: Callable, *arguments, **more) -> None:
    """Make a call that must be refused: the error is the case's outcome."""
    call(*arguments, **more)
    raise Wrong("the mistake was taken, without an error")


def outcome(case: Case) -> tuple[str, str]:
    """The kind of this rank's outcome, and a text."""
    if case.since > TORCH:
        return SKIPPED, f"needs PyTorch {case.since[0]}.{case.since[1]}"
    torch.manual_seed(0)
    try:
        case.call()
    except Wrong as error:
        if case.differs and here.backend == "netsum":
            return DIFFERS, case.differs
        return WRONG, words(error)
    except Skipped as error:
        return SKIPPED, words(error)
    except Exception as error:  # noqa: BLE001 every error is an outcome
        kind = type(error).__name__
        named = kind not in ACCIDENTS and str(error)
        return (REFUSED if named else WRONG), f"{kind}: {words(error)}"
    return RIGHT, ""


def words(error: Exception) -> str:
    """The first words of an error, without addresses and places in source files."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = re.sub(r"\[[^\]]*\.(cc|cpp|h|py):\d+\] *", "", " ".join(lines))
    text = re.sub(r"\b\d+\.\d+\.\d+\.\d+(:\d+)?", "ADDRESS", text)
    text = re.sub(r"0x[0-9a-f]+", "0x", text).replace("|", "/").replace("\t", " ")
    return text if len(text) <= 110 else text[:107].rsplit(" ", 1)[0] + " ..."
