"""The first step is compared with the user's own model: what tracing loses, and what few rows do not show, is found."""

import copy
import logging
import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pippy import PipelineDriver1F1B, pipeline
from pippy.drivers.base.errors import DriverError, MicrobatchError
from pippy.drivers.driver.check import first_step
from pippy.drivers.driver.check.comparisons import Budget, Comparisons, Cost
from pippy.drivers.driver.check.first_step import FirstStep
from pippy.drivers.driver.check.report import Checked
from pippy.drivers.worker.gradients.buffers import StepBuffers
from pippy.ir.pipe import compiled_of, model_of
from tests.drivers.driver.check.faults import Acts

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")


def batch(rows=7):
    return torch.randn(rows, 4), torch.randint(3, (rows,))


def plain_numbers(model, loss_fn, x, target):
    model = copy.deepcopy(model)
    loss = loss_fn(model(x), target)
    loss.backward()
    return loss.detach(), {name: each.grad for name, each in model.named_parameters()}


# What tracing loses


def node_of(pipe, stage, name):
    """An operation of a stage, by the name of what it calls."""
    module = compiled_of(pipe).stage(stage)
    calls = [each for each in module.graph.nodes if each.op.startswith("call_")]
    return module, next(each for each in calls if name == getattr(each.target, "__name__", each.target))


def behind(stage, name, function):
    """What an operation gives goes through a function."""

    def plant(pipe):
        module, node = node_of(pipe, stage, name)
        inner = node.target
        node.target = lambda *args: function(inner(*args))
        module.recompile()

    return plant


def before(stage, name, function):
    """What an operation takes goes through a function."""

    def plant(pipe):
        module, node = node_of(pipe, stage, name)
        with module.graph.inserting_before(node):
            node.args = (module.graph.call_function(function, node.args),)
        module.recompile()

    return plant


def dropped(pipe):
    """An operation is not in the graph."""
    module, node = node_of(pipe, "submod_1", "tanh")
    node.target = lambda x: x
    module.recompile()


def scaled(gradient):
    return gradient * 1.001


def with_scaled_gradient(x):
    y = x * 1
    y.register_hook(scaled)
    return y


FAULTS = {
    "an operation is dropped": (dropped, "submod_2"),
    "a value is a constant": (behind("submod_1", "tanh", lambda x: torch.full_like(x, 0.3)), "submod_2"),
    "a gradient is cut": (behind("submod_1", "tanh", torch.Tensor.detach), "submod_1"),
    "a gradient is cut in the first stage": (behind("submod_0", "tanh", torch.Tensor.detach), "submod_0"),
    "a gradient is scaled": (behind("submod_1", "tanh", with_scaled_gradient), "submod_1"),
    "a value is scaled": (before("submod_1", "second", scaled), "submod_1"),
    "a value is rounded": (before("submod_1", "second", lambda x: x.bfloat16().double()), "submod_1"),
    "an argument is negated": (before("submod_2", "last", torch.neg), "submod_2"),
    "rows are turned": (before("submod_2", "last", lambda x: x.flip(0)), "submod_2"),
    "a function is another": (behind("submod_0", "tanh", torch.relu), "submod_1"),
}


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("name", FAULTS)
def test_what_tracing_loses_is_found_and_named(threads, name, chunks):
    plant, stage = FAULTS[name]
    pipe = pipeline(Acts(), nn.CrossEntropyLoss())
    plant(pipe)
    driver = PipelineDriver1F1B(pipe, threads)
    with pytest.raises(MicrobatchError, match=r"(?s)tracing has lost something|cannot") as raised:
        driver.run(chunks, *batch())
    assert "the stages do not compute what the model computes" in str(raised.value)
    assert f"It begins in {stage}" in str(raised.value)
    assert all(each is None for each in driver.gradients().values())


# What few rows do not show

BY_ROWS = {
    "the first six": lambda o, t: F.cross_entropy(o[:6], t[:6]),
    "the largest eight": lambda o, t: F.cross_entropy(o, t, reduction="none").topk(min(8, len(o))).values.mean(),
    "more than six": lambda o, t: F.cross_entropy(o, t) * (2 if len(o) > 6 else 1),
    "shuffled": lambda o, t: (o * o[torch.randperm(len(o))]).sum(1).mean() + 0 * t.sum(),
    "a spread": lambda o, t: (o - t[:, None]).std(),
    "each with each": lambda o, t: F.cross_entropy(o @ o.T, torch.arange(len(o))) + 0 * t.sum(),
}


