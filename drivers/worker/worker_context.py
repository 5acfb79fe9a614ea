"""What a worker is given when it starts."""

import logging
from dataclasses import dataclass
from typing import Any

from pippy.drivers.wire.gpu.copies import DeviceCopies
from pippy.drivers.wire.messages.worker_messages import MessageQueue


@dataclass(frozen=True)
class WorkerContext:
    """A worker's place in its cluster. ``threads`` and the core, if pinned, are set already.

    ``copies`` are those between the host and the ``device``, if that is not the CPU: then ``transport`` uses them, too.
    With ``shares_process`` the worker is a thread of a process whose settings and random numbers are a script's. Else what is
    logged in its process from ``log_level`` on is sent to the controller.

    >>> context = WorkerContext(0, ("first", "last"), MessageQueue(), None, "cpu", 1)
    >>> context.name, context.workers
    ('first', 2)
    """

    index: int
    names: tuple[str, ...]
    messages: MessageQueue
    transport: Any
    device: str
    threads: int
    shares_process: bool = False
    copies: DeviceCopies | None = None
    log_level: int = logging.WARNING

    @property
    def workers(self) -> int:
        """How many workers the cluster has."""
        return len(self.names)

    @property
    def name(self) -> str:
        """The name of this worker."""
        return self.names[self.index]
