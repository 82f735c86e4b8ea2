"""Test cases for ranks: python cases.py NAME."""

import asyncio
import ctypes
import gc
import os
import signal
import socket
import sys
import threading
import time

import numpy

import netsum


def raises(kind, word, call, *arguments, **more):
    try:
        call(*arguments, **more)
    except kind as error:
        assert word in str(error), error
        return error
    raise AssertionError(f"no {kind.__name__}")


def sums():
    with netsum.init() as comm:
        others = comm.ranks * (comm.ranks - 1) // 2
        for length in (0, 1, 7, 100_003):
            for dtype in (numpy.float32, numpy.int32, numpy.uint32):
                x = numpy.full(length, comm.rank + 1, dtype=dtype)
                where = x.ctypes.data
                report = comm.all_reduce(x)
                assert x.ctypes.data == where and (x == others + comm.ranks).all(), x
                assert report.mode == "ring" and report.elapsed > 0, report
        x = numpy.full((3, 5), comm.rank, dtype=numpy.float32)
        comm.all_reduce(x, "avg")
        assert (x == numpy.float32(others) / numpy.float32(comm.ranks)).all(), x
        x = numpy.arange(24, dtype=numpy.int32).reshape(4, 6)
        comm.all_reduce(x[1:3])  # contiguous
        assert (
            (x[1:3].ravel() == numpy.arange(6, 18) * comm.ranks).all()
            and x[0, 1] == 1
            and x[3, 5] == 23
        )
        many = [numpy.full(n, comm.rank + n, dtype=numpy.float32) for n in (1, 40_000, 0, 3)]
        comm.all_reduce(many)
        assert all((x == others + comm.ranks * len(x)).all() for x in many)
        array = memoryview(bytearray(8)).cast("i")
        array[1] = 2
        comm.all_reduce(array)
        assert array.tolist() == [0, 2 * comm.ranks]
        assert comm.statistics()["all_reduces"] == 16, comm.statistics()
        assert (
            comm.transport == "UDP"
            and repr(comm) == f"<netsum.Communicator: rank {comm.rank} of {comm.ranks}>"
        )
    raises(netsum.ClosedError, "closed", comm.all_reduce, x)
    comm.close()


OPERATORS = {
    "sum": numpy.add,
    "min": numpy.minimum,
    "max": numpy.maximum,
    "prod": numpy.multiply,
    "band": numpy.bitwise_and,
    "bor": numpy.bitwise_or,
    "bxor": numpy.bitwise_xor,
}


def operators():
    """All operators on all dtypes, against numpy."""
    random = numpy.random.default_rng(7)
    with netsum.init() as comm, numpy.errstate(all="ignore"):
        ranks, rank = comm.ranks, comm.rank
        for dtype in map(numpy.dtype, "i1 u1 i2 u2 i4 u4 i8 u8 f4 f8 ?".split()):
            for op, by in OPERATORS.items():
                if dtype.kind == "f" and op.startswith("b"):
                    continue
                given = random.bytes(ranks * 3 * ranks * dtype.itemsize)
                if dtype.kind == "f":
                    whole = random.integers(-9, 9, (ranks, 3 * ranks)).astype(dtype)
                elif dtype.kind == "b":
                    whole = random.integers(0, 4, (ranks, 3 * ranks)) > 0
                else:
                    whole = numpy.frombuffer(given, dtype).reshape(ranks, 3 * ranks)
                expected = by.reduce(whole, axis=0, dtype=dtype)
                x = whole[rank].copy()
                comm.all_reduce(x, op)
                assert (x == expected).all(), (dtype, op, x, expected)
                part = slice(3 * rank, 3 * rank + 3)
                x = whole[rank].copy()
                comm.reduce_scatter(x[part], x, op)
                assert (x[part] == expected[part]).all(), (dtype, op, x, expected)
                many = [whole[rank][:1].copy(), whole[rank][1:].copy()]
                comm.all_reduce(many, op)
                assert (numpy.concatenate(many) == expected).all(), (dtype, op, many, expected)
                x = whole[rank].copy()
                # Older numpy has no booleans in DLPack.
                comm.reduce(x if dtype.kind == "b" else OnlyDLPack(x), 0, op)
                assert (x == (whole[rank] if rank else expected)).all(), (dtype, op, x)
        for dtype in ("f4", "f8"):
            x = [numpy.full(2, rank, dtype), numpy.full(70_000, rank, dtype)]
            comm.all_reduce(x, "avg")
            assert all((y == (ranks - 1) / 2).all() for y in x), x
        x = numpy.full(70_000, 1e-300) * (rank + 1)
        x[1] = numpy.nan if rank == 1 else 1
        comm.all_reduce(x, "max")
        assert numpy.isnan(x[1]) and (x[2:] == 1e-300 * ranks).all(), x


