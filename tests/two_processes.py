"""How `pytest -n 2`, which is `make test`, divides the suite among its two processes.

One runs the tests of clusters, one after another: two clusters at once would fight for the cores, and many of these tests are
about time. They wait more than they compute. The other process runs all other tests meanwhile, a file at a time, and takes
only the time that the first leaves: it is nice. What remains when the clusters are done is shared.
"""

import os

from xdist.scheduler import LoadScopeScheduling

CLUSTERS = (
    "tests/balance/test_profile.py",  # no clusters, but it measures real time
    "tests/cli/test_run.py",
    "tests/drivers/clusters/",
    "tests/drivers/recording/test_record.py",
    "tests/drivers/test_",
    "tests/drivers/transport/",
    "tests/drivers/workers/test_compile.py",
    "tests/exps/",
    "tests/test_notebook.py",
)
LONGEST = (
    "tests/drivers/workers/test_out_of_order.py",  # its workers are threads
    "tests/test_doctests.py",
    "tests/test_docs.py",
    "tests/ir/passes/test_verify.py",
    "tests/test_random_models.py",
    "tests/ir/show/test_shapes.py",
)
NICENESS = 10


def runs_clusters(nodeid: str) -> bool:
    """Whether a test has the cores to itself.

    >>> runs_clusters("tests/drivers/clusters/test_cluster.py::test_a"), runs_clusters("tests/ir/test_golden.py::test_a")
    (True, False)
    """
    return nodeid.startswith(CLUSTERS)


def order(nodeid: str) -> int:
    """What comes first: the clusters, then the files that take longest; at the end both processes should be done."""
    return 0 if runs_clusters(nodeid) else 1 if nodeid.startswith(LONGEST) else 2


def give_way(nodeid: str) -> None:
    """Leave the cores to the tests of clusters, if this test is of the others."""
    if not runs_clusters(nodeid) and os.nice(0) < NICENESS:
        os.nice(NICENESS)


class TwoProcesses(LoadScopeScheduling):
    """Gives out all tests of clusters at once, and other tests by file, in the order in which they were collected."""

    def _split_scope(self, nodeid: str) -> str:
        return "clusters" if runs_clusters(nodeid) else nodeid.partition("::")[0]
