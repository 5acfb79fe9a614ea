"""The connection that a worker which joins has with the controller, from its greeting to its end.

    worker      {"place": ...}       where it is, and what it has
    controller  {"run": ...}         which worker it is, what it computes with, and how it gets its connections for messages
    worker      {"failed": text}     why it ends, if it raised
    controller  {"end": why}         the worker is to end; null if the cluster was closed

Each is a line of JSON. When the connection breaks, each end knows that the other is gone.
"""

import json
import select
import socket
import time
from contextlib import suppress
from typing import Any

_LONGEST = 1 << 20  # bytes of a line


class ControlLines:
    """One end of the connection. `send` may be called by any thread, `read` by one.

    >>> here, there = map(ControlLines, socket.socketpair())
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
                raise ConnectionError("it says something else than was expected")
        line, _, self._said = self._said.partition(b"\n")
        try:
            message = json.loads(line)
        except ValueError as error:
            raise ConnectionError("it says something else than was expected") from error
        if not isinstance(message, dict):
            raise ConnectionError("it says something else than was expected")
        return message

    def close(self) -> None:
        """End the connection, also where a fork of this process holds it open."""
        with suppress(OSError):  # the other end has done so
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
