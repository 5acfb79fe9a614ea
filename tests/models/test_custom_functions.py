"""Custom autograd functions, written and called as PyTorch's tutorials do: the backward is the function's own."""

import pytest
import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from pippy import pipe_split
from tests.models.idioms import ROWS, assert_same_steps, in_all_ways

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")


class LegendrePolynomial3(torch.autograd.Function):
    """Of the tutorial "PyTorch: Defining New autograd Functions"."""

    @staticmethod
    def forward(ctx, input):
        ctx.save_for_backward(input)
        return 0.5 * (5 * input**3 - 3 * input)

    @staticmethod
    def backward(ctx, grad_output):
        (input,) = ctx.saved_tensors
        return grad_output * 1.5 * (5 * input**2 - 1)


class Exp(torch.autograd.Function):
    """Of the documentation of `torch.autograd.Function`."""

    @staticmethod
    def forward(ctx, i):
        result = i.exp()
        ctx.save_for_backward(result)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        (result,) = ctx.saved_tensors
        return grad_output * result


class Reverse(torch.autograd.Function):
    """Gradient reversal, of domain adaptation: any derivative that is computed otherwise has the other sign."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad_output):
        return -ctx.factor * grad_output, None


class Linear(torch.autograd.Function):
    """Of the tutorial "Extending PyTorch": `ctx.needs_input_grad` decides what is computed."""

    @staticmethod
    def forward(input, weight, bias):
        return input.mm(weight.t()) + bias

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad_output):
        input, weight, bias = ctx.saved_tensors
        of_input = grad_output.mm(weight) if ctx.needs_input_grad[0] else None
        of_weight = grad_output.t().mm(input) if ctx.needs_input_grad[1] else None
        return of_input, of_weight, grad_output.sum(0) if ctx.needs_input_grad[2] else None


class Round(torch.autograd.Function):
    """A quantizer whose gradient goes straight through."""

    @staticmethod
    def forward(ctx, x):
        return (x * 8).round() / 8

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output


p3, exp, linear, straight_through = LegendrePolynomial3.apply, Exp.apply, Linear.apply, Round.apply
activations = {"p3": LegendrePolynomial3.apply, "exp": Exp.apply}


class Polynomial(nn.Module):
    """y = a + b * P3(c + d * x), a stage for each half."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Parameter(torch.full((), each)) for each in (0.1, -1.0, 0.2, 0.3))

    def forward(self, x):
        inner = self.c + self.d * x
        pipe_split()
        return self.a + self.b * self.curve(inner)

    def curve(self, x):
        return LegendrePolynomial3.apply(x)


class ByLocalName(Polynomial):
    def curve(self, x):
        P3 = LegendrePolynomial3.apply
        return P3(x)


class ByAlias(Polynomial):
    def curve(self, x):
        return p3(x)


class ByDict(Polynomial):
    def curve(self, x):
        return activations["p3"](x)


class ByDefault(Polynomial):
    def curve(self, x, function=LegendrePolynomial3.apply):
        return function(x)


class ByAttribute(Polynomial):
    def __init__(self):
        super().__init__()
        self.function = LegendrePolynomial3.apply

    def curve(self, x):
        return self.function(x)


class ByModule(Polynomial):
    """Wrapped into a module, as an activation is."""

    class P3(nn.Module):
        def forward(self, x):
            return p3(x)

    def __init__(self):
        super().__init__()
        self.function = self.P3()

    def curve(self, x):
        return self.function(x)


def curves(count=3):
    x = torch.linspace(-torch.pi, torch.pi, count * ROWS).reshape(count, ROWS, 1)
    return [(each, each.sin()) for each in x]


@pytest.mark.parametrize("model", [Polynomial, ByLocalName, ByAlias, ByDict, ByDefault, ByAttribute, ByModule])
@in_all_ways
def test_the_tutorials_polynomial(model, workers, schedule, chunks):
    assert_same_steps(model(), nn.MSELoss(), curves(), workers, schedule, chunks)


class Mixed(nn.Module):
    """Layers that are functions of their own, in every stage."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)
        self.weight, self.bias = nn.Parameter(torch.randn(4, 4) / 2), nn.Parameter(torch.zeros(4))

    def forward(self, x):
        x = straight_through(torch.tanh(self.first(x)))
        pipe_split()
        x = torch.tanh(linear(x, self.weight, self.bias))
        pipe_split()
        return self.last(exp(-x * x))


class Adapted(nn.Module):
    """Classes of a domain are learnt against the features, by a reversed gradient."""

    def __init__(self):
        super().__init__()
        self.features, self.classes, self.domains = nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(4, 2)

    def forward(self, x):
        x = torch.tanh(self.features(x))
        pipe_split()
        return self.classes(x), self.domains(Reverse.apply(x, 0.5))


def of_both(outputs, target):
    return F.cross_entropy(outputs[0], target) + F.cross_entropy(outputs[1], target % 2)


def classes(count=3):
    return [(torch.randn(ROWS, 4), torch.randint(3, (ROWS,))) for _ in range(count)]


@in_all_ways
def test_functions_in_every_stage(workers, schedule, chunks):
    assert_same_steps(Mixed(), nn.CrossEntropyLoss(), classes(), workers, schedule, chunks)


@in_all_ways
def test_gradient_reversal(workers, schedule, chunks):
    assert_same_steps(Adapted(), of_both, classes(), workers, schedule, chunks)


@in_all_ways
def test_a_function_in_the_loss(workers, schedule, chunks):
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    batches = [(x, F.one_hot(target, 3).double()) for x, target in classes()]
    assert_same_steps(
        Halved(net), lambda output, target: p3(0.3 * (output - target)).mean(), batches, workers, schedule, chunks
    )


class Halved(nn.Module):
    """A sequence of layers in two stages."""

    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        for index, layer in enumerate(self.layers):
            if index == 2:
                pipe_split()
            x = layer(x)
        return x
