"""The workers that a controller drives, on an engine. Other files open clusters: those of the engines, and lazy_cluster.py."""

import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from pippy.drivers.base.errors import ClusterError
from pippy.drivers.base.interrupts import put_off
from pippy.drivers.engines.engine import Engine
from pippy.drivers.engines.routes import Routes
from pippy.drivers.engines.topology import ClusterTopology, DriverPlaces, WorkerPlace
from pippy.drivers.session.session import Session
from pippy.ir.base.readable import count_with_noun, html_table, shortened

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

    def __init__(
        self,
        names: Sequence[str],
        session: Session,
        engine: Engine,
        device_type: str = "cpu",
    ) -> None:
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
