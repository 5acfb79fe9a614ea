"""With which workers a recovery goes on, of those that are left."""

import pytest
from torch import nn

from pippy import Pipe
from pippy.drivers.base.errors import DriverError
from pippy.drivers.driver.steps.arrangement import Arrangement, Arrangements, WorkersToGoOnWith
from pippy.drivers.driver.steps.programs import RequestedSchedule
from pippy.ir.pipe import compiled_of


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
