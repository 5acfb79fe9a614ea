"""The engine of a cluster that workers join: it listens at one place, as long as the cluster is open.

Whoever knows the secret joins there. A worker says where it is, and waits until it gets a place: hub_engine.py has the rest.
"""

import math
import os
import shlex
import socket
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from pippy.drivers.base.errors import ClusterError
from pippy.drivers.base.process import kill_process
from pippy.drivers.engines.arguments import checked_names, polling_time
from pippy.drivers.engines.cluster import Cluster, check_none_open, note_local_cluster, opened
from pippy.drivers.engines.hub.hub_engine import HubEngine, HubLaunch
from pippy.drivers.engines.hub.members import Member, await_any, say
from pippy.drivers.engines.joined.address import (
    DEFAULT_SECRET,
    cannot_listen,
    listening_place,
    made_secret_file,
    secret_in,
)
from pippy.drivers.engines.local.local_cluster import WORKER
from pippy.drivers.session.calls import Address
from pippy.drivers.wire.messages.doors import Door, joined_address
from pippy.drivers.wire.messages.handed_sockets import shared_memory_of
from pippy.drivers.wire.messages.sockets import break_when_silent
from pippy.ir.base.readable import count_with_noun

_ENDS_WITHIN = 2.0  # seconds that a worker has to end when it is told to
_LOST_ENDS_WITHIN = 0.5  # and one that was lost, of this host; for those of others nobody waits


@dataclass(frozen=True, kw_only=True)
class JoinedLaunch(HubLaunch):
    """``join`` says where workers join, ``secret_file`` who may. Nobody waits for spares."""

    join: Any
    secret_file: str | os.PathLike[str]


class JoinedEngine(HubEngine[Member]):
    """The workers that have joined. ``close()`` tells them all to end."""

    over = "the workers of this cluster were told to end; open another"

    def __init__(self, launch: JoinedLaunch) -> None:
        super().__init__(launch)
        self._threads: dict[int, int] = {}  # with how many each worker computes
        self._told: list[int] = []  # how many had joined when it was said
        address, port, host = listening_place(launch.join)
        secret = secret_in(path := made_secret_file(launch.secret_file))
        try:
            self._door = Door(address, None, self.take, math.inf, port, secret, self._refused)
        except OSError as error:
            raise cannot_listen(launch.join, address, port, error) from error
        self.where = joined_address(host, self._door.invitation.port)
        self.command = f"pippy worker --join {self.where} --secret-file {shlex.quote(str(path))}"

    def kill(self, members: Sequence[Member], why: str) -> None:
        """Tell lost workers why they end. One of this host that does not end is killed."""
        _end(members, why)

    def refuse(self, worker: int, member: Member, why: str) -> None:
        """Send a worker away, and say why."""
        say(f"the worker on {member.place['host']} is sent away: {why}")
        _end([member], why)

    def end_all(self, lost: str | None) -> None:
        """Tell all workers to end, and close what listens."""
        self._door.close()
        members = [*self._at.values(), *self._waiting.close()]
        for each in members:
            each.tell_to_end(lost)
        self.messages.close()
        _end(members)

    # Who comes: on threads of their own

    def take(self, number: int, end: socket.socket) -> None:
        """Take a connection: 0 is that of a worker that joins; the others were asked for."""
        if number != 0:
            super().take(number, end)
            return
        with suppress(OSError):  # it is gone
            break_when_silent(end, self.launch.timeout)
        self._waiting.add(member := Member(next(self._numbers), end))
        threading.Thread(target=self._meet, args=(member,), name="pippy joining", daemon=True).start()

    def _meet(self, member: Member) -> None:
        """Hear the place of a worker, which waits from then on."""
        assert member.lines is not None, "it has joined"
        try:
            place = (member.lines.read(4 * self.launch.timeout) or {})["place"]
        except (OSError, KeyError):
            if self._waiting.remove(member):
                member.close()
            return
        member.place = place
        self._waiting.changed()

    def _refused(self, end: socket.socket, why: str) -> None:
        with suppress(OSError):
            say(f"a worker from {end.getpeername()[0]} was refused: {why}")

    # Who is chosen

    def _fill(self, workers: Iterable[int], deadline: float, spares: int = 0) -> dict[int, Address]:
        """Have workers that wait, or that join, take these places."""
        self._told = []
        return super()._fill(workers, deadline, spares)

    def check_left(self, workers: Sequence[int], present: Sequence[Member], left: float) -> None:
        """Say how to join, and how many have joined. Raises if no time is left."""
        if left <= 0:
            raise self._too_few(workers, present)
        if not self._told:
            what = self._named(workers) if self._started else count_with_noun(len(self.launch.names), "worker")
            say(f"{what} can join from any shell of any host:\n    {self.command}")
        if self._told[-1:] != [len(present)]:
            self._told.append(len(present))
            say(f"{len(present)} of {len(workers)} joined{_hosts(present)}; waits {left:.0f} s for the others")

    def device_and_threads(self, worker: int) -> tuple[str, Mapping[int, int]]:
        """What workers have said. One that takes another's place has as many threads: sums depend on them."""
        self._threads |= {
            at: self._threads.get(at) or its["threads"] or max(1, len(its["cores"]) // len(self.places.beside(at)))
            for at, its in self.places.of.items()
        }
        return self.places.of[worker]["device"], self._threads

    # What is said

    def _named(self, workers: Iterable[int]) -> str:
        return f"a worker in the place of {', '.join(repr(self.launch.names[worker]) for worker in workers)}"

    def _too_few(self, workers: Sequence[int], present: Sequence[Member]) -> ClusterError:
        missing = count_with_noun(len(workers) - len(present), "worker")
        also = "" if self._started else "; or give cluster() a larger start_timeout, or fewer workers"
        return ClusterError(
            f"{len(present)} of {len(workers)} joined within {self.timeout:g} s{_hosts(present)}; start {missing} more, in any "
            f"shell of any host: {self.command}{also}"
        )


def _hosts(guests: Sequence[Member]) -> str:
    """How many are on which host."""
    hosts = [guest.place["host"] for guest in guests]
    said = ", ".join(f"{hosts.count(host)} on {host}" for host in dict.fromkeys(hosts))
    return f" ({said})" if said else ""


def _end(guests: Sequence[Member], why: str | None = None) -> None:
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
    names = checked_names(n, names, timeout=timeout, start_timeout=start_timeout)
    polling_time(patience, crowded=False)
    check_none_open()
    note_local_cluster()
    launch = JoinedLaunch(
        worker=_worker,
        names=names,
        join=join,
        secret_file=secret_file or DEFAULT_SECRET,
        timeout=timeout,
        patience=patience,
    )
    return opened(partial(JoinedEngine, launch), timeout, start_timeout)