def moves():
    with netsum.init() as comm:
        for root in range(comm.ranks):
            x = numpy.arange(5, dtype=numpy.float64) + comm.rank * 10
            comm.broadcast(x, root)
            assert (x == numpy.arange(5) + root * 10).all(), x
            x = numpy.full(3, comm.rank + 1, dtype=numpy.int32)
            comm.reduce(x, root)
            assert (
                x == (comm.ranks * (comm.ranks + 1) // 2 if comm.rank == root else comm.rank + 1)
            ).all()
        # 3 bytes: no whole lane
        out = numpy.zeros(3 * comm.ranks, dtype=numpy.uint8)
        comm.all_gather(out, bytes([comm.rank, 200, 7]))
        assert out.tolist() == [b for rank in range(comm.ranks) for b in (rank, 200, 7)], out
        out = numpy.zeros(comm.ranks, dtype=numpy.float16)
        comm.all_to_all(out, numpy.arange(comm.ranks, dtype=numpy.float16) + 100 * comm.rank)
        assert out.tolist() == [100 * rank + comm.rank for rank in range(comm.ranks)], out
        part = numpy.zeros(1000, dtype=numpy.float32)
        whole = numpy.arange(1000 * comm.ranks, dtype=numpy.float32)
        comm.reduce_scatter(part, whole, "avg")
        assert (part == numpy.arange(1000) + 1000 * comm.rank).all(), part
        assert (whole == numpy.arange(1000 * comm.ranks)).all()


def arguments():
    with netsum.init() as comm:
        f = numpy.float32
        bad = netsum.ArgumentError
        raises(bad, "complex128", comm.all_reduce, numpy.zeros(3, dtype=complex))
        raises(bad, "astype", comm.all_reduce, numpy.zeros(3, dtype=numpy.complex64))
        raises(bad, "not contiguous", comm.all_reduce, numpy.zeros(6, dtype=f)[::2])
        raises(bad, "not contiguous", comm.all_reduce, numpy.zeros((3, 2), dtype=f).T)
        raises(bad, "float32", comm.all_reduce, numpy.zeros(6, dtype=">f4"))
        raises(bad, "read-only", comm.all_reduce, memoryview(bytes(8)).cast("f"))
        raises(
            bad,
            "aligned",
            comm.all_reduce,
            numpy.frombuffer(bytearray(9), dtype=f, offset=1, count=2),
        )
        raises(bad, "neither the buffer protocol nor DLPack", comm.all_reduce, 3.0)
        raises(bad, "a str has neither", comm.all_reduce, ["x", "y"])
        raises(bad, 'op "mean"', comm.all_reduce, numpy.zeros(3, dtype=f), "mean")
        raises(bad, "band of f32", comm.all_reduce, numpy.zeros(3, dtype=f), "band")
        raises(bad, "average", comm.all_reduce, numpy.zeros(3, dtype=numpy.int32), "avg")
        raises(bad, "root 9: 0 to 1", comm.broadcast, numpy.zeros(3), 9)
        raises(bad, "times as long", comm.all_gather, numpy.zeros(3), numpy.zeros(3))
        raises(
            bad,
            "times as long",
            comm.reduce_scatter,
            numpy.zeros(3, dtype=f),
            numpy.zeros(3, dtype=f),
        )
        raises(
            bad,
            "the same dtype",
            comm.reduce_scatter,
            numpy.zeros(3, dtype=f),
            numpy.zeros(6, dtype=numpy.int32),
        )
        raises(
            bad,
            "one operation must have one dtype",
            comm.all_reduce,
            [numpy.zeros(3, dtype=f), numpy.zeros(3, dtype="i4")],
        )
        records = numpy.zeros(3, dtype=[("O", "i4"), ("what", "O")])
        for x in (
            numpy.array(["x", None], dtype=object),
            (ctypes.py_object * 2)("x", None),
            records,
        ):
            raises(bad, "Python objects", comm.broadcast, x, 0)
            raises(bad, "Python objects", comm.all_gather, numpy.zeros(1000), x)
        comm.broadcast(numpy.zeros(3, dtype=[("O", "i4"), ("what", "f4")]), 0)
        x = numpy.ones(100_000, dtype=f)
        raises(bad, "share memory", comm.all_reduce, [x, x])
        raises(bad, "share memory", comm.all_reduce, [x[:10], x[9:20]])
        raises(bad, "share memory", comm.all_gather, x, x[1:50_001])
        comm.all_reduce([x[:10], x[10:]])
        assert (x == comm.ranks).all()
        raises(
            netsum.NonFiniteError, "infinity", comm.all_reduce, numpy.full(5000, numpy.inf, dtype=f)
        )
        assert issubclass(bad, ValueError) and issubclass(bad, netsum.Error)
        comm.barrier()  # it can still be used


class OnlyDLPack:
    """A tensor of a library that numpy stands in for."""

    def __init__(self, array, versions=True, device=(1, 0)):
        self.array, self.versions, self.device = array, versions, device

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **arguments):
        if arguments and not self.versions:
            raise TypeError("unexpected keyword argument")
        return self.array.__dlpack__(**arguments)


