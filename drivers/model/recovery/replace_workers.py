"""Puts other processes in the places of the workers that a cluster has lost. The other workers keep what they hold.

    lost workers:    those that died, and those that do not answer a ping
    fork server:     kills what is left of them ──▶ forks others, with new sockets to the controller
    other workers:   give up their commands, and drop their connections with lost workers
    controller:      goes on; the first message that needs it connects two workers again

A worker that was replaced holds nothing. Each driver that had stages there refuses its commands until it has recovered.
"""

from contextlib import suppress
from functools import partial

from pippy.drivers.base.errors import ClusterError, WorkerLostError
from pippy.drivers.engines.cluster import Cluster


def replace_lost_workers(cluster: Cluster, limit: float | None = None) -> tuple[int, ...]:
    """Replace the workers that are lost, if there are any. Gives their numbers.

    The other workers have ``limit`` seconds to end what they do; with None, as long as they answer pings. If this fails, or
    Ctrl-C ends it, the cluster cannot be used until another call succeeds.
    """
    if cluster.closed:
        raise ClusterError("this cluster is closed; open another")
    return cluster.session.in_turn(partial(_replace, cluster, limit))


def _replace(cluster: Cluster, limit: float | None) -> tuple[int, ...]:
    session, log = cluster.session, cluster.session.log
    if not session.broken:
        with suppress(Exception):  # a step may have failed; if a worker is lost, this finds it
            session.wait_all()
        for worker in list(cluster.engine.deaths())[:1]:
            session.mark_lost(worker, "it died")
    if not session.broken:
        return ()
    why = cluster.engine.fixed
    if log.lost is None:
        raise ClusterError(session.broken)
    if why is not None:
        raise ClusterError(
            f"{log.lost.removesuffix(session.recovery_advice)}; no other process can take its place: {why}"
        )
    with session.lock:  # the waits of all threads have ended
        log.to_replace |= session.lost_workers()
        try:
            replaced = cluster.engine.replace(sorted(log.to_replace))
        except (OSError, ClusterError) as error:
            raise ClusterError(_not_replaced(cluster, error)) from error
        try:
            session.mend(replaced, limit)
        except WorkerLostError:
            raise
        except BaseException:
            if not session.broken:
                session.mark_lost(min(replaced), "an earlier attempt to replace it was not finished")
            raise
        return tuple(replaced)


def _not_replaced(cluster: Cluster, error: Exception) -> str:
    names = ", ".join(repr(cluster.workers[worker]) for worker in sorted(cluster.session.log.to_replace))
    return (
        f"no process could be started in the place of worker {names}: {error}; the other workers hold what they "
        "held: call recover() again when this is repaired, or close this cluster"
    )
