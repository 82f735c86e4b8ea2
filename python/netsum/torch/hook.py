"""The hook of DistributedDataParallel."""

import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .._netsum import Communicator
from ..errors import ArgumentError, ConfigError
from .completion import Handle, completed
from .devices import refuse
from .staging import Staging, is_on_device
from .tensors import FLOATS, Reduced


class HookState:
    """The communicator of `comm_hook`, for one model.

    The communicator sums over all ranks. So the model's group must have all ranks in their order;
    a hook cannot find out its model's group by itself. `wire`, "32bit" or "16bit", is the number
    of bits of a gradient on the links; the default is that of its type.
    """

    def __init__(
        self, comm: Communicator, model: DistributedDataParallel, wire: "str | None" = None
    ):
        if not isinstance(comm, Communicator):
            raise ArgumentError(
                f"a {type(comm).__name__} instead of a communicator: "
                "HookState(netsum.init(), model)"
            )
        if not isinstance(model, DistributedDataParallel):
            raise ArgumentError(
                f"a {type(model).__name__} instead of a DistributedDataParallel: "
                "HookState(comm, model)"
            )
        world, group = dist.get_world_size(), dist.get_world_size(model.process_group)
        if comm.ranks != world or comm.rank != dist.get_rank():
            raise ConfigError(
                f"netsum has rank {comm.rank} of {comm.ranks}, and torch.distributed "
                f"{dist.get_rank()} of {world}: WORLD_SIZE (or NETSUM_RANKS) and the number of "
                "ranks of the job must be the same"
            )
        if group != world or dist.get_rank(model.process_group) != comm.rank:
            raise ConfigError(
                f"the model's group has {group} of {world} ranks, or another order of them, but "
                "netsum sums over all: leave its gradients to the group's own backend"
            )
        if wire not in (None, "32bit", "16bit"):
            raise ArgumentError(f"wire {wire!r}: must be 32bit or 16bit")
        self.comm, self.wire = comm, wire
        self._staging: "Staging | None" = None

    @property
    def staging(self) -> Staging:
        if self._staging is None:
            proxy = weakref.proxy(self)
            self._staging = Staging(self, lambda error: refuse(proxy, error))
        return self._staging


def comm_hook(state: HookState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket of gradients over all ranks in the network, during the backward pass.

    `model.register_comm_hook(netsum.torch.HookState(comm, model), netsum.torch.comm_hook)`, with a
    communicator from `netsum.init()`. Several buckets are in flight at once, and all ranks get the
    same bits. Gradients of bfloat16 and float16 take half the bytes of float32 on the wire.

    An infinity or a NaN at any rank makes the results of its block NaN at all ranks, beyond 4,096
    floats. A GradScaler can skip the step.
    """
    if not isinstance(state, HookState):
        raise ArgumentError(
            f"the hook's state is a {type(state).__name__}: "
            "model.register_comm_hook(netsum.torch.HookState(netsum.init(), model), "
            "netsum.torch.comm_hook)"
        )
    gradient = bucket.buffer()
    try:
        _check(gradient)
        # Buckets must not overtake those that are being copied.
        if is_on_device(gradient) or (state._staging and state._staging.needs([gradient])):
            handle = state.staging.run(_start(state), ([gradient],), ("rw",), (1,))
        else:
            handle = _start(state)([gradient])
    except ArgumentError as error:
        refuse(state, error)
        raise
    return handle.get_future().then(lambda future: future.value()[0])


def _start(state: HookState) -> Callable[[list[torch.Tensor]], Handle]:
    def start(gradients: list[torch.Tensor]) -> Handle:
        bucket_sum = Reduced(gradients[0], "avg")
        work = state.comm.all_reduce_async(
            bucket_sum.given, bucket_sum.op, tag=bucket_sum.tag(), wire=state.wire
        )
        return Handle().follow(
            lambda then: completed(state.comm, work, then), bucket_sum.finished
        )

    return start


def _check(gradient: torch.Tensor) -> None:
    if gradient.dtype not in FLOATS:
        raise ArgumentError(
            f"gradients of {gradient.dtype}: netsum sums float64, float32, bfloat16 and float16: "
            "convert the model to one of these (model.float())"
        )
