"""The group's calls for tensors of devices: through the host's memory, or by another backend."""

import functools
import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist

from ..errors import ArgumentError, Error
from .staging import Staging, is_on_device, tensors_in

#: For each call whether the tensors of its first arguments are read (r) and written (w).
_USES = {
    "allreduce": ("rw",),
    "reduce": ("rw",),
    "broadcast": ("rw",),
    "_reduce_scatter_base": ("w", "r"),
    "reduce_scatter": ("w", "r"),
    "_allgather_base": ("w", "r"),
    "allgather": ("w", "r"),
    "alltoall_base": ("w", "r"),
    "alltoall": ("w", "r"),
    "gather": ("w", "r"),
    "scatter": ("w", "r"),
    "barrier": (),
}
#: Calls that are made of these, and messages.
_OTHERS = (
    "allreduce_coalesced",
    "reduce_scatter_tensor_coalesced",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "send",
    "recv",
    "recv_anysource",
)
#: Newer names.
NEWER = {
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}


def device_types() -> list[str]:
    """The types of devices whose tensors netsum takes: those with streams."""
    accelerator = getattr(torch, "accelerator", None)
    found = accelerator and accelerator.current_accelerator()
    return list(dict.fromkeys(["cpu", "cuda", "xpu", *([found.type] if found else [])]))


def refuse(group: "dist.ProcessGroup", error: BaseException) -> None:
    """Announces to the other ranks a call that this rank does not make."""
    is_lost = isinstance(error, Error) and not isinstance(error, ArgumentError)
    if group.comm is not None and not is_lost and not getattr(error, "announced", False):
        group.comm._refuse()
        error.announced = True


def _uses(group: "dist.ProcessGroup", name: str, arguments: tuple, opts: object) -> tuple:
    """`_USES`, but only the root's tensors are read, or written, by a call that has a root."""
    if name not in ("broadcast", "reduce"):
        return _USES[name]
    opts = arguments[1] if len(arguments) > 1 else opts
    root = 0 if opts is None else getattr(opts, "rootRank", opts)
    if name == "broadcast":
        return ("r",) if group.rank() == root else ("w",)
    return ("rw",) if group.rank() == root else ("r",)


def _rows(group: "dist.ProcessGroup", name: str) -> tuple:
    """For calls that are cut, into how many rows each tensor is divided."""
    if group.comm is None:
        return ()
    rows = {"_reduce_scatter_base": (1, group.size()), "_allgather_base": (group.size(), 1)}
    return rows.get(name, (1,) if name in ("allreduce", "reduce", "broadcast") else ())


def _staging(group: "dist.ProcessGroup") -> Staging:
    if group.staging is None:
        proxy = weakref.proxy(group)
        group.staging = Staging(group, lambda error: refuse(proxy, error))
    return group.staging


def take_devices(group: type) -> None:
    """Makes the group's calls take tensors of devices."""

    def taking(name: str, call: Callable) -> Callable:
        @functools.wraps(call)
        def taken(self, *arguments, **more):
            tensors = tensors_in(arguments)
            device = next((x.device.type for x in tensors if is_on_device(x)), "cpu")
            if name != "barrier" and (other := other_backend(self, device)) is not None:
                newer = next((newer for newer, older in NEWER.items() if older == name), name)
                return (getattr(other, newer, None) or getattr(other, name))(*arguments, **more)
            is_queued = name in _USES and (
                device != "cpu" if self.staging is None else self.staging.needs(arguments)
            )
            if not is_queued:
                return call(self, *arguments, **more)
            return _staging(self).run(
                lambda *hosts: call(self, *hosts, **more),
                arguments,
                _uses(self, name, arguments, more.get("opts")),
                _rows(self, name),
            )

        return taken

    def ending(call: Callable) -> Callable:
        @functools.wraps(call)
        def ended(self) -> None:
            for other in self.others.values():
                getattr(other, "shutdown", lambda: None)()
            call(self)

        return ended

    for name in (*_USES, *_OTHERS):
        setattr(group, name, taking(name, getattr(group, name)))
    for name in ("shutdown", "abort"):
        setattr(group, name, ending(getattr(group, name)))


def other_backend(group: "dist.ProcessGroup", device: str) -> object:
    """The other backend that init_process_group names for a type of devices: "cuda:nccl".

    A group in Python gets the tensors of all devices. So the other backend is made here, when all
    ranks use it for the first time.
    """
    if device not in group.others:
        world = getattr(dist.distributed_c10d, "_world", None)
        config = world.pg_backend_config.get(group) if world else None
        if config is None:
            return None
        pairs = [pair.split(":") for pair in config.split(",") if ":" in pair]
        name = next((name for kind, name in pairs if kind == device), "netsum")
        group.others[device] = None if name == "netsum" else _register(group, device, name)
    return group.others[device]


def _register(group: "dist.ProcessGroup", device: str, name: str) -> object:
    store = dist.PrefixStore(f"{device}/{name}", group.gloo.store)
    made = _made(group, name, store)
    kind = dist.Backend.backend_type_map.get(name, dist.ProcessGroup.BackendType.CUSTOM)
    group._register_backend(torch.device(device), kind, made)
    return made


def _made(group: "dist.ProcessGroup", name: str, store: "dist.Store") -> object:
    rank, size, timeout = group.rank(), group.size(), group.gloo.timeout
    plugin = dist.Backend._plugins.get(name.upper())
    if plugin is not None and not plugin.extended_api:
        return plugin.creator_fn(store, rank, size, timeout)
    if plugin is not None:
        options = dist.distributed_c10d._DistributedBackendOptions()
        options.store, options.group_rank, options.group_size = store, rank, size
        options.timeout, options.group_id = timeout, group.getGroupName()
        options.global_ranks_in_group = group.gloo.ranks
        return plugin.creator_fn(options, None)
    kind = getattr(dist, f"ProcessGroup{name.upper()}", None)
    if name == "gloo":
        kind = dist.ProcessGroupGloo
    if kind is None:
        raise ArgumentError(f"{name}: this PyTorch has no such backend")
    return kind(store, rank, size, timeout=timeout)