def dlpack():
    with netsum.init() as comm:
        for versions in (True, False):
            x = numpy.full(1000, comm.rank + 1, dtype=numpy.float32)
            references = sys.getrefcount(x)
            tensor = OnlyDLPack(x[100:], versions)
            comm.all_reduce(tensor)
            assert (x[100:] == 3).all() and (x[:100] == comm.rank + 1).all(), x
            x = numpy.full(10, comm.rank, dtype=numpy.int64)
            comm.broadcast(OnlyDLPack(x, versions), 1)
            assert (x == 1).all()
            del tensor
        y = numpy.zeros((4, 4), dtype=numpy.float32)
        raises(netsum.ArgumentError, "not contiguous", comm.all_reduce, OnlyDLPack(y[:, :2]))
        raises(netsum.ArgumentError, "complex64", comm.all_reduce, OnlyDLPack(y.astype("c8")))
        for kind, name in ((2, "device kDLCUDA, but"), (99, "type 99"), (14, "x.cpu()")):
            raises(netsum.ArgumentError, name, comm.all_reduce, OnlyDLPack(y, device=(kind, 0)))
        # the tensor goes back to its library
        x = numpy.ones(10, dtype=numpy.float32)
        before = sys.getrefcount(x)
        comm.all_reduce(OnlyDLPack(x))
        comm.barrier()
        gc.collect()
        assert sys.getrefcount(x) == before, (sys.getrefcount(x), before)


def torch():
    import torch

    with netsum.init() as comm:
        x = torch.full((100, 7), comm.rank + 0.5)
        where = x.data_ptr()
        comm.all_reduce(x)
        assert x.data_ptr() == where and (x == 2).all(), x
        comm.all_reduce(x[10:20])
        assert (x[10:20] == 4).all() and (x[:10] == 2).all()
        weights = torch.zeros(3, requires_grad=True)
        raises(netsum.ArgumentError, "detach()", comm.all_reduce, weights)
        comm.all_reduce(weights.detach())
        raises(netsum.ArgumentError, "x.contiguous()", comm.all_reduce, x.T)
        raises(
            netsum.ArgumentError, "complex64", comm.all_reduce, torch.zeros(3, dtype=torch.complex64)
        )
        flags = torch.tensor([comm.rank == 1, False])
        comm.broadcast(flags.view(torch.uint8), 1)  # older ones have no bool in DLPack
        assert flags.tolist() == [True, False], flags
        long = torch.arange(4) * (comm.rank + 1)
        comm.broadcast(long, 1)
        assert long.tolist() == [0, 2, 4, 6], long


