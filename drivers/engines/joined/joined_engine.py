"""The engine of a cluster that workers join: it listens at one place, as long as the cluster is open.

worker ──────▶ the door: both prove that they know the secret (doors.py); the worker says where it is, and waits
controller ──▶ worker: which worker it is                         the others wait on: they are spares
worker ──────▶ the controller: two connections for messages, shared memory on one host, TCP between two
worker is gone: its connection breaks, and a spare, or the next that joins, takes its place
"""

import itertools
import math
import os
import queue
import shlex
import socket
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass
from typing import Any

from pippy.drivers.base.errors import RECOVERY_ADVICE, ClusterError
from pippy.drivers.base.interrupts import uninterrupted
from pippy.drivers.base.process import kill_process
from pippy.drivers.engines.arguments import check_seconds, polling_time, worker_names
from pippy.drivers.engines.cluster import Cluster, check_none_open, note_local_cluster, note_opened_cluster
from pippy.drivers.engines.connected.connected_worker import RunSettings
from pippy.drivers.engines.connected.worker_places import WaitingWorkers, WorkerPlaces, await_any, say
from pippy.drivers.engines.engine import start
from pippy.drivers.engines.joined.address import (
    DEFAULT_SECRET,
    ControlLines,
    cannot_listen,
    joined_address,
    listening_place,
    made_secret_file,
    secret_in,
)
from pippy.drivers.engines.local.local_cluster import WORKER
from pippy.drivers.engines.routes import Routes
from pippy.drivers.session.calls import Address
from pippy.drivers.wire.messages.doors import THIS_HOST, Door
from pippy.drivers.wire.messages.handed_sockets import SocketPair, hand_over_pairs, shared_memory_of
from pippy.drivers.wire.messages.sockets import break_when_silent
from pippy.ir.base.logs import LOGGER
from pippy.ir.base.readable import count_with_noun

_ENDS_WITHIN = 2.0  # seconds that a worker has to end when it is told to
_LOST_ENDS_WITHIN = 0.5  # and one that was lost, of this host; for those of others nobody waits


@dataclass(frozen=True)
class JoinedLaunch:
    """What the cluster is to have. ``join`` says where workers join, ``secret_file`` who may.

    >>> JoinedLaunch("package.module:Class", ("a", "b"), True, "~/.pippy/secret", 5.0, None).names
    ('a', 'b')
    """

    worker: str
    names: tuple[str, ...]
    join: Any
    secret_file: str | os.PathLike[str]
    timeout: float
    patience: float | None


class JoinedGuest:
    """A worker that has joined: its connection, and its place once it has said it. ``failed`` is what it said last, ``signs``
    the connection with its sign process."""

    def __init__(self, end: socket.socket, order: int) -> None:
        self.lines, self.order, self.failed = ControlLines(end), order, ""
        self.place: dict[str, Any] = {}
        self.signs: socket.socket | None = None

    def fileno(self) -> int:
        """The file descriptor of its connection."""
        return self.lines.fileno()

    def close(self) -> None:
        """End the connection."""
        self.lines.close()

    def gone(self) -> str | None:
        """How it ended; None if it is there. Does not wait."""
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
        """Tell it to end, if it hears."""
        with suppress(OSError):
            self.lines.socket.settimeout(_ENDS_WITHIN)
            self.lines.send(end=why)


