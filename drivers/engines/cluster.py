"""The workers that a controller drives, on an engine. Clusters are opened by the files of engines, and by `pippy run`.

`Topology` says who is who: the host and process of each worker, and the stages that the open drivers have placed on it.

Drivers without a cluster argument take the current cluster. A thread may have only one open at a time.

`pippy run` says how many workers a script's cluster has. This cluster starts when the script first uses it, by `cluster()`, or
by `current_cluster()`, as a driver does that is given no cluster. A cluster that the script opens by `local_cluster` is its
own. If the script never asks, no worker is started.
"""

import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from pippy.drivers.base.errors import ClusterError
from pippy.drivers.base.interrupts import put_off, uninterrupted
from pippy.drivers.engines.engine import Engine, start
from pippy.drivers.engines.routes import Routes
from pippy.drivers.session.session import Session
from pippy.ir.base.readable import brief, count_with_noun, html_table, shortened, text_table


@dataclass(frozen=True)
class WorkerPlace:
    """A worker: its name, host and process, and what each driver has placed there, in words, by the driver's number.

    A worker that was lost, and whose place is empty, has no process: its pid is None.

    >>> WorkerPlace("worker0", "node1", 4711).pid
    4711
    """

    name: str
    host: str
    pid: int | None
    holds: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class DriverPlaces:
    """A driver as its cluster knows it: its name, and what it has placed on each worker, in words.

    >>> DriverPlaces("PipelineDriver1F1B", {0: "stage 0"}).name
    'PipelineDriver1F1B'
    """

    name: str
    holds: Mapping[int, str]

    @staticmethod
    def of(name: str, replicas: Sequence[Sequence[int]]) -> "DriverPlaces":
        """Those of a driver, of which ``replicas`` has the worker of each stage, for each replica.

        >>> DriverPlaces.of("driver", [[0, 1, 0]]).holds, DriverPlaces.of("driver", [[3], [4]]).holds
        ({0: 'stages 0, 2', 1: 'stage 1'}, {3: 'replica 0, stage 0', 4: 'replica 1, stage 0'})
        """
        holds = {}
        for replica, ranks in enumerate(replicas):
            which = f"replica {replica}, " * (len(replicas) > 1)
            for rank in dict.fromkeys(ranks):
                stages = [str(stage) for stage, worker in enumerate(ranks) if worker == rank]
                holds[rank] = f"{which}stage{'s' * (len(stages) > 1)} {', '.join(stages)}"
        return DriverPlaces(name, holds)


@dataclass(frozen=True)
class ClusterTopology:
    """The workers of a cluster: print it, or ask for one by its number. ``drivers`` are the open drivers, in words, by number.

    >>> places = WorkerPlace("a", "node1", 10, {0: "stage 0"}), WorkerPlace("b", "node1", 11)
    >>> topology = ClusterTopology(places, {0: "1f1b"})
    >>> print(topology)
    worker   name   host    pid   1f1b
    ─────────────────────────────────────
    0        a      node1    10   stage 0
    1        b      node1    11
    >>> topology[1].name, len(topology)
    ('b', 2)
    """

    workers: tuple[WorkerPlace, ...]
    drivers: Mapping[int, str] = field(default_factory=dict)

    def __getitem__(self, worker: int) -> WorkerPlace:
        return self.workers[worker]

    def __len__(self) -> int:
        return len(self.workers)

    def _table(self) -> list[Sequence[str]]:
        rows = [
            [
                str(at),
                each.name,
                each.host,
                str(each.pid or ""),
                *(each.holds.get(number, "") for number in self.drivers),
            ]
            for at, each in enumerate(self.workers)
        ]
        return [["worker", "name", "host", "pid", *self.drivers.values()], *rows]

    def _words(self) -> tuple[int, ...]:
        return (0, 1, 2, *range(4, 4 + len(self.drivers)))

    def __str__(self) -> str:
        head, *rows = self._table()
        return text_table(head, rows, words=self._words())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html_table(self._table(), words=self._words())


_log = logging.getLogger(__name__)

# The thread and the cluster of each `with` block, the innermost last.
entered_clusters: list[tuple[threading.Thread, "Cluster"]] = []


