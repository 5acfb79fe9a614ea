"""A custom autograd function is one node of the graph, with its own backward, however forward reaches its `apply`.

The backward of each function here differs from the derivative of its forward, so a forward that was traced through gives other
gradients.
"""

import copy
import functools
import threading
import types
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.function import BackwardCFunction, _SingleLevelFunction, once_differentiable
from torch.nn import functional as F

from pippy import pipe_split, pipeline
from pippy.ir.base.errors import TracingError
from tests.comparisons import assert_same_gradients

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * 3 * x


class Inheriting(Square):
    @staticmethod
    def backward(ctx, gradient):
        return gradient * 100


class Scaled(torch.autograd.Function):
    """In the style of `setup_context`."""

    @staticmethod
    def forward(x, by=2.0):
        return x * by

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.by = inputs[1]

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.by * 5, None


class Sorted(torch.autograd.Function):
    """Two outputs, one that has no gradient, and arguments that are no tensors."""

    @staticmethod
    def forward(ctx, x, by, note=None):
        values, order = x.sort(-1)
        ctx.by = by
        ctx.mark_non_differentiable(order)
        ctx.save_for_backward(order)
        return values * by, order

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient, _):
        (order,) = ctx.saved_tensors
        return torch.zeros_like(gradient).scatter_(-1, order, gradient * ctx.by * 7), None, None


class Linear(torch.autograd.Function):
    """Asks which of its inputs need a gradient."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return x @ weight + bias

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        return (
            2 * gradient @ weight.T if wanted[0] else None,
            3 * x.T @ gradient if wanted[1] else None,
            gradient.sum(0) if wanted[2] else None,
        )


class Outer(torch.autograd.Function):
    """Calls another function, also in its backward."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return square(x) + Inheriting.apply(x)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            return 2 * torch.autograd.grad(square(leaf), leaf, gradient)[0]


class Around(torch.autograd.Function):
    """Its own `apply` computes something before."""

    @classmethod
    def apply(cls, x, by=4.0):
        return super().apply(x * 2, by)

    @staticmethod
    def forward(ctx, x, by):
        ctx.by = by
        return x * by

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.by * 11, None


applies: Any = [each.apply for each in (Square, Scaled, Sorted, Linear, Outer, Around)]
square, scaled, sort, linear, outer, around = applies
table, bound = {"square": square}, functools.partial(scaled, by=3.0)
imported = types.SimpleNamespace(square=square)
past_the_door = torch._C._FunctionBase.__dict__["apply"].__get__(None, Square)


class Whole(nn.Module):
    """Cannot be traced, so it is called as a whole."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x) if x.sum() > -1e9 else x


class Applying(nn.Module):
    def forward(self, x):
        return past_the_door(x)


class Net(nn.Module):
    def __init__(self, middle):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.function, self.part, self.middle = square, Whole(square), middle

    def forward(self, x):
        x = self.first(x)
        pipe_split()
        return self.last(self.middle(self, x))


def with_default(net, x, function=square):
    return function(x)


def without_gradient(net, x):
    with torch.no_grad():
        kept = square(x)
    return x * kept


def with_sorted(net, x):
    values, order = sort(x, 3.0, "a note")
    return values + 0 * order


ROWS: dict[str, Any] = {
    "by its class": lambda net, x: Square.apply(x),
    "a name at the top of a file": lambda net, x: square(x),
    "an attribute of a module": lambda net, x: net.function(x),
    "a dict": lambda net, x: table["square"](x),
    "a default argument": with_default,
    "functools.partial": lambda net, x: bound(x),
    "another file's": lambda net, x: imported.square(x),
    "map": lambda net, x: next(iter(map(square, [x]))),
    "a part that is kept whole": lambda net, x: net.part(x),
    "setup_context, with a keyword": lambda net, x: scaled(x, by=3.0),
    "setup_context, with a default": lambda net, x: scaled(x),
    "several outputs, once differentiable": with_sorted,
    "needs_input_grad": lambda net, x: linear(x, net.last.weight, net.first.bias.detach()),
    "functions in functions": lambda net, x: outer(x),
    "an apply of its own": lambda net, x: around(x),
    "an apply of its own, by its class": lambda net, x: Around.apply(x, 5.0),
    "a class that inherits": lambda net, x: Inheriting.apply(x) + square(x),
    "under no_grad": without_gradient,
}
X, TARGET = torch.randn(7, 4).double(), torch.randn(7, 4).double()


@pytest.mark.parametrize("example", [None, (X[:3], TARGET[:3])], ids=["", "with an example"])
@pytest.mark.parametrize("name", ROWS)
def test_the_backward_of_a_custom_function_is_its_own(name, example):
    model = Net(ROWS[name])
    plain = copy.deepcopy(model)
    F.mse_loss(plain(X), TARGET).backward()
    pipe = pipeline(model, F.mse_loss, example_args=example)
    pipe(X, TARGET)
    assert_same_gradients(pipe, plain)


def test_a_function_that_is_applied_past_its_door_is_refused_and_the_advice_works():
    words = r"(?s)Square past torch.autograd.Function.apply.*past_the_door\(x\).*What to do: call Square.apply"
    with pytest.raises(TracingError, match=words):
        pipeline(Net(lambda net, x: past_the_door(x)), F.mse_loss)
    plain = Net(lambda net, x: past_the_door(x))
    advised = copy.deepcopy(plain)
    advised.middle = lambda net, x: Square.apply(x)
    F.mse_loss(plain(X), TARGET).backward()
    pipe = pipeline(advised, F.mse_loss)
    pipe(X, TARGET)
    assert_same_gradients(pipe, plain)


def test_a_part_that_applies_a_function_past_its_door_is_kept_whole():
    model = Net(lambda net, x: net.part(x))
    model.part = Applying()
    plain = copy.deepcopy(model)
    F.mse_loss(plain(X), TARGET).backward()
    pipe = pipeline(model, F.mse_loss)
    assert "past torch.autograd.Function.apply" in pipe.kept_whole["part"]
    pipe(X, TARGET)
    assert_same_gradients(pipe, plain)


def test_other_threads_apply_functions_while_one_traces_and_all_is_put_back():
    before = [dict(vars(each)) for each in (_SingleLevelFunction, BackwardCFunction, torch.autograd.Function)]
    results = []

    def elsewhere():
        leaf = torch.ones(2, requires_grad=True)
        square(leaf).sum().backward()
        results.append(leaf.grad)

    def middle(net, x):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        return square(x)

    pipeline(Net(middle))
    assert [each.tolist() for each in results] == [[3.0, 3.0]] * len(results) and results
    assert [dict(vars(each)) for each in (_SingleLevelFunction, BackwardCFunction, torch.autograd.Function)] == before
