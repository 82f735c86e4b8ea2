"""Starts ranks of a case on loopback."""

import os
import pathlib
import signal
import subprocess
import sys
import tempfile

CASES = pathlib.Path(__file__).with_name("cases.py")


def addresses(count):
    """Loopback addresses that no other test of this machine has."""
    pid = os.getpid()
    return [f"127.{64 + pid % 64}.{pid // 64 % 256}.{rank + 1}" for rank in range(count)]


def start(case, rank, ranks=2, **more):
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("NETSUM_")
    }
    environment |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "NETSUM_PEERS": ",".join(addresses(ranks)),
    }
    return subprocess.Popen(
        [sys.executable, str(CASES), case],
        env=environment | more,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(case, ranks=2, **more):
    """Runs ranks, which must all succeed. Returns their outputs."""
    started = [start(case, rank, ranks, **more) for rank in range(ranks)]
    try:
        ended = [(rank, *rank.communicate(timeout=60)) for rank in started]
    finally:
        for rank in started:
            rank.kill()
    for number, (rank, out, err) in enumerate(ended):
        if rank.returncode != 0:
            raise AssertionError(f"{case}, rank {number}: {rank.returncode}\n{out}{err}")
    return [out for _, out, _ in ended]


def launched(command, environment, timeout=180):
    """Runs a launcher, and returns the output. All ranks must succeed.

    Their temporary files are removed with the folder.
    """
    with tempfile.TemporaryDirectory() as folder:
        started = subprocess.Popen(
            command,
            env=environment | {"OMP_NUM_THREADS": "1", "TMPDIR": folder},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            out, err = started.communicate(timeout=timeout)
        finally:
            # Also the ranks, if the launcher has not ended them.
            try:
                os.killpg(started.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            started.wait()
    if started.returncode != 0:
        raise AssertionError(f"{command}: {started.returncode}\n{out}{err}")
    return out
