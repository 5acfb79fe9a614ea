"""A stage that changes what it was given, where tracing cannot see it: a module of the user's own that is not traced."""

import copy
import warnings

import pytest
import torch
from torch import fx, nn

from pippy import Pipe, PipelineDriver1F1B, PippyWarning, pipe_split, pipeline
from pippy.drivers.base.errors import StepError
from pippy.ir.base.errors import SplitError, StageError
from pippy.ir.trace.tracer import PipeTracer

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")


class Clamp(nn.Module):
    """Changes its input in place, as a regularizer of activations may."""

    def forward(self, x):
        with torch.no_grad():
            x.clamp_(-0.1, 0.1)
        return x * 2


class Opaque(PipeTracer):
    def is_leaf_module(self, module, name):
        return isinstance(module, Clamp) or super().is_leaf_module(module, name)


class Skip(nn.Module):
    """The last stage uses a value that the second one has changed in place."""

    def __init__(self, view=lambda value: value):
        super().__init__()
        self.first, self.clamp, self.view = nn.Linear(4, 4), Clamp(), view

    def forward(self, x):
        value = self.first(x)
        other = self.view(value)
        pipe_split()
        y = self.clamp(value)
        pipe_split()
        return y + other


class FromInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.clamp, self.last = Clamp(), nn.Linear(4, 4)

    def forward(self, x):
        y = self.clamp(x)
        pipe_split()
        return self.last(y)


class OfWeight(nn.Module):
    """A weight that travels to the stage which changes it."""

    def __init__(self):
        super().__init__()
        self.weight, self.clamp = nn.Parameter(torch.randn(4, 4)), Clamp()

    def forward(self, x):
        y = x @ self.weight
        pipe_split()
        return y @ self.clamp(self.weight)


class Alone(nn.Module):
    """Nobody but the second stage uses what it changes."""

    def __init__(self):
        super().__init__()
        self.first, self.clamp, self.last = nn.Linear(4, 4), Clamp(), nn.Linear(4, 4)

    def forward(self, x):
        y = self.first(x)
        pipe_split()
        y = self.clamp(y)
        pipe_split()
        return self.last(y)


def loss_fn(output, target):
    return ((output - target) ** 2).mean()


MODELS = {
    "a value used later": Skip,
    "a view of it used later": lambda: Skip(lambda value: value.view(-1, 4)),
    "an input of the model": FromInput,
    "a parameter": OfWeight,
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("loss", [None, loss_fn], ids=["inference", "training"])
def test_the_reference_names_the_stage_the_input_and_the_line(model, loss):
    pipe = pipeline(model(), loss, tracer=Opaque)
    given = (torch.randn(3, 4), torch.randn(3, 4))[: 1 if loss is None else 2]
    with pytest.raises(StageError, match=r"(?s)submod_\d changed its input '\w+' in place.*self\.clamp\(.*clone\(\)"):
        pipe(*given)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_a_driver_refuses_it_too(threads, model):
    driver = PipelineDriver1F1B(pipeline(model(), loss_fn, tracer=Opaque), threads)
    with pytest.raises(StepError, match=r"(?s)submod_\d changed its input '\w+' in place.*self\.clamp\("):
        driver.run(2, torch.randn(4, 4), torch.randn(4, 4))
    driver.close()


def test_what_nobody_else_uses_may_be_changed(threads):
    model = Alone()
    plain, x, target = copy.deepcopy(model), torch.randn(4, 4), torch.randn(4, 4)
    expected = loss_fn(plain(x), target)
    expected.backward()
    pipe = pipeline(model, loss_fn, tracer=Opaque)
    torch.testing.assert_close(pipe(x, target), expected.detach())
    driver = PipelineDriver1F1B(pipe, threads)
    torch.testing.assert_close(driver.run(2, x, target), expected.detach())
    for name, gradient in driver.gradients().items():
        torch.testing.assert_close(gradient, plain.get_parameter(name).grad)
        torch.testing.assert_close(pipe.get_parameter(name).grad, gradient)
    driver.close()


def test_the_advice(threads):
    class Advised(Skip):
        def forward(self, x):
            value = self.first(x)
            pipe_split()
            y = self.clamp(value.clone())
            pipe_split()
            return y + value

    model, x = Advised(), torch.randn(4, 4)
    pipe = pipeline(model, tracer=Opaque)
    torch.testing.assert_close(pipe(x), model(x))


def test_a_loss_that_changes_its_target():
    def loss_of(output, target):
        target[target < 0] = 0
        return ((output - target) ** 2).mean()

    pipe = Pipe.from_sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), loss_of)
    with pytest.raises(StageError, match="_loss changed its input 'target' in place"):
        pipe(torch.randn(3, 4), torch.randn(3, 4))


@fx.wrap
def halve(value):
    with torch.no_grad():
        value.mul_(0.5)
    return value + 1


def test_a_function_that_was_not_traced():
    class Model(Skip):
        def forward(self, x):
            value = self.first(x)
            pipe_split()
            y = halve(value)
            pipe_split()
            return y + value

    with pytest.raises(StageError, match=r"(?s)changed its input 'first' in place.*halve\(value\)"):
        pipeline(Model())(torch.randn(3, 4))


def test_an_autograd_function_that_marks_its_input_dirty():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            ctx.mark_dirty(value)
            return value.mul_(2)

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

    class Model(Skip):
        def forward(self, x):
            value = self.first(x)
            pipe_split()
            y = Double.apply(value)
            pipe_split()
            return y + value

    with torch.no_grad(), pytest.raises(StageError, match="changed its input 'first' in place"):
        pipeline(Model())(torch.randn(3, 4))


def test_inference_mode_has_no_versions():
    model = Alone()
    with torch.inference_mode():
        x = torch.randn(3, 4)
        torch.testing.assert_close(pipeline(model, tracer=Opaque)(x), model(x))


class PassOn(nn.Module):
    """Returns its input, which no schema says."""

    def forward(self, x):
        return x


class OpaquePassOn(PipeTracer):
    def is_leaf_module(self, module, name):
        return isinstance(module, PassOn) or super().is_leaf_module(module, name)


def test_a_module_of_the_users_own_may_return_a_view():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.pass_on = PassOn()

        def forward(self, x):
            value = torch.sin(x)
            view = self.pass_on(value)
            pipe_split()
            value.add_(1)
            pipe_split()
            return view * 2

    with pytest.raises(SplitError, match="in place, which another stage made"), warnings.catch_warnings():
        warnings.simplefilter("ignore", PippyWarning)
        pipeline(Model(), tracer=OpaquePassOn)
