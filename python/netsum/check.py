"""Check what is missing on this machine: python -m netsum.check

Checks what netsum.init() would use: the settings NETSUM_NAME of the environment, the controller,
this rank's address, sockets, adapters. Sends nothing, but connects to the controller. Exits with 1
if something is missing.

    rank, ranks, local_rank      also from torchrun, Open MPI, MPICH and Slurm's srun
    controller                   HOST:PORT of the box's daemon, or of a fabric's manager; default:
                                 the host "netsum"
    job, token                   as `netsum job create` prints them
    group                        connects ranks of the job's ranks as a group of this name
    ip                           this rank's address; of several with commas, local_rank chooses;
                                 default: the address on the route to the controller
    peers                        without a box: the addresses of all ranks, separated by commas
    mtu, message_size, window, rings    with peers: the job's properties, the same at all ranks
    transport                    auto, udp, xdp or verbs
    wire                         32bit or 16bit: bits of a float in long sums; default: its own
    hierarchy                    auto, on or off: one host's ranks add long sums before they send
    secret                       16 random characters or more, the same at all ranks: seals sums
    secret_file                  a file with that, which only its user and group can open
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
    """Yields findings: (True, False if something is missing, None for a note; what; what to do)."""
    yield True, f"netsum {_netsum.__version__}, Python {sys.version.split()[0]}", ""
    for name in ("numpy", "torch"):
        try:
            yield True, f"{name} {__import__(name).__version__}", ""
        except ImportError:
            hint = "not needed: anything with the buffer protocol or DLPack can be summed"
            yield None, f"no {name}", hint
    try:
        found = _netsum.resolve({})
    except errors.Error as error:
        yield False, "settings", str(error)
        return
    yield True, f"rank {found['rank']} of {found['ranks']}, at {found['ip']}", ""
    if "controller" in found:
        yield controller(found["controller"])
    else:
        hint = "the hosts' ring sums: set NETSUM_CONTROLLER to use a box"
        yield None, f"peers {', '.join(found['peers'])}", hint
    yield own_address(found["ip"])
    yield buffers()
    adapters = listed("/sys/class/infiniband")
    if adapters:
        yield True, f"RDMA adapters: {', '.join(adapters)}", ""
    else:
        yield None, "no RDMA adapter", "netsum uses a UDP socket"


def controller(address):
    """Checks that a controller listens there."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
        return True, f"the controller at {address}", ""
    except (OSError, ValueError) as error:
        hint = "check that NETSUM_CONTROLLER is right and that `netsum run` runs there"
        return False, f"the controller at {address}: {error}", hint


def own_address(ip):
    """Checks that the address is this machine's, and its RoCE port free or shared."""
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as tried:
        try:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            tried.bind((ip, ROCE_PORT))
            return True, f"UDP port {ROCE_PORT} of {ip}", ""
        except OSError as error:
            hint = "set NETSUM_IP to an address of this machine that only your ranks use"
            return False, f"UDP port {ROCE_PORT} of {ip}: {error}", hint


def buffers():
    """Checks the size of socket buffers."""
    try:
        with open("/proc/sys/net/core/rmem_max") as file:
            room = int(file.read())
    except OSError as error:
        return None, f"net.core.rmem_max: {error}", ""
    what = f"net.core.rmem_max is {room}"
    if room >= BUFFER:
        return True, what, ""
    return None, what, f"less than {BUFFER}: bursts may lose packets"


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
