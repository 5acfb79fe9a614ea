"""How a process of a local cluster ends when the controller, or the process that it was forked from, ends."""

import contextlib
import ctypes
import os
import select
import signal
import socket

from pippy.drivers.engines.local.launch_config import LaunchConfig

_PR_SET_PDEATHSIG = 1


def watch_controller(
    waiting: "select.poll", controller: socket.socket, config: LaunchConfig, events: int = 0
) -> list[int]:
    """Register the controller's socket and, if the system allows it, its process, to notice when the controller ends.

    The socket alone is not enough: processes that the controller has forked hold it open, too. ``events`` are those of the
    socket to wait for, beside its end. Returns the file descriptors that were opened.
    """
    waiting.register(controller, events)  # poll reports a hang-up without being asked for it
    with contextlib.suppress(OSError):
        process = os.pidfd_open(config.controller)
        waiting.register(process, select.POLLIN)
        return [process]
    return []


def die_with_controller(controller: socket.socket, config: LaunchConfig) -> None:
    """A worker's thread that waits for the controller's end."""
    waiting = select.poll()
    watch_controller(waiting, controller, config)
    waiting.poll()
    os._exit(1)


def die_with_parent(parent: int) -> None:
    """Have the system kill this process when its parent dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
