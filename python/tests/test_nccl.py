"""NCCL's plugin under NCCL. It needs a GPU, and has not run on one yet."""

import importlib.util
import os
import pathlib
import subprocess
import sys
import unittest

from ranks import addresses

ROOT = pathlib.Path(__file__).parents[2]
PLUGIN = ROOT / "target/plugins/nccl/libnccl-net-netsum.so"

RANK = """
import os, torch, torch.distributed as dist
rank = int(os.environ["RANK"])
torch.cuda.set_device(rank % torch.cuda.device_count())
dist.init_process_group("nccl")
for dtype in torch.float32, torch.float16, torch.bfloat16, torch.int32:
    data = torch.full((1 << 20,), rank + 1, dtype=dtype, device="cuda")
    dist.all_reduce(data)
    assert bool((data == 3).all()), data
dist.destroy_process_group()
"""


def missing():
    """Why the test is skipped, if it is."""
    if not os.environ.get("NETSUM_TEST_GPU"):
        return "not asked for (--gpu)"
    if importlib.util.find_spec("torch") is None:
        return "no PyTorch: `cargo xtask test --gpu` installs it"
    import torch

    if not torch.cuda.is_available():
        return "no GPU that PyTorch's CUDA can use"
    return None if PLUGIN.exists() else f"no {PLUGIN}: `cargo xtask plugins`"


@unittest.skipIf(missing(), str(missing()))
class Nccl(unittest.TestCase):
    def test_nccl_sums_by_the_plugin(self):
        """Two ranks that NCCL takes for two hosts."""
        environment = os.environ | {
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(20000 + os.getpid() % 20000),
            "NCCL_NET_PLUGIN": str(PLUGIN),
            "NCCL_COLLNET_ENABLE": "1",
            # CollNetDirect needs NVSwitch.
            "NCCL_ALGO": "CollNetChain",
            "NCCL_DEBUG": "INFO",
            "NCCL_DEBUG_SUBSYS": "INIT,NET",
            "NCCL_SOCKET_IFNAME": "lo",
            "NETSUM_PEERS": ",".join(addresses(2)),
        }
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", RANK],
                env=environment | {"RANK": str(rank), "NCCL_HOSTID": f"host{rank}"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            said = [rank.communicate(timeout=120)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        for rank, text in zip(ranks, said, strict=True):
            self.assertEqual(rank.returncode, 0, text)
            self.assertIn("Loaded collnet plugin netsum", text)
            self.assertIn("COLLNET/netsum", text)
            self.assertIn("netsum: the hosts' ring sums", text)


if __name__ == "__main__":
    unittest.main()
