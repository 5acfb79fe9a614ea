"""How `pytest -n 3`, which is `make test`, divides the suite among its processes.

    1   tests of clusters that are about time, one after another; they wait more than they compute
    2   the other tests of clusters, one after another
    3   all other tests, a file at a time; it is nice, and takes only the time that the other two leave

What remains when a process is done is shared.
"""

import os

from xdist.scheduler import LoadScopeScheduling

ABOUT_TIME = (
    "tests/balance/test_profile.py",  # no clusters, but it measures real time
    "tests/cli/test_run.py",
    "tests/drivers/engines/",
    "tests/drivers/test_failures.py",
    "tests/drivers/test_lost_workers.py",
    "tests/drivers/wire/",
    "tests/exps/",
)
CLUSTERS = (
    *ABOUT_TIME,
    "tests/drivers/choice/test_auto.py",
    "tests/drivers/session/",
    "tests/drivers/model/optimizers/",
    "tests/drivers/placement/",
    "tests/drivers/report/test_record.py",
    "tests/drivers/model/state/",
    "tests/drivers/driver/steps/",
    "tests/drivers/test_",
    "tests/drivers/worker/test_compile.py",
    "tests/test_notebook.py",
)
LONGEST = (
    "tests/drivers/driver/test_data.py",
    "tests/drivers/driver/test_loading.py",
    "tests/drivers/lowering/test_lower.py",
    "tests/drivers/model/recovery/",
    "tests/drivers/worker/test_out_of_order.py",  # its workers are threads
    "tests/ir/cut/test_constraints.py",
    "tests/ir/verify/test_verify.py",
    "tests/ir/show/test_diagrams.py",
    "tests/models/",
    "tests/test_docs.py",
    "tests/test_site.py",
    "tests/test_transparency.py",
    "tests/training/",
)
NICENESS = 10


def runs_clusters(nodeid: str) -> bool:
    """Whether a test has the cores to itself.

    >>> runs_clusters("tests/drivers/engines/test_cluster.py::test_a"), runs_clusters("tests/ir/test_golden.py::test_a")
    (True, False)
    """
    return nodeid.startswith(CLUSTERS)


def order(nodeid: str) -> int:
    """What comes first: the clusters, then the files that take longest; at the end all processes should be done."""
    if runs_clusters(nodeid):
        return 0 if nodeid.startswith(ABOUT_TIME) else 1
    return 2 if nodeid.startswith(LONGEST) else 3


def give_way(nodeid: str) -> None:
    """Leave the cores to the tests of clusters, if this test is of the others."""
    if not runs_clusters(nodeid) and os.nice(0) < NICENESS:
        os.nice(NICENESS)


class SeveralProcesses(LoadScopeScheduling):
    """Gives out all tests of clusters at once, and other tests by file, in the order in which they were collected."""

    def _split_scope(self, nodeid: str) -> str:
        if runs_clusters(nodeid):
            return "about time" if nodeid.startswith(ABOUT_TIME) else "clusters"
        return nodeid.partition("::")[0]
