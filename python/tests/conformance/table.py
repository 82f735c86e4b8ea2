"""The table of cases and their outcomes: as a file of tab-separated text."""

import importlib
import pathlib

from .case import CASES, CRASH, HANG, RIGHT, TORCH, WRONG

BACKENDS = ("gloo", "netsum")
#: The modules of the cases, in the table's order.
TOPICS = (
    "reductions",
    "moves",
    "point_to_point",
    "groups",
    "works",
    "errors",
    "ddp",
    "sharded",
    "functional",
)
for module in TOPICS:
    importlib.import_module(f".{module}", __package__)
BAD = (WRONG, HANG, CRASH)
NOT_RUN = "skipped: not run yet"
FILE = pathlib.Path(__file__).with_name("table.tsv")


def cell(outcome: tuple[str, str]) -> str:
    kind, text = outcome
    return kind if kind == RIGHT else f"{kind}: {text}"


def write(found: dict[str, dict[str, str]]) -> None:
    """Write the columns that were found; the others stay."""
    before = read()[1] if FILE.exists() else {}
    rows = [f"PyTorch {TORCH[0]}.{TORCH[1]}"]
    for name, case in CASES.items():
        cells = [
            found[backend].get(name) or before.get(name, {}).get(backend, NOT_RUN)
            for backend in BACKENDS
        ]
        rows.append("\t".join([case.topic, name, *cells]))
    FILE.write_text("\n".join(rows) + "\n")


def read() -> tuple[tuple[int, ...], dict[str, dict[str, str]]]:
    """The version of PyTorch, and each case's outcome on each backend."""
    first, *rows = FILE.read_text().splitlines()
    cells = [row.split("\t") for row in rows]
    version = tuple(int(number) for number in first.removeprefix("PyTorch ").split("."))
    return version, {name: dict(zip(BACKENDS, found, strict=True)) for _, name, *found in cells}
