"""Workers for the idioms of PyTorch's tutorials."""

import pytest

from tests.drivers.thread_cluster import thread_cluster


@pytest.fixture(scope="module")
def workers():
    with thread_cluster(3) as cluster:
        yield cluster