@pytest.mark.parametrize("name", BY_ROWS)
def test_a_loss_that_depends_on_the_number_of_rows(threads, name):
    loss_fn, (x, target) = BY_ROWS[name], batch(12)
    pipe = pipeline(Acts(), loss_fn)
    with pytest.raises(MicrobatchError, match=r"chunks=1") as raised:
        PipelineDriver1F1B(pipe, threads).run(3, x, target)
    assert "example" not in str(raised.value)
    driver = PipelineDriver1F1B(pipe, threads)
    loss = driver.run(1, x, target)
    assert driver.checked.tried == 12
    if name != "shuffled":  # it draws
        expected, gradients = plain_numbers(model_of(pipe), loss_fn, x, target)
        torch.testing.assert_close(loss, expected)
        for key, each in driver.gradients().items():
            torch.testing.assert_close(each, gradients[key])


# What is left behind, and what is compared


class Remembers(Acts):
    """It changes a buffer, an attribute, a list and a flag, and draws random numbers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.dropout, self.times = nn.Dropout(0.3), 0

    def forward(self, x):
        self.calls.add_(1)
        return super().forward(self.dropout(x))


def test_the_users_model_is_afterwards_as_it_was(threads):
    model, loss_fn, (x, target) = Remembers(), nn.CrossEntropyLoss(), batch()
    driver = PipelineDriver1F1B(pipeline(model, loss_fn), threads)
    for each in model.parameters():
        each.grad = torch.ones_like(each)
    versions = {name: each._version for name, each in model.named_parameters()}
    before = copy.deepcopy(model.state_dict()), torch.get_rng_state(), random.getstate()
    gradients = {name: each.grad for name, each in model.named_parameters()}
    given = x.clone()
    driver.run(3, x, target)
    assert driver.checked.compared["buffer"] == 1 and torch.equal(x, given)
    assert {name: each._version for name, each in model.named_parameters()} == versions
    assert all(each.grad is gradients[name] and each.grad.eq(1).all() for name, each in model.named_parameters())
    assert all(torch.equal(each, before[0][name]) for name, each in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), before[1]) and random.getstate() == before[2]


def test_later_kinds_are_compared_with_the_numbers_of_the_workers(threads):
    """The model in this process is older than those of the workers; it has its own numbers again, at the same versions."""
    model, loss_fn, (x, target) = Acts(), nn.CrossEntropyLoss(), batch()
    driver = PipelineDriver1F1B(pipeline(model, loss_fn), threads)
    optimizer = driver.instantiate_optimizer(torch.optim.SGD, lr=1.0)
    driver.run(3, x, target)
    optimizer.step()
    before = {name: (each.detach().clone(), each._version) for name, each in model.named_parameters()}
    driver.run(1, x, target)
    assert driver.checked.chunks == 1 and driver.checked.largest < 1e-12
    for name, each in model.named_parameters():
        assert torch.equal(each, before[name][0]) and each._version == before[name][1]
    assert not torch.equal(driver.state_dict()["last.bias"], model.last.bias)


def test_what_was_compared_is_said(threads, caplog):
    driver = PipelineDriver1F1B(pipeline(Acts(), nn.MSELoss()), threads)
    assert driver.checked is None
    with caplog.at_level(logging.INFO, "pippy"):
        driver.run(3, torch.randn(7, 4), torch.randn(7, 3))
    assert "7 of 7 rows in 3 micro-batches: the loss and 6 gradients" in str(driver.checked)
    assert str(driver.checked) in caplog.text
    assert not PipelineDriver1F1B(pipeline(Acts(), nn.MSELoss()), threads, check=False).checked


def test_a_budget_says_how_many_rows_are_compared(threads):
    x, target = torch.randn(40, 4), torch.randn(40, 3)

    def tried(**options):
        driver = PipelineDriver1F1B(pipeline(Acts(), nn.MSELoss()), threads, **options)
        driver.run(4, x, target)
        return driver.checked.tried

    assert tried() == tried(check="full") == 40
    assert tried(check=1e-9) == 5
    for wrong in ("all", 0, -1.0, None):
        with pytest.raises(DriverError, match=r"check=.*give True, a number of seconds.*'full'.*or False"):
            PipelineDriver1F1B(pipeline(Acts(), nn.MSELoss()), threads, check=wrong)


def test_rows_that_do_not_fit_into_memory_are_not_run(threads, monkeypatch):
    cost, device = Cost(rows=5, seconds=0.1, bytes=1 << 20), torch.device("cpu")
    monkeypatch.setattr("pippy.drivers.driver.check.comparisons.free_bytes", lambda device: 4 << 20)
    assert Budget().rows(cost, device) == Budget(float("inf")).rows(cost, device) == 10
    assert Budget(seconds=0.15).rows(cost, device) == pytest.approx(7.5)
    assert Budget().is_over_memory(cost, 11, device) and not Budget().is_over_memory(cost, 10, device)


# 16 bits


class LosesLittle(torch.autograd.Function):
    """Its gradient is 2 % too small: in 16 bits that looks like rounding."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 0.98