def in_flight():
    with netsum.init() as comm:
        arrays = [numpy.full(50_000, i + comm.rank, dtype=numpy.int32) for i in range(100)]
        works = [comm.all_reduce_async(x) for x in arrays]
        reports = [work.wait() for work in works]
        assert all((x == 2 * i + 1).all() for i, x in enumerate(arrays))
        assert all(work.is_done() for work in works) and len(reports) == 100
        assert works[0].wait().elapsed == reports[0].elapsed
        # The array is held while it is in flight, also when nobody else has it or the handle.
        held = bytearray(4)
        view = memoryview(held).cast("i")
        if comm.rank == 0:
            work = comm.all_reduce_async(held_as(view))
            raises(TimeoutError, "in flight", work.wait, 0.05)
            assert not work.is_done() and "in flight" in repr(work)
            del view
            raises(BufferError, "", held.extend, b"more")
            comm_all = comm.all_reduce_async(numpy.ones(3, dtype=numpy.int32))
            del comm_all
            gc.collect()
            comm.all_gather(numpy.zeros(2, dtype=numpy.int8), numpy.zeros(1, dtype=numpy.int8))
            work.wait()
        else:
            time.sleep(2)
            comm.all_reduce(view)
            x = numpy.ones(3, dtype=numpy.int32)
            comm.all_reduce(x)
            assert x.tolist() == [2, 2, 2]
            comm.all_gather(numpy.zeros(2, dtype=numpy.int8), numpy.zeros(1, dtype=numpy.int8))
            del view
        comm.barrier()
        gc.collect()
        held.extend(b"more")
        # A handle that is dropped before it is done gives the buffer back, too.
        held, dropped = bytearray(4), None
        comm.all_reduce_async(memoryview(held).cast("f"))
        comm.barrier()
        gc.collect()
        held.extend(b"more")


class Finalized(bytearray):
    """Looks at its operation when it goes."""

    def __del__(self):
        self.seen.append(self.work[0].is_done())


def finalized():
    with netsum.init() as comm:
        array = Finalized(4)
        array.seen, array.work, seen, works = [], [], None, None
        seen, works = array.seen, array.work
        works.append(comm.all_reduce_async(memoryview(array).cast("i")))
        del array
        works[0].wait()
        assert seen == [True], seen


def overlaps():
    with netsum.init() as comm:
        x = numpy.ones(100, dtype=numpy.float32)
        if comm.rank == 1:
            time.sleep(0.5)
        first = comm.all_reduce_async(x[:60])
        if comm.rank == 0:
            for call, *arrays in [
                (comm.all_reduce_async, x[59:]),
                (comm.all_reduce, x),
                (comm.all_reduce, [x[80:], x[40:50]]),
                (comm.broadcast, x[:1], 1),
                (comm.all_gather, numpy.zeros(4, dtype=numpy.float32), x[:2]),
                (comm.reduce_scatter, x[:2], numpy.zeros(4, dtype=numpy.float32)),
            ]:
                raises(netsum.ArgumentError, "operation 1 of 1 in flight", call, *arrays)
        second = comm.all_reduce_async(x[60:])
        first.wait()
        comm.all_reduce(x[:60])
        second.wait()
        assert (x == [4] * 60 + [2] * 40).all(), x
        # Several operations may read the same array.
        out = [numpy.zeros(200, dtype=numpy.float32) for _ in range(3)]
        [work.wait() for work in [comm.all_gather_async(o, x) for o in out]]
        assert all((o == numpy.tile(x, 2)).all() for o in out)


def held_as(view):
    return view


def coroutines():
    async def main(comm):
        arrays = [numpy.full(30_000, i + comm.rank, dtype=numpy.float32) for i in range(20)]
        works = [comm.all_reduce_async(x) for x in arrays]
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        ticking = asyncio.create_task(tick())
        reports = await asyncio.gather(*map(waited, works))
        assert all((x == 2 * i + 1).all() for i, x in enumerate(arrays)) and len(reports) == 20
        twice = comm.all_reduce_async(numpy.zeros(1_000_000, dtype=numpy.float32))
        await asyncio.wait_for(asyncio.gather(waited(twice), waited(twice)), 20)
        late = (
            comm.all_reduce_async(numpy.zeros(3, dtype=numpy.float32)) if comm.rank == 0 else None
        )
        if late:
            try:
                await asyncio.wait_for(waited(late), 0.1)
                raise AssertionError("nobody else has called")
            except TimeoutError:
                pass
            report = await late
            assert report.elapsed > 0.1
        else:
            await asyncio.sleep(2)
            await comm.all_reduce_async(numpy.zeros(3, dtype=numpy.float32))
        ticking.cancel()
        assert ticks > 10
        error = comm.all_reduce_async(numpy.full(5000, numpy.nan, dtype=numpy.float32))
        try:
            await error
            raise AssertionError("no error")
        except netsum.NonFiniteError:
            pass

    async def waited(work):
        return await work

    with netsum.init() as comm:
        asyncio.run(main(comm))


