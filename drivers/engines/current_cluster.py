"""The current cluster, for drivers without a cluster argument, and the check that a thread has only one open at a time."""

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from pippy.drivers.base.errors import ClusterError
from pippy.drivers.engines.cluster import Cluster, entered_clusters
from pippy.drivers.engines.lazy_cluster import current_lazy_cluster
from pippy.ir.base.readable import brief

_opened: "weakref.WeakKeyDictionary[threading.Thread, weakref.ref[Cluster]]" = (
    weakref.WeakKeyDictionary()
)  # the last one
_by_rpc: "weakref.ref[Cluster] | None" = None  # the last one whose processes RPC connects
_joining = threading.Lock()


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


@contextmanager
def opening(by_rpc: bool) -> Iterator[None]:
    """The block opens a cluster. If RPC connects its processes, raise if any thread has one open of which that is so."""
    if not by_rpc:
        yield
        return
    with _joining:
        _check_closed(_open(_by_rpc), "by RPC can be open in a process", "open this one without transport='rpc'")
        yield


def note_opened_cluster(cluster: Cluster, by_rpc: bool) -> Cluster:
    """Note that this thread has opened a cluster."""
    global _by_rpc
    _opened[threading.current_thread()] = weakref.ref(cluster)
    if by_rpc:
        _by_rpc = weakref.ref(cluster)
    return cluster


def check_none_open() -> None:
    """Raise if this thread has opened a cluster that is open. One that has lost a worker is closed here."""
    _check_closed(
        _open(_opened.get(threading.current_thread())),
        "can be open in a thread",
        "use it: several drivers can share one cluster",
    )


def _check_closed(cluster: Cluster | None, rule: str, remedy: str) -> None:
    if cluster is None:
        return
    if not cluster.session.broken:
        raise ClusterError(
            f"only one cluster {rule}, and {brief(cluster)} is; {remedy}; or close it first: current_cluster().close()"
        )
    cluster.close()


def _open(reference: "weakref.ref[Cluster] | None") -> Cluster | None:
    cluster = reference() if reference is not None else None
    return cluster if cluster is not None and not cluster.closed else None
