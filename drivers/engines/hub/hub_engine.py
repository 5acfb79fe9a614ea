"""The engine of clusters whose workers come from outside: it listens, admits, places, watches and replaces its members.

member ──────▶ a door of the controller: both prove that they know a secret (doors.py); the member waits
controller ──▶ member: which worker it is                         the others wait on: they are spares
member ──────▶ the controller: two connections for messages, shared memory on one host, TCP between two; and there a third one,
               of the member's sign process
member is gone: its connection breaks, and a spare, or the next that comes, takes its place

How members are started and ended, and what is said of that, differs: JoinedEngine and RayEngine say it.
"""

import itertools
import os
import queue
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any, Generic

from pippy.drivers.base.errors import RECOVERY_ADVICE, ClusterError
from pippy.drivers.base.interrupts import uninterrupted
from pippy.drivers.engines.connected_worker import RunSettings
from pippy.drivers.engines.hub.members import AnyMember, WaitingWorkers, WorkerPlaces, await_any
from pippy.drivers.engines.routes import Routes
from pippy.drivers.session.calls import Address
from pippy.drivers.wire.messages.doors import THIS_HOST, Door, Invitation
from pippy.drivers.wire.messages.handed_sockets import SocketPair, hand_over_pairs
from pippy.drivers.wire.messages.sockets import break_when_silent
from pippy.ir.base.logs import LOGGER

_LOOKS = 0.1  # seconds between two looks whether a member is gone that is to come with another connection


@dataclass(frozen=True, kw_only=True)
class HubLaunch:
    """What a cluster is to have. ``worker`` is the dotted name of the class that its workers run; so many ``spares`` wait.

    >>> HubLaunch(worker="package.module:Class", names=("a", "b"), timeout=5.0, patience=None).names
    ('a', 'b')
    """

    worker: str
    names: tuple[str, ...]
    timeout: float
    patience: float | None
    spares: int = 0


