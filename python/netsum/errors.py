"""Exceptions, derived from netsum.Error. An error that ends the communicator is raised again."""


class Error(RuntimeError):
    """An error of a communicator; the text says what happened, and what to do."""


class ConfigError(Error, ValueError):
    """A setting is missing or wrong, or contradicts the job's."""


class ArgumentError(Error, ValueError):
    """An argument cannot be used. The communicator still can."""


class ControllerError(Error):
    """The controller could not be reached, it refused, or ranks are missing."""


class _OfRank(Error):
    def __init__(self, text: str, rank: int):
        super().__init__(text)
        self.rank = rank

    def __reduce__(self):
        return type(self), (self.args[0], self.rank)


class UnreachableError(_OfRank):
    """The rank `rank` did not answer when the connections were opened."""


class RankDiedError(_OfRank):
    """The rank `rank` has died, or cannot be reached."""


class RankLeftError(_OfRank):
    """The rank `rank` has left the job, but is needed."""


class MismatchError(Error):
    """The ranks called for different operations."""


class NonFiniteError(Error, ArithmeticError):
    """One of over 4,096 floats is infinite or NaN at some rank.

    All results of its block of 1,024 are NaN, the others are sums. The communicator can still be used.
    """


class ClosedError(Error):
    """The communicator was closed."""


class NoBoxWarning(UserWarning):
    """A box should sum, but the hosts' ring does."""


class UnderflowWarning(UserWarning):
    """Many nonzero floats became 0, because their block has far larger ones."""


class ForkedError(Error):
    """This process was forked from the one that connected."""
