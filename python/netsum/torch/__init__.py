"""PyTorch over netsum: a hook that sums the gradients of DistributedDataParallel.

    import netsum, netsum.torch

    comm = netsum.init()
    model = torch.nn.parallel.DistributedDataParallel(model)
    model.register_comm_hook(comm, netsum.torch.comm_hook)
"""

from .hook import comm_hook

__all__ = ["comm_hook"]
