"""The ranks of a job on a box: python box.py NAME. They wait for lines on standard input."""

import os
import signal
import sys
import threading
import time
import warnings

import numpy

import netsum


def told(word):
    print(word, flush=True)
    sys.stdin.readline()


def sums():
    """All collectives through the box, and the fallback when the box has ended."""
    warnings.simplefilter("always")
    comm = netsum.init(timeout=5)
    ranks, others = comm.ranks, comm.ranks * (comm.ranks - 1) // 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for dtype in (numpy.float32, numpy.int32):
            x = numpy.arange(300_000, dtype=dtype) + comm.rank
            report = comm.all_reduce(x)
            assert report.mode == "box" and report.verified > 0, report
            assert (x == numpy.arange(300_000, dtype=dtype) * ranks + others).all(), x
        arrays = [numpy.full(20_000, comm.rank + i, dtype=numpy.float32) for i in range(30)]
        works = [comm.all_reduce_async(x, "avg") for x in arrays]
        assert all(work.wait().mode == "box" for work in works)
        assert all((x == i + others / ranks).all() for i, x in enumerate(arrays))
        out = numpy.zeros(ranks * 5000, dtype=numpy.int64)
        assert comm.all_gather(out, numpy.arange(5000) + comm.rank * 5000).mode == "box"
        assert (out == numpy.arange(ranks * 5000)).all()
        assert comm.broadcast(out, 2).mode == "box"
        part = numpy.zeros(9000, dtype=numpy.float32)
        assert (
            comm.reduce_scatter(part, numpy.arange(ranks * 9000, dtype=numpy.float32)).mode == "box"
        )
        assert (part == (numpy.arange(9000) + 9000 * comm.rank) * ranks).all()
        for dtype, op, expected in (
            ("f8", "min", 0),
            ("f4", "max", ranks - 1),
            ("f8", "avg", others / ranks),
            ("i8", "sum", others),
            ("u1", "sum", others),
            ("i4", "bor", 1 if ranks == 2 else 3),
            ("?", "band", False),
        ):
            x = numpy.full(50_000, comm.rank, dtype=dtype)
            assert comm.all_reduce(x, op).mode == "box" and (x == expected).all(), (dtype, op, x)
    with comm.split(comm.rank % 2, -comm.rank) as part:
        x = numpy.full(50_000, comm.rank)
        assert part.all_reduce(x).mode == "box"
        pairs = [r for r in range(ranks) if r % 2 == comm.rank % 2]
        assert (x == sum(pairs)).all() and part.rank == pairs[::-1].index(comm.rank), (x, part)
    assert comm.split(None) is None
    statistics = comm.statistics()
    assert comm.mode == "box" and statistics["fallbacks"] == statistics["ring_bytes"] == 0, (
        statistics
    )
    told("summed")
    with warnings.catch_warnings(record=True) as caught:
        x = numpy.full(100_000, comm.rank, dtype=numpy.float32)
        report = comm.all_reduce(x)
        comm.all_reduce(numpy.ones(3, dtype=numpy.float32))
    assert report.mode == "ring" and (x == others).all(), report
    assert [w.category for w in caught] == [netsum.NoBoxWarning], caught
    assert "netsum diagnose" in str(caught[0].message) and caught[0].filename == __file__, caught[0]
    print("fell back", flush=True)


def reconnects():
    """Operations in flight without a pause, while the ranks reconnect three times."""
    comm = netsum.init(timeout=5)
    arrays = [numpy.empty(5000, dtype=numpy.int32) for _ in range(8)]
    for times in range(1, 4):
        print("ready", flush=True)
        reconnected = 0
        # All have the same sum, so all end after the same operation.
        while reconnected < times * comm.ranks:
            for x in arrays:
                x.fill(comm.rank)
            works = []
            for x in arrays:
                works.append(comm.all_reduce_async(x))
                # All refuse it, and it keeps its place among the others over all connections.
                try:
                    comm.all_reduce(numpy.zeros(3), "bxor")
                    raise AssertionError("floats have no bitwise operations")
                except netsum.ArgumentError:
                    pass
            for work, x in zip(works, arrays):
                work.wait()
                assert (x == comm.ranks * (comm.ranks - 1) // 2).all(), x
            flag = numpy.array([min(comm.statistics()["reconnects"], times)], dtype=numpy.int32)
            comm.all_reduce(flag)
            reconnected = flag[0]
    print("reconnected", flush=True)


def soon(call, error):
    """Calls a function that must raise an error soon, before the reconnect ends."""
    begun = time.monotonic()
    try:
        call()
    except error:
        took = time.monotonic() - begun
        assert took < 5, took
        return True
    return False


def held():
    """Waits end in time, or by Ctrl-C, if the box's daemon is stopped during a reconnect."""
    # Tests that run in the background have SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    comm = netsum.init(timeout=20)
    arrays = [numpy.ones(100, dtype=numpy.int32) for _ in range(3)]
    told("ready")
    comm.all_reduce(arrays[0])
    begun = time.monotonic()
    work = comm.all_reduce_async(arrays[1])
    assert soon(lambda: work.wait(timeout=0.1), TimeoutError)
    assert not work.is_done() and comm.mode == "box" and time.monotonic() - begun < 5, (
        time.monotonic() - begun
    )
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    assert soon(lambda: comm.all_reduce(arrays[2]), KeyboardInterrupt)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    assert soon(work.wait, KeyboardInterrupt)
    told("held")
    assert work.wait().mode == "box" and comm.barrier().mode == "box"
    assert (arrays[1] == comm.ranks).all() and (arrays[2] == comm.ranks).all(), arrays
    assert comm.statistics()["reconnects"] == 1, comm.statistics()
    print("reconnected", flush=True)


def refused_alone():
    """Only rank 2 refuses a call, and continues."""
    comm = netsum.init(timeout=5)
    ones = [numpy.ones(5000, dtype=numpy.float32) for _ in range(3)]
    assert comm.all_reduce(ones[0]).mode == "box"
    wrong = numpy.ones(5000, dtype=complex)
    for times in range(2):
        if times == 0 or comm.rank == 2:
            try:
                comm.all_reduce(wrong)
            except netsum.ArgumentError:
                pass
        try:
            comm.all_reduce(ones[times + 1])
            assert times == 0 and (ones[1] == comm.ranks).all(), ones
        except netsum.MismatchError as error:
            assert times == 1
            print(f"MismatchError: {error}", flush=True)


def refused():
    """A job that says no: the text that a user sees."""
    try:
        netsum.init()
        print("joined", flush=True)
    except netsum.Error as error:
        print(f"{type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
