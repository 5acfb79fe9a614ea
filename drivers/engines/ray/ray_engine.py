"""The engine of a cluster on Ray: an actor for each worker, in a bundle of a placement group.

    controller ──Ray──▶ actor: where are you? join                      (ray_worker.py)
    actor ────────────▶ a door of the controller, which is open until it has come: it is a member (hub_engine.py)
                                                             as many actors as are asked for wait here: they are spares

From then on nothing goes through Ray. When a worker is lost, an actor that waits takes its place, and Ray starts another.
"""

import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pippy.drivers.base.beside import beside
from pippy.drivers.base.errors import ClusterError
from pippy.drivers.base.json_lines import JsonLines
from pippy.drivers.base.process import kill_process
from pippy.drivers.engines.hub.hub_engine import HubEngine, HubLaunch, next_of
from pippy.drivers.engines.hub.members import Member, await_any, say
from pippy.drivers.engines.ray.ray_instance import imported_ray, leave_ray
from pippy.drivers.engines.ray.ray_worker import RayWorker
from pippy.drivers.session.calls import Address
from pippy.drivers.wire.messages.doors import THIS_HOST, Invitation
from pippy.ir.base.readable import count_with_noun

_AGAIN = 0.5  # seconds until an actor is started again that never ran
_LOOKS = 0.5  # seconds between two looks whether the cluster is closed, while an actor starts, or has got a place
_SAYS = 0.2  # seconds that Ray has at least to say how an actor ended: it is asked once
_STARTS_END_WITHIN = 1.0  # seconds that the threads have to end which start actors
_ENDS_WITHIN = 5.0  # seconds that Ray has to end the actors, and to end itself


@dataclass(frozen=True, kw_only=True)
class RayLaunch(HubLaunch):
    """What is asked of Ray. Each worker, and each spare, reserves what the ``bundle`` names: CPUs, GPUs, and other resources.

    >>> bundle = {"CPU": 1.0, "node7": 0.5}
    >>> given = {"worker": "package.module:Class", "names": ("a", "b"), "timeout": 5.0, "patience": None, "spares": 1}
    >>> launch = RayLaunch(**given, devices=("cpu", "cpu"), threads=1, bundle=bundle, strategy="PACK")
    >>> print(launch)
    2 workers and 1 spare with CPU 1, node7 0.5 each, strategy 'PACK'
    >>> launch.options
    {'num_cpus': 1.0, 'num_gpus': 0, 'memory': None, 'resources': {'node7': 0.5}}
    """

    devices: tuple[str, ...]
    threads: int
    bundle: Mapping[str, float]
    strategy: str

    @property
    def actors(self) -> int:
        """How many there are, spares included."""
        return len(self.names) + self.spares

    @property
    def options(self) -> dict[str, Any]:
        """The options of an actor."""
        named = {"CPU", "GPU", "memory"}
        return {
            "num_cpus": self.bundle.get("CPU", 0),
            "num_gpus": self.bundle.get("GPU", 0),
            "memory": self.bundle.get("memory"),
            "resources": {name: count for name, count in self.bundle.items() if name not in named},
        }

    def __str__(self) -> str:
        spares = f" and {count_with_noun(self.spares, 'spare')}" * bool(self.spares)
        workers = count_with_noun(len(self.names), "worker")
        return f"{workers}{spares} with {_counts(self.bundle)} each, strategy {self.strategy!r}"


class RayGuest(Member):
    """An actor, in a ``bundle`` of the placement group; a member once it has come.

    ``name`` is that of the worker that it is started for; None if it is to be a spare. ``error`` is why it did not start, or
    not so far. Ray answers ``joined`` when it is gone.
    """

    def __init__(self, bundle: int, name: str | None) -> None:
        super().__init__(bundle)
        self.bundle, self.name = bundle, name
        self.actor: Any = None
        self.joined: Any = None
        self.starts = True
        self.error: ClusterError | None = None

    def __str__(self) -> str:
        return "a spare" if self.name is None else f"worker {self.name!r}"


