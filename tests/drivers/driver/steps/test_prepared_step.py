"""A step before it is sent: where its stages are, and what is prepared."""

import pytest
import torch
from torch import nn

from pippy import Pipe, PipelineDriver1F1B, pipe_split, pipeline
from pippy.drivers.base.errors import DriverError
from pippy.drivers.driver.steps.arrangement import Arrangement, Arrangements, WorkersToGoOnWith
from pippy.drivers.driver.steps.prepared_step import prepare
from pippy.drivers.driver.steps.programs import RequestedSchedule
from pippy.drivers.protocol.steps import StepReturning
from pippy.ir.base.surroundings import Surroundings
from pippy.ir.pipe import compiled_of

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


# With which workers a recovery goes on, of those that are left.


def arrangements(replicas, own, stages=2):
    compiled = compiled_of(Pipe.from_sequential(nn.Sequential(*(nn.Linear(2, 2) for _ in range(stages)))))
    schedule = RequestedSchedule("1f1b", {}, stages, replicas=replicas)
    return Arrangements(compiled, schedule, own, single_loss=False, mask=False)


@pytest.mark.parametrize(
    ("own", "replicas", "asked", "lost", "chosen"),
    [
        ([0, 1, 2, 3], 2, {"replicas": 1}, {0}, [2, 3]),
        ([0, 1, 2, 3], 2, {"replicas": 1}, {3}, [0, 1]),
        ([0, 1, 2, 3], 2, {"replicas": 1}, {1, 2}, [0, 3]),
        ([0, 1, 2, 3], 2, {"replicas": 1, "workers": 1}, {0}, [2]),
        ([0, 1, 2, 3], 2, {"workers": 2}, {0}, [2, 3]),
        ([0, 1, 2, 3], 2, {}, {0}, [0, 1, 2, 3]),
        ([0, 1, 2, 3, 4, 5], 3, {"replicas": 2}, {1}, [2, 3, 4, 5]),
        ([0, 1, 2, 3, 4, 5], 3, {"replicas": 2}, {1, 2}, [4, 5, 0, 3]),
        ([4, 1], 1, {"workers": 1}, {4}, [1]),
        ([4, 1], 1, {"workers": 1}, set(), [4]),
        ([4, 1], 1, {"workers": 2}, {4}, [4, 1]),
        ([4, 1], 1, {"workers": [2, 0]}, {0}, [2, 0]),
    ],
)
def test_whole_replicas_stay_and_then_come_workers_that_are_there(own, replicas, asked, lost, chosen):
    made = arrangements(replicas, own)
    assert WorkersToGoOnWith(**asked).chosen(made.first, own, lost) == chosen


@pytest.mark.parametrize(
    ("own", "replicas", "lost", "left"),
    [
        ([0, 1, 2, 3], 2, {1}, [2, 3]),
        ([0, 1, 2, 3], 2, {1, 2}, [0, 3]),
        ([0, 1, 2, 3], 2, {1, 2, 3}, [0]),
        ([0, 1, 2], 3, {1}, [0, 2]),
        ([0, 1, 2, 3, 4, 5], 3, {1}, [2, 3, 4, 5]),
        ([0, 1], 1, {0}, [1]),
    ],
)
def test_what_is_left_makes_as_many_replicas_as_it_can_or_one_pipeline(own, replicas, lost, left):
    made = arrangements(replicas, own)
    found, warning = made.next(made.first, made.left(made.first, lost), None, lost)
    assert list(found.ranks) == left and not warning
    assert found.schedule.replicas == max(1, len(left) // made.first.placement.workers)


def test_nothing_goes_on_without_workers():
    made = arrangements(1, [0, 1])
    with pytest.raises(DriverError, match="none of the driver's workers is left"):
        made.left(made.first, {0, 1})


def test_workers_that_were_named_are_the_drivers_own_from_then_on():
    made = arrangements(1, [0, 1])
    with pytest.raises(DriverError, match="3 workers are asked for, and the driver was made for 2"):
        made.next(made.first, WorkersToGoOnWith(workers=3), None, ())
    named, _ = made.next(made.first, WorkersToGoOnWith(workers=[1, 3]), None, {0})
    made.note(named, None)
    assert isinstance(named, Arrangement) and named.ranks == (1, 3)
    assert made.next(named, WorkersToGoOnWith(workers=2), None, {0, 1})[0].ranks == (0, 3)
