"""PyTorch's own behaviour over the backend, case by case, as the committed table says."""

import importlib.util
import os
import re
import sys
import unittest

from ranks import launched

TORCH = importlib.util.find_spec("torch") is not None
VERSION = OLDEST = (0, 0)
if TORCH:
    from conformance import table
    from conformance.case import OLDEST
    from conformance.case import TORCH as VERSION

#: A run takes about 90 s on one core that does nothing else.
SECONDS = 1200
#: Cases that are not right yet, and why. One that becomes right must leave this list.
OPEN = {
    "recv into a tensor that is smaller than what is sent": "Gloo carries it, and waits or aborts",
}


def run(*options):
    """The command's lines, one a case: backend, case, outcome, seconds."""
    command = [sys.executable, "-m", "conformance", "--backend", "netsum", *options]
    out = launched(command, dict(os.environ), timeout=SECONDS)
    return [line.split("\t") for line in out.splitlines() if line.startswith("netsum\t")]


def plain(text):
    """An outcome without numbers and without calls that differ, which are named in any order."""
    return re.sub(r"\d+", "N", text).split(": rank N calls for")[0]


@unittest.skipUnless(
    TORCH, "no PyTorch: Debian's python3-torch, or `cargo xtask test --torch pypi`"
)
@unittest.skipIf(VERSION < OLDEST, f"cases need PyTorch {OLDEST[0]}.{OLDEST[1]} or later")
class Conformance(unittest.TestCase):
    def test_no_case_is_wrong_hangs_or_crashes_and_the_table_is_true(self):
        lines = run()
        self.assertEqual([name for _, name, _, _ in lines], list(table.CASES))
        found = {name: outcome for _, name, outcome, _ in lines}
        bad = {name: text for name, text in found.items() if text.startswith(table.BAD)}
        self.assertEqual(set(bad), set(OPEN), f"cases that are wrong, hang or crash: {bad}")
        version, expected = table.read()
        if version != VERSION:
            self.skipTest(f"all is well; the table is of PyTorch {version[0]}.{version[1]}")
        changed = {
            name: f"{text}; the table: {expected.get(name, {}).get('netsum')}"
            for name, text in found.items()
            if name not in OPEN and plain(expected.get(name, {}).get("netsum", "")) != plain(text)
        }
        self.assertEqual(changed, {}, "python -m conformance --write brings the table up to date")
        self.assertEqual(list(expected), list(found))

    def test_a_wrong_result_a_hang_and_a_crash_are_found(self):
        lines = run("--case", "outcome: ", "--self-check")
        self.assertEqual(
            [(name, outcome) for _, name, outcome, _ in lines],
            [
                ("outcome: right", "right"),
                ("outcome: wrong", "wrong: result: element 0 is 1, not 2"),
                ("outcome: refused", "refused: ValueError: the reason"),
                ("outcome: an accident", "wrong: KeyError: 'it'"),
                ("outcome: hang", "hang: not over after 2 s: ranks 1"),
                ("outcome: crash", "crash: rank 1 ended: SIGABRT"),
                ("outcome: right after that", "right"),
            ],
        )


if __name__ == "__main__":
    unittest.main()