class RayEngine(HubEngine[RayGuest]):
    """The actors. ``close()`` ends them all, and leaves Ray."""

    over = "the actors of this cluster were ended; open another"

    def __init__(self, launch: RayLaunch) -> None:
        super().__init__(launch)
        self.ray = imported_ray()
        self._group: Any = None
        self._guests: list[RayGuest] = []  # all actors that start, wait or run
        self._failed: list[RayGuest] = []  # those that did not start, since places were to be filled
        self._wanted: Sequence[int] = ()  # the workers whose places are to be filled
        self._threads: list[threading.Thread] = []
        self._launching = threading.RLock()

    @property
    def fixed(self) -> str | None:
        """Why a worker cannot be replaced; None if it can."""
        return super().fixed or (None if self.ray.is_initialized() else self.over)

    def start(self, timeout: float) -> Sequence[Address]:
        """Have Ray place the workers and start them, and connect with each."""
        self.timeout = timeout
        deadline = time.monotonic() + timeout
        bundles = [dict(self.launch.bundle) for _ in range(self.launch.actors)]
        self._group = self.ray.util.placement_group(bundles, strategy=self.launch.strategy)
        while not self._group.wait(min(0.5, timeout)):  # Ctrl-C waits for it
            if time.monotonic() > deadline:
                raise self._not_placed("the workers", timeout)
        return super().start(timeout)

    def deaths(self, wait: float = 0.0) -> Mapping[int, str]:
        """The workers that have died, and how. Waits up to so many seconds for the first."""
        if self._closed or os.getpid() != self.owner or self.ray.is_initialized():
            return super().deaths(wait)
        return dict.fromkeys(range(len(self.launch.names)), "this process has left Ray (ray.shutdown())")

    def how_ended(self, member: RayGuest, how: str, within: float) -> str:
        """What Ray says of it, if it knows in time."""
        if not self.ray.wait([member.joined], timeout=max(within, _SAYS))[0]:
            return how
        return _how(self.ray, member.joined)

    def replace(self, workers: Iterable[int]) -> Mapping[int, Address]:
        """End what is left of some workers, and have spares, or others that Ray starts, take their places.

        Gives where those are. Ray starts as many spares anew as were taken. If this fails it can be tried again.
        """
        if self.fixed is None and not _within(_ENDS_WITHIN, self.ray.nodes):
            raise ClusterError(
                f"the head of Ray has left a question unanswered for {_ENDS_WITHIN:g} s, and nothing else places workers; "
                "close this cluster, and open another when Ray runs again"
            )
        return super().replace(workers)

    def end(self, workers: Iterable[int]) -> None:
        """End what is left of some workers, and what was to take their places."""
        with self._reading:
            super().end(workers)
            idle = [each for each in self._guests if each not in self._at.values()]
            self._end(sorted(idle, key=lambda each: each.starts)[self.launch.spares :])

    def kill(self, members: Sequence[RayGuest], why: str) -> None:
        """End lost actors, but for those of which Ray says that they are gone."""
        gone = [each for each in members if self.ray.wait([each.joined], timeout=0)[0]]
        for each in gone:
            self._drop(each)
        self._end([each for each in members if each not in gone])
        for each in members:
            each.close()

    def end_all(self, lost: str | None) -> None:
        """End all actors, and leave Ray."""
        answers = _within(_ENDS_WITHIN, self._end_all)
        self.messages.close()
        for each in [*self._at.values(), *self._waiting.close()]:
            each.close()  # at which a worker ends that Ray has not ended
        _within(_STARTS_END_WITHIN, self._await_threads)
        _within(_ENDS_WITHIN if answers else 0.0, leave_ray)

    def _end_all(self) -> None:
        if not self.ray.is_initialized():  # a call would start another Ray
            return
        for guest in self._guests:
            if guest.actor is not None:
                self.ray.kill(guest.actor)
        if self._group is not None:  # ends what is left there, also a process that is stopped
            self.ray.util.remove_placement_group(self._group)

    def _end(self, guests: Sequence[RayGuest]) -> None:
        """End actors whose processes may be stopped: then only a signal does, from their nodes."""
        affinity = self.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        ended = []
        for guest in guests:
            self._drop(guest)
            if guest.actor is not None:
                self.ray.kill(guest.actor)
            if guest.place:
                there = affinity(guest.place["node"], soft=False)
                end = self.ray.remote(kill_process).options(num_cpus=0, scheduling_strategy=there, max_retries=0)
                ended.append(end.remote(guest.place["pid"], guest.place["began"]))
        if ended:
            self.ray.wait(ended, num_returns=len(ended), timeout=_ENDS_WITHIN)

    # Actors that start, each on a thread of its own

    def _launch_missing(self) -> None:
        """Have Ray start actors, until there is one for each worker, and as many spares as are asked for."""
        with self._launching:
            while self.fixed is None:
                empty = [worker for worker in self._wanted if worker not in self._at]
                idle = len(self._guests) - len(self._at)
                if idle >= len(empty) + self.launch.spares:
                    break
                bundle = min(set(range(self.launch.actors)) - {each.bundle for each in self._guests})
                name = self.launch.names[empty[idle]] if idle < len(empty) else None
                self._guests.append(guest := RayGuest(bundle, name))
                thread = threading.Thread(target=self._prepare, args=(guest,), name="pippy ray actor", daemon=True)
                self._threads = [*(each for each in self._threads if each.is_alive()), thread]
                thread.start()

    def _await_threads(self) -> None:
        for each in self._threads:
            each.join()

    def dropped(self, member: RayGuest) -> None:
        """One has ended while it waited. Start another."""
        self._drop(member)
        if self.fixed is None:
            self.ray.kill(member.actor)  # if only its connection has ended
            self._launch_missing()

    def _drop(self, guest: RayGuest) -> None:
        self._waiting.remove(guest)
        with self._launching:
            self._guests = [each for each in self._guests if each is not guest]

    def _prepare(self, guest: RayGuest) -> None:
        """Start an actor, connect with it, and watch it until it has a place."""
        try:
            self._where(guest)
            self._let_in(guest)
        except Exception as error:  # Ray raises errors of all kinds
            if self._expects(guest):
                self._note_failure(guest, error)
            return
        finally:
            if guest.lines is not None:
                self._waiting.add(guest)
            guest.starts = False
            self._waiting.changed()
        if self._closed and self._waiting.remove(guest):  # nobody else has seen its connections
            guest.close()
            return
        with suppress(ValueError):  # its connection is closed
            while guest in self._waiting and not await_any([guest], _LOOKS):
                pass
        self._waiting.present()

    def _let_in(self, guest: RayGuest) -> None:
        """Open a door for an actor until it has come."""
        address = THIS_HOST if self.places.is_near(guest.place) else self.far_address
        number, timeout = next(self._numbers), self.launch.timeout
        with self.expected(address, [number]) as (invitation, (coming,)):
            assert invitation is not None, "there is a door"
            guest.joined = guest.actor.join.remote(invitation.line(), number, timeout)
            try:
                guest.lines = JsonLines(next_of(coming, 4 * timeout, lambda: self._comes_not(guest)))
            except OSError as error:
                raise self._out_of_reach(guest, invitation, error) from error

    def _comes_not(self, guest: RayGuest) -> str | None:
        """Why an actor that was told to does not come; None if it may. Raises ClusterError if it is ended meanwhile."""
        if not self._expects(guest):
            raise ClusterError(f"{guest} was ended")
        return _how(self.ray, guest.joined) if self.ray.wait([guest.joined], timeout=0)[0] else None

    def _where(self, guest: RayGuest) -> None:
        """Start an actor, and ask where it is.

        One that Ray had placed on a node which is gone, before Ray knew that, is started again.
        """
        schedulings = self.ray.util.scheduling_strategies
        placed = schedulings.PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=guest.bundle)
        until = time.monotonic() + self.timeout
        while True:
            actor = self.ray.remote(RayWorker).options(
                scheduling_strategy=placed, max_restarts=0, **self.launch.options
            )
            guest.actor = actor.remote(guest.name or "spare")
            if not self._expects(guest):  # and who has ended it has not seen this actor
                self.ray.kill(guest.actor)
            try:
                guest.place = self._answer(guest, guest.actor.where.remote(self.launch.worker))
                return
            except self.ray.exceptions.RayActorError as error:
                guest.error = self._not_started(guest, error)
                if error.actor_init_failed or time.monotonic() > until or not self._expects(guest):
                    raise
            time.sleep(_AGAIN)

    def _answer(self, guest: RayGuest, call: Any) -> Any:
        """What an actor answers. Raises ClusterError if it is ended meanwhile."""
        while self._expects(guest):
            if self.ray.wait([call], timeout=_LOOKS)[0]:
                return self.ray.get(call)
        raise ClusterError(f"{guest} was ended")

    def _expects(self, guest: RayGuest) -> bool:
        return self.fixed is None and guest in self._guests

    def _note_failure(self, guest: RayGuest, error: Exception) -> None:
        guest.error = error if isinstance(error, ClusterError) else self._not_started(guest, error)
        with self._launching:
            self._failed.append(guest)
        self._drop(guest)
        self.ray.kill(guest.actor)
        if self._started and guest.name is None:
            say(f"{guest.error}\ndriver.recover() has Ray start another")

    # Who takes which place

    def _fill(self, workers: Iterable[int], deadline: float, spares: int = 0) -> dict[int, Address]:
        """Have actors that wait, or that Ray starts, take these places, when so many ``spares`` wait besides."""
        self._failed, self._wanted = [], tuple(workers)
        try:
            self._launch_missing()
            return super()._fill(self._wanted, deadline, spares)
        finally:
            self._wanted = ()

    def check_left(self, workers: Sequence[int], present: Sequence[RayGuest], left: float) -> None:
        """Raise if nobody starts for whom a worker could wait, or it has no time left."""
        starting = [each for each in self._guests if each.starts]
        if left > 0 and (starting or len(self._waiting.present()) > len(present)):
            return
        failed = [*self._failed, *starting]
        error = next((each.error for each in failed if each.error is not None), None)
        raise error or self._not_placed(f"worker {self.launch.names[workers[0]]!r}", self.timeout)

    def refuse(self, worker: int, member: RayGuest, why: str) -> None:
        """End an actor that cannot be a worker. Raises what it said, if it did."""
        self._end([member])
        member.close()
        if member.failed:
            member.name = self.launch.names[worker]
            raise self._not_started(member, ClusterError(member.failed))
        self._launch_missing()

    def device_and_threads(self, worker: int) -> tuple[str, Mapping[int, int]]:
        """What was asked for."""
        device = self.places.of[worker]["device"] = self.launch.devices[worker]
        return device, dict.fromkeys(self.places.of, self.launch.threads)

    @property
    def far_address(self) -> str:  # type: ignore[override]
        """That of this node. No door stays open."""
        return str(self.ray.util.get_node_ip_address())

    def _not_started(self, guest: RayGuest, error: Exception) -> ClusterError:
        return ClusterError(
            f"{guest} did not start on Ray: {_first_cause(error)}\nEach node needs what this "
            "process runs: the same Python, torch and pippy (or ray.init(runtime_env=...) before cluster(), which has Ray "
            "bring them)"
        )

    def _out_of_reach(self, guest: RayGuest, invitation: Invitation, error: Exception) -> ClusterError:
        return ClusterError(
            f"this process gets no connection with {guest} on {guest.place['host']} "
            f"({invitation.address}, port {invitation.port}): {error}. Workers and the script connect with each other at "
            "ports that their systems choose: a firewall between the nodes must let them, and the script must run on a node"
        )

    def _not_placed(self, who: str, seconds: float) -> ClusterError:
        nodes = [each for each in self.ray.nodes() if each["Alive"]]
        has = "; ".join(f"{each['NodeManagerAddress']} {_counts(each['Resources'])}" for each in nodes)
        return ClusterError(
            f"Ray did not start {who} within {seconds:g} s. Asked for: {self.launch}. The cluster has {len(nodes)} nodes: "
            f"{has}; free are {_counts(self.ray.available_resources())}. Give fewer workers"
            f"{' or spares' * bool(self.launch.spares)}, smaller resources= or num_gpus=, "
            "another strategy=, or a larger start_timeout= if nodes are still to join"
        )


