"""Clusters of four workers, one of processes and one of threads, for all tests that only run things on them."""

import pytest

from pippy.drivers.clusters.cluster import local_cluster
from tests.drivers.threads import thread_cluster


@pytest.fixture(scope="package")
def shared():
    """The cluster of processes, opened again after a test that broke it; closed before other folders open theirs."""
    held = {}
    yield held
    if "cluster" in held:
        held["cluster"].close()


@pytest.fixture
def cluster(shared):
    if "cluster" in shared and shared["cluster"].control.broken:
        shared.pop("cluster").close()
    if "cluster" not in shared:
        shared["cluster"] = local_cluster(4, threads=1)
    return shared["cluster"]


@pytest.fixture
def alone(shared):
    """No cluster is open: for tests that open their own."""
    if "cluster" in shared:
        shared.pop("cluster").close()


@pytest.fixture
def threads():
    """Workers in this process, for tests that look inside of them."""
    with thread_cluster(4) as cluster:
        yield cluster
