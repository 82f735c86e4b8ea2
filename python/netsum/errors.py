"""What can go wrong. All are netsum.Error; what ends the communicator is raised by every later call, too."""


class Error(RuntimeError):
    """Something went wrong with a communicator; the text says what, and what to do."""


class ConfigError(Error, ValueError):
    """A setting is missing or wrong, or contradicts the job's."""


class ArgumentError(Error, ValueError):
    """What was given to a call cannot be used. The communicator still can."""


class ControllerError(Error):
    """The box's daemon could not be reached, refused, or ranks are missing."""


class _OfRank(Error):
    def __init__(self, text: str, rank: int):
        super().__init__(text)
        self.rank = rank

    def __reduce__(self):
        return type(self), (self.args[0], self.rank)


class UnreachableError(_OfRank):
    """The rank `rank` did not answer when the connections were opened."""


class RankDiedError(_OfRank):
    """The rank `rank` has died, or the network to it has."""


class RankLeftError(_OfRank):
    """The rank `rank` has left the job, and is needed."""


class MismatchError(Error):
    """The ranks called for different operations."""


class NonFiniteError(Error, ArithmeticError):
    """An element is infinite or NaN at some rank: all results of its message are NaN, the others are sums. The communicator can still be
    used.
    """


class ClosedError(Error):
    """The communicator was closed."""


class NoBoxWarning(UserWarning):
    """A box should sum, and the ranks do it by themselves."""


class UnderflowWarning(UserWarning):
    """Many floats that are not zero counted as 0, beside far larger ones in their message."""


class ForkedError(Error):
    """This process was forked from the one that connected."""
