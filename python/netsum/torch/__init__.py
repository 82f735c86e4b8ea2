"""PyTorch over netsum: on import, torch.distributed has the backend "netsum"; and a hook for DistributedDataParallel beside another one.

    import netsum.torch

    torch.distributed.init_process_group("netsum")

    # or, where torch.distributed has another backend
    comm = netsum.init()
    model = torch.nn.parallel.DistributedDataParallel(model)
    model.register_comm_hook(netsum.torch.HookState(comm, model), netsum.torch.comm_hook)
"""

from .backend import Delegated, register as _register
from .hook import HookState, comm_hook

__all__ = ["Delegated", "HookState", "comm_hook"]

_register()
