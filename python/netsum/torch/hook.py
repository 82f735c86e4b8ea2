"""The hook of DistributedDataParallel."""

import torch
import torch.distributed as dist

from .._netsum import Communicator
from ..errors import ArgumentError, ConfigError
from .completion import completed
from .tensors import WIDENED, Sum


def comm_hook(state: Communicator, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket of gradients over all ranks, in the network, while the backward pass goes on.

    `model.register_comm_hook(comm, netsum.torch.comm_hook)`, with the communicator that `netsum.init()` gave. Buckets are in flight
    beside each other, and all ranks get the same bits. Gradients of bfloat16 and float16 are summed as float32: that takes as many
    bytes on the wire as float32, and rounds once.

    An infinity or a NaN at any rank makes the bucket NaN at all, so that a GradScaler can skip the step.
    """
    gradient = bucket.buffer()
    _check(state, gradient)
    bucket_sum = Sum(gradient)
    return completed(state, state.all_reduce_async(bucket_sum.summed, "avg"), bucket_sum.finish)


def _check(comm: Communicator, gradient: torch.Tensor) -> None:
    if not isinstance(comm, Communicator):
        raise ArgumentError(
            f"the hook's state is a {type(comm).__name__}: model.register_comm_hook(netsum.init(), netsum.torch.comm_hook)"
        )
    if gradient.device.type != "cpu":
        raise ArgumentError(
            f"gradients on {gradient.device}: netsum sums what is in the host's memory, so the model must be on the CPU"
        )
    if gradient.dtype != torch.float32 and gradient.dtype not in WIDENED:
        raise ArgumentError(
            f"gradients of {gradient.dtype}: netsum sums float32, and bfloat16 and float16 as such; make the model one of these "
            "(model.float())"
        )
    if comm.ranks != dist.get_world_size():
        raise ConfigError(
            f"netsum has {comm.ranks} ranks, and torch.distributed {dist.get_world_size()}: WORLD_SIZE (or NETSUM_RANKS) and the "
            "number of ranks of the job must be the same"
        )
