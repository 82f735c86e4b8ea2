"""A rank, perhaps on another machine: python torch_hosts.py INIT_METHOD. Prints its result."""

import sys
import time
import warnings

import torch
import torch.distributed as dist

import netsum
import netsum.torch

warnings.simplefilter("ignore", netsum.NoBoxWarning)
rank, ranks = map(int, sys.argv[2:])
start = time.monotonic()
try:
    dist.init_process_group("netsum", init_method=sys.argv[1], rank=rank, world_size=ranks)
except netsum.ConfigError as error:
    # The connections alone would wait for a minute.
    assert time.monotonic() - start < 30, time.monotonic() - start
    print(f"refused: {error}")
    sys.exit()
sums = torch.ones(1000)
dist.all_reduce(sums)
assert (sums == ranks).all(), sums
print(f"summed at {netsum.torch.backend.ProcessGroup.address}")
dist.destroy_process_group()
