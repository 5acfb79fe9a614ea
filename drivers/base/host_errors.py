"""What the system refuses a cluster, in words: processes, memory, file descriptors. All of it is said here.

with in_words("worker 'front'"):       what was needed ──┐
    os.fork()                          OSError ──────────┴──▶ HostError: why it cannot be had, and what to do
"""

import errno
import os
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pippy.drivers.base.errors import ClusterError


class HostError(ClusterError, OSError):
    """The system refuses what a cluster needs. ``errno`` is that of the system's error.

    >>> issubclass(HostError, ClusterError) and issubclass(HostError, OSError)
    True
    """

    def __init__(self, words: str, number: int | None = None) -> None:
        super().__init__(words)
        self.errno = number


@contextmanager
def in_words(what: str) -> Iterator[None]:
    """What the system refuses in the block is a HostError that says why there is no ``what``, and what to do.

    >>> with in_words("worker 'front'"):
    ...     raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
    Traceback (most recent call last):
    pippy.drivers.base.host_errors.HostError: no other process or thread is allowed for worker 'front': ...
    """
    try:
        yield
    except HostError:
        raise
    except OSError as error:
        raise host_error(error, what) from error
    except RuntimeError as error:
        if "can't start new thread" not in str(error):
            raise
        raise host_error(OSError(errno.EAGAIN, str(error)), what) from error


def host_error(error: OSError, what: str) -> HostError:
    """The error that says why there is no ``what``, and what to do.

    >>> host_error(OSError(errno.EIO, "Input/output error"), "worker 'front'")
    HostError("the system refuses worker 'front': Input/output error")
    """
    if error.filename == (sys.executable or "") and error.errno in (errno.ENOENT, errno.EACCES, errno.ENOEXEC):
        return HostError(_executable(what), error.errno)
    say = _SAYINGS.get(error.errno or 0)
    return HostError(say(what) if say else f"the system refuses {what}: {error.strerror or error}", error.errno)


def no_descriptor(what: str) -> HostError:
    """The error of a process that has too many files open.

    >>> no_descriptor("a socket").errno == errno.EMFILE
    True
    """
    return HostError(_descriptors(what), errno.EMFILE)


def _executable(what: str) -> str:
    return (
        f"no Python can be started for {what}: sys.executable is {sys.executable!r}, and must be the path of a Python that "
        "has the packages of this one; a program in which Python is embedded sets it: "
        "sys.executable = '/usr/bin/python3'"
    )


def _descriptors(what: str) -> str:
    return (
        f"process {os.getpid()} has no free file descriptor for {what}: it may have {_limit(resource.RLIMIT_NOFILE)} open; "
        "close files in the script or in what the stages run, or raise the limit before the script starts (ulimit -n)"
    )


def _processes(what: str) -> str:
    return (
        f"no other process or thread is allowed for {what}: this account may have {_limit(resource.RLIMIT_NPROC)} at once, and "
        "a container or a job may allow fewer; end some, raise the limit before the script starts (ulimit -u), or start fewer "
        "workers"
    )


def _memory(what: str) -> str:
    return (
        f"there is no memory for {what}: that of this host, or of its container or job, is in use, or process {os.getpid()} "
        f"may have no more (ulimit -v: {_limit(resource.RLIMIT_AS)}); free some, give more micro-batches, or raise the limit"
    )


def _file_size(what: str) -> str:
    return (
        f"process {os.getpid()} may not make memory for {what}: memory that processes share counts as a file, and a file may "
        f"have {_limit(resource.RLIMIT_FSIZE)} bytes at most; raise the limit before the script starts (ulimit -f unlimited)"
    )


def _environment(what: str) -> str:
    return (
        f"the environment is too large for {what}: the system allows 131,072 bytes for one variable, and for all a quarter of "
        "the stack's limit (ulimit -s); delete from os.environ what the workers do not need"
    )


def _limit(which: int) -> str:
    soft, _ = resource.getrlimit(which)
    return "any number" if soft == resource.RLIM_INFINITY else f"{soft:,}"


_SAYINGS: dict[int, Callable[[str], str]] = {
    errno.EMFILE: _descriptors,
    errno.ENFILE: _descriptors,
    errno.ETOOMANYREFS: _descriptors,
    errno.EAGAIN: _processes,
    errno.ENOMEM: _memory,
    errno.ENOSPC: _memory,
    errno.EFBIG: _file_size,
    errno.E2BIG: _environment,
}
