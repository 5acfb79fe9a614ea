"""A worker that runs scripted commands, for tests of the cluster without drivers."""

import logging
import os
import signal
import sys
import threading
import time
from contextlib import nullcontext
from typing import Any

from pippy.drivers.protocol.commands import Dump, GiveUp, News, Ping
from pippy.drivers.worker.worker import LogHandler
from pippy.drivers.worker.worker_context import WorkerContext


class Worker:
    """Takes tuples: the name of a method, and its arguments."""

    def __init__(self, context: WorkerContext) -> None:
        self.context = context
        self.log: list[Any] = []
        self.now = "waits for a message"
        self.begun, self.released = threading.Event(), threading.Event()
        self.records = LogHandler()

    def run(self) -> None:
        of_this = nullcontext if self.context.shares_process else self.records.of_this_process
        with of_this(self.context.log_level):
            self.run_commands()

    def run_commands(self) -> None:
        while True:
            self.context.transport.wait_for(self.context.messages.fileno())
            message, reply = self.context.messages.get()
            self.now = f"does {message}"
            answer = self.do(*message)
            self.now = "waits for a message"  # or whoever has the answer could be told that it does something
            reply(answer)

    def urgent(self, message: Any) -> Any:
        if isinstance(message, Ping):
            return News(records=self.records.take())
        if isinstance(message, GiveUp):
            return None
        return self.now if isinstance(message, Dump) else self.do(*message)

    def doing(self) -> str:
        return self.now

    def do(self, name: str, *arguments: Any) -> Any:
        return getattr(self, name)(*arguments)

    def echo(self, value: Any) -> Any:
        return value

    def pid(self) -> int:
        return os.getpid()

    def path(self) -> list[str]:
        return sys.path

    def parent(self) -> int:
        return os.getppid()

    def note(self, value: Any) -> None:
        self.log.append(value)

    def noted(self) -> list[Any]:
        return self.log

    def tell(self, level: int, text: str) -> None:
        logging.getLogger("pippy.scripted").log(level, text)

    def compute(self, seconds: float) -> float:
        """Busy in Python, as a stage may be."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pass
        return seconds

    def hold(self) -> str:
        """Busy until it is released."""
        self.begun.set()
        assert self.released.wait(30)
        for each in (self.begun, self.released):
            each.clear()
        return "released"

    def await_begun(self) -> bool:
        return self.begun.wait(30)

    def release(self) -> None:
        self.released.set()

    def block(self) -> None:
        """Never answers."""
        time.sleep(3600)

    def fail(self) -> None:
        raise ValueError("no")

    def exit(self, status: int) -> None:
        os._exit(status)

    def about(self) -> dict[str, Any]:
        import torch

        return {
            "threads": torch.get_num_threads(),
            "cores": os.sched_getaffinity(0),
            "name": self.context.name,
            "environment": dict(os.environ),
            "folder": os.getcwd(),
            "path": sys.path,
            "arguments": [each for each in sys.argv if not each.isdigit()],
            "main": sorted(name for name in vars(sys.modules["__main__"]) if not name.startswith("__")),
            "niceness": os.nice(0),
            "signals": [str(signal.getsignal(each)) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)],
            "session": os.getsid(0) == os.getppid(),
            "output": [os.readlink(f"/proc/self/fd/{number}") for number in range(3)],
            "files": len(os.listdir("/proc/self/fd")),
        }


class Broken(Worker):
    """Fails to start, on the last worker only."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        if context.index == context.workers - 1:
            raise ValueError("this worker cannot be made")
