"""The parts of a step's length: what computing takes, what was lost to what, and the chain that they lie on."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pippy.drivers.plan import add_communication, make_schedule, simulate
from pippy.drivers.plan.language.edges import Replicated
from pippy.drivers.plan.language.instructions import Compute, Receive, Send
from pippy.drivers.report.activity import Activity, Cause
from pippy.drivers.report.findings import StepPart, critical_path, losses, step_parts
from tests.drivers.report.test_record import programs, randoms, times
from tests.drivers.synthetic_steps import slow_stage, stepped


@settings(max_examples=30, deadline=None)
@given(programs(), randoms, times, times, times, st.none() | times)
def test_the_critical_path_is_a_chain_of_what_had_to_follow_one_another(
    program, dice, flight, starting, ending, adding
):
    """It has no gap, and no waiting. If what it has of transfers took no time, the step would still take the rest: that is so
    only if each part of it had to wait for the part before."""
    durations = {each: dice.random() for order in program.orders for each in order if not isinstance(each, Receive)}
    cost = lambda each: durations.get(each, 0.0)  # noqa: E731
    step = stepped(program, cost, flight, starting, ending, adding)
    path = critical_path(program, step.activities)
    assert (path[0][1].start, path[-1][1].end) == (0.0, pytest.approx(step.makespan))
    assert all(one.end == other.start for (_, one), (_, other) in pairwise(path))
    assert not {each.cause for _, each in path} & {Cause.WAITING, Cause.FILL, Cause.DRAIN}
    transfers = sum(each.duration for _, each in path if each.cause == Cause.TRANSFER)
    others = stepped(program, cost, 0.0, starting, ending, adding)
    assert others.makespan >= step.makespan - transfers - 1e-9


@settings(max_examples=25, deadline=None)
@given(programs(), randoms, times, times, times, st.none() | times)
def test_the_parts_add_up_to_the_measured_step(program, dice, flight, starting, ending, adding):
    step = stepped(program, lambda each: dice.random(), flight, starting, ending, adding)
    found = step_parts(step)
    assert sum(found.values()) == pytest.approx(step.makespan)
    assert min(found.values()) >= 0
    shown = list(losses(step).values())
    assert shown == sorted(shown, reverse=True)


def test_each_part_is_what_the_step_would_be_shorter_without_it():
    """A step is made with all of them, and again with one of them taken away."""
    given = {"flight": 0.5, "starting": 3.0, "ending": 1.0, "adding": 2.0}
    found = step_parts(slow_stage(3.0, **given))
    ends = {
        "flight": StepPart.TRANSFER,
        "starting": StepPart.STARTING,
        "ending": StepPart.PYTHON,
        "adding": StepPart.ADDING,
    }
    for name, part in ends.items():
        without = slow_stage(3.0, **{key: value for key, value in given.items() if key != name})
        assert found[part] == pytest.approx(slow_stage(3.0, **given).makespan - without.makespan)
    program = slow_stage(3.0).program
    even = float(simulate(program, 1.5, 0.75, 0.75, backward=1.5).makespan)
    assert found[StepPart.UNEVEN] == pytest.approx(slow_stage(3.0).makespan - even)
    assert found[StepPart.COMPUTING] == pytest.approx(4 * 12.0 / 4)
    assert found[StepPart.SCHEDULE] == pytest.approx(even - 12.0)


def test_sending_that_keeps_the_sender_from_its_next_pass_is_on_the_path():
    """The first worker sends for 5 s after each forward of 1 s."""
    program = add_communication(make_schedule("forward_only", workers=2, chunks=4))
    step = stepped(program, lambda each: {Compute: 1.0, Send: 5.0}.get(type(each), 0.0))
    assert step.makespan == 24.0
    path = [(worker, str(each.cause), each.duration) for worker, each in critical_path(program, step.activities)]
    assert path == [*[(0, "computing", 1.0), (0, "sending", 5.0)] * 4]


def test_one_slow_pass_is_a_loss_of_its_own():
    """Medians do not show it; whoever waits for it does."""
    program = add_communication(make_schedule("1f1b", workers=3, chunks=5))
    step = stepped(program, lambda each: {"F0.1": 100.0}.get(str(each), float(isinstance(each, Compute))))
    assert next(iter(losses(step))) == StepPart.SLOWER
    assert step_parts(step)[StepPart.UNEVEN] == 0


def test_adding_up_is_that_of_the_last_worker_to_bring_gradients():
    """Worker 0 waits from second 1 for the gradients that worker 1 has at second 9: until then, worker 1 counts."""
    program = make_schedule("1f1b", workers=2, chunks=1)
    program = replace(program, replicated=(Replicated("weight", (0, 1)),))
    worker0 = [Activity(Cause.PYTHON, 0.0, 1.0), Activity(Cause.ADDING, 1.0, 10.0)]
    worker1 = [Activity(Cause.SENDING, 0.0, 9.0, 0, 0), Activity(Cause.ADDING, 9.0, 9.5)]
    path = critical_path(program, [worker0, worker1])
    assert [(worker, str(each.cause), each.duration) for worker, each in path] == [
        (1, "sending", 9.0),
        (0, "adding up", 1.0),
    ]
