"""All-reduce inside the network: a Linux box between the hosts adds arrays and tensors up.

    import netsum

    with netsum.init() as comm:
        comm.all_reduce(gradient)
"""

from ._netsum import Communicator, Report, Work, __version__, connect as _connect
from .errors import (
    ArgumentError,
    ClosedError,
    ConfigError,
    ControllerError,
    Error,
    ForkedError,
    MismatchError,
    NoBoxWarning,
    NonFiniteError,
    RankDiedError,
    RankLeftError,
    UnderflowWarning,
    UnreachableError,
)


def init(**settings):
    """Joins the job that the environment tells of, and returns a Communicator when all ranks are there.

    Settings given here stand in for NETSUM_NAME in the environment; rank, ranks and local_rank also come from what torchrun, mpirun
    and srun set. With a box: controller ("HOST:PORT"; else the host "netsum" is looked for), job and token, as
    `netsum job create` prints them. Without: peers, the addresses of all ranks. More: `python -m netsum.check --help`.
    """
    texts = {}
    for name, value in settings.items():
        if value is not None:
            listed = isinstance(value, (list, tuple))
            texts[name] = ",".join(map(str, value)) if listed else str(value)
    return _connect(texts)
