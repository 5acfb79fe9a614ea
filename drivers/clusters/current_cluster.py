"""The current cluster, for drivers without a cluster argument, and the check that only one cluster is open at a time."""

import threading
import weakref

from pippy.drivers.clusters.cluster import Cluster, entered_clusters
from pippy.drivers.clusters.lazy_cluster import current_lazy_cluster
from pippy.drivers.errors import ClusterError

_opened: "weakref.ref[Cluster] | None" = None  # the cluster that was opened last


def current_cluster() -> Cluster:
    """The cluster of the innermost ``with`` of this thread, or else of the main thread, or of the only other one that has any;
    without any, the only one that is open, or that of `pippy run`.

    >>> current_cluster()
    Traceback (most recent call last):
    pippy.drivers.errors.ClusterError: no cluster is open; open one: with local_cluster(2) as cluster: ...
    """
    found = _entered_cluster() or _open_cluster()
    if found is None and (lazy := current_lazy_cluster()) is not None:
        found = lazy.current()
    if found is None:
        raise ClusterError("no cluster is open; open one: with local_cluster(2) as cluster: ...")
    return found


def _entered_cluster() -> Cluster | None:
    innermost = dict(entered_clusters)  # of each thread
    for thread in (threading.get_ident(), threading.main_thread().ident):
        if thread in innermost:
            return innermost[thread]
    if len(innermost) > 1:
        raise ClusterError(
            f"{len(innermost)} other threads have opened clusters, and this thread has none; give the driver its cluster: "
            "PipelineDriver(pipe, cluster)"
        )
    return next(iter(innermost.values()), None)


def opened(cluster: Cluster) -> Cluster:
    """Note that this cluster was opened."""
    global _opened
    _opened = weakref.ref(cluster)
    return cluster


def check_none_open() -> None:
    """Raise if a cluster is open, since RPC joins one group at a time. A cluster that has lost a worker is closed here."""
    if (cluster := _open_cluster()) is None:
        return
    if not cluster.control.broken:
        raise ClusterError(
            f"only one cluster can be open in a process, and {cluster!r} is; use it: several drivers can share one cluster; or "
            "close it first: current_cluster().close()"
        )
    cluster.close()


def _open_cluster() -> Cluster | None:
    cluster = _opened() if _opened else None
    return cluster if cluster is not None and not cluster.closed else None
