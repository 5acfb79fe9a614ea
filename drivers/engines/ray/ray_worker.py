"""A worker in an actor of Ray.

The calls of Ray start it and give it its place, and the last one, `run`, is answered when it is gone. All else goes over
connections. It has them from the beginning: a spare, which has no place yet, ends when they end.
"""

import os
import queue
import select
import signal
import socket
import sys
import threading
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

from pippy.drivers.base.process import exit_at_once, keep_freed_memory
from pippy.drivers.base.versions import versions
from pippy.drivers.engines.arguments import device_name
from pippy.drivers.engines.hub.hub_worker import ConnectedWorker, RunSettings, place_of_this_process
from pippy.drivers.engines.local.fork_server import load
from pippy.drivers.wire.messages.doors import THIS_HOST, Door
from pippy.drivers.wire.messages.handed_sockets import take_over
from pippy.drivers.wire.messages.sockets import break_when_silent


class RayWorker:
    """The actor of a worker. Ray writes its ``name`` before the lines that it prints."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._ends: queue.SimpleQueue[tuple[int, socket.socket]] = queue.SimpleQueue()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the controller's
        # Ray gives its workers a lower priority than all else, and the system may not let it be raised
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, os.getppid()))
        keep_freed_memory()

    def __repr__(self) -> str:
        return self.name

    def where(self, worker: str) -> dict[str, Any]:
        """Where this process is, and what it runs. Imports what a worker needs."""
        import ray

        load(worker)
        return {
            **place_of_this_process(),
            "node": ray.get_runtime_context().get_node_id(),
            "versions": {**versions(), "ray": ray.__version__},
        }

    def open(self, near: bool, timeout: float) -> str:
        """Open a door for the controller. Returns the line of its invitation."""
        import ray

        self.timeout, self.address = timeout, ray.util.get_node_ip_address()
        door = Door(THIS_HOST if near else self.address, [0] if near else [0, 1], self._meet_controller, 4 * timeout)
        return door.invitation.line()

    def take_place(self, name: str, device: str) -> str:
        """Be the worker of this name. Returns the name of its device."""
        if name != self.name:
            from ray._private.ray_constants import LOG_PREFIX_ACTOR_NAME

            self.name = name
            for stream in (sys.stdout, sys.stderr):  # Ray has asked for the name when the actor began
                print(f"{LOG_PREFIX_ACTOR_NAME}{name}", file=stream, flush=True)
        return device_name(device)

    def run(self, index: int, settings: RunSettings) -> None:
        """Run commands until this process ends."""
        ends = dict(self._ends.get(timeout=4 * self.timeout) for _ in range(2))
        ConnectedWorker(index, self.address, settings, partial(exit_at_once, 0)).run(ends[0], ends[1])

    def _meet_controller(self, guest: int, end: socket.socket) -> None:
        if end.family != socket.AF_UNIX:
            break_when_silent(end, self.timeout)
            self._came(guest, end)
            return
        with end, suppress(OSError):  # the controller is told
            end.settimeout(self.timeout)
            for number, each in enumerate(take_over(end, 2)):
                self._came(number, each)

    def _came(self, number: int, end: socket.socket) -> None:
        threading.Thread(target=_end_with, args=(end,), daemon=True).start()
        self._ends.put((number, end))


def _end_with(end: socket.socket) -> NoReturn:
    """Wait until the controller has ended a connection."""
    waiting = select.poll()
    waiting.register(end, select.POLLRDHUP)
    waiting.poll()
    exit_at_once(0)
