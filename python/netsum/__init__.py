"""All-reduce inside the network: a Linux box between the hosts adds arrays and tensors.

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
    """Joins the job from the environment, and returns a Communicator when all ranks have joined.

    Settings given here replace NETSUM_NAME in the environment; rank, ranks and local_rank are also
    read from the variables of torchrun, mpirun and srun. With a box: controller ("HOST:PORT";
    default: the host "netsum"), job and token, as `netsum job create` prints them. Without a box:
    peers, the addresses of all ranks. More: `python -m netsum.check --help`.
    """
    texts = {}
    for name, value in settings.items():
        if value is not None:
            listed = isinstance(value, (list, tuple))
            texts[name] = ",".join(map(str, value)) if listed else str(value)
    return _connect(texts)
