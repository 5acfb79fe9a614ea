"""A process that holds one object and calls its methods when told; between calls it is blocked on a socket.

The child is a fresh interpreter, pinned to one core, with one intra-op thread. It has no process of its own to leave
behind, and it ends when its socket closes, whatever became of the parent.
"""

import os
import pickle
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from exps.peers.hosts import Host

ROOT = Path(__file__).resolve().parent.parent.parent
SECONDS = 300.0  # the longest that any call may take

# what pippy gives to the workers that it starts: freed memory stays in the process, and is not faulted in again
KEEP_MEMORY = {
    "MALLOC_TRIM_THRESHOLD_": "-1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
    "MALLOC_TOP_PAD_": str(64 << 20),
    "MALLOC_ARENA_MAX": "1",
}


class ChildFailed(Exception):
    """A child raised an exception, died, or took too long."""


class Child:
    """A process on core ``core``, or on any for None, that holds ``make(*args)``. It is on this host, or on ``host``.

    >>> child = Child(0, dict, {"a": 1})
    >>> child.ask("get", "a")
    >>> child.answer()
    1
    >>> child.close()
    """

    def __init__(
        self,
        core: int | None,
        make: Callable[..., Any],
        *args: Any,
        keep_memory: bool = False,
        host: Host | None = None,
    ) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            core = -1 if core is None else core
            words = [sys.executable, "-m", "exps.peers.process", str(theirs.fileno()), str(core)]
            self._process = subprocess.Popen(
                words if host is None else host.command(*words),
                pass_fds=[theirs.fileno()],
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1"} | (KEEP_MEMORY if keep_memory else {}),
            )
        self._connection = Connection(ours.detach())
        self._what = getattr(make, "__name__", str(make))
        self._send(make, args)
        self._made = False

    def ask(self, method: str, *args: Any) -> None:
        """Have a method called; `answer` waits for what it returns."""
        if not self._made:
            self._made = True  # or not: then the answer to this, and to all that follows, is that there is no object
            self._receive()
        self._send(method, args)

    def answer(self) -> Any:
        """What the method returned that was asked for."""
        return self._receive()

    def close(self) -> None:
        """End the process: at once if it waits, within seconds if it does not."""
        self._connection.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _send(self, what: object, args: tuple[Any, ...]) -> None:
        try:
            self._connection.send_bytes(pickle.dumps((what, args)))
        except OSError:
            self._dead()

    def _receive(self) -> Any:
        if not wait([self._connection], SECONDS):
            raise ChildFailed(f"{self._what} took more than {SECONDS:.0f} s")
        try:
            good, value = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            self._dead()
        if not good:
            raise ChildFailed(f"{self._what} failed:\n{value}")
        return value

    def _dead(self) -> None:
        raise ChildFailed(f"{self._what} died; its exit status is {self._process.wait(5)}")


def serve(connection: Connection) -> None:
    """Make the object, then call its methods until the parent hangs up."""
    held: Any = None
    answer: tuple[bool, Any]
    while True:
        try:
            message = connection.recv_bytes()
        except (EOFError, OSError):
            return
        try:
            what, args = pickle.loads(message)
            if held is None and not isinstance(what, str):
                held, result = what(*args), None
            else:
                result = getattr(held, what)(*args)
            answer = (True, result)
        except Exception:
            answer = (False, traceback.format_exc())
        try:
            connection.send_bytes(pickle.dumps(answer))
        except OSError:
            return


def main() -> None:
    """The child."""
    import torch

    number, core = map(int, sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears Ctrl-C, and hangs up
    if core >= 0:
        os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    serve(Connection(number))
    sys.stdout.flush()
    os._exit(0)  # a process group whose peer is gone would wait in its destructor


if __name__ == "__main__":
    main()
