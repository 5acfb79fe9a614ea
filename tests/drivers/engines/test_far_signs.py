"""What a worker of another host does while its Python may not run. Its sign process says it; it is lost only if it waits."""

import os
import signal
import socket
import time

import pytest
import torch
from torch import nn

from pippy import PipelineDriver1F1B, cluster, pipe_split, pipeline
from pippy.drivers.base.errors import WorkerLostError
from pippy.drivers.base.json_lines import JsonLines
from pippy.drivers.base.sign_process import FarSigns
from tests.drivers.failing_model import ASLEEP, BUSY, hold_pythons_lock
from tests.drivers.joining_shells import Shells
from tests.drivers.processes import stop, until, within

pytestmark = pytest.mark.usefixtures("alone")


class Holds(nn.Module):
    """A second stage that holds Python's lock for as long as it is told."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x, how):
        h = self.a(x)
        pipe_split()
        hold(how)
        return self.b(h)


@torch.fx.wrap
def hold(how):
    if how:
        hold_pythons_lock(how)


def children(pid):
    return [int(each) for each in open(f"/proc/{pid}/task/{pid}/children").read().split()]


@pytest.fixture
def far(quick_clusters, tmp_path):
    """A driver of two workers that count as of another host."""
    shells = Shells(quick_clusters, tmp_path)
    for _ in range(2):
        shells.worker(host="b")
    try:
        with cluster(2, join=shells.join, secret_file=shells.secret_file, timeout=20.0, start_timeout=100) as workers:
            assert [each.is_here for each in workers.session.workers] == [False, False]
            workers.session.timeout, workers.session.interval = 1.0, 0.2
            yield workers, PipelineDriver1F1B(pipeline(Holds()), workers), shells
    finally:
        shells.close()


def test_a_far_worker_that_computes_with_pythons_lock_is_not_lost(far):
    _, driver, _ = far
    x = torch.randn(2, 2)
    started = time.monotonic()
    driver.run(1, x, BUSY)
    assert time.monotonic() - started > 1.0, "the lock was held for less than the timeout"
    assert driver.run(1, x, 0).shape == (2, 2)


def test_a_far_worker_that_waits_with_pythons_lock_is_lost_and_it_is_said_where(far):
    workers, driver, shells = far
    driver.run(1, torch.randn(2, 2), 0)
    with (
        within(4.0),
        pytest.raises(WorkerLostError, match=r"it waits since 1 s in .*failing_model.py:\d+, in hold_pythons_lock"),
    ):
        driver.run(1, torch.randn(2, 2), ASLEEP)
    shells.worker(host="b")
    driver.recover()
    assert driver.run(1, torch.randn(2, 2), 0).shape == (2, 2)


def test_a_far_worker_that_is_stopped_is_lost_and_its_sign_process_ends_with_it(far):
    workers, driver, _ = far
    driver.run(1, torch.randn(2, 2), 0)
    pid = workers.session.workers[1].pid
    (sign,) = children(pid)
    stop(pid)
    with within(4.0), pytest.raises(WorkerLostError, match=rf"its process is stopped; kill -CONT {pid} lets it go on"):
        driver.run(1, torch.randn(2, 2), 0)
    os.kill(pid, signal.SIGKILL)
    assert until(lambda: not os.path.exists(f"/proc/{sign}"))


def test_a_worker_whose_sign_process_is_gone_is_as_one_that_says_nothing(far):
    workers, driver, _ = far
    driver.run(1, torch.randn(2, 2), 0)
    pid = workers.session.workers[1].pid
    os.kill(children(pid)[0], signal.SIGKILL)
    assert until(lambda: workers.session.sign(1) is None)
    assert driver.run(1, torch.randn(2, 2), 0).shape == (2, 2)
    with within(4.0), pytest.raises(WorkerLostError, match=r"says how long it may\); call driver"):
        driver.run(1, torch.randn(2, 2), BUSY)


@pytest.mark.parametrize(
    "said", [b"", b"no JSON\n", b'{"to": 1, "before": 3}\n', b"x" * (1 << 17)], ids=["nothing", "text", "else", "much"]
)
def test_what_is_no_answer_ends_the_asking(said):
    here, there = socket.socketpair()
    there.sendall(said[: 1 << 16])
    if not said:
        there.close()
    (signs := FarSigns()).take(0, here)
    with within(4.0):
        assert signs.sign(0) is None and signs.sign(0) is None
    there.close()


@pytest.mark.parametrize("said", [b"no JSON\n", b"[1]\n"])
def test_a_line_that_is_no_message_is_refused(said):
    here, there = socket.socketpair()
    with here, there, pytest.raises(ConnectionError, match="something else than was expected"):
        there.sendall(said)
        JsonLines(here).read(1.0)