def _counts(resources: Mapping[str, float]) -> str:
    """Resources in words, without those that Ray adds for itself."""
    own = ("node:", "object_store_memory", "bundle_group")
    shown = [
        f"{name} {count:g}"
        for name, count in sorted(resources.items())
        if not name.startswith(own) and "_group_" not in name and name != "memory"
    ]
    return ", ".join(shown) or "nothing"


def _how(ray: Any, run: Any) -> str:
    """How the worker died whose last call is answered."""
    try:
        ray.get(run)
    except Exception as error:  # Ray raises errors of all kinds
        return _first_cause(error)
    return "it ended"


def _first_cause(error: Exception) -> str:
    """What Ray says of an actor that died, without its advice."""
    text = str(error).strip()
    if found := re.search(r"Worker exit detail: (.*?)(?: Some common causes|$)", text, re.DOTALL):
        text = found[1]
    return f"Ray says: {text.strip().splitlines()[-1].strip().rstrip('.')}" if text else type(error).__name__


def _within(seconds: float, do: Callable[[], Any]) -> bool:
    """Call a function, and wait no longer for it: where the head of Ray is gone, its calls take a minute. False if it did.

    What it raises says nothing: there is nothing left to end.
    """
    return bool(wait([beside(do, "pippy ray")], seconds).done)
