"""A run under torchrun that loses a rank at its last step, once, and goes on from its checkpoint when it is started again."""

import os
import signal
import sys

import torch
from torch import nn

from pippy import Pipe, PipelineDriver1F1B, cluster
from pippy.errors import ClusterError, WorkerLostError

STEPS = 3


class Position:
    """Where the run is: with it, random states are loaded, too."""

    def __init__(self):
        self.step = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


def driver_on(workers):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2)), nn.Linear(4, 1))
    return PipelineDriver1F1B(Pipe.from_sequential(model, nn.MSELoss()), workers)


def step_of(driver):
    return float(driver.run(2, torch.randn(4, 4), torch.randn(4, 1)))


def main(folder):
    with cluster(start_timeout=30) as workers:
        driver, position = driver_on(workers), Position()
        if goes_on := os.path.isdir(folder):
            driver.load(folder, position=position)
        print("from", position.step, flush=True)
        while position.step < STEPS:
            if position.step == STEPS - 1 and not goes_on:
                os.kill(workers.control.workers[1].pid, signal.SIGKILL)
            try:
                loss = step_of(driver)
            except WorkerLostError:
                refused(driver)
                raise
            position.step += 1
            driver.save(folder, position=position, step=position.step)
        print("loss", loss, flush=True)


def refused(driver):
    try:
        driver.recover()
    except ClusterError as error:
        print("refused", "max-restarts" in str(error) and "driver.load" in str(error), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
