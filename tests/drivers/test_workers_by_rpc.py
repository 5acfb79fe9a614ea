"""Workers that send each other values by RPC: what is lost on the way is an error, soon, and never a wait without an end."""

import pytest

from pippy.drivers.clusters.local_cluster import local_cluster
from pippy.drivers.errors import StepError
from tests.drivers.failing_model import UNREADABLE
from tests.drivers.processes import within
from tests.drivers.test_failures import Training

pytestmark = pytest.mark.usefixtures("in_float64", "seeded", "alone")


def test_what_is_lost_between_two_workers():
    with local_cluster(4, threads=1, timeout=1.0, transport="rpc") as cluster:
        training = Training(cluster)
        training.step()
        with (
            within(2.0),
            pytest.raises(StepError, match=r"getitem_3 of micro-batch 1, from worker 1, could not be read: ValueError"),
        ):
            training.fail(UNREADABLE)
        training.check()
