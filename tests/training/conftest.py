"""One cluster of two processes, and one of threads, for all tests of the loop."""

import pytest

from pippy.drivers.clusters.local_cluster import local_cluster
from tests.drivers.processes import close_open_cluster
from tests.drivers.thread_cluster import thread_cluster


@pytest.fixture(scope="package")
def cluster():
    close_open_cluster()
    with local_cluster(2, threads=1) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def threads():
    with thread_cluster(2) as cluster:
        yield cluster