class HubEngine(ABC, Generic[AnyMember]):
    """The members. ``over`` says that the cluster is closed.

    ``far_address`` is where doors for members of other hosts are opened. None if these come where they have come in.
    """

    recovery_advice = RECOVERY_ADVICE
    over: str
    far_address: str | None = None

    def __init__(self, launch: HubLaunch) -> None:
        self.launch: Any = launch
        self.owner = os.getpid()
        self.names, self.places = launch.names, WorkerPlaces(launch.names)
        self.messages = self.places.messages
        self._at: dict[int, AnyMember] = {}  # those that run
        self._waiting = WaitingWorkers[AnyMember](self.places, self.dropped)
        self._died: dict[int, str] = {}
        self._coming: dict[int, queue.SimpleQueue[socket.socket]] = {}  # by the numbers of connections
        self._numbers = itertools.count(1)
        self._reading = threading.RLock()
        self._started = self._closed = False

    # What differs

    @abstractmethod
    def kill(self, members: Sequence[AnyMember], why: str) -> None:
        """End what is left of members that the cluster has lost, and say why."""

    @abstractmethod
    def check_left(self, workers: Sequence[int], present: Sequence[AnyMember], left: float) -> None:
        """Called before each wait for members. Raises if no more can come in the seconds that are left."""

    @abstractmethod
    def refuse(self, worker: int, member: AnyMember, why: str) -> None:
        """End a member that cannot be this worker."""

    @abstractmethod
    def device_and_threads(self, worker: int) -> tuple[str, Mapping[int, int]]:
        """The device of a worker, and with how many threads each worker computes."""

    @abstractmethod
    def end_all(self, lost: str | None) -> None:
        """End all members, also those that wait; ``lost`` says which worker the cluster has lost, if it has."""

    def dropped(self, member: AnyMember) -> None:
        """A member has ended while it waited."""

    def how_ended(self, member: AnyMember, how: str, within: float) -> str:
        """How a member ended whose connection is gone, which says ``how``. Waits no longer than so many seconds."""
        return how

    # What all have in common

    @property
    def fixed(self) -> str | None:
        """Why a worker cannot be replaced; None if it can."""
        return self.over if self._closed or os.getpid() != self.owner else None

    @property
    def device_type(self) -> str:
        """The kind of device of the workers."""
        return self.places.device_type

    @property
    def routes(self) -> Routes:
        """How values go between the workers, as they are placed now."""
        return self.places.routes

    @property
    def spares(self) -> int:
        """How many members wait."""
        return len(self._waiting.present())

    def start(self, timeout: float) -> Sequence[Address]:
        """Wait until there are enough members, and connect with each."""
        self.timeout = timeout
        addresses = self._fill(range(len(self.launch.names)), time.monotonic() + timeout, self.launch.spares)
        self._started = True
        return list(addresses.values())

    def deaths(self, wait: float = 0.0) -> Mapping[int, str]:
        """The workers that have died, and how. Waits up to so many seconds for the first."""
        with self._reading:
            if self._closed or os.getpid() != self.owner:
                return {}
            until = time.monotonic() + wait
            while True:
                there = {at: member for at, member in self._at.items() if at not in self._died}
                ended = {at: how for at, member in there.items() if (how := member.gone()) is not None}
                self._died |= {at: self.how_ended(there[at], how, wait) for at, how in ended.items()}
                left = until - time.monotonic()
                if self._died or left <= 0:
                    return dict(self._died)
                await_any(there.values(), left)

    def replace(self, workers: Iterable[int]) -> Mapping[int, Address]:
        """End what is left of some workers, and have members that wait, or that come, take their places.

        Gives where those are. If this fails it can be tried again.
        """
        with self._reading:
            self._forget(workers := list(workers), "another worker takes its place: the cluster had lost it")
            return self._fill(workers, time.monotonic() + self.timeout)

    def end(self, workers: Iterable[int]) -> None:
        """End what is left of some workers."""
        with self._reading:
            self._forget(workers := list(workers), "the cluster had lost it, and goes on without it")
            for worker in workers:
                self.places.drop(worker)

    def close(self, lost: str | None = None) -> None:
        """End all members; a second call does nothing."""
        if self._closed or os.getpid() != self.owner:
            return
        with uninterrupted():
            self._closed = True
            self.end_all(lost)

    def _forget(self, workers: Sequence[int], why: str) -> None:
        """End what is left of some workers, and go on without what is known of their ends."""
        if self.fixed is not None:
            raise ClusterError(self.fixed)
        lost = [self._at.pop(each) for each in workers if each in self._at]
        self._died = {worker: how for worker, how in self._died.items() if worker not in workers}
        self.kill(lost, why)

    # Members that become workers

    def _fill(self, workers: Iterable[int], deadline: float, spares: int = 0) -> dict[int, Address]:
        """Have members take these places, when so many ``spares`` wait besides. Gives where the workers are."""
        places = list(workers)
        open_places = list(places)
        while open_places:
            chosen = self._chosen(open_places, deadline, spares)
            self.places.of |= {worker: member.place for worker, member in chosen.items()}
            try:
                for worker, member in list(chosen.items()):
                    if self._takes_its_place(worker, member):
                        open_places.remove(worker)
                    del chosen[worker]
            except BaseException:  # Ctrl-C
                for member in chosen.values():
                    member.close()
                    self.dropped(member)
                raise
        return {worker: self.places.address(worker) for worker in places}

    def _chosen(self, workers: Sequence[int], deadline: float, spares: int) -> dict[int, AnyMember]:
        """The best member for each worker, once there are enough."""
        while len(present := self._waiting.present()) < len(workers) + spares:
            left = deadline - time.monotonic()
            self.check_left(workers, present, left)
            self._waiting.await_change(present, left)
        return self._waiting.take_best(workers, present)

    def _takes_its_place(self, worker: int, member: AnyMember) -> bool:
        """Have a member be a worker. Returns False if it cannot, and ends it."""
        try:
            ends, signs = self._connected(worker, member)
        except OSError as error:
            self.refuse(worker, member, f"the controller gets no connection for messages with it: {error}")
            return False
        with uninterrupted():
            self.places.connected(worker, ends, signs)
            self._at[worker] = member
        return True

    def _connected(self, worker: int, member: AnyMember) -> tuple[SocketPair, socket.socket | None]:
        """Tell a member which worker it is. Returns the controller's ends of two connections for messages, and that to the
        sign process of a member of another host."""
        timeout, near = self.launch.timeout, self.places.is_near(member.place)
        numbers = [next(self._numbers) for _ in range(1 if near else 3)]
        run = {"index": worker, "settings": asdict(self._settings(worker)), "numbers": numbers}
        with (
            self.expected(THIS_HOST if near else self.far_address, numbers) as (invitation, coming),
            ExitStack() as undo,
        ):
            member.tell(timeout, run=run | {"invitation": invitation and invitation.line()})
            ends = [undo.enter_context(next_of(each, timeout, member.gone)) for each in coming]
            undo.pop_all()
        return (_near_pair(ends[0], timeout), None) if near else ((ends[0], ends[1]), ends[2])

    @contextmanager
    def expected(
        self, address: str | None, numbers: Sequence[int]
    ) -> "Iterator[tuple[Invitation | None, Sequence[queue.SimpleQueue[socket.socket]]]]":
        """Inside, the connections with these numbers come into queues, through a door at an address if there is one."""
        coming = {number: queue.SimpleQueue[socket.socket]() for number in numbers}
        self._coming |= coming
        try:
            with ExitStack() as opened:
                invitation = None
                if address is not None:
                    door = Door(address, numbers, self.take, 4 * self.launch.timeout)
                    invitation = opened.enter_context(closing(door)).invitation
                yield invitation, list(coming.values())
        finally:
            for number in numbers:
                self._coming.pop(number, None)

    def take(self, number: int, end: socket.socket) -> None:
        """Take a connection that is expected, and close any other. On the thread of a door."""
        with suppress(OSError):  # it is gone
            if end.family != socket.AF_UNIX:
                break_when_silent(end, self.launch.timeout)
        if (coming := self._coming.pop(number, None)) is not None:
            coming.put(end)
        else:
            end.close()

    def _settings(self, worker: int) -> RunSettings:
        """What a worker computes with."""
        launch, (device, threads) = self.launch, self.device_and_threads(worker)
        patience = self.places.patience(worker, launch.patience, threads)
        given = launch.worker, launch.names, device, threads[worker], launch.timeout, patience
        return RunSettings(*given, LOGGER.getEffectiveLevel())


def next_of(coming: "queue.SimpleQueue[socket.socket]", within: float, gone: Callable[[], str | None]) -> socket.socket:
    """The next connection. Raises OSError if it does not come in time, or who is to come is ``gone``, which says how."""
    until = time.monotonic() + within
    while (left := until - time.monotonic()) > 0:
        try:
            return coming.get(timeout=min(left, _LOOKS))
        except queue.Empty:
            if (how := gone()) is not None:
                raise ConnectionError(how) from None
    raise TimeoutError(f"it has not come within {within:g} s")


def _near_pair(end: socket.socket, timeout: float) -> SocketPair:
    """The controller's ends of two sockets, whose others a member of this host gets through its connection."""
    with end:
        end.settimeout(timeout)
        return hand_over_pairs(end)
