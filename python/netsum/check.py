"""What is missing on this machine: python -m netsum.check

Looks at what netsum.init() would use: the settings NETSUM_NAME of the environment, the box's daemon, this rank's address, sockets,
adapters. Nothing is sent but a connection to the daemon. Ends with 1 where something is missing.

    rank, ranks, local_rank      also as torchrun, Open MPI, MPICH and Slurm's srun tell them
    controller                   HOST:PORT of the box's daemon; else the host "netsum" is looked for
    job, token                   as `netsum job create` prints them
    ip                           this rank's address; several with commas: local_rank chooses. Else that towards the controller
    peers                        without a box: the addresses of all ranks, with commas
    mtu, message_size, window, rings    with peers: the job's properties, at all ranks the same
    transport                    auto, udp, xdp or verbs
    timeout, connect_timeout     seconds
    ib_timeout, ib_retry_cnt     of RDMA adapters, as NCCL's
    tls_ca, tls_cert, tls_key    PEM files
"""

import os
import socket
import sys

from . import _netsum, errors

ROCE_PORT = 4791
BUFFER = 16 << 20


def find():
    """Findings: (whether it is good, or None where it is as good as can be; what; what to do)."""
    yield True, f"netsum {_netsum.__version__}, Python {sys.version.split()[0]}", ""
    for name in ("numpy", "torch"):
        try:
            yield True, f"{name} {__import__(name).__version__}", ""
        except ImportError:
            yield None, f"no {name}", "not needed: anything with the buffer protocol or DLPack can be summed"
    try:
        found = _netsum.resolve({})
    except errors.Error as error:
        yield False, "settings", str(error)
        return
    yield True, f"rank {found['rank']} of {found['ranks']}, at {found['ip']}", ""
    if "controller" in found:
        yield controller(found["controller"])
    else:
        yield None, f"peers {', '.join(found['peers'])}", "the ranks sum by themselves: set NETSUM_CONTROLLER for a box"
    yield own_address(found["ip"])
    yield buffers()
    adapters = listed("/sys/class/infiniband")
    if adapters:
        yield True, f"RDMA adapters: {', '.join(adapters)}", ""
    else:
        yield None, "no RDMA adapter", "packets go over a UDP socket"


def controller(address):
    """Whether somebody listens there."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
        return True, f"the box's daemon at {address}", ""
    except (OSError, ValueError) as error:
        return False, f"the box's daemon at {address}: {error}", "is NETSUM_CONTROLLER right, and does `netsum run` run there?"


def own_address(ip):
    """Whether the address is this machine's, and its RoCE port free."""
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as tried:
        try:
            tried.bind((ip, ROCE_PORT))
            return True, f"UDP port {ROCE_PORT} of {ip}", ""
        except OSError as error:
            return False, f"UDP port {ROCE_PORT} of {ip}: {error}", "NETSUM_IP must be this machine's, for one rank alone"


def buffers():
    """How much sockets may hold."""
    try:
        with open("/proc/sys/net/core/rmem_max") as file:
            room = int(file.read())
    except OSError as error:
        return None, f"net.core.rmem_max: {error}", ""
    what = f"net.core.rmem_max is {room}"
    return (True, what, "") if room >= BUFFER else (None, what, f"less than {BUFFER}: packets may be lost in bursts")


def listed(folder):
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def main():
    if len(sys.argv) > 1:
        print(__doc__.strip())
        return 0
    good = True
    for is_good, what, todo in find():
        word = {True: "ok", None: "note", False: "MISSING"}[is_good]
        print(f"{word:8}{what}" + (f"\n{'':8}{todo}" if todo else ""))
        good = good and is_good is not False
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
