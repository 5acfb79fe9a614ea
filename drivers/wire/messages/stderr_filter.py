"""Keeps lines that are known to mean nothing off standard error for a while."""

import os
import tempfile
import threading
from typing import IO

from pippy.drivers.base.interrupts import uninterrupted


class StderrFilter:
    """Between ``start`` and ``stop``, lines that contain ``text`` do not reach standard error; the others do at ``stop``.

    What C++ writes goes past sys.stderr, so the file descriptor itself is redirected to a file meanwhile. Both may be
    called twice, and from any thread.

    >>> stderr_filter = StderrFilter(b"nothing of note")
    >>> stderr_filter.start()
    >>> os.write(2, b"nothing of note happened\\n")
    25
    >>> stderr_filter.stop()
    """

    def __init__(self, text: bytes) -> None:
        self.text = text
        self._lock = threading.Lock()
        self._redirected: tuple[int, IO[bytes]] | None = None

    def start(self) -> None:
        """Redirect standard error."""
        with self._lock, uninterrupted():
            if self._redirected is None:
                try:
                    saved = os.dup(2)
                except OSError:  # there is no standard error
                    return
                file = tempfile.TemporaryFile("a+b", 0)  # noqa: SIM115 # closed by stop
                os.dup2(file.fileno(), 2)
                self._redirected = saved, file

    def stop(self) -> None:
        """Restore standard error, and write the other lines."""
        with self._lock, uninterrupted():
            if self._redirected is None:
                return
            (saved, file), self._redirected = self._redirected, None
            os.dup2(saved, 2)
            os.close(saved)
            with file:
                file.seek(0)
                for line in file:
                    if self.text not in line:
                        os.write(2, line)
