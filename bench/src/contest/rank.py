"""A rank of Gloo, oneCCL, Open MPI or MPICH. It reads orders from standard input, a JSON object a line,
and writes answers.

    rank.py gloo RANK RANKS ADDRESS   with torch.distributed; ADDRESS is rank 0's, for the rendezvous
    rank.py gloo-16bit RANK RANKS ADDRESS   the same with half-precision floats
    rank.py oneccl RANK RANKS FILE    FILE is where rank 0 tells the others how to find it
    rank.py mpi                       started by mpirun, which gives standard input to rank 0
    rank.py mpich                     the same by mpiexec
"""

import ctypes
import json
import os
import resource
import sys
import time


# Elements are smaller than this, so sums of 8 ranks are exact in 16 bits, too.
PERIOD = 53


class Gloo:
    # Connections between two ranks, each with its part of the vector.
    CONNECTIONS = [1, 2, 4]

    def __init__(self, rank, ranks, address):
        import datetime
        import torch
        import torch.distributed

        self.numbers, self.rank, self.ranks = torch, rank, ranks
        self.distributed = torch.distributed
        # At most one core for each rank.
        torch.set_num_threads(1)
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"tcp://{address}:29500",
            rank=rank,
            world_size=ranks,
            timeout=datetime.timedelta(seconds=120),
        )
        # A group has connections of its own.
        self.groups = [torch.distributed.new_group() for _ in range(max(self.CONNECTIONS))]
        self.settings = [f"{n}-connection{'s' * (n > 1)}" for n in self.CONNECTIONS]

    def order(self):
        return sys.stdin.readline()

    def barrier(self):
        self.distributed.all_reduce(self.numbers.zeros(1))

    def reduce(self, buffer, setting):
        parts = buffer.chunk(self.CONNECTIONS[setting])
        works = [
            self.distributed.all_reduce(part, group=group, async_op=True)
            for part, group in zip(parts, self.groups)
        ]
        for work in works:
            work.wait()

    def operation(self, name, length):
        """A collective other than all_reduce: the functions that make its input, run it and count
        wrong elements of its result."""
        torch, dist, rank, ranks = self.numbers, self.distributed, self.rank, self.ranks
        part = length // ranks
        element = (torch.arange(length) % PERIOD).float()
        whole, block = element * (rank + 1), slice(rank * part, (rank + 1) * part)
        of_ranks = lambda x: torch.cat([x * (other + 1) for other in range(ranks)])
        data, output = whole.clone(), torch.empty(length)
        parts = list(output.chunk(ranks)) if length else []
        run, result, right = {
            "reduce": (lambda: dist.reduce(data, 0), data, element * (ranks * (ranks + 1) // 2)),
            "broadcast": (lambda: dist.broadcast(data, 0), data, element),
            "all_gather": (lambda: dist.all_gather(parts, data[:part]), output, of_ranks(element[:part])),
            "alltoall": (lambda: dist.all_to_all_single(output, data), output, of_ranks(element[block])),
            "barrier": (dist.barrier, data, element),
        }[name]

        def fill():
            data.copy_(whole)
            output.fill_(-1)

        # Other ranks than the root may have any result.
        unchecked = name == "reduce" and rank > 0
        return fill, run, lambda: 0 if unchecked else int((result != right).sum())

    def of_all(self, micros, wrong):
        return micros, wrong


class GlooHalf(Gloo):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.dtype = self.numbers.float16


class Mpi:
    # The parameters coll_tuned_allreduce_algorithm and ..._segmentsize; 0 leaves the choice to Open
    # MPI.
    ALGORITHMS = {
        "own-choice": (0, 0),
        "recursive-doubling": (3, 0),
        "ring": (4, 0),
        "segmented-ring": (5, 1 << 18),
        "rabenseifner": (6, 0),
    }

    def __init__(self):
        import numpy
        from mpi4py import MPI

        self.numbers, self.mpi, self.world = numpy, MPI, MPI.COMM_WORLD
        self.rank, self.ranks = self.world.Get_rank(), self.world.Get_size()
        # A communicator reads the parameters when it is created.
        self.comms = []
        for algorithm, segment in self.ALGORITHMS.values():
            self.set("coll_tuned_allreduce_algorithm", algorithm)
            self.set("coll_tuned_allreduce_algorithm_segmentsize", segment)
            self.comms.append(self.world.Dup())
        self.settings = list(self.ALGORITHMS)

    def set(self, name, value):
        """MPI's tool interface, which mpi4py does not have."""
        lib = ctypes.CDLL("libmpi.so.40")
        number, handle, count = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_int()
        calls = [
            (lib.MPI_T_init_thread, 0, ctypes.byref(number)),
            (lib.MPI_T_cvar_get_index, name.encode(), ctypes.byref(number)),
            (lib.MPI_T_cvar_handle_alloc, number, None, ctypes.byref(handle), ctypes.byref(count)),
            (lib.MPI_T_cvar_write, handle, ctypes.byref(ctypes.c_int(value))),
        ]
        for call, *arguments in calls:
            if error := call(*arguments):
                sys.exit(f"{name}: {call.__name__} returns {error}")

    def order(self):
        line = sys.stdin.readline() if self.rank == 0 else None
        # Open MPI spins while it waits, and would take CPUs from the contestant whose turn it is.
        barrier = self.world.Ibarrier()
        while not barrier.Test():
            time.sleep(0.02)
        return self.world.bcast(line)

    def barrier(self):
        self.world.Barrier()

    def reduce(self, buffer, setting):
        self.comms[setting].Allreduce(self.mpi.IN_PLACE, buffer)

    def of_all(self, micros, wrong):
        longest = self.numbers.array(micros)
        self.world.Allreduce(self.mpi.IN_PLACE, longest, op=self.mpi.MAX)
        return longest.tolist(), self.world.allreduce(wrong)


class Mpich(Mpi):
    def __init__(self):
        import numpy
        from mpi4py import MPI

        self.numbers, self.mpi, self.world = numpy, MPI, MPI.COMM_WORLD
        self.rank, self.ranks = self.world.Get_rank(), self.world.Get_size()
        self.comms, self.settings = [self.world], ["own-choice"]


class OneCclId(ctypes.Structure):
    _fields_ = [("data", ctypes.c_char * 4096)]


class OneCcl:
    FLOAT, SUM = 7, 0

    def __init__(self, rank, ranks, file):
        import numpy

        self.numbers, self.rank, self.ranks = numpy, rank, ranks
        # It prints its environment to standard output, where the answers belong.
        answers = os.dup(1)
        os.dup2(2, 1)
        self.lib, me, self.comm = ctypes.CDLL("libccl.so.2"), OneCclId(), ctypes.c_void_p()
        size, number, pointer = ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p
        self.lib.onecclCommInitRank.argtypes = [pointer, size, OneCclId, number]
        self.lib.onecclAllReduce.argtypes = [pointer, pointer, size, number, number, pointer, pointer]
        if rank == 0:
            self.call("onecclGetUniqueId", ctypes.byref(me))
            with open(file + ".part", "wb") as out:
                out.write(bytes(me))
            os.rename(file + ".part", file)
        while not os.path.exists(file):
            time.sleep(0.02)
        with open(file, "rb") as told:
            me = OneCclId.from_buffer_copy(told.read())
        self.call("onecclCommInitRank", ctypes.byref(self.comm), ranks, me, rank)
        os.dup2(answers, 1)
        self.settings = ["own-choice"]

    def call(self, name, *arguments):
        if error := getattr(self.lib, name)(*arguments):
            sys.exit(f"{name} returns {error}")

    def order(self):
        return sys.stdin.readline()

    def barrier(self):
        self.reduce(self.numbers.zeros(1, dtype="float32"), 0)

    def reduce(self, buffer, setting):
        at = buffer.ctypes.data
        self.call("onecclAllReduce", at, at, len(buffer), self.FLOAT, self.SUM, self.comm, None)

    def of_all(self, micros, wrong):
        return micros, wrong


def busy():
    """Seconds that each processor has been busy."""
    with open("/proc/stat") as stat:
        lines = [line.split()[1:] for line in stat if line.startswith("cpu")][1:]
    return [sum(int(ticks[i]) for i in (0, 1, 2, 5, 6)) / 100 for ticks in lines]


def own_cpu():
    """CPU seconds of this process, user and system."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main():
    kind = {"gloo": Gloo, "gloo-16bit": GlooHalf, "oneccl": OneCcl, "mpi": Mpi, "mpich": Mpich}[sys.argv[1]]
    alone = kind in (Gloo, GlooHalf, OneCcl)
    comm = kind(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]) if alone else kind()
    speaks = alone or comm.rank == 0
    if speaks:
        print("ready", *comm.settings, flush=True)
    while line := comm.order():
        order = json.loads(line)
        length = order["len"]
        # Neighbouring elements differ, so a sum of the wrong elements is found. In blocks, because
        # vectors are large.
        block = PERIOD << 12
        dtype = getattr(comm, "dtype", comm.numbers.float32)
        pattern = (comm.numbers.arange(block) % PERIOD + 0.0)
        pattern = pattern.to(dtype) if isinstance(comm, Gloo) else pattern.astype(dtype)
        own, right = pattern * (comm.rank + 1), pattern * (comm.ranks * (comm.ranks + 1) // 2)
        buffer = comm.numbers.empty(length, dtype=dtype)
        blocks = [slice(start, min(start + block, length)) for start in range(0, length, block)]
        micros, seconds, busiest, cpu, wrong = [], 0.0, 0.0, 0.0, 0

        def fill():
            for part in blocks:
                buffer[part] = own[: part.stop - part.start]

        def run():
            comm.reduce(buffer, order["setting"])

        def count():
            return sum(int((buffer[part] != right[: part.stop - part.start]).sum()) for part in blocks)

        if order["collective"] != "all_reduce":
            fill, run, count = comm.operation(order["collective"], length)
        for _ in range(order["iters"]):
            fill()
            comm.barrier()
            before, cpu, start = busy(), cpu - own_cpu(), time.perf_counter()
            run()
            micros.append((time.perf_counter() - start) * 1e6)
            cpu += own_cpu()
            spent = [now - then for now, then in zip(busy(), before)]
            seconds, busiest = seconds + sum(spent), busiest + max(spent)
            wrong += count()
        micros, wrong = comm.of_all(micros, wrong)
        if speaks:
            answer = {"micros": micros, "wrong": wrong, "busy": seconds, "busiest": busiest, "cpu": cpu}
            print(json.dumps(answer), flush=True)


main()