class Cluster:
    """The workers that a controller drives; made by `cluster`, or `local_cluster`.

    It is a context manager, and inside its ``with`` it is the current cluster of the thread that entered it. Several threads
    can use one cluster; the commands of their drivers take turns. A cluster that is not closed is closed when nothing refers to
    it any more, or when the script ends, however it ends. ``routes`` says how values go between each two workers.

    >>> from pippy import cluster, current_cluster
    >>> with cluster(1, names=["only"]) as workers:
    ...     len(workers), workers.workers, current_cluster() is workers
    (1, ('only',), True)
    >>> workers
    <Cluster of 1 worker, closed: only>
    """

    def __init__(self, names: Sequence[str], session: Session, engine: Engine, device_type: str = "cpu") -> None:
        self.workers, self.device_type = tuple(names), device_type
        self.session, self.engine = session, engine
        self._drivers = itertools.count()
        self.open_drivers = weakref.WeakValueDictionary[int, DriverPlaces]()  # by number
        self.closed = False
        self.profiled: Path | None = None  # the file that a profile of its workers is for
        self.unfinished: list[Callable[[], None]] = []  # what waits for work that goes on beside commands
        self._finalizer = weakref.finalize(self, _end_unclosed, session, engine)
        started = ", ".join(f"{each.name} (pid {each.pid} on {each.host})" for each in session.workers)
        _log.info("%s started: %s", count_with_noun(len(session.workers), "worker"), started)

    def close(self) -> None:
        """End all workers, when checkpoints that are being written are whole. A second call does nothing."""
        try:
            for finish in () if self.session.broken else self.unfinished.copy():
                finish()
        finally:
            self._end()

    def _end(self) -> None:
        self.closed = True
        self.session.end("this cluster is closed; open another")
        entered_clusters[:] = [each for each in entered_clusters if each[1] is not self]
        self._finalizer.detach()
        self.engine.close(self.session.log.lost)
        _log.info("cluster closed: %s", ", ".join(self.workers))

    @property
    def gone(self) -> frozenset[int]:
        """The numbers of workers that were lost, and without which `driver.recover` went on: they have no process."""
        return self.session.log.gone

    @property
    def routes(self) -> Routes:
        """How values go between each two workers. Those that compute on GPUs are asked what they have tried so far."""
        routes = self.engine.routes.without(self.gone)
        asks = routes.has_devices and not (self.closed or self.session.broken)
        return routes.tried(self.session.ways()) if asks else routes

    def hosts_of(self, workers: Sequence[int]) -> tuple[int, ...] | None:
        """The hosts on which these workers are now, as numbers; None if all are on one.

        >>> from pippy import cluster
        >>> with cluster(2, threads=1) as workers:
        ...     print(workers.hosts_of([0, 1]))
        None
        """
        return self.engine.routes.hosts_of(workers)

    def next_driver(self) -> int:
        """The number of another driver."""
        return next(self._drivers)

    @property
    def topology(self) -> ClusterTopology:
        """Who is who: the host and process of each worker, and the stages and replicas that each open driver has there.

        The division into stages and replicas is that of a driver: `driver.topology` has it in numbers.

        >>> from pippy import cluster
        >>> with cluster(1, names=["only"], threads=1) as workers:
        ...     print(workers.topology[0].name, workers.topology[0].pid == workers.session.workers[0].pid)
        only True
        """
        drivers = dict(sorted(self.open_drivers.items()))
        places = []
        for worker, (address, host) in enumerate(zip(self.session.workers, self.engine.routes.hosts)):
            holds = {number: each.holds[worker] for number, each in drivers.items() if worker in each.holds}
            places.append(WorkerPlace(address.name, host, None if worker in self.gone else address.pid, holds))
        return ClusterTopology(tuple(places), {number: each.name for number, each in drivers.items()})

    def dump(self, timeout: float = 1.0) -> str:
        """What every worker does or waits for, one line or more each, and which workers do not answer in time."""
        return self.session.dump(timeout)

    def __len__(self) -> int:
        return len(self.workers)

    def __enter__(self) -> "Cluster":
        self.session.check()
        entered_clusters.append((threading.current_thread(), self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception as late:
            if error is None:
                raise
            error.add_note(f"and at the end of the cluster: {late}")

    def __repr__(self) -> str:
        state = "closed" if self.closed else "broken" if self.session.broken else "open"
        present = [self.workers[worker] for worker in self.session.log.present]
        gone = ", ".join(self.workers[worker] for worker in sorted(self.gone))
        workers = f"{count_with_noun(len(present), 'worker')}, {state}: {shortened(', '.join(present), 200)}"
        return f"<Cluster of {workers}{f'; gone: {shortened(gone, 200)}' if gone else ''}>"

    def _repr_html_(self) -> str:
        """The workers and their hosts; and how values go between them, if there are several ways."""
        routes = self.routes
        rows = [["worker", "host"], *([self.workers[at], routes.hosts[at]] for at in self.session.log.present)]
        ways = str(routes) if len(routes.groups) > 1 or routes.on_devices else ""
        state = escape(repr(self).partition(":")[0].lstrip("<"))
        return f"<div>{state}{html_table(rows)}<pre>{escape(ways)}</pre></div>"

    def __reduce__(self) -> NoReturn:
        raise ClusterError(
            "a cluster cannot be pickled, because it stands for processes that this process started. Do not keep "
            "it in a model, or in a value that is sent to workers; call current_cluster() in the controller instead"
        )


def _end_unclosed(session: Session, engine: Engine) -> None:
    """End the workers of a cluster that nobody has closed, and to which nothing refers any more."""
    with put_off():
        engine.close(session.log.lost)


@dataclass
class LazyCluster:
    """The number of workers of a script, the function that starts them, and the cluster that was started last.

    >>> LazyCluster(2, {"threads": 1}, dict).requested(2, {"device": "cpu"}, timeout=3.0)
    {'n': 2, 'threads': 1, 'device': 'cpu', 'timeout': 3.0}
    """

    n: int
    options: dict[str, Any]
    start: Callable[..., Cluster]
    started: Cluster | None = field(default=None, repr=False)
    is_passed_over: bool = field(default=False, repr=False)  # the script has opened a cluster of its own

    def current(self) -> Cluster:
        """The cluster; a new one if the last one is closed."""
        if self.started is None or self.started.closed:
            self.started = self.start(n=self.n, **self.options)
        return self.started

    def requested(self, n: int | None, options: dict[str, Any], **times: float) -> Cluster:
        """The cluster for a call of `cluster` in the script. Its options override those of the command line."""
        if n not in (None, self.n):
            raise ClusterError(
                f"n={brief(n)}, and this script was started for {self.n} workers; leave out n, or start it "
                f"with: pippy run -n {brief(n)}"
            )
        if options or self.started is None or self.started.closed:
            self.started = self.start(n=self.n, **self.options | options, **times)
        return self.started


_current: LazyCluster | None = None


def current_lazy_cluster() -> LazyCluster | None:
    """The lazy cluster of this process, if `pippy run` has made one.

    >>> current_lazy_cluster() is None
    True
    """
    return _current


def note_local_cluster() -> None:
    """A local cluster starts: that of `pippy run`, or one of the script's own."""
    if _current is not None and _current.started is None:
        _current.is_passed_over = True


@contextmanager
def lazy_cluster(n: int, start: Callable[..., Cluster], **options: Any) -> Iterator[LazyCluster]:
    """Inside, the first use of the cluster calls ``start(n=n, **options)``; at the end the cluster is closed."""
    global _current
    _current = lazy = LazyCluster(n, options, start)
    try:
        yield lazy
    finally:
        _current = None
        if lazy.started is not None:
            lazy.started.close()


_opened: "weakref.WeakKeyDictionary[threading.Thread, weakref.ref[Cluster]]" = (
    weakref.WeakKeyDictionary()
)  # the last one


def current_cluster() -> Cluster:
    """The cluster of this thread: that of its innermost ``with``, or the one that it has open; or else that of the main thread.

    A thread without either takes the only cluster that another thread has, or that of `pippy run`.

    >>> current_cluster()
    Traceback (most recent call last):
    pippy.drivers.base.errors.ClusterError: no cluster is open; open one: with cluster(2) as workers: ...
    """
    cluster = _cluster_of(threading.current_thread()) or _cluster_of(threading.main_thread()) or _cluster_of_others()
    if cluster is None and (lazy := current_lazy_cluster()) is not None:
        cluster = lazy.current()
    if cluster is None:
        raise ClusterError("no cluster is open; open one: with cluster(2) as workers: ...")
    return cluster


def _cluster_of_others() -> Cluster | None:
    threads = {thread for thread, _ in entered_clusters} | set(_opened)
    clusters = [cluster for cluster in map(_cluster_of, threads) if cluster is not None]
    if len(clusters) > 1:
        raise ClusterError(
            f"this thread has opened no cluster, and {len(clusters)} other threads have; give the driver its cluster: "
            "PipelineDriver(pipe, workers)"
        )
    return clusters[0] if clusters else None


def _cluster_of(thread: threading.Thread) -> Cluster | None:
    entered = [cluster for other, cluster in entered_clusters if other is thread]
    return entered[-1] if entered else _open(_opened.get(thread))


def opened(make: Callable[[], Engine], timeout: float, start_timeout: float) -> Cluster:
    """The cluster of an engine, which this thread has opened. The engine is closed if its workers do not start."""
    engine = None
    try:
        with uninterrupted():  # or processes would run that nobody knows of
            engine = make()
        cluster = Cluster(engine.names, start(engine, timeout, start_timeout), engine, engine.device_type)
    except BaseException as error:
        if engine is not None:
            engine.close(lost=f"the cluster did not start: {str(error) or type(error).__name__}")
        raise
    _opened[threading.current_thread()] = weakref.ref(cluster)
    return cluster


def check_none_open() -> None:
    """Raise if this thread has opened a cluster that is open. One that has lost a worker is closed here."""
    cluster = _open(_opened.get(threading.current_thread()))
    if cluster is None:
        return
    if not cluster.session.broken:
        raise ClusterError(
            f"only one cluster can be open in a thread, and {brief(cluster)} is; use it: several drivers can share one "
            "cluster; or close it first: current_cluster().close()"
        )
    cluster.close()


def _open(reference: "weakref.ref[Cluster] | None") -> Cluster | None:
    cluster = reference() if reference is not None else None
    return cluster if cluster is not None and not cluster.closed else None
