"""What a worker is given when it starts."""

from dataclasses import dataclass
from typing import Any

from pippy.drivers.transport.inbox import Inbox


@dataclass(frozen=True)
class Seat:
    """A worker's place in its cluster. ``threads`` and the core, if pinned, are set already.

    >>> seat = Seat(0, ("first", "last"), Inbox(), None, "cpu", 1)
    >>> seat.name, seat.workers
    ('first', 2)
    """

    index: int
    names: tuple[str, ...]
    inbox: Inbox
    transport: Any
    device: str
    threads: int

    @property
    def workers(self) -> int:
        """How many workers the cluster has."""
        return len(self.names)

    @property
    def name(self) -> str:
        """The name of this worker."""
        return self.names[self.index]
