"""Wakes a thread that waits on file descriptors, from any other thread."""

import os
from contextlib import suppress
from io import FileIO
from threading import Lock

from pippy.drivers.base.interrupts import uninterrupted


class PollableEvent:
    """A `threading.Event` that `select` can wait for: its file descriptor is readable from ``set`` to ``clear``.

    It is closed when nothing refers to it any more, as Ctrl-C may come before `close`. Python code that runs then would
    lose another Ctrl-C, so the descriptor belongs to an object whose end is code of C.

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

    def __init__(self) -> None:
        self._closing = Lock()
        with uninterrupted():
            self._file = FileIO(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC), "r+")

    def fileno(self) -> int:
        """The file descriptor; -1 once it is closed."""
        return -1 if self._file.closed else self._file.fileno()

    def set(self) -> None:
        """Wake the thread that waits. Does nothing once the event is closed."""
        with self._closing:  # or the number may be another file's by now
            if not self._file.closed:
                os.eventfd_write(self._file.fileno(), 1)

    def clear(self) -> None:
        """Make it unreadable until it is set again."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._file.fileno())

    def close(self) -> None:
        """Close the file descriptor."""
        with self._closing:
            self._file.close()
