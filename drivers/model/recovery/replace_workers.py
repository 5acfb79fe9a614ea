"""Puts other processes in the places of the workers that a cluster has lost, or leaves them empty. The other workers keep
what they hold.

    lost workers:    those that died, and those that do not answer a ping
    fork server:     kills what is left of them ──▶ forks others, with new sockets to the controller
                                                ──▶ or none: those workers are gone, and may be started later
    other workers:   give up their commands, and drop their connections with lost workers
    controller:      goes on; the first message that needs it connects two workers again

A worker that was replaced, or is gone, holds nothing. Each driver that had stages there refuses its commands until it has
recovered.
"""

import logging
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial

from pippy.drivers.base.errors import ClusterError, WorkerLostError
from pippy.drivers.engines.cluster import Cluster

_log = logging.getLogger(__name__)


class NotReplaced(ClusterError):
    """No process could be started in the places of lost workers; ``why`` says which, without what to do."""

    def __init__(self, why: str) -> None:
        super().__init__(
            f"{why}; the workers that are left hold what they held: call recover() again when this is repaired, or "
            "recover(fewer=True) to go on with those, or close this cluster"
        )
        self.why = why


Wanted = Callable[[frozenset[int]], Collection[int]]


def replace_lost_workers(cluster: Cluster, wanted: Wanted = lambda lost: lost) -> tuple[int, ...]:
    """Replace the workers that are lost, if there are any. Gives their numbers.

    ``wanted`` is called with the numbers of the lost workers, and says which are to be replaced: it may leave some out, which
    are gone then, and name some that were gone before. If it raises, nothing has changed. The other workers have the cluster's
    ``timeout`` to end what they do. If this fails, or Ctrl-C ends it, the cluster cannot be used until another call succeeds.
    """
    if cluster.closed:
        raise ClusterError("this cluster is closed; open another")
    return cluster.session.in_turn(partial(_replace, cluster, wanted))


def _replace(cluster: Cluster, wanted: Wanted) -> tuple[int, ...]:
    session, log = cluster.session, cluster.session.log
    if not session.broken:
        with suppress(Exception):  # a step may have failed; if a worker is lost, this finds it
            session.wait_all()
        for worker in list(cluster.engine.deaths())[:1]:
            session.mark_lost(worker, "it died")
    if session.broken:
        why = cluster.engine.fixed
        if log.lost is None:
            raise ClusterError(session.broken)
        if why is not None:
            raise ClusterError(
                f"{log.lost.removesuffix(session.recovery_advice)}; no other process can take its place: {why}"
            )
    with session.lock:  # the waits of all threads have ended
        if session.broken:
            log.to_replace |= session.lost_workers()
        again = sorted(wanted(frozenset(log.to_replace)))
        gone = sorted(log.to_replace.difference(again))
        if not again and not gone:
            return ()
        try:
            cluster.engine.end(gone)
            replaced = cluster.engine.replace(again) if again else {}
        except (OSError, ClusterError) as error:
            names = ", ".join(repr(cluster.workers[worker]) for worker in again or gone)
            raise NotReplaced(f"no process could be started in the place of worker {names}: {error}") from error
        try:
            session.mend(replaced, gone)
        except WorkerLostError:
            raise
        except BaseException:
            if not session.broken:
                session.mark_lost(min(again or gone), "an earlier attempt to replace it was not finished")
            raise
        for worker, address in replaced.items():
            _log.info("worker %r has another process: pid %d on %s", cluster.workers[worker], address.pid, address.host)
        for worker in gone:
            _log.info("worker %r is gone: the run goes on without it", cluster.workers[worker])
        return tuple(replaced)
