"""The engine of a cluster on Ray: an actor for each worker, in a bundle of a placement group.

    controller ──Ray──▶ actor: where are you? open a door    (ray_worker.py)
    controller ──────▶ its door: two connections, shared memory on one host, TCP between two
    controller ──Ray──▶ actor: run                           answered when the worker is gone, and how

From then on nothing goes through Ray.
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
from pippy.drivers.base.versions import versions
from pippy.drivers.engines.connected.connected_worker import RunSettings
from pippy.drivers.engines.connected.processes import kill_process
from pippy.drivers.engines.connected.worker_places import WorkerPlaces
from pippy.drivers.engines.ray.ray_instance import imported_ray, leave_ray
from pippy.drivers.engines.ray.ray_worker import RayWorker
from pippy.drivers.engines.routes import Routes
from pippy.drivers.session.calls import Address
from pippy.drivers.wire.messages.doors import Invitation, come_in
from pippy.drivers.wire.messages.handed_sockets import SocketPair, hand_over_pairs
from pippy.drivers.wire.messages.silent_connections import break_when_silent

_AGAIN = 0.5  # seconds until an actor is started again that never ran
_ENDS_WITHIN = 5.0  # seconds that Ray has to end the actors, and to end itself


@dataclass(frozen=True)
class RayLaunch:
    """What is asked of Ray. Each worker reserves what the ``bundle`` names: CPUs, GPUs, and resources of other names.

    >>> launch = RayLaunch("package.module:Class", ("a", "b"), ("cpu", "cpu"), 1, {"CPU": 1.0, "node7": 0.5}, "PACK", 5.0, None)
    >>> print(launch)
    2 workers with CPU 1, node7 0.5 each, strategy 'PACK'
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
        return f"{len(self.names)} workers with {_counts(self.bundle)} each, strategy {self.strategy!r}"


