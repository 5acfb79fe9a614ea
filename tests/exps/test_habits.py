"""The generator of models with habits can find faults: its habits show in the numbers, and its judge sees what is wrong."""

from dataclasses import replace

import pytest
import torch

from exps.habits import judge as judging
from exps.habits.alone import BASE, alone
from exps.habits.changes import CHANGES, OPTIMIZERS
from exps.habits.example import LOSSES, PARTS, SCHEDULES, Example, draw
from exps.habits.functions import WAYS
from exps.habits.judge import ScriptWithDriver, first_difference, judge, plain_numbers
from tests.drivers.thread_cluster import thread_cluster

EXAMPLES = {name: example for name, example in alone() if example.chunks == 1}


@pytest.fixture(scope="module")
def workers():
    with thread_cluster(3) as cluster:
        yield cluster


def test_every_habit_is_drawn_with_every_schedule():
    drawn = [draw(seed) for seed in range(1, 3001)]
    assert {part for each in drawn for part in each.parts} == set(PARTS)
    assert {each.loss for each in drawn} == set(LOSSES)
    assert {each.change for each in drawn} == {None, *CHANGES}
    assert {each.optimizer for each in drawn} == set(OPTIMIZERS)
    assert {(each.schedule, min(each.chunks, 3)) for each in drawn} == {(s, c) for s in SCHEDULES for c in (1, 2, 3)}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen_in_the_plain_models_numbers(change):
    changed = EXAMPLES[f"change {change}"]
    found, without = plain_numbers(changed), plain_numbers(replace(changed, change=None))
    assert found.error is None and len(found.steps) == 3
    assert first_difference(judging.Numbers(found.steps[:1]), judging.Numbers(without.steps[:1])) == ""
    assert first_difference(found, without).startswith(("step 1", "step 2"))


@pytest.mark.parametrize("way", [way for way in WAYS if way not in ("scripted", "list")])
def test_a_backward_that_is_dropped_is_seen(way):
    """The backward is not the derivative of the forward, as numbers on both sides of a value tell it."""
    value = torch.linspace(-0.9, 0.9, 4, dtype=torch.float64).requires_grad_()
    (found,) = torch.autograd.grad(WAYS[way](value).sum(), value)
    with torch.no_grad():
        slope = (WAYS[way](value + 1e-5) - WAYS[way](value - 1e-5)) / 2e-5
    assert not torch.allclose(found, slope, rtol=1e-3)


def test_numbers_that_are_off_are_silently_wrong(workers, monkeypatch):
    step = ScriptWithDriver.step
    assert judge(BASE, workers).kind == "equal"
    monkeypatch.setattr(ScriptWithDriver, "step", lambda self, *given: step(self, *given) * (1 + 1e-7))
    assert judge(BASE, workers).kind == "silently wrong"


def test_a_gradient_that_is_lost_is_silently_wrong(workers, monkeypatch):
    gradients = ScriptWithDriver.gradients
    monkeypatch.setattr(ScriptWithDriver, "gradients", lambda self: {**gradients(self), "first.bias": None})
    assert judge(BASE, workers).what == "step 0: the gradient of first.bias is None"


def test_what_the_check_refuses_is_silently_wrong_without_it(workers, monkeypatch):
    example = replace(BASE, parts=("linear", "centred", "linear"))
    assert judge(example, workers).kind == "refused"
    driver = Example.driver
    monkeypatch.setattr(Example, "driver", lambda *given, **more: driver(*given, **{**more, "check": False}))
    assert judge(example, workers).kind == "silently wrong"


def test_a_refusal_without_need_is_a_false_alarm(workers, monkeypatch):
    def driver_that_refuses(self, pipe, workers, check=True):
        made = driver(self, pipe, workers, check=check)
        monkeypatch.setattr(made, "run", refuse if check else made.run)
        return made

    def refuse(*given):
        raise judging.errors.MicrobatchError("no")

    driver = Example.driver
    monkeypatch.setattr(Example, "driver", driver_that_refuses)
    assert judge(BASE, workers).kind == "false alarm"


def test_an_error_that_is_not_pippys_is_a_crash(workers, monkeypatch):
    def fail(self, *given):
        raise ValueError("raw")

    monkeypatch.setattr(ScriptWithDriver, "step", fail)
    assert judge(BASE, workers).kind == "crash"


def test_an_error_in_the_users_code_on_a_worker_is_told_from_a_guards():
    of_torch = judging.errors.StepError("worker 1 failed\nStageError: forward of submod_1 failed: RuntimeError: no")
    of_a_guard = judging.errors.StepError("worker 1 failed\nStageError: forward of submod_1 failed: InputError: no")
    assert judging.raw_error(of_torch).endswith("RuntimeError: no")
    assert judging.raw_error(of_a_guard) == ""
