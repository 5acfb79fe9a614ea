"""Wakes a thread that waits on file descriptors, from any other thread."""

import os
from contextlib import suppress
from threading import Lock


class Bell:
    """A file descriptor that is readable from ``ring`` to ``quiet``.

    >>> import select
    >>> bell = Bell()
    >>> bell.ring()
    >>> select.select([bell], [], [], 0)[0] == [bell]
    True
    >>> bell.quiet()
    >>> select.select([bell], [], [], 0)[0]
    []
    >>> bell.close()
    """

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = Lock()

    def fileno(self) -> int:
        """The file descriptor; -1 once it is closed."""
        return self._fd

    def ring(self) -> None:
        """Wake whoever waits. A bell that is closed is silent."""
        with self._closing:  # or the number may be another file's by now
            if self._fd >= 0:
                os.eventfd_write(self._fd, 1)

    def quiet(self) -> None:
        """Make it unreadable until it rings again."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def close(self) -> None:
        """Give up the file descriptor."""
        with self._closing:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)
