"""The rendezvous of a process group's ranks: they find the box, or each other."""

import ipaddress
import json
import os
import secrets
import socket
import time
import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

import netsum

from .. import errors
from .._netsum import Communicator, own_addresses, resolve, towards
from ..check import own_address
from ..errors import ConfigError, NoBoxWarning, UnreachableError


T = TypeVar("T")

#: Seconds after which a rank that is silent in an operation is dead, at most.
LONGEST = 60.0


def apart(store: "dist.Store", ranks: int) -> "dist.Store":
    """A part of the store that no earlier group has used.

    The store of torchrun's agent outlives destroy_process_group. The store counts the groups, as a
    restarted rank does not know of earlier ones. All ranks of a group call this before one of them
    calls it for the next group.
    """
    generation = (store.add(f"netsum/{ranks}", 1) - 1) // ranks
    return dist.PrefixStore(f"netsum/{ranks}/{generation}", store)


def has_come(store: "dist.Store", key: str, until: float) -> bool:
    """Waits for a key of a store. Returns whether it was set before `until` (monotonic clock)."""
    try:
        store.wait([key], timedelta(seconds=max(until - time.monotonic(), 0.001)))
    except RuntimeError:
        # Stores count whole milliseconds.
        if until - time.monotonic() > 0.01:
            raise
        return False
    return True


class _Within:
    """A part of a store, with the group's timeout for waiting instead of the store's."""

    def __init__(self, store: "dist.Store", timeout: float):
        self.store, self.timeout, self.until = store, timeout, time.monotonic() + timeout
        self.set, self.add = store.set, store.add
        #: Seconds after which a silent rank is dead.
        self.silence = LONGEST

    def of_rank(self, key: str, rank: int) -> bytes:
        if not has_come(self.store, f"{key}/{rank}", self.until):
            text = (
                f"rank {rank} has not called init_process_group or new_group within "
                f"{self.timeout:g} s, the group's timeout"
            )
            raise UnreachableError(text, rank)
        return self.store.get(f"{key}/{rank}")

    def connect(self, **settings) -> Communicator:
        """Connects within the rest of the group's timeout, if that is less than the default."""
        if not os.environ.get("NETSUM_TIMEOUT"):
            settings["timeout"] = self.silence
        left = max(self.until - time.monotonic(), 1)
        if left < 60 and not os.environ.get("NETSUM_CONNECT_TIMEOUT"):
            settings["connect_timeout"] = left
        return netsum.init(**settings)


def rendezvous(
    store: "dist.Store", rank: int, ranks: int, timeout: float
) -> tuple[Communicator, str, bool]:
    """Connects all ranks. Returns communicator, this rank's address, and whether there is a box.

    With NETSUM_PEERS, NETSUM_CONTROLLER or a host "netsum", this is netsum.init(). With none of
    these at any rank, the ranks exchange their addresses over the store, and the hosts' ring sums.
    An error of one rank is raised by all ranks: none is left waiting. `timeout` is the group's, in
    seconds: a rank that is silent that long in an operation, 60 s at most, is dead.
    """
    store = _Within(store, timeout)
    configured = _known(store, rank, ranks, timeout)
    if all(configured):
        own = resolve({"rank": str(rank), "ranks": str(ranks)})["ip"]
        has_box = all(by == "controller" for by in configured)
        return store.connect(rank=rank, ranks=ranks), own, has_box
    if any(configured):
        text = (
            f"rank {next(r for r in range(ranks) if configured[r])} knows of a box and rank "
            f"{configured.index('')} does not: set NETSUM_CONTROLLER (or NETSUM_PEERS) at all "
            "ranks, or at none"
        )
        raise _together(store, rank, ranks, ConfigError(text))
    peers = _peers(store, rank, ranks)
    is_good, what, hint = own_address(peers[rank])
    refusal = None if is_good else ("ConfigError", f"rank {rank}: {what}; {hint}")
    if rank == 0:
        try:
            warnings.warn(
                'no box: NETSUM_CONTROLLER is not set, and there is no host "netsum". '
                "The hosts' ring sums, at " + ", ".join(peers[:4] + ["..."] * (ranks > 4)),
                NoBoxWarning,
                stacklevel=2,
            )
        except NoBoxWarning as warning:
            refusal = ("NoBoxWarning", str(warning))
    for kind, text in filter(None, _all(store, rank, ranks, "ready", refusal)):
        raise _together(store, rank, ranks, getattr(errors, kind)(text))
    comm = store.connect(rank=rank, ranks=ranks, peers=peers, ip=peers[rank])
    return comm, peers[rank], False


def group_rendezvous(
    store: "dist.Store", rank: int, ranks: int, timeout: float
) -> "tuple[Communicator | None, str]":
    """Connects some ranks of the box's job as a group. Returns None, and why, where they cannot.

    All ranks return the same: an error of one, as of a job that has too many groups, is the reason
    of all.
    """
    store = _Within(store, timeout)
    if not all(by == "controller" for by in _known(store, rank, ranks, timeout)):
        return None, ""
    if rank == 0:
        # No other group of the job has it, in this process or another.
        store.set("name/0", secrets.token_hex(8))
    name = store.of_rank("name", 0).decode()
    comm, why = None, ""
    try:
        comm = store.connect(rank=rank, ranks=ranks, group=name)
    except errors.Error as error:
        why = f"rank {rank}: {error}"
    reasons = _all(store, rank, ranks, "connected", why)
    if reason := next(filter(None, reasons), ""):
        if comm is not None:
            comm.close()
        return None, reason
    return comm, ""


