"""How many file descriptors a cluster takes: they grow with the pairs of workers that a program uses."""

import copy
import os
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from pippy import PipelineDriver1F1B, PipelineDriverInterleaved1F1B, local_cluster, pipeline
from pippy.drivers.errors import ClusterError
from tests.drivers.models import Chain
from tests.drivers.processes import few_descriptors

WORKERS = 6
pytestmark = pytest.mark.usefixtures("in_float64", "seeded", "alone")


def sockets(pid):
    """How many sockets a process has."""
    found = 0
    for each in Path(f"/proc/{pid}/fd").iterdir():
        found += os.readlink(each).startswith("socket:")
    return found


def trains_as_plain(driver, plain):
    x, target = torch.randn(8, 8), torch.randn(8, 8)
    driver.run(4, x, target)
    plain.zero_grad()
    F.mse_loss(plain(x), target).backward()
    for name, gradient in driver.gradients().items():
        torch.testing.assert_close(gradient, plain.get_parameter(name).grad)


def test_descriptors_grow_with_the_pairs_that_a_program_uses():
    """64 workers start where 1,024 descriptors are allowed; here the same on a smaller scale: 6 with some 40."""
    with few_descriptors(12 + 5 * WORKERS), local_cluster(WORKERS, threads=1) as cluster:
        pids = [worker.pid for worker in cluster.control.workers]
        assert len({before := sockets(pid) for pid in pids}) == 1
        plain = Chain(WORKERS)
        pipe = pipeline(copy.deepcopy(plain), F.mse_loss)
        driver = PipelineDriver1F1B(pipe, cluster)
        trains_as_plain(driver, plain)
        assert [sockets(pid) - before for pid in pids] == [1, *[2] * (WORKERS - 2), 1]
        again = PipelineDriver1F1B(pipe, cluster)
        trains_as_plain(again, plain)
        assert [sockets(pid) - before for pid in pids] == [1, *[2] * (WORKERS - 2), 1]
        first = PipelineDriverInterleaved1F1B(pipe, cluster, all_ranks=[0, 2, 4], stages_per_worker=2)
        trains_as_plain(first, plain)
        assert [sockets(pids[at]) - before for at in (0, 2, 4)] == [3, 4, 4]


def test_too_few_descriptors_to_start_are_said_to_be_too_few():
    open_now = len(os.listdir("/proc/self/fd"))
    for free in (10, 4 * WORKERS):
        with few_descriptors(free), pytest.raises(ClusterError, match=r"6 workers.*file descriptors.*ulimit -n"):
            local_cluster(WORKERS, threads=1)
        assert len(os.listdir("/proc/self/fd")) == open_now
