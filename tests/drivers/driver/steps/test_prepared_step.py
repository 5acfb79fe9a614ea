"""The messages of a step, made from plain values: nothing is sent."""

import pytest
import torch
from torch import nn

from pippy import PipelineDriver1F1B, pipe_split, pipeline
from pippy.drivers.driver.steps.prepared_step import prepare
from pippy.drivers.protocol.steps import StepReturning
from pippy.ir.base.surroundings import Surroundings

pytestmark = pytest.mark.usefixtures("seeded")
X, SKIPPED, TARGET = torch.randn(7, 4), torch.randn(7, 4), torch.randn(7, 4)


class Model(nn.Module):
    """An input for each stage."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, skipped):
        x = self.first(x)
        pipe_split()
        return self.last(x + skipped)


@pytest.fixture
def driver(threads):
    return PipelineDriver1F1B(pipeline(Model(), nn.MSELoss()), threads, check=False)


def prepared(driver, outputs=None, trains=True, told=None, **how):
    with torch.set_grad_enabled(trains):
        call = driver.steps.call(Surroundings.current(), 3, (X, SKIPPED, TARGET), {}, outputs)
        sent, results = driver.programs.next(3, trains), driver.steps.results(call, None)
    message = call.message(sent, results.weights, reduce=False)
    for name, value in how.items():
        object.__setattr__(message, name, value)
    counts = list(driver.cluster.session.counts)
    found = prepare(call, message, [sent], results, driver.ranks, driver.steps.datasets, told)
    assert driver.cluster.session.counts == counts  # nothing was sent
    return found


def test_each_worker_is_given_the_inputs_of_its_stages_and_all_have_the_rest_alike(driver):
    first, last = (step for _, step in sorted(prepared(driver, probe_outputs=True).items()))
    assert first.inputs.arguments.keys() == {"x"} and last.inputs.arguments.keys() == {"skipped", "target"}
    assert first.weights == last.weights == pytest.approx((3 / 7, 2 / 7, 2 / 7))
    assert first.program == last.program and first.trains and last.trains and first.probe_outputs and last.probe_outputs
    assert first.flags is last.flags is None and first.hooks is last.hooks is None


def test_flags_go_to_those_whose_stages_they_are(driver):
    flags = driver.placed.flags()
    first, last = (step for _, step in sorted(prepared(driver, told=(flags, {})).items()))
    assert first.flags == flags[0] and last.flags == flags[1] and "submod_0" in first.flags and "submod_1" in last.flags


@pytest.mark.parametrize("outputs, count", [(None, None), (False, 1), (True, 2)])
def test_values_are_returned_by_those_who_make_them(driver, outputs, count):
    first, last = (step for _, step in sorted(prepared(driver, outputs).items()))
    if count is None:
        assert not isinstance(last, StepReturning)
    else:
        assert first.returns == {} and len(last.returns) == count


def test_without_gradients_no_step_trains(driver):
    assert not any(step.trains for step in prepared(driver, trains=False).values())
