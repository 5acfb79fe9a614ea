"""Processes of this host: when one began and how it ends, the memory that this one frees, and its standard streams.

Nothing is imported here that takes long.
"""

import ctypes
import os
import signal
import sys
from contextlib import suppress
from typing import NoReturn


def stat_of(pid: int) -> list[str]:
    """What the system says of a process, from the state of the process on; nothing if the process is gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def began(pid: int) -> str:
    """When a process began, so that another one with its number is not taken for it; "" if it is gone.

    >>> began(os.getpid()) != "", began(1 << 30)
    (True, '')
    """
    fields = stat_of(pid)
    return fields[19] if fields else ""


def kill_process(pid: int, since: str) -> None:
    """End a process of this host, which may be stopped, unless another one has its number by now.

    >>> kill_process(os.getpid(), "another time")
    """
    if since and began(pid) == since:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


# glibc's numbers for mallopt, and what local workers get in their environment. No memory of its own for any large block.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8
_SETTINGS = {_ARENA_MAX: 1, _TRIM_THRESHOLD: (1 << 31) - 1, _TOP_PAD: 64 << 20, _MMAP_MAX: 0}


def keep_freed_memory() -> None:
    """Take memory from the system in large pieces, and give none back. Does nothing where the C library is another one.

    Fresh memory takes a page fault for every 4 KiB, and a training step frees and takes gigabytes.

    >>> keep_freed_memory()
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for setting, value in _SETTINGS.items():
            mallopt(setting, value)


def open_standard_streams() -> None:
    """Open the null device where one of these is closed, as by ``>&-`` or by a daemon.

    A socket would get its number, and what a library prints.

    >>> open_standard_streams()
    """
    while True:
        descriptor = os.open(os.devnull, os.O_RDWR)
        if descriptor > 2:
            os.close(descriptor)
            return
        os.set_inheritable(descriptor, True)


def exit_at_once(status: int) -> NoReturn:
    """End this process without taking Python and torch apart, which takes most of a second. What was printed is written."""
    try:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
    finally:  # also where nobody reads it
        os._exit(status)