def threads():
    with netsum.init() as comm:
        counted, stop = 0, False

        def count():
            nonlocal counted
            while not stop:
                counted += 1

        counting = threading.Thread(target=count)
        counting.start()
        if comm.rank == 1:
            time.sleep(1)
        before = counted
        comm.barrier()
        assert comm.rank == 1 or counted - before > 1000, "Python stood still while it waited"
        stop = True
        counting.join()

        def reduce():
            for _ in range(50):
                x = numpy.ones(100, dtype=numpy.int32)
                comm.all_reduce(x)
                assert (x == 2).all()

        # Two wait for one operation, and a third looks.
        x = numpy.ones(1000, dtype=numpy.int32)
        if comm.rank == 1:
            time.sleep(2)
        work, looked = comm.all_reduce_async(x), 0
        waiting = [threading.Thread(target=work.wait) for _ in range(2)]
        [t.start() for t in waiting]
        while not work.is_done():
            looked += 1
            time.sleep(0.001)
        [t.join() for t in waiting]
        assert (x == 2).all() and (comm.rank == 1 or looked > 20), looked

        several = [threading.Thread(target=reduce) for _ in range(4)]
        [t.start() for t in several]
        [t.join() for t in several]


def interrupt():
    with netsum.init() as comm:
        if comm.rank == 0:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
            x, start = numpy.ones(1, dtype=numpy.int32), time.monotonic()
            raises(KeyboardInterrupt, "", comm.all_reduce, x)
            assert time.monotonic() - start < 4
        else:
            time.sleep(6)
            comm.all_reduce(numpy.ones(1, dtype=numpy.int32))
        comm.barrier()


def interrupt_where_all_places_are_taken():
    with netsum.init() as comm:
        arrays = [numpy.ones(1, dtype=numpy.int32) for _ in range(65)]
        if comm.rank == 0:
            works = [comm.all_reduce_async(x) for x in arrays[:64]]
            threading.Timer(2, os.kill, (os.getpid(), signal.SIGINT)).start()
            start, modes = time.monotonic(), []
            looking = threading.Timer(
                0.2, lambda: modes.append((comm.mode, time.monotonic() - start))
            )
            looking.start()
            raises(KeyboardInterrupt, "", comm.all_reduce, arrays[64])
            assert time.monotonic() - start < 4
            looking.join()
            assert modes[0][1] < 1.5, modes
            works.append(comm.all_reduce_async(arrays[64]))
        else:
            time.sleep(6)
            works = [comm.all_reduce_async(x) for x in arrays]
        [work.wait() for work in works]
        assert all(x == 2 for x in arrays)


def looks():
    """Nobody who only looks waits for one who waits."""
    with netsum.init() as comm:
        if comm.rank == 1:
            time.sleep(3)
        waiting = threading.Thread(target=comm.barrier)
        waiting.start()
        time.sleep(0.1)
        took = []
        while comm.rank == 0 and len(took) < 20:
            start = time.monotonic()
            assert comm.mode == "ring" and comm.statistics()["all_reduces"] == 0
            took.append(time.monotonic() - start)
            time.sleep(0.02)
        assert comm.rank == 1 or sorted(took)[10] < 0.05, took
        waiting.join()


def interrupted_at_the_start():
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    raises(KeyboardInterrupt, "", netsum.init)
    assert time.monotonic() - start < 1.5


def fork():
    with netsum.init() as comm:

        def barrier():
            comm.all_reduce_async(numpy.ones(1, dtype=numpy.int32)).wait()

        busy = threading.Thread(target=lambda: [barrier() for _ in range(500)])
        busy.start()
        time.sleep(0.01)
        child = os.fork()
        if child == 0:
            raises(netsum.ForkedError, "spawn", comm.all_reduce, numpy.ones(1, dtype=numpy.int32))
            raises(netsum.ForkedError, "forked", comm.barrier)
            comm.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        busy.join()
        comm.barrier()


