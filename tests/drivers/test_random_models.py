"""Random models with modules that tracing does not look into: a driver gives the numbers of the plain model, or refuses.

Workers share no memory, so this sees what the reference, which runs all stages in one process, cannot.
"""

import copy
import warnings
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from pippy import PipelineDriver1F1B, PipeTracer, PippyWarning, pipeline
from pippy.drivers.errors import StepError
from pippy.ir.errors import SharedParameterError, SplitError
from tests.comparisons import assert_same, assert_same_gradient
from tests.drivers.thread_cluster import thread_cluster
from tests.test_random_models import WIDTH, Random, expected_step, loss_of, programs

UNTRACED = ("clamp", "average", "pass on", "flip")
# Few of these save a value for the backward: autograd refuses a plain model that changes such a value in place.
KINDS = (*UNTRACED, "clamp", "lin", "lin", "add", "add", "frozen", "iadd", "cat", "view", "pair", "count")


class Untraced(nn.Module):
    """A module that tracing does not look into."""


class Clamp(Untraced):
    """Changes its input in place."""

    def forward(self, x: Any) -> Any:
        with torch.no_grad():
            x.clamp_(-0.5, 0.5)
        return x * 2


class Average(Untraced):
    """Keeps a state, and hands it out."""

    state: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(WIDTH))

    def forward(self, x: Any) -> Any:
        with torch.no_grad():
            self.state.mul_(0.5).add_(x.mean(0))
        return x - self.state, self.state


class PassOn(Untraced):
    """Returns its input, or a view of it, or what is new."""

    def __init__(self, which: int) -> None:
        super().__init__()
        self.which = which

    def forward(self, x: Any) -> Any:
        return (x, x.view_as(x), x * 1)[self.which]


class Flip(torch.autograd.Function):
    """Turns gradients around; its result is a view."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return -gradient


class RandomTracer(PipeTracer):
    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return isinstance(module, Untraced) or super().is_leaf_module(module, name)


class RandomUntraced(Random):
    """Some of its steps are modules that tracing does not look into."""

    def __init__(self, program: list[Any], outputs: list[int]) -> None:
        super().__init__(program, outputs)
        self.clamp, self.average = Clamp(), nn.ModuleList(Average() for _ in range(3))
        self.pass_on = nn.ModuleList(map(PassOn, range(3)))

    def step(self, kind: str, x: Any, y: Any, which: int) -> Any:
        if kind == "clamp":
            return self.clamp(x)
        if kind == "average":
            difference, state = self.average[which](x)
            return difference + state * 3
        if kind == "pass on":
            return self.pass_on[which](x)
        if kind == "flip":
            return Flip.apply(x)
        return super().step(kind, x, y, which)


@pytest.fixture(scope="module")
def workers():
    with thread_cluster(3) as cluster:
        yield cluster


def made(model, workers):
    """A driver; None if the model is refused."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PippyWarning)  # some programs have no cut, or end in one
        try:
            pipe = pipeline(model, loss_of, tracer=RandomTracer)
        except (SplitError, SharedParameterError) as refusal:
            assert "in place" in str(refusal) or "drift apart" in str(refusal)
            return None
        return PipelineDriver1F1B(pipe, workers)


def plain_step(plain, x):
    """The loss of the plain model; None where autograd refuses a change in place, or nothing requires a gradient."""
    try:
        return expected_step(plain, x)
    except RuntimeError as error:
        assert "inplace" in str(error) or "in-place" in str(error)
        return None


@settings(max_examples=80, suppress_health_check=list(HealthCheck))
@given(program=programs(KINDS), outputs=st.lists(st.integers(0, 30), min_size=1, max_size=4), chunks=st.integers(1, 3))
def test_random_models_on_workers(workers, program, outputs, chunks):
    torch.manual_seed(0)
    model, x = RandomUntraced(program, outputs).double(), torch.randn(5, WIDTH, dtype=torch.float64)
    plain = copy.deepcopy(model)
    kinds = {kind for kind, *_ in program}
    expected = plain_step(plain, x.clone())
    driver = None if expected is None else made(model, workers)
    if driver is None:
        return
    try:
        # What keeps a state sees micro-batches one by one.
        loss = driver.run(1 if kinds & {"count", "average"} else chunks, x, torch.tensor(0.5, dtype=torch.float64))
        assert_same(loss, expected, "loss")
        for name, gradient in driver.gradients().items():
            assert_same_gradient(gradient, plain.get_parameter(name).grad, name)
        assert_same(driver.state_dict(), plain.state_dict(), "state")
    except StepError as refusal:
        assert "clamp" in kinds
        assert "changed its input" in str(refusal)
    finally:
        driver.close()
