"""Messages of JSON between two processes, one a line. Nothing is imported here that takes long."""

import json
import select
import socket
import time
from contextlib import suppress
from typing import Any

_LONGEST = 1 << 20  # bytes of a line
_UNEXPECTED = "it says something else than was expected"


class JsonLines:
    """One end of a connection. `send` may be called by any thread, `read` by one.

    >>> here, there = map(JsonLines, socket.socketpair())
    >>> here.send(end=None)
    >>> there.read()
    {'end': None}
    >>> here.close()
    >>> there.read() is None
    True
    >>> there.close()
    """

    def __init__(self, end: socket.socket) -> None:
        self.socket, self._said = end, b""

    def fileno(self) -> int:
        """The file descriptor to wait for."""
        return self.socket.fileno()

    def send(self, **message: Any) -> None:
        """Send a message. Raises OSError if the other end is gone."""
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def read(self, within: float | None = None) -> dict[str, Any] | None:
        """The next message; None if the other end is gone. Raises OSError if none comes in so many seconds, or it is none."""
        until = None if within is None else time.monotonic() + within
        while b"\n" not in self._said:
            waiting = select.poll()
            waiting.register(self.socket, select.POLLIN)
            if not waiting.poll(None if until is None else max(0.0, until - time.monotonic()) * 1000):
                raise TimeoutError(f"no answer within {within:g} s")
            more = self.socket.recv(1 << 16)
            if not more:
                return None
            self._said += more
            if len(self._said) > _LONGEST:
                raise ConnectionError(_UNEXPECTED)
        line, _, self._said = self._said.partition(b"\n")
        try:
            message = json.loads(line)
        except ValueError as error:
            raise ConnectionError(_UNEXPECTED) from error
        if not isinstance(message, dict):
            raise ConnectionError(_UNEXPECTED)
        return message

    def close(self) -> None:
        """End the connection, also where a fork of this process holds it open."""
        with suppress(OSError):  # the other end has done so
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
