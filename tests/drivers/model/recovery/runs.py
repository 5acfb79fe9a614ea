"""A run with dropout, AdamW and a scheduler, of which every loss is noted, and what may happen to it."""

import signal
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from pippy import Pipe, PipelineDriver, local_cluster
from pippy.drivers.base.errors import WorkerLostError
from tests.drivers.processes import close_open_cluster, strike

STAGES, ROWS, WIDTH = 3, 8, 4


class Counting(nn.Module):
    """Has a buffer that each forward changes, and one that is not persistent and never changes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("factor", torch.full((), 0.5), persistent=False)

    def forward(self, x):
        self.calls.add_(1.0)
        return x * (1 + self.factor / (1 + self.calls))


def model(stages=STAGES, counts=True):
    torch.manual_seed(0)
    more = [Counting] if counts else []
    layers = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), *(each() for each in more)) for _ in range(stages - 1)
    ]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 1))


class Run:
    """A driver with what goes with it."""

    def __init__(self, cluster, schedule="1f1b", made=None, divide_state=False, **options):
        pipe = Pipe.from_sequential(model() if made is None else made, nn.MSELoss())
        self.cluster, self.driver = cluster, PipelineDriver(pipe, cluster, schedule=schedule, **options)
        self.optimizer = self.driver.instantiate_optimizer(torch.optim.AdamW, lr=0.05, divide_state=divide_state)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=20)
        self.losses: dict[int, float] = {}

    def step(self, number):
        x, target = torch.randn(ROWS, WIDTH), torch.randn(ROWS, 1)  # of the random numbers of this process
        self.losses[number] = float(self.driver.run(4, x, target))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()

    def steps(self, first, last):
        for number in range(first, last):
            self.step(number)

    def save(self, folder, step, **options):
        return self.driver.save(
            folder, optimizer=self.optimizer, scheduler=self.scheduler, step=step, losses=dict(self.losses), **options
        )

    def protect(self, step):
        self.driver.protect(optimizer=self.optimizer, scheduler=self.scheduler, step=step)

    def lose(self, *workers, how=signal.SIGKILL):
        self.cluster.session.timeout = 2.0 if how == signal.SIGSTOP else 20.0
        for worker in workers:
            strike(self.cluster.session.workers[worker].pid, how)

    def lose_in_step(self, number, *workers, how=signal.SIGKILL):
        """Lose workers, which the step with this number notices."""
        self.lose(*workers, how=how)
        with pytest.raises(WorkerLostError):
            self.step(number)

    def goes_on(self, expected, first, last, rel=0.0):
        """The run goes on as one to which nothing happened, to the bit; or to rounding, on other workers."""
        self.steps(first, last)
        losses, state = expected
        assert list(self.losses) == list(range(last))
        wanted = [losses[number] for number in range(last)]
        assert list(self.losses.values()) == pytest.approx(wanted, rel=rel, abs=0)
        if len(losses) == last:
            for name, value in self.driver.state_dict().items():
                torch.testing.assert_close(value, state[name], rtol=1e3 * rel, atol=rel)


def undisturbed(cluster, steps, **options):
    """The losses of a run to which nothing happens, and its parameters in the end."""
    run = Run(cluster, **options)
    run.steps(0, steps)
    return run.losses, run.driver.state_dict()


def opened(workers=STAGES):
    """A cluster for runs."""
    close_open_cluster()
    return local_cluster(workers, threads=1, timeout=20.0)


@contextmanager
def interrupted_in(monkeypatch, where, name):
    """The block ends by Ctrl-C, behind the first call of a function."""
    real = getattr(where, name)

    def interrupt(*given):
        monkeypatch.undo()
        real(*given)
        raise KeyboardInterrupt

    monkeypatch.setattr(where, name, interrupt)
    with pytest.raises(KeyboardInterrupt):
        yield
