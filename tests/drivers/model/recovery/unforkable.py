"""A worker whose fork server forks the first three processes, fails at the fourth, and forks those after it."""

import os
from itertools import count

from pippy.drivers.worker import worker

FIRST = 3
Worker = worker.Worker
_forks, _fork = count(), os.fork


def _fork_or_fail() -> int:
    if next(_forks) == FIRST:
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return _fork()


os.fork = _fork_or_fail
