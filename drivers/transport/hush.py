"""Keeps lines that are known to mean nothing off standard error, while a moment lasts."""

import os
import tempfile
import threading
from typing import IO


class Hush:
    """Between ``start`` and ``stop``, lines with ``word`` do not reach standard error; the others do at ``stop``.

    What C++ writes goes past sys.stderr, so the file descriptor itself is led to a file meanwhile. Both may be called
    twice, and from any thread.

    >>> hush = Hush(b"nothing of note")
    >>> hush.start()
    >>> os.write(2, b"nothing of note happened\\n")
    25
    >>> hush.stop()
    """

    def __init__(self, word: bytes) -> None:
        self.word = word
        self._lock = threading.Lock()
        self._held: tuple[int, IO[bytes]] | None = None

    def start(self) -> None:
        """From here on."""
        with self._lock:
            if self._held is None:
                try:
                    saved = os.dup(2)
                except OSError:  # there is no standard error
                    return
                file = tempfile.TemporaryFile("a+b", 0)  # noqa: SIM115 # closed by stop
                os.dup2(file.fileno(), 2)
                self._held = saved, file

    def stop(self) -> None:
        """To here."""
        with self._lock:
            if self._held is None:
                return
            (saved, file), self._held = self._held, None
            os.dup2(saved, 2)
            os.close(saved)
            with file:
                file.seek(0)
                for line in file:
                    if self.word not in line:
                        os.write(2, line)
