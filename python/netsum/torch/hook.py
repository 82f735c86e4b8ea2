"""The hook of DistributedDataParallel."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .._netsum import Communicator
from ..errors import ArgumentError, ConfigError
from .completion import completed
from .tensors import WIDENED, Sum, tag


class HookState:
    """What `comm_hook` sums by, for one model.

    The communicator sums for all ranks. So the model's group must be that of all ranks, in their order; DistributedDataParallel does
    not tell a hook which it is.
    """

    def __init__(self, comm: Communicator, model: DistributedDataParallel):
        if not isinstance(comm, Communicator):
            raise ArgumentError(f"a {type(comm).__name__}, where a communicator is needed: HookState(netsum.init(), model)")
        if not isinstance(model, DistributedDataParallel):
            raise ArgumentError(f"a {type(model).__name__}, where a DistributedDataParallel is needed: HookState(comm, model)")
        world, group = dist.get_world_size(), dist.get_world_size(model.process_group)
        if comm.ranks != world or comm.rank != dist.get_rank():
            raise ConfigError(
                f"netsum has rank {comm.rank} of {comm.ranks}, and torch.distributed {dist.get_rank()} of {world}: WORLD_SIZE (or "
                "NETSUM_RANKS) and the number of ranks of the job must be the same"
            )
        if group != world or dist.get_rank(model.process_group) != comm.rank:
            raise ConfigError(
                f"the model's group has {group} of {world} ranks, or another order of them, and netsum sums for all: leave its gradients "
                "to the group's own backend"
            )
        self.comm = comm


def comm_hook(state: HookState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket of gradients over all ranks, in the network, while the backward pass goes on.

    `model.register_comm_hook(netsum.torch.HookState(comm, model), netsum.torch.comm_hook)`, with the communicator that `netsum.init()`
    gave. Buckets are in flight beside each other, and all ranks get the same bits. Gradients of bfloat16 and float16 are summed as
    float32: that takes as many bytes on the wire as float32, and rounds once.

    An infinity or a NaN at any rank makes the results of its message NaN at all, so that a GradScaler can skip the step.
    """
    if not isinstance(state, HookState):
        raise ArgumentError(
            f"the hook's state is a {type(state).__name__}: model.register_comm_hook(netsum.torch.HookState(netsum.init(), model), "
            "netsum.torch.comm_hook)"
        )
    gradient = bucket.buffer()
    try:
        _check(gradient)
        bucket_sum = Sum(gradient)
    except ArgumentError:
        state.comm._refuse()
        raise
    work = state.comm.all_reduce_async(bucket_sum.flat, "avg", tag=tag(gradient.dtype))
    return completed(state.comm, work, bucket_sum.finish)


def _check(gradient: torch.Tensor) -> None:
    if gradient.device.type != "cpu":
        raise ArgumentError(
            f"gradients on {gradient.device}: netsum sums what is in the host's memory, so the model must be on the CPU"
        )
    if gradient.dtype != torch.float32 and gradient.dtype not in WIDENED:
        raise ArgumentError(
            f"gradients of {gradient.dtype}: netsum sums float32, and bfloat16 and float16 as such; make the model one of these "
            "(model.float())"
        )
