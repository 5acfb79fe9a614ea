"""`driver.recover` with all that a run may have around it: each goes on to the bit, from a checkpoint and from memory."""

import os
import signal
from typing import Any

import pytest
import torch
from torch import nn

from pippy import (
    IndexLoader,
    MultiUseParameterConfig,
    Pipe,
    PipelineDriver1F1B,
    SplitPoint,
    annotate_split_points,
    convert_deferred_batch_norm,
    pipeline,
)
from pippy.drivers.base.errors import WorkerLostError
from pippy.drivers.model.recovery.recovery import replace_lost_workers
from tests.drivers.model.recovery.runs import opened

STEPS, AT = 4, 2
pytestmark = pytest.mark.usefixtures("in_float64")


@pytest.fixture(scope="module")
def workers():
    with opened(4) as cluster:
        yield cluster


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3)), nn.Sequential(nn.Tanh(), nn.Linear(4, 1)))


class Rows:
    """Rows that draw random numbers where they are loaded."""

    def __len__(self):
        return 32

    def __getitem__(self, at):
        return torch.arange(4.0) * (at % 5) + torch.rand(4), torch.ones(1) * (at % 3)


class Kind:
    """A run of one kind. Its steps draw their rows from the random numbers of this process."""

    options: dict[str, Any] = {}
    optimizer_options: dict[str, Any] = {}
    accumulated = 1

    def __init__(self, cluster):
        self.cluster, self.losses, self.given = cluster, {}, {}
        self.driver = PipelineDriver1F1B(self.pipe(), cluster, **self.options)
        self.optimizer = self.driver.instantiate_optimizer(torch.optim.AdamW, lr=0.1, **self.optimizer_options)
        self.begin()

    def pipe(self):
        return Pipe.from_sequential(layers(), nn.MSELoss())

    def begin(self):
        """What is made once."""

    def rows(self):
        return torch.randn(8, 4), torch.randn(8, 1)

    def step(self, number):
        for _ in range(self.accumulated):
            loss = self.driver.run(4, *self.rows())
        self.losses[number] = float(loss)
        self.update()
        self.driver.zero_grad()

    def update(self):
        self.optimizer.step()

    def point(self, folder):
        given = {"optimizer": self.optimizer, "step": AT, **self.given}
        if folder is None:
            self.driver.protect(**given)
        else:
            self.driver.save(folder, **given)

    def lose(self, *which):
        for worker in which:
            os.kill(self.cluster.session.workers[worker].pid, signal.SIGKILL)
        with pytest.raises(WorkerLostError):
            self.driver.run(4, *self.rows())

    def to_the_end(self):
        for number in range(STEPS):
            self.step(number)
        return self.losses, self.driver.state_dict(), self.driver.random_state


class ByIndex(Kind):
    """The workers load the rows, of a dataset that they were sent."""

    dataset: Any = Rows()

    def begin(self):
        self.loader = IndexLoader(self.dataset, columns=2, sampler=range(32), seed=3)
        self.given = {"loader": self.loader}

    def rows(self):
        return self.loader.batch(torch.randint(32, (8,)))


class ByName(ByIndex):
    """Each worker makes the dataset for itself."""

    dataset = f"{__name__}:Rows"


class OnMeta(Kind):
    """The workers make the parameters, and the controller never has them."""

    def pipe(self):
        with torch.device("meta"):
            model = nn.Sequential(*layers()[0], *layers()[1])
        return Pipe.from_sequential(nn.Sequential(model[:2], model[2:]), nn.MSELoss())

    def begin(self):
        self.driver.initialize(seed=3)


class OwnNumbers(Kind):
    """Each worker draws from a generator of its own."""

    options = {"keyed_random": False}


class Accumulates(Kind):
    """A worker is lost when the first of two calls of an update was made."""

    accumulated = 2


class Replicated(Kind):
    options = {"replicas": 2}


class Divided(Replicated):
    """Each replica has a part of the optimizer's state."""

    optimizer_options = {"divide_state": True}


class Normalized(Replicated):
    """Replicas tell each other what their norms have noted."""

    def pipe(self):
        norm = convert_deferred_batch_norm(nn.BatchNorm1d(4))
        return Pipe.from_sequential(nn.Sequential(nn.Sequential(layers()[0], norm), layers()[1]), nn.MSELoss())


class Scaled(Kind):
    """The scale of the loss changes with the steps."""

    def begin(self):
        self.scaler = self.driver.instantiate_grad_scaler(init_scale=4.0, growth_interval=1)
        self.given = {"scaler": self.scaler}

    def update(self):
        self.scaler.step(self.optimizer)
        self.scaler.update()


class Tied(Kind):
    """Two stages have copies of a parameter."""

    def pipe(self):
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 1))
        model[2].weight = model[0].weight
        annotate_split_points(model, {"1": SplitPoint.END})
        return pipeline(model, nn.MSELoss(), multi_use_param_spec=MultiUseParameterConfig.REPLICATE)


class Compiled(Kind):
    options = {"compile": "graphs"}


KINDS = [ByIndex, ByName, OnMeta, OwnNumbers, Accumulates, Replicated, Divided]
FEWER = [ByIndex, OnMeta, Accumulates, Normalized, Scaled, Tied, Compiled]


@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_on_to_the_bit_from_the_start_from_a_checkpoint_and_from_memory(workers, tmp_path, kind):
    torch.manual_seed(1)
    losses, state, numbers = kind(workers).to_the_end()
    torch.manual_seed(1)
    run = kind(workers)
    last = len(workers) - 1 if "replicas" in kind.options else 1
    run.driver.run(4, *run.rows())
    run.lose(0)
    assert run.driver.recover() == {}
    if "loader" in run.given:  # the start does not have its position
        run.begin()
    for folder, lost in ((tmp_path, last), (None, 0)):
        for number in range(len(run.losses), AT):
            run.step(number)
        run.point(folder)
        run.step(AT)
        if run.accumulated > 1:
            run.driver.run(4, *run.rows())
        run.lose(lost)
        assert run.driver.recover() == {"step": AT}
    for number in range(AT, STEPS):
        run.step(number)
    assert run.losses == losses and run.driver.random_state == numbers
    for name, value in run.driver.state_dict().items():
        assert torch.equal(value, state[name]), name
    run.driver.close()


@pytest.mark.parametrize("kind", FEWER)
def test_it_goes_on_with_fewer_workers_or_replicas(workers, tmp_path, kind):
    replace_lost_workers(workers, wanted=lambda lost: lost | workers.gone)
    torch.manual_seed(1)
    losses, state, _ = kind(workers).to_the_end()
    torch.manual_seed(1)
    run = kind(workers)
    fewer = {"replicas": 1} if "replicas" in kind.options else {"workers": 1}
    for number in range(AT):
        run.step(number)
    run.point(None)
    run.step(AT)
    run.lose(0)
    assert run.driver.recover(**fewer) == {"step": AT}
    run.step(AT)
    run.point(tmp_path)
    assert run.driver.recover(workers=2 * run.driver.replicas) == {"step": AT}
    for number in range(AT + 1, STEPS):
        run.step(number)
    assert list(run.losses.values()) == pytest.approx(list(losses.values()), rel=1e-12)
    for name, value in run.driver.state_dict().items():
        torch.testing.assert_close(value, state[name], rtol=1e-9, atol=1e-12)
    run.driver.close()
