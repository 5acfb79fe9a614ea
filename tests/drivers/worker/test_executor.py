"""What a forward computes on: a leaf of its own, made only where the value that arrived is not one already."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from pippy import PipelineDriver, pipe_split, pipeline
from pippy.drivers.lowering.flow import Work
from pippy.drivers.plan.language.edges import Pass
from pippy.drivers.plan.language.instructions import Receive
from pippy.drivers.worker import executor, handlers
from tests.drivers.models import Chain
from tests.drivers.thread_cluster import thread_cluster


class Skip(nn.Module):
    """Of four stages on two workers, both of the second take the same value of the first."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        used_later = self.layers[0](x)
        pipe_split()
        x = self.layers[1](used_later)
        pipe_split()
        x = self.layers[2](x)
        pipe_split()
        return self.layers[3](x) + used_later * x.sigmoid()


@pytest.fixture
def two():
    with thread_cluster(2) as cluster:
        yield cluster


@pytest.mark.usefixtures("in_float64", "seeded")
def test_a_value_that_two_stages_of_a_worker_take_is_counted_once_in_each(two):
    model = Skip()
    plain = copy.deepcopy(model)
    x, target = torch.randn(8, 4), torch.randn(8, 4)
    driver = PipelineDriver(pipeline(model, nn.MSELoss()), two, schedule="interleaved_1f1b")
    driver.run(4, x, target)
    nn.MSELoss()(plain(x), target).backward()
    found = driver.gradients()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)


def test_what_one_call_alone_takes_is_no_copy_of_a_leaf(two, monkeypatch):
    detached = []
    inner = handlers.as_leaf
    monkeypatch.setattr(handlers, "as_leaf", lambda value: detached.append(value) or inner(value))
    driver = PipelineDriver(pipeline(Chain(2), nn.MSELoss()), two, check=False)
    driver.run(4, torch.randn(8, 8), torch.randn(8, 8))
    # for each micro-batch: the input of the model, and for the loss the target and the output, which was made on its worker
    assert len(detached) == 4 * 3


def test_only_what_was_received_and_is_taken_once_is_a_calls_own():
    def forward(stage, *takes):
        return Pass("F", stage), (Work("F", stage, f"submod_{stage}", 0, takes, (f"out{stage}",)),)

    work = dict([forward(1, "once", "twice", "here"), forward(3, "twice", "again", "again")])
    work[Pass("B", 1)] = (Work("B", 1, "submod_1", 0, (("gradient",),), ("other",)),)
    order = [Receive(name, 0, 0) for name in ("once", "twice", "again", "gradient")]
    program = SimpleNamespace(work=work, order=order)
    assert executor._received_for_one_call(program) == {"once"}
