"""Processes of a host that pippy did not start: when one began, and its end. It imports nothing that takes long."""

import os
import signal
from contextlib import suppress


def began(pid: int) -> str:
    """When a process began, so that another one with its number is not taken for it; "" if it is gone.

    >>> began(os.getpid()) != "", began(1 << 30)
    (True, '')
    """
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def kill_process(pid: int, since: str) -> None:
    """End a process of this host, which may be stopped, unless another one has its number by now.

    >>> kill_process(os.getpid(), "another time")
    """
    if since and began(pid) == since:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
