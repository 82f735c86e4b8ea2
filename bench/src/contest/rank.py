"""A rank of Gloo or Open MPI: does what it is told on standard input, a JSON object a line, and answers likewise.

    rank.py gloo RANK RANKS ADDRESS   with torch.distributed; ADDRESS is rank 0's, for the rendezvous
    rank.py mpi                       started by mpirun, which gives standard input to rank 0
"""

import json
import sys
import time


class Gloo:
    def __init__(self, rank, ranks, address):
        import datetime
        import torch
        import torch.distributed

        self.torch, self.rank, self.ranks = torch, rank, ranks
        # One core or less for each rank.
        torch.set_num_threads(1)
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"tcp://{address}:29500",
            rank=rank,
            world_size=ranks,
            timeout=datetime.timedelta(seconds=60),
        )

    def order(self):
        return sys.stdin.readline()

    def make(self, length, is_float):
        dtype = self.torch.float32 if is_float else self.torch.int32
        return self.torch.empty(length, dtype=dtype)

    def fill(self, buffer, value):
        buffer.fill_(value)

    def reduce(self, buffer):
        self.torch.distributed.all_reduce(buffer)

    def wrong(self, buffer, value):
        return int((buffer != value).sum())


class Mpi:
    def __init__(self):
        import numpy
        from mpi4py import MPI

        self.numpy, self.mpi, self.world = numpy, MPI, MPI.COMM_WORLD
        self.rank, self.ranks = self.world.Get_rank(), self.world.Get_size()

    def order(self):
        line = sys.stdin.readline() if self.rank == 0 else None
        # Who waits in Open MPI spins, and would take the processors from whoever's turn it is.
        barrier = self.world.Ibarrier()
        while not barrier.Test():
            time.sleep(0.002)
        return self.world.bcast(line)

    def make(self, length, is_float):
        return self.numpy.empty(length, dtype=self.numpy.float32 if is_float else self.numpy.int32)

    def fill(self, buffer, value):
        buffer.fill(value)

    def reduce(self, buffer):
        self.world.Allreduce(self.mpi.IN_PLACE, buffer)

    def wrong(self, buffer, value):
        return int(self.world.allreduce(int((buffer != value).sum())))


def main():
    if sys.argv[1] == "gloo":
        comm = Gloo(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    else:
        comm = Mpi()
    speaks = isinstance(comm, Gloo) or comm.rank == 0
    if speaks:
        print("ready", flush=True)
    while line := comm.order():
        order = json.loads(line)
        buffer = comm.make(order["len"], order["float"])
        micros = []
        for _ in range(order["iters"]):
            comm.fill(buffer, comm.rank + 1)
            start = time.perf_counter()
            comm.reduce(buffer)
            micros.append((time.perf_counter() - start) * 1e6)
        wrong = comm.wrong(buffer, comm.ranks * (comm.ranks + 1) // 2)
        if speaks:
            print(json.dumps({"micros": micros, "wrong": wrong}), flush=True)


main()