def fork_keeps_no_port():
    comm = netsum.init()
    own = os.environ["NETSUM_PEERS"].split(",")[comm.rank]
    comm.barrier()
    (until, end), (ready, begun) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(end)
        os.write(begun, b".")
        os.read(until, 1)
        os._exit(0)
    os.read(ready, 1)
    comm.close()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as port:
        port.bind((own, 4791))  # the child lives
    os.close(end)
    assert os.waitpid(child, 0)[1] == 0


def dies():
    comm = netsum.init(timeout=1)
    comm.barrier()
    if comm.rank == 1:
        os._exit(0)
    error = raises(
        netsum.RankDiedError, "rank 1", comm.all_reduce, numpy.ones(1, dtype=numpy.int32)
    )
    assert error.rank == 1
    raises(netsum.RankDiedError, "rank 1", comm.barrier)


def leaves():
    comm = netsum.init()
    comm.barrier()
    if comm.rank == 1:
        return comm.close()
    time.sleep(0.5)
    error = raises(netsum.RankLeftError, "rank 1", comm.barrier)
    assert error.rank == 1


def mismatch():
    comm = netsum.init()
    raises(
        netsum.MismatchError,
        "all ranks must call for the same",
        comm.all_reduce,
        numpy.ones(1000 + comm.rank, dtype=numpy.int32),
    )
    # Each by a communicator of its own, as a mismatch ends it.
    f, i = numpy.float32, numpy.int32
    for first, second in (
        (lambda c: c.all_reduce(numpy.ones(4, i)), lambda c: c.broadcast(numpy.ones(4, i), 1)),
        (lambda c: c.broadcast(numpy.ones(4, f), 0), lambda c: c.broadcast(numpy.ones(4, f), 1)),
        (lambda c: c.all_reduce(numpy.ones(3, f)), lambda c: c.all_reduce(numpy.ones(3, f), "avg")),
        (
            lambda c: c.all_reduce(numpy.ones(3), "min"),
            lambda c: c.all_reduce(numpy.ones(3), "max"),
        ),
        (lambda c: c.all_reduce(numpy.ones(3, i)), lambda c: c.all_reduce(numpy.ones(3, "u4"))),
        (lambda c: c.barrier(), lambda c: c.all_reduce(numpy.ones(1, i))),
        (lambda c: c.reduce(numpy.ones(4, i), 0), lambda c: c.all_reduce(numpy.ones(4, i))),
        (
            lambda c: c.all_gather(numpy.zeros(4, i), numpy.ones(2, i)),
            lambda c: c.all_reduce(numpy.ones(4, i)),
        ),
        (lambda c: c.barrier_async(tag=1).wait(), lambda c: c.barrier()),
    ):
        comm.close()

        # One may hear of the other's call before it has made its own.
        def call(first=first, second=second):
            nonlocal comm
            comm = netsum.init()
            (first if comm.rank == 0 else second)(comm)

        raises(netsum.MismatchError, "all ranks must call for the same", call)


