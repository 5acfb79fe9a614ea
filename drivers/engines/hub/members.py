"""The members of a cluster whose workers come from outside: what they say, their places, and which of them wait.

who has come ──add──▶ waits ──take_best──▶ takes the place that suits it best: one of the first, or that of a lost worker
                        └── ends meanwhile: ``dropped`` is told

What goes through the connection of a member with the controller, from its greeting to its end, as JSON (json_lines.py):

    worker      {"place": ...}       where it is, and what it has; Ray says this of its actors itself
    controller  {"run": ...}         which worker it is, what it computes with, and how it gets its connections for messages
    worker      {"failed": text}     why it ends, if it raised
    controller  {"end": why}         the worker is to end; null if the cluster was closed

When the connection breaks, each end knows that the other is gone.
"""

import select
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Generic, TypeVar

import torch

from pippy.drivers.base.json_lines import JsonLines
from pippy.drivers.engines.arguments import polling_time
from pippy.drivers.engines.routes import Routes
from pippy.drivers.session.calls import Address
from pippy.drivers.wire.messages.controller_messages import ControllerConnections
from pippy.drivers.wire.messages.handed_sockets import SocketPair, shared_memory_of, this_host
from pippy.drivers.wire.pollable_event import PollableEvent


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
        self.names, self.messages = tuple(names), ControllerConnections()
        self.of: dict[int, dict[str, Any]] = {}
        self.memory, self.machine = shared_memory_of(), this_host()

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
        is_here = place["machine"] == self.machine
        return Address(self.names[worker], place["host"], place["pid"], place["memory"], is_here)

    def is_near(self, place: Mapping[str, Any]) -> bool:
        """Whether a worker there shares memory with this process."""
        return bool(place["memory"] == self.memory)

    def connected(self, worker: int, ends: SocketPair, signs: socket.socket | None = None) -> None:
        """Use these connections with a worker, and with its sign process, from now on. Ctrl-C must wait meanwhile."""
        self.messages.replace(worker, *ends)
        if signs is not None:
            self.messages.signs.take(worker, signs)

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


_HEARS_WITHIN = 2.0  # seconds that a member has to hear that it is to end


class Member:
    """One that has come, or is to come. Of two members, the one with the lower ``order`` is taken first.

    ``place`` is empty until it is known, and ``lines`` is None until the member has come. ``failed`` is what it said last.
    """

    def __init__(self, order: int, end: socket.socket | None = None) -> None:
        self.order, self.failed = order, ""
        self.lines = None if end is None else JsonLines(end)
        self.place: dict[str, Any] = {}

    def fileno(self) -> int:
        """The file descriptor of its connection, which is readable when the member has said something, or is gone."""
        return -1 if self.lines is None else self.lines.fileno()

    def close(self) -> None:
        """End the connection."""
        if self.lines is not None:
            self.lines.close()

    def gone(self) -> str | None:
        """How it ended; None if it is there. Does not wait."""
        assert self.lines is not None, "only who has come is asked"
        try:
            while await_any([self], 0.0):
                if (said := self.lines.read(0.0)) is None:
                    return self.failed or "its process has ended; what it printed may say why"
                self.failed = str(said.get("failed", "")) or self.failed
        except TimeoutError:  # a part of a line has come
            return None
        except OSError as error:
            return self.failed or f"the connection with it broke: {error}"
        return None

    def tell_to_end(self, why: str | None) -> None:
        """Tell a member to end, if it hears; None if the cluster was closed."""
        with suppress(OSError):
            self.tell(_HEARS_WITHIN, end=why)

    def tell(self, within: float, **message: Any) -> None:
        """Say something to a member. Raises OSError if it is gone, or does not hear it in so many seconds."""
        assert self.lines is not None, "only who has come is told something"
        self.lines.socket.settimeout(within)
        self.lines.send(**message)


AnyMember = TypeVar("AnyMember", bound=Member)


class WaitingWorkers(Generic[AnyMember]):
    """Those that wait. Any thread may add one; one thread takes them for ``places``.

    ``dropped`` is called with each that has ended while it waited, when that is found.
    """

    def __init__(self, places: WorkerPlaces, dropped: Callable[[AnyMember], object] = lambda guest: None) -> None:
        self.places, self._dropped = places, dropped
        self._all: list[AnyMember] = []
        self._lock, self._changed = threading.Lock(), PollableEvent()

    def add(self, guest: AnyMember) -> None:
        """One has come. When its place is known later, call `changed`."""
        with self._lock:
            self._all.append(guest)
            self._all.sort(key=lambda each: each.order)
        self.changed()

    def __contains__(self, member: AnyMember) -> bool:
        with self._lock:
            return member in self._all

    def changed(self) -> None:
        """End `await_change`."""
        self._changed.set()

    def remove(self, guest: AnyMember) -> bool:
        """One waits no more. Returns False if it did not wait."""
        with self._lock:
            found = guest in self._all
            if found:
                self._all.remove(guest)
            return found

    def close(self) -> list[AnyMember]:
        """Nobody waits any more. Returns who did."""
        with self._lock:
            left, self._all = self._all, []
        self._changed.close()
        return left

    def present(self) -> list[AnyMember]:
        """Those that wait and are there."""
        with self._lock:
            placed = [each for each in self._all if each.place]
        gone = [each for each in placed if each.gone() is not None and self.remove(each)]
        for each in gone:
            each.close()
            self._dropped(each)
        return [each for each in placed if each not in gone]

    def await_change(self, present: Iterable[AnyMember], seconds: float) -> None:
        """Wait until another has come, or one of these is gone, or the time is up."""
        await_any([self._changed, *present], seconds)
        self._changed.clear()

    def take_best(self, workers: Sequence[int], present: Sequence[AnyMember]) -> dict[int, AnyMember]:
        """The best of these members for each worker. They wait no more."""
        return {worker: member for worker, member in self._best(workers, present).items() if self.remove(member)}

    def _best(self, workers: Sequence[int], present: Sequence[AnyMember]) -> dict[int, AnyMember]:
        """For each worker one of those that wait: on its own host if it had one, else host after host in their order."""
        hosts = list(dict.fromkeys(each.place["memory"] for each in present))
        left = sorted(present, key=lambda each: hosts.index(each.place["memory"]))
        chosen = {}
        for worker in workers:
            had = self.places.of.get(worker, {}).get("memory")
            chosen[worker] = next((each for each in left if each.place["memory"] == had), left[0])
            left.remove(chosen[worker])
        return chosen


def await_any(ends: Iterable[Any], seconds: float | None) -> bool:
    """Wait until one of these file descriptors is readable. Returns False if none is in time."""
    waiting = select.poll()
    for each in ends:
        waiting.register(each, select.POLLIN)
    return bool(waiting.poll(None if seconds is None else max(0.0, seconds) * 1000))


def say(text: str) -> None:
    """Print a line of this process's own."""
    if sys.stderr is not None:
        print(f"pippy: {text}", file=sys.stderr, flush=True)