class RayEngine:
    """The actors. ``close()`` ends them all, and leaves Ray."""

    recovery_advice = RECOVERY_ADVICE

    def __init__(self, launch: RayLaunch) -> None:
        self.launch, self.ray, self.owner = launch, imported_ray(), os.getpid()
        self.places = WorkerPlaces(launch.names)
        self.messages = self.places.messages
        self._group: Any = None
        self._actors: dict[int, Any] = {}
        self._runs: dict[Any, int] = {}  # the calls that are answered when a worker is gone
        self._died: dict[int, str] = {}
        self._reading, self._closed = threading.RLock(), False

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

    def start(self, timeout: float) -> Sequence[Address]:
        """Have Ray place the workers and start them, and connect with each."""
        self.timeout = timeout
        deadline = time.monotonic() + timeout
        bundles = [dict(self.launch.bundle) for _ in self.launch.names]
        self._group = self.ray.util.placement_group(bundles, strategy=self.launch.strategy)
        while not self._group.wait(min(0.5, timeout)):  # Ctrl-C waits for it
            if time.monotonic() > deadline:
                raise self._not_placed("the workers", timeout)
        return list(self._begin(range(len(self.launch.names)), deadline).values())

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
        """End what is left of some workers, and have Ray start others in their places. Gives where those are.

        If that fails it can be tried again; an actor that was started meanwhile is ended then.
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
            return self._begin(workers, time.monotonic() + self.timeout)

    def end(self, workers: Iterable[int]) -> None:
        """End what is left of some workers."""
        if self.fixed is not None:
            raise ClusterError(self.fixed)
        with self._reading:
            self._forget(workers := list(workers))
            for worker in workers:
                self.places.drop(worker)

    def _forget(self, workers: Sequence[int]) -> None:
        """End what is left of some workers, and go on without what Ray says of it."""
        died = self.deaths()
        self._end([worker for worker in workers if worker not in died])
        self._runs = {run: worker for run, worker in self._runs.items() if worker not in workers}
        self._died = {worker: how for worker, how in died.items() if worker not in workers}

    def close(self, lost: str | None = None) -> None:
        """End all actors, and leave Ray; a second call does nothing."""
        if self._closed or os.getpid() != self.owner:
            return
        self._closed = True
        with uninterrupted():
            answers = _within(_ENDS_WITHIN, self._end_all)
            self.messages.close()  # at which a worker ends that Ray has not ended
            _within(_ENDS_WITHIN if answers else 0.0, leave_ray)

    def _end_all(self) -> None:
        if not self.ray.is_initialized():  # a call would start another Ray
            return
        for actor in self._actors.values():
            self.ray.kill(actor)
        if self._group is not None:  # ends what is left there, also a process that is stopped
            self.ray.util.remove_placement_group(self._group)

    def _end(self, workers: Sequence[int]) -> None:
        """End actors whose processes may be stopped: then only a signal does, from their nodes."""
        affinity = self.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        ended = []
        for worker in workers:
            self.ray.kill(self._actors[worker])
            if (place := self.places.of.get(worker)) is not None:
                there = affinity(place["node"], soft=False)
                end = self.ray.remote(kill_process).options(num_cpus=0, scheduling_strategy=there, max_retries=0)
                ended.append(end.remote(place["pid"], place["began"]))
        if ended:
            self.ray.wait(ended, num_returns=len(ended), timeout=_ENDS_WITHIN)

    def _begin(self, workers: Iterable[int], deadline: float) -> dict[int, Address]:
        """Start actors, and connect with them."""
        launch, workers = self.launch, list(workers)
        found = self._answers({each: self._ask_where(each) for each in workers}, deadline, self._ask_where)
        self._check_versions(found)
        self.places.of |= found
        calls = {each: self._actors[each].open.remote(self.places.is_near(each), launch.timeout) for each in workers}
        for worker, line in self._answers(calls, deadline).items():
            ends = self._connected(worker, Invitation.of_line(line))
            with uninterrupted():
                self.places.connected(worker, ends)
        with uninterrupted():
            self._runs |= {self._actors[each].run.remote(self._settings(each)): each for each in workers}
        return {worker: self.places.address(worker) for worker in workers}

    def _ask_where(self, worker: int) -> Any:
        """Start an actor, and ask where it is."""
        launch, schedulings = self.launch, self.ray.util.scheduling_strategies
        self.places.of.pop(worker, None)
        placed = schedulings.PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=worker)
        actor = self.ray.remote(RayWorker).options(scheduling_strategy=placed, max_restarts=0, **launch.options)
        self._actors[worker] = actor.remote(worker, launch.names[worker])
        return self._actors[worker].where.remote(launch.worker, launch.devices[worker])

    def _settings(self, worker: int) -> RunSettings:
        launch, device = self.launch, self.places.of[worker]["device"]
        patience = self.places.patience(worker, launch.patience, dict.fromkeys(self.places.of, launch.threads))
        return RunSettings(launch.worker, launch.names, device, launch.threads, launch.timeout, patience)

    def _answers(
        self, calls: Mapping[int, Any], deadline: float, again: Callable[[int], Any] | None = None
    ) -> dict[int, Any]:
        """What actors answer, by their workers.

        An actor that Ray had placed on a node which is gone, before Ray knew that, is started ``again``.
        """
        waiting, answers = dict(calls), {}
        while waiting:
            left = max(0.0, deadline - time.monotonic())
            done = self.ray.wait(list(waiting.values()), timeout=left)[0]
            if not done:
                raise self._not_placed(f"worker {self.launch.names[min(waiting)]!r}", self.timeout)
            for worker in [each for each, call in waiting.items() if call in done]:
                try:
                    answers[worker] = self.ray.get(waiting.pop(worker))
                except self.ray.exceptions.RayError as error:
                    if again is None or not self._never_ran(error) or time.monotonic() > deadline:
                        raise self._not_started(worker, error) from error
                    time.sleep(_AGAIN)
                    waiting[worker] = again(worker)
        return answers

    def _never_ran(self, error: Exception) -> bool:
        return isinstance(error, self.ray.exceptions.RayActorError) and not error.actor_init_failed

    def _not_started(self, worker: int, error: Exception) -> ClusterError:
        return ClusterError(
            f"worker {self.launch.names[worker]!r} did not start on Ray: {_first_cause(error)}\nEach node needs what this "
            "process runs: the same Python, torch and pippy (or ray.init(runtime_env=...) before cluster(), which has Ray "
            "bring them)"
        )

    def _connected(self, worker: int, invitation: Invitation) -> SocketPair:
        """The controller's ends of two connections with a worker."""
        timeout, place = self.launch.timeout, self.places.of[worker]
        try:
            if not self.places.is_near(worker):
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
                f"this process gets no connection with worker {self.launch.names[worker]!r} on {place['host']} "
                f"({invitation.address}, port {invitation.port}): {error}. Workers and the script connect with each other at "
                "ports that their systems choose: a firewall between the nodes must let them, and the script must run on a node"
            ) from error

    def _check_versions(self, found: Mapping[int, Mapping[str, Any]]) -> None:
        own = {**versions(), "ray": self.ray.__version__}
        wrong = [
            f"{what}: {its} on {place['host']} (worker {self.launch.names[worker]!r}), {own.get(what)} here"
            for worker, place in found.items()
            for what, its in place["versions"].items()
            if its != own.get(what)
        ]
        if wrong:
            raise ClusterError(
                "these workers cannot work with this process:\n  "
                + "\n  ".join(wrong)
                + "\ninstall the same versions on each node"
            )

    def _not_placed(self, who: str, seconds: float) -> ClusterError:
        nodes = [each for each in self.ray.nodes() if each["Alive"]]
        has = "; ".join(f"{each['NodeManagerAddress']} {_counts(each['Resources'])}" for each in nodes)
        return ClusterError(
            f"Ray did not start {who} within {seconds:g} s. Asked for: {self.launch}. The cluster has {len(nodes)} nodes: "
            f"{has}; free are {_counts(self.ray.available_resources())}. Give fewer workers, smaller resources= or num_gpus=, "
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
    """Call a function, and wait no longer for it: where the head of Ray is gone, its calls take a minute. False if it did."""

    def quietly() -> None:
        with suppress(Exception):  # there is nothing left to end
            do()

    thread = threading.Thread(target=quietly, name="pippy ray", daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()
