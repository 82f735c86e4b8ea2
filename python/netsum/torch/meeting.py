"""How the ranks of a process group find the box, or one another."""

import ipaddress
import json
import os
import secrets
import socket
import warnings
from typing import TypeVar

import torch.distributed as dist

import netsum

from .._netsum import Communicator, resolve
from ..errors import ConfigError, NoBoxWarning


T = TypeVar("T")


def apart(store: "dist.Store", ranks: int) -> "dist.Store":
    """A part of the store that no earlier group has had: that of torchrun's agent outlives destroy_process_group.

    The store counts, as a rank that was started anew does not know of earlier groups. A group's ranks have all come here before one of
    them comes for the next.
    """
    generation = (store.add(f"netsum/{ranks}", 1) - 1) // ranks
    return dist.PrefixStore(f"netsum/{ranks}/{generation}", store)


def meet(store: "dist.Store", rank: int, ranks: int) -> tuple[Communicator, str]:
    """The communicator of all ranks, and this rank's address.

    With NETSUM_PEERS, NETSUM_CONTROLLER or a host "netsum", as netsum.init() does. With none of these at any rank the ranks tell one
    another their addresses over the store, and sum by themselves.
    """
    told = _all(store, rank, ranks, "known", _is_told())
    if all(told):
        return netsum.init(rank=rank, ranks=ranks), resolve({"rank": str(rank), "ranks": str(ranks)})["ip"]
    if any(told):
        raise ConfigError(
            f"rank {told.index(True)} knows of a box and rank {told.index(False)} does not: set NETSUM_CONTROLLER (or NETSUM_PEERS) at "
            "all ranks, or at none"
        )
    addresses = _all(store, rank, ranks, "address", _own_address(rank, ranks))
    peers = _loopback(store, rank, ranks) if len(set(addresses)) == 1 else addresses
    twice = next((a for a in peers if peers.count(a) > 1), None)
    if twice:
        raise ConfigError(
            f"two ranks have the address {twice}: give each one of its own by NETSUM_IP (with several, LOCAL_RANK chooses)"
        )
    if rank == 0:
        warnings.warn(
            "no box: NETSUM_CONTROLLER is not set, and there is no host \"netsum\". The ranks sum by themselves, at "
            + ", ".join(peers[:4] + ["..."] * (ranks > 4)),
            NoBoxWarning,
            stacklevel=2,
        )
    return netsum.init(rank=rank, ranks=ranks, peers=peers, ip=peers[rank]), peers[rank]


def _is_told() -> bool:
    if os.environ.get("NETSUM_PEERS") or os.environ.get("NETSUM_CONTROLLER"):
        return True
    try:
        return bool(socket.getaddrinfo("netsum", None))
    except OSError:
        return False


def _all(store: "dist.Store", rank: int, ranks: int, key: str, value: T) -> "list[T]":
    """What each rank says."""
    store.set(f"{key}/{rank}", json.dumps(value))
    return [json.loads(store.get(f"{key}/{other}")) for other in range(ranks)]


def _own_address(rank: int, ranks: int) -> str:
    """NETSUM_IP, or the address towards rank 0's machine."""
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    master = f"[{master}]:9" if ":" in master else f"{master}:9"
    return resolve({"rank": str(rank), "ranks": str(ranks), "controller": master, "job": "-", "token": "-"})["ip"]


def _loopback(store: "dist.Store", rank: int, ranks: int) -> list[str]:
    """One address for each rank of one machine, which no other group has."""
    first = _all(store, rank, ranks, "loopback", secrets.randbelow(1 << 22))[0]
    network = int(ipaddress.ip_address("127.64.0.0"))
    return [str(ipaddress.ip_address(network + (first + other + 1) % (1 << 22))) for other in range(ranks)]
