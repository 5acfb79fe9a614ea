"""A cluster whose workers are threads of this process: for tests that need workers, and no processes."""

import threading
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

from pippy.drivers.engines import threads
from pippy.drivers.worker import handlers
from pippy.ir.run.random_state import RandomState


@contextmanager
def thread_cluster(n, accelerators=None):
    """A cluster of ``n`` workers; each computes on its accelerator, if some are given."""
    with threads.thread_cluster(n, accelerators=accelerators) as cluster:
        yield cluster


@contextmanager
def as_on_hosts(cluster, hosts):
    """Inside, the workers of a cluster of threads take themselves for those of these hosts, as "a a b b" names them."""
    routes = cluster.engine.routes
    cluster.engine.routes = replace(routes, hosts=tuple(hosts.split()))
    try:
        yield cluster
    finally:
        cluster.engine.routes = routes


@contextmanager
def one_draws_at_a_time():
    """Inside, workers that are threads compute in turn, as they share the generators of the process.

    Else one may seed them between the seed and the draw of another: its dropout draws other numbers than when it is repeated.
    """
    lock = threading.RLock()

    def alone(inner):
        def locked(*args, **kwargs):
            with lock:
                return inner(*args, **kwargs)

        return locked

    with (
        patch.object(handlers, "computation", alone(handlers.computation)),
        patch.object(RandomState, "restore", alone(RandomState.restore)),
    ):
        yield
