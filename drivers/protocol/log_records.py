"""What workers have logged, on its way to the controller."""

from dataclasses import dataclass


@dataclass(frozen=True)
class WorkerLogRecord:
    """A record of a worker's logger. The message is whole: with its arguments, and with the traceback if it has one.

    >>> WorkerLogRecord("pippy.drivers", 20, "a message", 0.0, "/a/file.py", 7, "function").level
    20
    """

    logger: str
    level: int
    message: str
    created: float
    path: str
    line: int
    function: str
