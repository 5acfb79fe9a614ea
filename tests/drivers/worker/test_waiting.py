"""What a worker says that it waits for: each instruction that waits names it, in a step and outside of one."""

import os
import re
import signal
import threading
import time

import pytest
import torch
from torch import nn

from pippy import Pipe, PipelineDriver1F1B
from pippy.drivers.base.errors import WorkerLostError
from pippy.drivers.engines.local.local_cluster import local_cluster
from tests.drivers.processes import stop, within


def do_until_worker_3_is_lost(workers, act, said):
    """Do something while worker 3 has stopped, in a thread. A worker waits for it, and says for what; then it is killed."""
    errors = []

    def run():
        try:
            act()
        except WorkerLostError as error:
            errors.append(error)

    stop(workers.session.workers[3].pid)
    thread, end = threading.Thread(target=run), time.monotonic() + 60
    thread.start()
    while not re.search(said, dump := workers.dump(0.3)):
        assert time.monotonic() < end, dump
    os.kill(workers.session.workers[3].pid, signal.SIGKILL)
    with within(5.0):
        thread.join()
    assert len(errors) == 1 and "worker3" in str(errors[0])


@pytest.mark.parametrize(
    ("updates", "act", "said"),
    [
        (
            0,
            lambda driver, optimizer: optimizer.step(),
            r"worker 1 .*: command (\d+), OptimizerStep, instruction \d+ of \d+: receive gradients of stage 1 part 0 from 3; "
            r"waits for gradients of stage 1 part 0 of step \1, from worker 3",
        ),
        (
            1,
            lambda driver, optimizer: optimizer.step(),
            r"worker 1 .*: command (\d+), OptimizerStep, instruction 2 of 2: receive parameters of stage 1 part 1 from 3; "
            r"waits for parameters of stage 1 part 1 of step \1, from worker 3",
        ),
        (
            1,
            lambda driver, optimizer: (driver.zero_grad(), driver.protect()),
            r"worker 0 .*: command (\d+), KeepState, instruction 2 of 2: receive state of worker 3 from 3; "
            r"waits for state of worker 3 of step \1, from worker 3",
        ),
    ],
    ids=["gradients", "parameters", "state"],
)
def test_a_worker_names_what_it_waits_for(alone, updates, act, said):
    """Before its first update a driver does not know which step is the last before it: `step` adds up gradients."""
    pipe = Pipe.from_sequential(nn.Sequential(*(nn.Linear(4, 4) for _ in range(2))), nn.MSELoss())
    with local_cluster(4, threads=1) as workers:
        driver = PipelineDriver1F1B(pipe, workers, replicas=2)
        optimizer = driver.instantiate_optimizer(torch.optim.SGD, lr=0.1, divide_state=True)
        for _ in range(updates):
            driver.run(4, torch.ones(8, 4), torch.ones(8, 4))
            optimizer.step()
            optimizer.zero_grad()
        driver.run(4, torch.ones(8, 4), torch.ones(8, 4))
        do_until_worker_3_is_lost(workers, lambda: act(driver, optimizer), said)