def losing_little(x):
    return LosesLittle.apply(x)


@pytest.mark.parametrize("how", ["parameters", "autocast"])
def test_a_part_of_a_gradient_that_is_lost_does_not_hide_in_16_bits(threads, how):
    torch.set_default_dtype(torch.float32)
    model = Acts().bfloat16() if how == "parameters" else Acts()
    pipe = pipeline(model, nn.CrossEntropyLoss())
    x, target = batch(8)
    x = x.bfloat16() if how == "parameters" else x.float()
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        driver = PipelineDriver1F1B(pipe, threads)
        driver.run(2, x, target)
        assert driver.checked.by_model
        before("submod_1", "second", losing_little)(pipe)
        with pytest.raises(MicrobatchError, match="tracing has lost something"):
            PipelineDriver1F1B(pipe, threads).run(2, x, target)
    assert all(each.dtype is (torch.bfloat16 if how == "parameters" else torch.float32) for each in model.parameters())


# Each part of it is needed: damaged in one place, it accepts what it refuses.


def without(left_out):
    """Leave out the numbers for which ``left_out`` is true, on both sides."""

    def mutant(monkeypatch):
        inner = Comparisons.beside

        def beside(self, *given):
            sides = inner(self, *given)
            return tuple({key: each for key, each in side.items() if not left_out(*key)} for side in sides)

        monkeypatch.setattr(Comparisons, "beside", beside)
        monkeypatch.setattr(StepBuffers, "disagreeing", lambda self: [])

    return mutant


def the_pipeline_is_its_own_witness(monkeypatch):
    inner = FirstStep.__init__
    monkeypatch.setattr(FirstStep, "__init__", lambda self, trials, witness, *rest: inner(self, trials, None, *rest))


def few_rows_alone(monkeypatch):
    monkeypatch.setattr(Budget, "rows", lambda *given: 0.0)


def the_rows_as_they_are(monkeypatch):
    monkeypatch.setattr(first_step, "edited", lambda *_: iter(()))
    monkeypatch.setattr(FirstStep, "_check_choices", lambda *_: None)


def a_warning_in_place_of_a_refusal(monkeypatch):
    inner = FirstStep._check

    def check(self, *given):
        try:
            return inner(self, *given)
        except MicrobatchError:
            return Checked(True, None, None, 1)

    monkeypatch.setattr(FirstStep, "_check", check)


def mixing_gradients(h):
    """Its values are those of each row, and its gradients mix rows."""
    mean = torch.tanh(h).mean(0) ** 2
    return torch.tanh(h) + mean - mean.detach()


class Counts(Acts):
    """Keeps a running mean, and uses it nowhere."""

    def __init__(self):
        super().__init__(self.counted)
        self.register_buffer("mean", torch.zeros(6))

    def counted(self, h):
        with torch.no_grad():
            self.mean.lerp_(h.mean(0), 0.1)
        return torch.tanh(h)


def masked(output, target):
    keep = (target != -100).unsqueeze(1)
    return ((output - target.unsqueeze(1)) ** 2 * keep).sum() / keep.sum()


def cut_gradient():
    return Acts(), nn.CrossEntropyLoss(), FAULTS["a gradient is cut"][0]


def mixing():
    return Acts(mixing_gradients), nn.CrossEntropyLoss(), None


def losing(name):
    return lambda: (Acts(), BY_ROWS[name], None)


MUTANTS = {
    "gradients": (without(lambda kind, name: kind == "gradient"), cut_gradient),
    "the gradients of a stage": (without(lambda kind, name: (kind, name[:5]) == ("gradient", "first")), mixing),
    "all but losses": (without(lambda kind, name: kind != "loss"), mixing),
    "buffers": (without(lambda kind, name: kind == "buffer"), lambda: (Counts(), nn.CrossEntropyLoss(), None)),
    "the user's model": (the_pipeline_is_its_own_witness, cut_gradient),
    "all rows": (few_rows_alone, losing("the first six")),
    "other rows": (the_rows_as_they_are, lambda: (Acts(), masked, None)),
    "the refusal": (a_warning_in_place_of_a_refusal, losing("a spread")),
}


@pytest.mark.parametrize("left_out", MUTANTS)
def test_a_damaged_witness_accepts_what_is_wrong(threads, monkeypatch, left_out):
    mutant, make = MUTANTS[left_out]
    x, target = batch(12)

    def first_loss():
        model, loss_fn, fault = make()
        pipe = pipeline(model, loss_fn)
        if fault is not None:
            fault(pipe)
        return PipelineDriver1F1B(pipe, threads).run(2, x, target)

    with pytest.raises(MicrobatchError):
        first_loss()
    mutant(monkeypatch)
    assert first_loss().isfinite()
