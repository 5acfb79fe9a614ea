"""A process beside a worker of another host: it answers what that worker does, also while the worker's Python may not run.

    worker ──── one more connection with the controller, handed to ───▶ its sign process
    controller ──▶ sign process: what does it do?         with each ping, while the controller waits for the worker
    sign process ──▶ controller: what /proc says of the worker, and where its Python is

The sign process ends with the connection, and with the worker. It imports no torch.
"""

import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress

from pippy.drivers.base.process_signs import Look, Sign

_ANSWERS = 1.0  # seconds that an answer may take
_LOOKS_UP = 1.0  # seconds between two looks at whether the worker lives
_LONGEST = 1 << 16  # bytes of an answer


class FarSigns:
    """The controller's connections with sign processes, by worker. None is said of a worker that has none.

    >>> FarSigns().sign(3) is None
    True
    """

    def __init__(self) -> None:
        self._asked: dict[int, _Asked] = {}
        self._lock = threading.Lock()

    def take(self, worker: int, end: socket.socket) -> None:
        """Ask over this connection from now on."""
        self.drop(worker)
        self._asked[worker] = _Asked(end)

    def sign(self, worker: int) -> Sign | None:
        """What the process of a worker has done until now."""
        look = self._ask(worker, b"s")
        return None if look is None else look.now

    def look(self, worker: int) -> Look | None:
        """What the process of a worker does, and where its Python is."""
        return self._ask(worker, b"l")

    def drop(self, worker: int) -> None:
        """A worker is gone: its sign process ends."""
        with self._lock:
            if (asked := self._asked.pop(worker, None)) is not None:
                asked.end.close()

    def close(self) -> None:
        """Close all connections."""
        for worker in list(self._asked):
            self.drop(worker)

    def _ask(self, worker: int, what: bytes) -> Look | None:
        with self._lock:
            asked = self._asked.get(worker)
            try:
                return None if asked is None else asked.answer(what)
            except TimeoutError:  # its host is busy
                return None
            except (OSError, ValueError, TypeError, KeyError):  # it is gone, or says something else than was expected
                pass
        self.drop(worker)
        return None


class _Asked:
    """A sign process that is asked. Questions have numbers, since an answer may come too late."""

    def __init__(self, end: socket.socket) -> None:
        self.end, self._number, self._said = end, 0, b""

    def answer(self, what: bytes) -> Look:
        """What it answers. Raises TimeoutError if that takes too long."""
        self._number = (self._number + 1) % 256
        until = time.monotonic() + _ANSWERS
        self.end.settimeout(_ANSWERS)
        self.end.sendall(what + bytes([self._number]))
        while True:
            line, found, rest = self._said.partition(b"\n")
            if found:
                self._said = rest
                answer = json.loads(line)
                if answer["to"] == self._number:
                    return Look.of_message(answer)
            elif len(self._said) > _LONGEST:
                raise ConnectionError("it says something else than was expected")
            else:
                self.end.settimeout(max(1e-3, until - time.monotonic()))
                if not (more := self.end.recv(_LONGEST)):
                    raise ConnectionError("it has ended")
                self._said += more


def start_sign_process(end: socket.socket) -> None:
    """Start the sign process of this process, which answers over this connection.

    >>> here, there = socket.socketpair()
    >>> start_sign_process(there)
    >>> (signs := FarSigns()).take(0, here)
    >>> signs.sign(0).state in ("R", "S"), signs.look(0).now.computed > 0
    (True, True)
    >>> signs.close()
    """
    with end, suppress(OSError):  # without one, the worker is lost as soon as it is silent
        path = os.pathsep.join(each for each in sys.path if each)
        process = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import answer; answer({end.fileno()}, {os.getpid()})"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[end.fileno()],
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C is the controller's
        )
        threading.Thread(target=process.wait, name="pippy signs", daemon=True).start()


def answer(number: int, worker: int) -> None:
    """Answer over the socket with this descriptor what a worker, the parent of this process, does; until either ends."""
    with socket.socket(fileno=number) as end, suppress(OSError):
        waiting = select.poll()
        waiting.register(end, select.POLLIN)
        while os.getppid() == worker:
            if not waiting.poll(_LOOKS_UP * 1000):
                continue
            asked = end.recv(2, socket.MSG_WAITALL)
            if len(asked) < 2:
                return
            look = Look.at(worker) if asked[:1] == b"l" else Look.briefly(worker)
            end.sendall(json.dumps({"to": asked[1], **look.message()}).encode() + b"\n")
