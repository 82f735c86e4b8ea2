"""PyTorch over netsum. The import registers the backend "netsum" of torch.distributed.

There is also a hook for DistributedDataParallel with another backend.

    import netsum.torch

    torch.distributed.init_process_group("netsum")

    # or, with another backend
    comm = netsum.init()
    model = torch.nn.parallel.DistributedDataParallel(model)
    model.register_comm_hook(netsum.torch.HookState(comm, model), netsum.torch.comm_hook)
"""

from .backend import DelegatedWarning, register as _register
from .hook import HookState, comm_hook
from .recorder import dump_flight_recorder

__all__ = ["DelegatedWarning", "HookState", "comm_hook", "dump_flight_recorder"]

_register()
