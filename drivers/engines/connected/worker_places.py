"""Where workers are that pippy did not start, and the controller's connections with them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pippy.drivers.engines.arguments import polling_time
from pippy.drivers.engines.routes import Routes
from pippy.drivers.session.calls import Address
from pippy.drivers.wire.messages.controller_connections import ControllerConnections
from pippy.drivers.wire.messages.handed_sockets import SocketPair, shared_memory_of


class ConnectionsAnywhere(ControllerConnections):
    """The controller's connections to workers anywhere. ``near`` are those of its own host.

    Two of them get a socket from here; of two others, the first opens a door for the second.
    """

    def __init__(self) -> None:
        super().__init__()
        self.near: set[int] = set()

    def connect(self, one: int, other: int) -> int | None:
        """Give two workers of this host a socket to each other. If a worker is to let the other one in, return it."""
        return super().connect(one, other) if self.near >= {one, other} else one


class WorkerPlaces:
    """The place of each worker, by its number, as `place_of_this_process` gave it there; and the messages to them.

    >>> places = WorkerPlaces(["a", "b"])
    >>> for worker, host in enumerate(["node1", "node2"]):
    ...     places.of[worker] = {"host": host, "machine": host, "pid": 4711, "memory": host, "cores": [0, 1]}
    >>> print(places.routes)
    a on node1
    b on node2
    between these lines: TCP
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names, self.messages = tuple(names), ConnectionsAnywhere()
        self.of: dict[int, dict[str, Any]] = {}
        self.memory = shared_memory_of()

    @property
    def routes(self) -> Routes:
        """How values go between the workers, as they are placed now."""
        memory = {worker: place["memory"] for worker, place in sorted(self.of.items())}
        groups = (tuple(at for at, its in memory.items() if its == each) for each in dict.fromkeys(memory.values()))
        hosts, machines = (
            tuple(self.of[at][what] if at in self.of else "" for at in range(len(self.names)))
            for what in ("host", "machine")
        )
        return Routes(self.names, hosts, tuple(groups), machines=machines)

    @property
    def device_type(self) -> str:
        """The kind of device of the workers."""
        return torch.device(self.of[0]["device"]).type

    def address(self, worker: int) -> Address:
        """Where a worker is."""
        place = self.of[worker]
        return Address(self.names[worker], place["host"], place["pid"], place["memory"], self.is_near(place))

    def is_near(self, place: Mapping[str, Any]) -> bool:
        """Whether a worker there shares memory with this process."""
        return bool(place["memory"] == self.memory)

    def connected(self, worker: int, ends: SocketPair) -> None:
        """Use these connections with a worker from now on. Ctrl-C must wait meanwhile."""
        self.messages.near = self.messages.near - {worker} | ({worker} if self.is_near(self.of[worker]) else set())
        self.messages.replace(worker, *ends)

    def drop(self, worker: int) -> None:
        """A worker is gone, and no other takes its place."""
        self.of.pop(worker, None)
        self.messages.drop(worker)

    def beside(self, worker: int) -> list[int]:
        """The workers that share cores with a worker, and the worker itself."""
        own = self.of[worker]
        return [
            at
            for at, its in self.of.items()
            if its["host"] == own["host"] and not set(its["cores"]).isdisjoint(own["cores"])
        ]

    def patience(self, worker: int, given: float | None, threads: Mapping[int, int]) -> float:
        """How long a worker polls; ``threads`` are those that each worker computes with."""
        wanted = sum(threads[each] for each in self.beside(worker))
        return polling_time(given, crowded=wanted > len(self.of[worker]["cores"]))
