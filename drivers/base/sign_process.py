"""A process beside a worker of another host: it answers what that worker does, also while the worker's Python may not run.

    worker ──── one more connection with the controller, handed to ───▶ its sign process
    controller ──▶ sign process: what does it do?         with each ping, while the controller waits for the worker
    sign process ──▶ controller: what /proc says of the worker, and where its Python is

The sign process ends with the connection, and with the worker. It imports no torch.
"""

import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress

from pippy.drivers.base.json_lines import JsonLines
from pippy.drivers.base.process_signs import Look, Sign

_ANSWERS = 1.0  # seconds that an answer may take
_LOOKS_UP = 1.0  # seconds between two looks at whether the worker lives


class FarSigns:
    """The controller's connections with sign processes, by worker. None is said of a worker that has none.

    Questions have numbers, since an answer may come too late.

    >>> FarSigns().sign(3) is None
    True
    """

    def __init__(self) -> None:
        self._lines: dict[int, JsonLines] = {}
        self._lock, self._number = threading.Lock(), 0

    def take(self, worker: int, end: socket.socket) -> None:
        """Ask over this connection from now on."""
        self.drop(worker)
        self._lines[worker] = JsonLines(end)

    def sign(self, worker: int) -> Sign | None:
        """What the process of a worker has done until now."""
        look = self._ask(worker, looks=False)
        return None if look is None else look.now

    def look(self, worker: int) -> Look | None:
        """What the process of a worker does, and where its Python is."""
        return self._ask(worker, looks=True)

    def drop(self, worker: int) -> None:
        """A worker is gone: its sign process ends."""
        with self._lock:
            if (lines := self._lines.pop(worker, None)) is not None:
                lines.close()

    def close(self) -> None:
        """Close all connections."""
        for worker in list(self._lines):
            self.drop(worker)

    def _ask(self, worker: int, looks: bool) -> Look | None:
        with self._lock:
            lines = self._lines.get(worker)
            try:
                return None if lines is None else self._answer(lines, looks)
            except TimeoutError:  # its host is busy
                return None
            except (OSError, TypeError, KeyError):  # it is gone, or says something else than was expected
                pass
        self.drop(worker)
        return None

    def _answer(self, lines: JsonLines, looks: bool) -> Look:
        self._number += 1
        until = time.monotonic() + _ANSWERS
        lines.socket.settimeout(_ANSWERS)
        lines.send(number=self._number, looks=looks)
        while (said := lines.read(max(0.0, until - time.monotonic()))) is not None:
            if said["to"] == self._number:
                return Look.of_message(said)
        raise ConnectionError("it has ended")


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
    lines = JsonLines(socket.socket(fileno=number))
    with suppress(OSError):
        while os.getppid() == worker:
            try:
                asked = lines.read(_LOOKS_UP)
            except TimeoutError:
                continue
            if asked is None:
                return
            look = Look.at(worker) if asked["looks"] else Look.briefly(worker)
            lines.send(to=asked["number"], **look.message())
