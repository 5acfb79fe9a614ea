"""The engine of a cluster on Ray: an actor for each worker, in a bundle of a placement group.

    controller ──Ray──▶ actor: where are you? open a door    (ray_worker.py)
    controller ──────▶ its door: two connections, shared memory on one host, TCP between two
                                                             as many actors as are asked for wait here: they are spares
    controller ──Ray──▶ actor: take a place, and run         answered when the worker is gone, and how

From then on nothing goes through Ray. When a worker is lost, an actor that waits takes its place, and Ray starts another.
"""

import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from pippy.drivers.base.errors import RECOVERY_ADVICE, ClusterError
from pippy.drivers.base.interrupts import uninterrupted
from pippy.drivers.base.process import kill_process
from pippy.drivers.base.versions import versions
from pippy.drivers.engines.hub.hub_worker import RunSettings
from pippy.drivers.engines.hub.members import WaitingWorkers, WorkerPlaces, await_any, say
from pippy.drivers.engines.ray.ray_instance import imported_ray, leave_ray
from pippy.drivers.engines.ray.ray_worker import RayWorker
from pippy.drivers.engines.routes import Routes
from pippy.drivers.session.calls import Address
from pippy.drivers.wire.messages.doors import Invitation, come_in
from pippy.drivers.wire.messages.handed_sockets import SocketPair, hand_over_pairs
from pippy.drivers.wire.messages.sockets import break_when_silent
from pippy.drivers.wire.pollable_event import PollableEvent
from pippy.ir.base.logs import LOGGER
from pippy.ir.base.readable import count_with_noun

_AGAIN = 0.5  # seconds until an actor is started again that never ran
_LOOKS = 0.5  # seconds between two looks whether the cluster is closed, while an actor starts
_STARTS_END_WITHIN = 1.0  # seconds that the threads have to end which start actors
_ENDS_WITHIN = 5.0  # seconds that Ray has to end the actors, and to end itself


@dataclass(frozen=True)
class RayLaunch:
    """What is asked of Ray. Each worker, and each spare, reserves what the ``bundle`` names: CPUs, GPUs, and other resources.

    >>> bundle = {"CPU": 1.0, "node7": 0.5}
    >>> launch = RayLaunch("package.module:Class", ("a", "b"), ("cpu", "cpu"), 1, bundle, "PACK", 5.0, None, spares=1)
    >>> print(launch)
    2 workers and 1 spare with CPU 1, node7 0.5 each, strategy 'PACK'
    >>> launch.options
    {'num_cpus': 1.0, 'num_gpus': 0, 'memory': None, 'resources': {'node7': 0.5}}
    """

    worker: str
    names: tuple[str, ...]
    devices: tuple[str, ...]
    threads: int
    bundle: Mapping[str, float]
    strategy: str
    timeout: float
    patience: float | None
    spares: int = 0

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


class RayGuest:
    """An actor, in a ``bundle`` of the placement group, and its connections with the controller once it has them.

    ``name`` is that of the worker that it is started for; None if it is to be a spare. ``error`` is why it did not start, or
    not so far, and ``wrong`` says which of its versions are others than here.
    """

    def __init__(self, bundle: int, name: str | None) -> None:
        self.order = self.bundle = bundle
        self.name = name
        self.actor: Any = None
        self.place: dict[str, Any] = {}
        self.ends: SocketPair | None = None
        self.starts, self.wrong = True, list[str]()
        self.error: ClusterError | None = None
        self.over = PollableEvent()  # it is not watched any more

    def fileno(self) -> int:
        """The file descriptor of a connection."""
        return self.ends[0].fileno() if self.ends else -1

    def gone(self) -> str | None:
        """How it ended, if it has: before it has a place, it says nothing."""
        return "its connection broke" if await_any([self], 0.0) else None

    def close(self) -> None:
        """End its connections."""
        self.over.set()
        for each in self.ends or ():
            each.close()

    def __str__(self) -> str:
        return "a spare" if self.name is None else f"worker {self.name!r}"