class JoinedEngine:
    """The workers that have joined. ``close()`` tells them all to end."""

    recovery_advice = RECOVERY_ADVICE

    def __init__(self, launch: JoinedLaunch) -> None:
        self.launch, self.owner = launch, os.getpid()
        self.places = WorkerPlaces(launch.names)
        self.messages = self.places.messages
        self._at: dict[int, JoinedGuest] = {}  # those that run
        self._waiting = WaitingWorkers[JoinedGuest](self.places)
        self._threads: dict[int, int] = {}  # with how many each worker computes
        self._died: dict[int, str] = {}
        self._coming: dict[int, queue.SimpleQueue[socket.socket]] = {}  # by the numbers of connections for messages
        self._numbers = itertools.count(1)
        self._reading = threading.RLock()
        self._started = self._closed = False
        address, port, host = listening_place(launch.join)
        secret = secret_in(path := made_secret_file(launch.secret_file))
        try:
            self._door = Door(address, None, self._take, math.inf, port, secret, self._refused)
        except OSError as error:
            raise cannot_listen(launch.join, address, port, error) from error
        self.where = joined_address(host, self._door.invitation.port)
        self.command = f"pippy worker --join {self.where} --secret-file {shlex.quote(str(path))}"

    @property
    def fixed(self) -> str | None:
        """Why a worker cannot be replaced; None if it can."""
        if self._closed or os.getpid() != self.owner:
            return "the workers of this cluster were told to end; open another"
        return None

    @property
    def routes(self) -> Routes:
        """How values go between the workers, as they are placed now."""
        return self.places.routes

    @property
    def spares(self) -> int:
        """How many workers have joined and wait."""
        return len(self._waiting.present())

    def start(self, timeout: float) -> Sequence[Address]:
        """Wait until enough workers have joined, and connect with each."""
        self.timeout = timeout
        addresses = self._fill(range(len(self.launch.names)), time.monotonic() + timeout)
        self._started = True
        return list(addresses.values())

    def deaths(self, wait: float = 0.0) -> Mapping[int, str]:
        """The workers that have died, and how. Waits up to so many seconds for the first."""
        with self._reading:
            if self._closed or os.getpid() != self.owner:
                return {}
            until = time.monotonic() + wait
            while True:
                there = {at: guest for at, guest in self._at.items() if at not in self._died}
                self._died |= {at: how for at, guest in there.items() if (how := guest.gone()) is not None}
                left = until - time.monotonic()
                if self._died or left <= 0:
                    return dict(self._died)
                await_any(there.values(), left)

    def replace(self, workers: Iterable[int]) -> Mapping[int, Address]:
        """End what is left of some workers, and take others that wait, or that join, in their places. Gives where those are.

        If that fails it can be tried again.
        """
        with self._reading:
            self._send_away(workers := list(workers), "another worker takes its place: the cluster had lost it")
            return self._fill(workers, time.monotonic() + self.timeout)

    def end(self, workers: Iterable[int]) -> None:
        """End what is left of some workers."""
        with self._reading:
            self._send_away(workers := list(workers), "the cluster had lost it, and goes on without it")
            for worker in workers:
                self.places.drop(worker)

    def _send_away(self, workers: Sequence[int], why: str) -> None:
        if self.fixed is not None:
            raise ClusterError(self.fixed)
        lost = [self._at.pop(each) for each in workers if each in self._at]
        self._died = {worker: how for worker, how in self._died.items() if worker not in workers}
        _end(lost, why)

    def close(self, lost: str | None = None) -> None:
        """Tell all workers to end, and close what listens; a second call does nothing."""
        if self._closed or os.getpid() != self.owner:
            return
        with uninterrupted():
            self._closed = True
            self._door.close()
            guests = [*self._at.values(), *self._waiting.close()]
            for each in guests:
                each.tell_to_end(lost)
            self.messages.close()
            _end(guests)

    # Who comes: on threads of their own

    def _take(self, number: int, end: socket.socket) -> None:
        """Take a connection: 0 is that of a worker that joins; the others were asked for."""
        timeout = self.launch.timeout
        with suppress(OSError):  # it is gone
            break_when_silent(end, timeout)
        if number == 0:
            self._waiting.add(guest := JoinedGuest(end, next(self._numbers)))
            threading.Thread(target=self._meet, args=(guest,), name="pippy joining", daemon=True).start()
        elif (coming := self._coming.pop(number, None)) is not None:
            coming.put(end)
        else:
            end.close()

    def _meet(self, guest: JoinedGuest) -> None:
        """Hear the place of a worker, which waits from then on."""
        try:
            place = (guest.lines.read(4 * self.launch.timeout) or {})["place"]
        except (OSError, KeyError):
            if self._waiting.remove(guest):
                guest.close()
            return
        guest.place = place
        self._waiting.changed()

    def _refused(self, end: socket.socket, why: str) -> None:
        with suppress(OSError):
            say(f"a worker from {end.getpeername()[0]} was refused: {why}")

    # Who is chosen

    def _fill(self, workers: Iterable[int], deadline: float) -> dict[int, Address]:
        """Have workers that wait take these places."""
        told: list[int] = []  # how many were there when it was said

        def waits(open_places: Sequence[int], present: Sequence[JoinedGuest], left: float) -> None:
            if left <= 0:
                raise self._too_few(open_places, present)
            if not told:
                what = self._named(open_places) if self._started else count_with_noun(len(self.launch.names), "worker")
                say(f"{what} can join from any shell of any host:\n    {self.command}")
            if told[-1:] != [len(present)]:
                told.append(len(present))
                say(f"{len(present)} of {len(open_places)} joined{_hosts(present)}; waits {left:.0f} s for the others")

        return self._waiting.fill(workers, deadline, waits, self._takes_its_place)

    def _takes_its_place(self, worker: int, guest: JoinedGuest) -> bool:
        """Have a guest be a worker. Returns False if it cannot, and sends it away."""
        try:
            ends = self._connected(worker, guest)
        except OSError as error:
            why = f"the controller gets no connection for messages with it: {error}"
            say(f"the worker on {guest.place['host']} is sent away: {why}")
            _end([guest], why)
            return False
        with uninterrupted():
            self.places.connected(worker, ends, guest.signs)
            self._at[worker] = guest
        return True

    def _connected(self, worker: int, guest: JoinedGuest) -> SocketPair:
        """Tell a guest which worker it is. Returns the controller's ends of two connections for messages."""
        timeout, near = self.launch.timeout, self.places.is_near(guest.place)
        run = {"index": worker, "settings": asdict(self._settings(worker))}
        if near:
            came: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
            with closing(Door(THIS_HOST, [worker], lambda _, end: came.put(end), timeout)) as door:
                guest.lines.send(run=run | {"invitation": door.invitation.line()})
                with _next_of(came, timeout) as end:
                    end.settimeout(timeout)
                    own, why = hand_over_pairs(end)
            if own is None:
                raise OSError(why)
            return own
        numbers = [next(self._numbers) for _ in range(3)]
        coming = {number: queue.SimpleQueue[socket.socket]() for number in numbers}
        self._coming |= coming
        try:
            guest.lines.send(run=run | {"numbers": numbers})
            with ExitStack() as undo:
                ends = [undo.enter_context(_next_of(coming[number], timeout)) for number in numbers]
                undo.pop_all()
            guest.signs = ends[2]
            return ends[0], ends[1]
        finally:
            for number in numbers:
                self._coming.pop(number, None)

    def _settings(self, worker: int) -> RunSettings:
        """What a worker computes with. One that takes another's place has as many threads: sums depend on them."""
        launch, place = self.launch, self.places.of[worker]
        threads = {
            at: self._threads.get(at) or its["threads"] or max(1, len(its["cores"]) // len(self.places.beside(at)))
            for at, its in self.places.of.items()
        }
        self._threads |= threads
        patience = self.places.patience(worker, launch.patience, threads)
        given = launch.worker, launch.names, place["device"], threads[worker], launch.timeout, patience
        return RunSettings(*given, LOGGER.getEffectiveLevel())

    # What is said

    def _named(self, workers: Iterable[int]) -> str:
        return f"a worker in the place of {', '.join(repr(self.launch.names[worker]) for worker in workers)}"

    def _too_few(self, workers: Sequence[int], present: Sequence[JoinedGuest]) -> ClusterError:
        missing = count_with_noun(len(workers) - len(present), "worker")
        also = "" if self._started else "; or give cluster() a larger start_timeout, or fewer workers"
        return ClusterError(
            f"{len(present)} of {len(workers)} joined within {self.timeout:g} s{_hosts(present)}; start {missing} more, in any "
            f"shell of any host: {self.command}{also}"
        )


def _next_of(coming: "queue.SimpleQueue[socket.socket]", within: float) -> socket.socket:
    try:
        return coming.get(timeout=within)
    except queue.Empty:
        raise TimeoutError(f"it has not come within {within:g} s") from None


def _hosts(guests: Sequence[JoinedGuest]) -> str:
    """How many are on which host."""
    hosts = [guest.place["host"] for guest in guests]
    said = ", ".join(f"{hosts.count(host)} on {host}" for host in dict.fromkeys(hosts))
    return f" ({said})" if said else ""


def _end(guests: Sequence[JoinedGuest], why: str | None = None) -> None:
    """Wait until workers end that were told to; or tell lost ones why. One of this host that does not end is killed."""
    for each in guests if why is not None else ():
        each.tell_to_end(why)
    until = time.monotonic() + (_ENDS_WITHIN if why is None else _LOST_ENDS_WITHIN)
    own = shared_memory_of()
    for each in guests:
        near = each.place.get("memory") == own
        while (near or why is None) and each.gone() is None and (left := until - time.monotonic()) > 0:
            await_any([each], left)
        if near:
            kill_process(each.place["pid"], each.place["began"])
        each.close()


def joined_cluster(
    n: int,
    *,
    join: bool | int | str = True,
    secret_file: str | os.PathLike[str] | None = None,
    names: Sequence[str] | None = None,
    timeout: float = 5.0,
    start_timeout: float = 60.0,
    patience: float | None = None,
    _worker: str = WORKER,
) -> Cluster:
    """A cluster of ``n`` workers that join. `cluster` says what the arguments are."""
    names = worker_names(n, names)
    check_seconds(timeout=timeout, start_timeout=start_timeout)
    polling_time(patience, crowded=False)
    check_none_open()
    note_local_cluster()
    engine = JoinedEngine(JoinedLaunch(_worker, names, join, secret_file or DEFAULT_SECRET, timeout, patience))
    try:
        session = start(engine, timeout, start_timeout)
        return note_opened_cluster(Cluster(names, session, engine, engine.places.device_type), by_rpc=False)
    except BaseException as error:
        engine.close(lost=f"the cluster did not start: {str(error) or type(error).__name__}")
        raise
