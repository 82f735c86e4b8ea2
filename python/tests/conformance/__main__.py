"""The command."""

import argparse
import sys
import time

from . import table
from .runner import run


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m conformance")
    parser.add_argument("--backend", choices=table.BACKENDS, help="run one alone")
    parser.add_argument("--case", default="", help="run cases whose names have this in them")
    parser.add_argument(
        "--write", action="store_true", help="write the table, or a backend's column"
    )
    parser.add_argument("--self-check", action="store_true", help="run the runner's own cases")
    parser.add_argument("--verbose", action="store_true", help="show where ranks hang")
    options = parser.parse_args()
    if options.write and options.case:
        parser.error("--write needs all cases")
    if options.self_check:
        from . import outcomes  # noqa: F401 its cases
    names = [name for name in table.CASES if options.case in name]
    found = {backend: {} for backend in table.BACKENDS}
    for backend in [options.backend] if options.backend else table.BACKENDS:
        began = time.monotonic()
        for name, outcome, seconds in run(backend, names, options.verbose):
            found[backend][name] = table.cell(outcome)
            print("\t".join([backend, name, found[backend][name], f"{seconds:.2f}"]), flush=True)
        print(f"{backend}: {time.monotonic() - began:.0f} s", file=sys.stderr)
    if options.write:
        table.write(found)


main()
