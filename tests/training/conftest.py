"""One cluster of two processes, and one of threads, for all tests of the loop."""

import pytest

from pippy.drivers.clusters.local_cluster import local_cluster
from tests.drivers.processes import close_open_cluster
from tests.drivers.thread_cluster import thread_cluster
from tests.training.models import run


@pytest.fixture(scope="package")
def shared():
    held = []
    yield held
    while held:
        held.pop().close()


@pytest.fixture
def cluster(shared):
    """Opened again after a test that broke it."""
    if not shared or shared[0].control.broken:
        close_open_cluster()
        shared[:] = [local_cluster(2, threads=1)]
    return shared[0]


@pytest.fixture(scope="module")
def threads():
    with thread_cluster(2) as cluster:
        yield cluster


@pytest.fixture(scope="package")
def known():
    return {}


@pytest.fixture
def undisturbed(cluster, known):
    """What a run gives that nothing happens to."""
    if not known:
        known["run"] = run(cluster, None)
    return known["run"]
