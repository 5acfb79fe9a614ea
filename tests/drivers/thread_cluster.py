"""A cluster whose workers are threads of this process: for tests that need workers, and no processes."""

import gc
from contextlib import contextmanager

from pippy.drivers.engines import threads


@contextmanager
def thread_cluster(n, accelerators=None):
    """A cluster of ``n`` workers; each computes on its accelerator, if some are given."""
    gc.freeze()  # a worker collects garbage when a driver is closed: as in a process, without what was imported before
    try:
        with threads.thread_cluster(n, accelerators=accelerators) as cluster:
            yield cluster
    finally:
        gc.unfreeze()