def _known(store: _Within, rank: int, ranks: int, timeout: float) -> list[str]:
    """How each rank is configured. Sets the store's `silence`."""
    known = _all(store, rank, ranks, "known", [_configured(), timeout])
    # Ranks may have different timeouts.
    store.silence = min(max(min(theirs for _, theirs in known), 0.1), LONGEST)
    return [by for by, _ in known]


def _configured() -> str:
    """Where the ranks' addresses come from: "peers", "controller", or "" for the store."""
    if os.environ.get("NETSUM_PEERS"):
        return "peers"
    if os.environ.get("NETSUM_CONTROLLER"):
        return "controller"
    try:
        return "controller" if socket.getaddrinfo("netsum", None) else ""
    except OSError:
        return ""


def _all(store: _Within, rank: int, ranks: int, key: str, value: T) -> "list[T]":
    """The value of each rank."""
    store.set(f"{key}/{rank}", json.dumps(value))
    return [json.loads(store.of_rank(key, other)) for other in range(ranks)]


def _together(store: _Within, rank: int, ranks: int, error: Exception) -> Exception:
    """Returns an error that all ranks raise, when all have it: the store may end with rank 0."""
    store.add("refused", 1)
    until = time.monotonic() + 5
    while rank == 0 and store.add("refused", 0) < ranks and time.monotonic() < until:
        time.sleep(0.01)
    return error


def _peers(store: _Within, rank: int, ranks: int) -> list[str]:
    """The addresses of all ranks. Every rank gets the same result, or the same error."""
    places = _all(store, rank, ranks, "place", _place(store, rank, ranks))
    # On one machine NETSUM_IP is used if it differs between ranks.
    is_any_set = any(place["is_set"] for place in places)
    distinct = {place["ip"] or place["why"] for place in places} if is_any_set else set()
    are_valid = all(place["ip"] for place in places if place["is_set"])
    if _is_one_machine(places) and len(distinct) < 2 and are_valid:
        return _loopback(store, rank, ranks)
    own = places[rank]
    others = [place["ip"] for place in places if place["ip"] and place["machine"] != own["machine"]]
    if own["ip"] is None and others and not own["is_set"]:
        try:
            own["ip"] = towards(others[0])
        except OSError as error:
            own["why"] += f"; there is no route to {others[0]}: {error}"
    places = _all(store, rank, ranks, "placed", own)
    if refusal := refused(places):
        raise _together(store, rank, ranks, ConfigError(refusal))
    return [place["ip"] for place in places]


def _is_one_machine(places: Sequence[dict]) -> bool:
    return all(place["machine"] == places[0]["machine"] for place in places)


def refused(places: Sequence[dict]) -> str | None:
    """Why ranks cannot reach each other at their addresses, if that is certain."""
    seen: dict[str, int] = {}
    for rank, place in enumerate(places):
        ip, machine = place["ip"], place["machine"]
        if ip is None:
            why = place["why"]
            return f"rank {rank}: {why}. Set NETSUM_IP there to its address on the ranks' network"
        if ipaddress.ip_address(ip).is_loopback and not _is_one_machine(places):
            return (
                f"rank {rank} has the loopback address {ip}, which ranks on other machines cannot "
                "reach: set NETSUM_IP there to its address on the ranks' network"
            )
        first = seen.setdefault(ip, rank)
        if places[first]["machine"] != machine:
            return (
                f"rank {first} and rank {rank} are on different machines, or in different "
                f"containers, and have the same address {ip}: set NETSUM_IP there to addresses "
                "that all ranks reach, and start containers in their machine's network (--network "
                "host)"
            )
    return None


def _place(store: _Within, rank: int, ranks: int) -> dict:
    """This rank's machine, and its address that others reach, or why there is none."""
    is_set = bool(os.environ.get("NETSUM_IP"))
    place = {"machine": _machine(), "ip": None, "is_set": is_set, "why": ""}
    if is_set:
        job = {"controller": "-", "job": "-", "token": "-"}
        try:
            place["ip"] = resolve({"rank": str(rank), "ranks": str(ranks), **job})["ip"]
        except ConfigError as error:
            place["why"] = str(error)
        return place
    own = own_addresses()
    listed = ", ".join(own) or "it has only loopback addresses"
    place["why"] = f"it is not known which of its addresses the others reach ({listed})"
    if host := _host(store):
        try:
            ip = towards(host)
            if not ipaddress.ip_address(ip).is_loopback:
                place["ip"] = ip
                return place
            place["why"] += f"; its address on the route to {host} is {ip}"
        except OSError as error:
            place["why"] += f"; there is no route to {host}: {error}"
    by_family = [[ip for ip in own if (":" in ip) == is_v6] for is_v6 in (False, True)]
    # With addresses of both families, IPv4 comes first.
    first = next(filter(None, by_family), [])
    place["ip"] = first[0] if len(first) == 1 else None
    return place


def _machine() -> str:
    """Identifies this machine and its network: containers may share one without the other."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.stat('/proc/self/ns/net').st_ino}"


def _host(store: _Within) -> str | None:
    """The machine that has the store, usually rank 0's. None if the store is a file."""
    store = store.store
    while isinstance(store, dist.PrefixStore) and hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "host", None) or os.environ.get("MASTER_ADDR")


def _loopback(store: _Within, rank: int, ranks: int) -> list[str]:
    """One loopback address for each rank, which no other group uses."""
    first = _all(store, rank, ranks, "loopback", secrets.randbelow(1 << 22))[0]
    network = int(ipaddress.ip_address("127.64.0.0"))
    numbers = [network + (first + other + 1) % (1 << 22) for other in range(ranks)]
    return [str(ipaddress.ip_address(number)) for number in numbers]
