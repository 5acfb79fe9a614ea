"""The reports of the fork server and the workers to the controller: a worker starts, cannot start, or has died.

Each says which start of the worker it is about: a worker that was lost is started again, and reports of its earlier processes
may still come.
"""

import contextlib
import pickle
import signal
import socket
from dataclasses import dataclass, replace

LONGEST_TRACEBACK = 1 << 16  # a traceback is cut to this many characters; one packet of the socket holds it


@dataclass(frozen=True)
class Ready:
    """A worker is about to join.

    >>> Ready(0, 4711)
    Ready(index=0, pid=4711, start=0)
    """

    index: int
    pid: int
    start: int = 0


@dataclass(frozen=True)
class Failed:
    """A worker, or the fork server (None), failed to start.

    >>> Failed(None, "Traceback ...")
    Failed(index=None, text='Traceback ...', start=0)
    """

    index: int | None
    text: str
    start: int = 0


@dataclass(frozen=True)
class Died:
    """A worker has ended; ``status`` is an exit status, or minus the number of a signal.

    ``out_of_memory`` says whether the system has killed a process meanwhile because memory ran out.

    >>> print(Died(0, -9).how, "|", Died(0, 3).how)
    killed by SIGKILL | it ended with status 3
    >>> print(Died(0, -9, out_of_memory=True).how)
    killed by SIGKILL, when the system killed a process because memory ran out (dmesg says which; driver.memory ...
    """

    index: int
    status: int
    start: int = 0
    out_of_memory: bool = False

    @property
    def how(self) -> str:
        """In words."""
        if self.status >= 0:
            return f"it ended with status {self.status}"
        if -self.status not in list(signal.Signals):
            return f"killed by signal {-self.status}"
        how = f"killed by {signal.Signals(-self.status).name}"
        if self.status == -signal.SIGKILL and self.out_of_memory:
            return (
                f"{how}, when the system killed a process because memory ran out (dmesg says which; driver.memory says what a "
                "worker holds; the memory may be that of a container or a job)"
            )
        return how


def killed_for_memory() -> int:
    """How many processes the system has killed because memory ran out, in all or in a container; 0 if it does not say.

    >>> killed_for_memory() >= 0
    True
    """
    with contextlib.suppress(OSError), open("/proc/vmstat") as lines:
        return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
    return 0


def report(controller: socket.socket, message: Ready | Failed | Died) -> None:
    """Send a report, if the controller is there."""
    if isinstance(message, Failed):
        message = replace(message, text=message.text[-LONGEST_TRACEBACK:])
    with contextlib.suppress(OSError):
        controller.send(pickle.dumps(message), socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
