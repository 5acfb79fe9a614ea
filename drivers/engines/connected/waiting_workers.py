"""Workers that have come to a cluster and wait for a place in it: one of the first, or that of a worker which was lost.

who has come ──add──▶ waits ──fill──▶ takes the place that suits it best
                        └── ends meanwhile: ``dropped`` is told
"""

import select
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from pippy.drivers.engines.connected.worker_places import WorkerPlaces
from pippy.drivers.session.calls import Address
from pippy.drivers.wire.pollable_event import PollableEvent


class Guest(Protocol):
    """One that has come. ``place`` is empty until it is known; of two, that with the lower ``order`` is taken first.

    `fileno` is that of a connection which becomes readable when the other end is gone.
    """

    order: int
    place: dict[str, Any]

    def fileno(self) -> int: ...

    def gone(self) -> str | None:
        """How it ended; None if it is there. Does not wait."""

    def close(self) -> None:
        """End its connections."""


AnyGuest = TypeVar("AnyGuest", bound=Guest)


class WaitingWorkers(Generic[AnyGuest]):
    """Those that wait. Any thread may add one; one thread fills ``places``.

    ``dropped`` is called with each that has ended while it waited, when that is found.
    """

    def __init__(self, places: WorkerPlaces, dropped: Callable[[AnyGuest], object] = lambda guest: None) -> None:
        self.places, self._dropped = places, dropped
        self._all: list[AnyGuest] = []
        self._lock, self._changed = threading.Lock(), PollableEvent()

    def add(self, guest: AnyGuest) -> None:
        """One has come. When its place is known later, call `changed`."""
        with self._lock:
            self._all.append(guest)
            self._all.sort(key=lambda each: each.order)
        self.changed()

    def changed(self) -> None:
        """Have `fill` look again."""
        self._changed.set()

    def remove(self, guest: AnyGuest) -> bool:
        """One waits no more. Returns False if it did not wait."""
        with self._lock:
            found = guest in self._all
            if found:
                self._all.remove(guest)
            return found

    def close(self) -> list[AnyGuest]:
        """Nobody waits any more. Returns who did."""
        with self._lock:
            left, self._all = self._all, []
        self._changed.close()
        return left

    def present(self) -> list[AnyGuest]:
        """Those that wait and are there."""
        with self._lock:
            placed = [each for each in self._all if each.place]
        gone = [each for each in placed if each.gone() is not None and self.remove(each)]
        for each in gone:
            each.close()
            self._dropped(each)
        return [each for each in placed if each not in gone]

    def fill(
        self,
        workers: Iterable[int],
        deadline: float,
        waits: Callable[[Sequence[int], Sequence[AnyGuest], float], object],
        takes: Callable[[int, AnyGuest], bool],
        spares: int = 0,
    ) -> dict[int, Address]:
        """Have guests take these workers' places, when so many ``spares`` wait besides. Gives where the workers are.

        ``waits`` is called before each wait, with the workers, those that are present and the seconds that are left. It raises
        if none are left. ``takes`` has a guest be a worker; one that cannot is gone when it returns False.
        """
        places = list(workers)
        open_places = list(places)
        while open_places:
            chosen = self._chosen(open_places, deadline, waits, spares)
            self.places.of |= {worker: guest.place for worker, guest in chosen.items()}
            try:
                for worker, guest in list(chosen.items()):
                    if takes(worker, guest):
                        open_places.remove(worker)
                    del chosen[worker]
            except BaseException:  # Ctrl-C
                for guest in chosen.values():
                    guest.close()
                    self._dropped(guest)
                raise
        return {worker: self.places.address(worker) for worker in places}

    def _chosen(
        self,
        workers: Sequence[int],
        deadline: float,
        waits: Callable[[Sequence[int], Sequence[AnyGuest], float], object],
        spares: int,
    ) -> dict[int, AnyGuest]:
        """The best guest for each worker, once there are enough."""
        while len(present := self.present()) < len(workers) + spares:
            left = deadline - time.monotonic()
            waits(workers, present, left)
            await_any([self._changed, *present], left)
            self._changed.clear()
        return {worker: guest for worker, guest in self._best(workers, present).items() if self.remove(guest)}

    def _best(self, workers: Sequence[int], present: Sequence[AnyGuest]) -> dict[int, AnyGuest]:
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
