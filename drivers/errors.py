"""The errors of everything that runs a Pipe on workers."""

from pippy.ir.errors import PippyError


class LoweringError(PippyError, ValueError):
    """A schedule or program that does not fit the Pipe it is to run.

    >>> issubclass(LoweringError, PippyError)
    True
    """
