"""Wakes a thread that waits on file descriptors, from any other thread."""

import os
from contextlib import suppress
from threading import Lock

from pippy.drivers.interrupts import put_off


class PollableEvent:
    """A `threading.Event` that `select` can wait for: its file descriptor is readable from ``set`` to ``clear``.

    >>> import select
    >>> event = PollableEvent()
    >>> event.set()
    >>> select.select([event], [], [], 0)[0] == [event]
    True
    >>> event.clear()
    >>> select.select([event], [], [], 0)[0]
    []
    >>> event.close()
    """

    _fd = -1

    def __init__(self) -> None:
        self._closing = Lock()
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """The file descriptor; -1 once it is closed."""
        return self._fd

    def set(self) -> None:
        """Wake the thread that waits. Does nothing once the event is closed."""
        with self._closing:  # or the number may be another file's by now
            if self._fd >= 0:
                os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Make it unreadable until it is set again."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def __del__(self) -> None:
        if self._fd >= 0:  # Ctrl-C has come before `close`, and may come again
            with put_off():
                self.close()

    def close(self) -> None:
        """Close the file descriptor."""
        with self._closing:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)
