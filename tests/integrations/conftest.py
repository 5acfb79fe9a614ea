"""Workers that are threads, for all trainers of a file."""

import pytest

from tests.drivers.thread_cluster import thread_cluster


@pytest.fixture(scope="module")
def threads():
    with thread_cluster(2) as cluster:
        yield cluster