def refused_alone():
    """Rank 1 refuses a call: the other's call is not summed with its next one."""
    f, i = numpy.float32, numpy.int32
    x = numpy.ones(8, dtype=f)
    for refused in (
        lambda c: c.all_reduce(numpy.ones(4, complex)),
        lambda c: c.all_reduce(numpy.ones(4), "bor"),
        lambda c: c.all_reduce(numpy.ones(8, f)[::2]),
        lambda c: c.all_reduce(memoryview(bytes(8)).cast("i")),
        lambda c: c.all_reduce(3.0),
        lambda c: c.all_reduce([x, x]),
        lambda c: c.all_reduce([numpy.ones(4, f), numpy.ones(4, i)]),
        lambda c: c.all_reduce(numpy.ones(4, i), "avg"),
        lambda c: c.all_reduce_async(numpy.ones(4, i), "mean"),
        lambda c: c.all_reduce(numpy.ones(4, f), wire="16"),
        lambda c: c.reduce(numpy.ones(4, i), -1),
        lambda c: c.broadcast(numpy.ones(4, i), 9),
        lambda c: c.broadcast_async(numpy.ones(4, i), -1),
        lambda c: c.reduce_scatter(numpy.ones(4, i), numpy.ones(4, i)),
        lambda c: c.reduce_scatter(numpy.ones(4, i), numpy.ones(8, f)),
        lambda c: c.all_gather(numpy.ones(4, i), numpy.ones(4, i)),
        lambda c: c.all_to_all(bytearray(3), bytes(3)),
    ):
        with netsum.init() as comm:
            # All alike: no harm is done.
            raises(netsum.ArgumentError, "", refused, comm)
            ones = numpy.ones(4, i)
            comm.all_reduce(ones)
            assert (ones == comm.ranks).all(), ones
            if comm.rank == 1:
                raises(netsum.ArgumentError, "", refused, comm)
            for _ in range(2):
                ones = numpy.ones(4, i)
                raises(
                    netsum.MismatchError,
                    "nothing (its own call returned an error",
                    comm.all_reduce,
                    ones,
                )


def small_beside_large():
    """With 4 ranks: floats that become 0 are counted; only the first such operation warns."""
    import warnings

    with netsum.init() as comm, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for n in range(3):
            x = numpy.full(16_000, 1e-9, dtype=numpy.float32)
            x[0] = 10
            report = comm.all_reduce(x)
            # Those of the large one's block.
            assert not x[1:1024].any() and x[1024] > 0, x
            assert report.underflows == 1023, report.underflows
            assert comm.statistics()["underflows"] == 1023 * (n + 1)
        warned = [str(w.message) for w in told if w.category is netsum.UnderflowWarning]
        assert len(warned) == 1 and "1023 of 16000 nonzero floats" in warned[0], warned
        x = numpy.full(40_000, comm.rank, dtype=numpy.float32)
        x[20_000] = numpy.nan if comm.rank == 1 else 1
        # The fourth block of the second message, which begins at 15,965.
        raises(netsum.NonFiniteError, "19037..20061", comm.all_reduce, x)
        bad = numpy.isnan(x)
        assert bad[19_037:20_061].all() and bad.sum() == 1024 and (x[~bad] == 6).all()


def few_floats():
    """Up to 4,096 floats are as IEEE 754 has them, rounded once."""
    with netsum.init() as comm:
        x = numpy.array([4096.0, 4.1e8, 8e13], dtype=numpy.float32)
        few = numpy.append(x, [numpy.inf, 1.0, numpy.inf]).astype(numpy.float32)
        if comm.rank == 1:
            few[3:] = [1.0, numpy.nan, -numpy.inf]
        for times in (1, 100):
            y = numpy.tile(few, times)
            report = comm.all_reduce(y)
            assert report.underflows == 0, report
            assert (y.reshape(times, 6)[:, :3] == x * comm.ranks).all(), y
            rest = y.reshape(times, 6)[:, 3:]
            assert numpy.isposinf(rest[:, 0]).all() and numpy.isnan(rest[:, 1:]).all(), y


def alone():
    with netsum.init() as comm:
        x = numpy.arange(5, dtype=numpy.float32)
        comm.all_reduce(x, "avg")
        assert x.tolist() == [0, 1, 2, 3, 4]
        y = numpy.array(
            [4096, 4.1, 4.1e8, 8.2e-3, 8.2e13, numpy.nan, -numpy.inf, 1e-45], dtype=numpy.float32
        )
        before = y.tobytes()
        for op in ("sum", "avg"):
            comm.all_reduce(y, op)
            comm.reduce(y, 0, op)
            comm.reduce_scatter(y, y.copy(), op)
            comm.all_reduce([y])
        comm.broadcast(y, 0)
        assert y.tobytes() == before and comm.statistics()["underflows"] == 0, y
        out = numpy.zeros(5, dtype=numpy.float32)
        comm.all_gather(out, x)
        assert (out == x).all()
        assert comm.split(None) is None
        with comm.split(3, key=1) as part:
            part.all_reduce(out)
        assert part.ranks == 1 and (out == x).all()


if __name__ == "__main__":
    # Tests that run in the background have SIGINT ignored, and their children with them.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    globals()[sys.argv[1]]()
