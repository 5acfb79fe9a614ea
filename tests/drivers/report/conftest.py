"""Recorded steps that several tests of reports look at."""

import pytest
import torch
from torch import nn

from pippy import PipelineDriver, pipeline
from tests.drivers.models import Chain
from tests.drivers.thread_cluster import thread_cluster


@pytest.fixture(scope="package")
def real():
    """A recording of real steps."""
    with thread_cluster(4) as cluster:
        driver = PipelineDriver(pipeline(Chain(4), nn.MSELoss()), cluster, schedule="zb_h1")
        x = torch.randn(8, 8)
        driver.run(4, x, x)
        with driver.record(limit=3) as recording:
            for _ in range(5):
                driver.run(4, x, x)
        driver.close()
    return recording