class RayEngine:
    """The actors. ``close()`` ends them all, and leaves Ray."""

    recovery_advice = RECOVERY_ADVICE

    def __init__(self, launch: RayLaunch) -> None:
        self.launch, self.ray, self.owner = launch, imported_ray(), os.getpid()
        self.places = WorkerPlaces(launch.names)
        self.messages = self.places.messages
        self._group: Any = None
        self._guests: list[RayGuest] = []  # all actors that start, wait or run
        self._waiting = WaitingWorkers(self.places, self._launch_again)
        self._failed: list[RayGuest] = []  # those that did not start, since places were to be filled
        self._wanted: Sequence[int] = ()  # the workers whose places are to be filled
        self._threads: list[threading.Thread] = []
        self._at: dict[int, RayGuest] = {}  # those that run
        self._runs: dict[Any, int] = {}  # the calls that are answered when a worker is gone
        self._died: dict[int, str] = {}
        self._reading, self._launching = threading.RLock(), threading.RLock()
        self._started = self._closed = False

    @property
    def fixed(self) -> str | None:
        """Why a worker cannot be replaced; None if it can."""
        if self._closed or os.getpid() != self.owner or not self.ray.is_initialized():
            return "the actors of this cluster were ended; open another"
        return None

    @property
    def routes(self) -> Routes:
        """How values go between the workers, as they are placed now."""
        return self.places.routes

    @property
    def spares(self) -> int:
        """How many actors have started and wait."""
        return len(self._waiting.present())

    def start(self, timeout: float) -> Sequence[Address]:
        """Have Ray place the workers and start them, and connect with each."""
        self.timeout = timeout
        deadline = time.monotonic() + timeout
        bundles = [dict(self.launch.bundle) for _ in range(self.launch.actors)]
        self._group = self.ray.util.placement_group(bundles, strategy=self.launch.strategy)
        while not self._group.wait(min(0.5, timeout)):  # Ctrl-C waits for it
            if time.monotonic() > deadline:
                raise self._not_placed("the workers", timeout)
        addresses = self._fill(range(len(self.launch.names)), deadline, self.launch.spares)
        self._started = True
        return [addresses[worker] for worker in sorted(addresses)]

    def deaths(self, wait: float = 0.0) -> Mapping[int, str]:
        """The workers that have died, and how. Waits up to so many seconds for the first."""
        with self._reading:
            if self._closed or os.getpid() != self.owner:
                return {}
            if not self.ray.is_initialized():
                return dict.fromkeys(range(len(self.launch.names)), "this process has left Ray (ray.shutdown())")
            wait = 0.0 if self._died else wait
            while self._runs and (done := self.ray.wait(list(self._runs), timeout=wait)[0]):
                wait = 0.0
                self._died |= {self._runs.pop(each): _how(self.ray, each) for each in done}
            return dict(self._died)

    def replace(self, workers: Iterable[int]) -> Mapping[int, Address]:
        """End what is left of some workers, and have spares, or others that Ray starts, take their places.

        Gives where those are. Ray starts as many spares anew as were taken. If this fails it can be tried again.
        """
        if self.fixed is not None:
            raise ClusterError(self.fixed)
        if not _within(_ENDS_WITHIN, self.ray.nodes):
            raise ClusterError(
                f"the head of Ray has left a question unanswered for {_ENDS_WITHIN:g} s, and nothing else places workers; "
                "close this cluster, and open another when Ray runs again"
            )
        with self._reading:
            self._forget(workers := list(workers))
            return self._fill(workers, time.monotonic() + self.timeout)

    def end(self, workers: Iterable[int]) -> None:
        """End what is left of some workers, and what was to take their places."""
        if self.fixed is not None:
            raise ClusterError(self.fixed)
        with self._reading:
            self._forget(workers := list(workers))
            for worker in workers:
                self.places.drop(worker)
            idle = [each for each in self._guests if each not in self._at.values()]
            self._end(sorted(idle, key=lambda each: each.starts)[self.launch.spares :])

    def _forget(self, workers: Sequence[int]) -> None:
        """End what is left of some workers, and go on without what Ray says of it."""
        died = self.deaths()
        left = {worker: self._at.pop(worker) for worker in workers if worker in self._at}
        for guest in left.values():
            self._drop(guest)
        self._end([guest for worker, guest in left.items() if worker not in died])
        self._runs = {run: worker for run, worker in self._runs.items() if worker not in workers}
        self._died = {worker: how for worker, how in died.items() if worker not in workers}

    def close(self, lost: str | None = None) -> None:
        """End all actors, and leave Ray; a second call does nothing."""
        if self._closed or os.getpid() != self.owner:
            return
        self._closed = True
        with uninterrupted():
            for each in self._guests:
                each.over.set()
            answers = _within(_ENDS_WITHIN, self._end_all)
            self.messages.close()  # at which a worker ends that Ray has not ended
            for each in self._waiting.close():
                each.close()
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

    def _launch_again(self, guest: RayGuest) -> None:
        """One has ended while it waited. Start another."""
        self._drop(guest)
        if self.fixed is None:
            self.ray.kill(guest.actor)  # if only its connection has ended
            self._launch_missing()

    def _drop(self, guest: RayGuest) -> None:
        guest.over.set()
        self._waiting.remove(guest)
        with self._launching:
            self._guests = [each for each in self._guests if each is not guest]

    def _prepare(self, guest: RayGuest) -> None:
        """Start an actor, connect with it, and watch it until it has a place."""
        try:
            self._make_ready(guest)
        except Exception as error:  # Ray raises errors of all kinds
            if self._expects(guest):
                self._note_failure(guest, error)
            return
        finally:
            if guest.ends is not None:
                self._waiting.add(guest)
            guest.starts = False
            self._waiting.changed()
        if self._closed and self._waiting.remove(guest):  # nobody else has seen its connections
            guest.close()
            return
        with suppress(ValueError):  # its connections are closed
            await_any([guest, guest.over], None)
        guest.over.close()
        self._waiting.present()

    def _make_ready(self, guest: RayGuest) -> None:
        place = self._where(guest)
        own = {**versions(), "ray": self.ray.__version__}
        guest.wrong = [
            f"{what}: {its} on {place['host']} ({guest}), {own.get(what)} here"
            for what, its in place["versions"].items()
            if its != own.get(what)
        ]
        if guest.wrong:
            raise _other_versions(guest.wrong)
        line = self._answer(guest, guest.actor.open.remote(self.places.is_near(place), self.launch.timeout))
        guest.ends = self._connected(guest, Invitation.of_line(line))

    def _where(self, guest: RayGuest) -> dict[str, Any]:
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
                return guest.place
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
            return self._waiting.fill(self._wanted, deadline, self._check_starts, self._takes_its_place, spares)
        finally:
            self._wanted = ()

    def _check_starts(self, workers: Sequence[int], present: Sequence[RayGuest], left: float) -> None:
        """Raise if nobody starts for whom a worker could wait, or it has no time left."""
        starting = [each for each in self._guests if each.starts]
        if left > 0 and (starting or len(self._waiting.present()) > len(present)):
            return
        failed = [*self._failed, *starting]
        if wrong := [line for each in failed for line in each.wrong]:
            raise _other_versions(wrong)
        error = next((each.error for each in failed if each.error is not None), None)
        raise error or self._not_placed(f"worker {self.launch.names[workers[0]]!r}", self.timeout)

    def _takes_its_place(self, worker: int, guest: RayGuest) -> bool:
        """Have an actor be a worker. Returns False if it does not answer, and ends it."""
        told = guest.actor.take_place.remote(self.launch.names[worker], self.launch.devices[worker])
        answered = bool(self.ray.wait([told], timeout=self.launch.timeout)[0])
        try:
            guest.place["device"] = self.ray.get(told) if answered else None
        except self.ray.exceptions.RayActorError:
            answered = False
        except self.ray.exceptions.RayError as error:
            guest.name = self.launch.names[worker]
            raise self._not_started(guest, error) from error
        if not answered or guest.ends is None:
            self._end([guest])
            guest.close()
            self._launch_missing()
            return False
        with uninterrupted():
            guest.over.set()
            self.places.connected(worker, guest.ends)
            self._at[worker] = guest
            self._runs[guest.actor.run.remote(worker, self._settings(worker))] = worker
        return True

    def _settings(self, worker: int) -> RunSettings:
        launch, device = self.launch, self.places.of[worker]["device"]
        patience = self.places.patience(worker, launch.patience, dict.fromkeys(self.places.of, launch.threads))
        given = launch.worker, launch.names, device, launch.threads, launch.timeout, patience
        return RunSettings(*given, LOGGER.getEffectiveLevel())

    def _not_started(self, guest: RayGuest, error: Exception) -> ClusterError:
        return ClusterError(
            f"{guest} did not start on Ray: {_first_cause(error)}\nEach node needs what this "
            "process runs: the same Python, torch and pippy (or ray.init(runtime_env=...) before cluster(), which has Ray "
            "bring them)"
        )

    def _connected(self, guest: RayGuest, invitation: Invitation) -> SocketPair:
        """The controller's ends of two connections with an actor."""
        timeout = self.launch.timeout
        try:
            if not self.places.is_near(guest.place):
                with ExitStack() as undo:
                    ends = come_in(invitation, 0, timeout), come_in(invitation, 1, timeout)
                    for end in ends:
                        undo.callback(end.close)
                        break_when_silent(end, timeout)
                    undo.pop_all()
                return ends
            with come_in(invitation, 0, timeout) as end:
                end.settimeout(timeout)
                own, why = hand_over_pairs(end)
            if own is None:
                raise OSError(why)
            return own
        except OSError as error:
            raise ClusterError(
                f"this process gets no connection with {guest} on {guest.place['host']} "
                f"({invitation.address}, port {invitation.port}): {error}. Workers and the script connect with each other at "
                "ports that their systems choose: a firewall between the nodes must let them, and the script must run on a node"
            ) from error

    def _not_placed(self, who: str, seconds: float) -> ClusterError:
        nodes = [each for each in self.ray.nodes() if each["Alive"]]
        has = "; ".join(f"{each['NodeManagerAddress']} {_counts(each['Resources'])}" for each in nodes)
        return ClusterError(
            f"Ray did not start {who} within {seconds:g} s. Asked for: {self.launch}. The cluster has {len(nodes)} nodes: "
            f"{has}; free are {_counts(self.ray.available_resources())}. Give fewer workers"
            f"{' or spares' * bool(self.launch.spares)}, smaller resources= or num_gpus=, "
            "another strategy=, or a larger start_timeout= if nodes are still to join"
        )


def _other_versions(lines: Iterable[str]) -> ClusterError:
    return ClusterError(
        "these workers cannot work with this process:\n  "
        + "\n  ".join(lines)
        + "\ninstall the same versions on each node"
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
    """Call a function, and wait no longer for it: where the head of Ray is gone, its calls take a minute. False if it did."""

    def quietly() -> None:
        with suppress(Exception):  # there is nothing left to end
            do()

    thread = threading.Thread(target=quietly, name="pippy ray", daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()
