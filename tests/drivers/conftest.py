"""Clusters of four workers, one of processes and one of threads, for all tests that only run things on them."""

import pytest

from tests.drivers.processes import close_open_cluster, kept_open
from tests.drivers.thread_cluster import thread_cluster


@pytest.fixture(scope="package")
def shared():
    """The cluster of processes: opened again after a test that broke it or closed it; closed after the last test."""
    held = []
    yield held
    while held:
        held.pop().close()


@pytest.fixture
def cluster(shared):
    return kept_open(shared, 4)


@pytest.fixture
def alone():
    """No cluster is open: for tests that open their own."""
    close_open_cluster()


@pytest.fixture
def threads():
    """Workers in this process, for tests that look inside of them."""
    with thread_cluster(4) as cluster:
        yield cluster
