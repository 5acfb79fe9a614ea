"""One cluster of two processes, and one of threads, for all tests of the loop."""

import pytest

from tests.drivers.processes import kept_open
from tests.drivers.thread_cluster import thread_cluster
from tests.training.models import Parts, run


@pytest.fixture(scope="package")
def shared():
    held = []
    yield held
    while held:
        held.pop().close()


@pytest.fixture
def cluster(shared):
    return kept_open(shared, 2)


@pytest.fixture(scope="module")
def threads():
    with thread_cluster(2) as cluster:
        yield cluster


@pytest.fixture
def parts(threads):
    """A driver on these workers, with an optimizer and a scheduler; closed after the test."""
    made = Parts(threads)
    yield made
    made.driver.close()


@pytest.fixture(scope="package")
def known():
    return {}


@pytest.fixture
def undisturbed(cluster, known):
    """What a run gives that nothing happens to."""
    if not known:
        known["run"] = run(cluster, None)
    return known["run"]
