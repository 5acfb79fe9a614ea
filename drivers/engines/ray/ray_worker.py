"""A worker in an actor of Ray.

The calls of Ray start it and have it join its cluster. The last one is answered when it is gone. All else goes over
connections.
"""

import os
import signal
import sys
from contextlib import suppress
from typing import Any

from pippy.drivers.base.process import keep_freed_memory
from pippy.drivers.engines.arguments import device_name
from pippy.drivers.engines.connected_worker import load
from pippy.drivers.engines.hub.hub_worker import MemberWorker, RunSettings, place_of_this_process
from pippy.drivers.wire.messages.doors import Invitation, come_in


class RayWorker:
    """The actor of a worker. Ray writes its ``name`` before the lines that it prints."""

    def __init__(self, name: str) -> None:
        self.name = name
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the controller's
        # Ray gives its workers a lower priority than all else, and the system may not let it be raised
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, os.getppid()))
        keep_freed_memory()

    def __repr__(self) -> str:
        return self.name

    def where(self, worker: str) -> dict[str, Any]:
        """Where this process is. Imports what a worker needs."""
        import ray

        load(worker)
        return {**place_of_this_process(), "node": ray.get_runtime_context().get_node_id()}

    def join(self, line: str, number: int, timeout: float) -> None:
        """Come in at a door of the controller, which an invitation names, and be its worker until this process ends."""
        import ray

        invitation = Invitation.of_line(line)
        end = come_in(invitation, number, timeout)
        MemberWorker(end, invitation, ray.util.get_node_ip_address(), _say_nothing, self._becomes).run()

    def _becomes(self, index: int, settings: RunSettings) -> None:
        """Have Ray write the name of the worker. Raises if there is no such device."""
        if (name := settings.names[index]) != self.name:
            from ray._private.ray_constants import LOG_PREFIX_ACTOR_NAME

            self.name = name
            for stream in (sys.stdout, sys.stderr):  # Ray has asked for the name when the actor began
                print(f"{LOG_PREFIX_ACTOR_NAME}{name}", file=stream, flush=True)
        device_name(settings.device)


def _say_nothing(text: str) -> None:
    """Ray tells the script how its actors are."""
