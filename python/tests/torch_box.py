"""A rank that trains with the backend netsum on a box, also after the box ended.

Run: python torch_box.py. It waits for lines on standard input.
"""

import hashlib
import warnings

import torch
import torch.distributed as dist
from box import told
from torch.nn.parallel import DistributedDataParallel

import netsum
import netsum.torch

warnings.simplefilter("always")
dist.init_process_group("netsum")
torch.manual_seed(1)
model = torch.nn.Sequential(*(torch.nn.Linear(200, 200) for _ in range(8)))
ddp = DistributedDataParallel(model, bucket_cap_mb=0.2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
generator = torch.Generator().manual_seed(dist.get_rank())


def train(steps):
    """The hash of the weights after these steps."""
    for _ in range(steps):
        ddp(torch.randn(8, 200, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return hashlib.sha256(
        b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    ).hexdigest()


with warnings.catch_warnings():
    warnings.simplefilter("error", netsum.NoBoxWarning)
    told(f"by the box {train(10)}")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    weights = train(20)
said = [str(w.message) for w in caught if w.category is netsum.NoBoxWarning]
assert len(said) == 1 and "netsum diagnose" in said[0], said
told(f"by the ranks {weights}")
# The network cannot: Gloo does it, at the same addresses.
ranks, rank = dist.get_world_size(), dist.get_rank()
out = torch.zeros(ranks)
dist.all_to_all_single(out, torch.full((ranks,), float(rank)))
assert torch.equal(out, torch.arange(float(ranks))), out
dist.destroy_process_group()
