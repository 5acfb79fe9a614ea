"""Transforms of torch.func: refused in a model's own forward, and right in a module of its own, as the error says."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd.functional import jacobian
from torch.func import (
    functional_call,
    functionalize,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    vjp,
    vmap,
)
from torch.nn import functional as F

from pippy import pipe_split, pipeline
from pippy.errors import TracingError
from tests.comparisons import assert_same_gradients, assert_same_state

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")
MSE = nn.MSELoss()
NUMBERS = torch.arange(4.0, dtype=torch.float64)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.layer, self.last = (nn.Linear(4, 4) for _ in range(3))
        self.register_buffer("scale", torch.randn(4))
        self.mapped = vmap(Doubled(self.layer))
        self.jacobian = jacrev(Doubled(self.layer))

    def forward(self, x):
        x = self.first(x)
        pipe_split()
        return self.last(self.middle(x))


class Doubled:
    """A function that knows a layer."""

    def __init__(self, layer):
        self.layer = layer

    def __call__(self, row):
        return self.layer(row) * row


def net(middle):
    return type("Net", (Net,), {"middle": middle})()


def with_trees(self, x):
    made, other = vmap(lambda given: ({"a": given["x"] * 2}, given["y"][0] + self.scale))({"x": x, "y": (x.tanh(),)})
    return made["a"] * other


def with_two(self, x):
    gradient, value = grad_and_value(lambda r: self.layer(r).tanh().sum())(x)
    return gradient * value


def by_sample(self, x):
    def loss(parameters, row):
        return functional_call(self.layer, parameters, (row,)).pow(2).sum()

    return vmap(grad(loss), in_dims=(None, 0))(dict(self.layer.named_parameters()), x)["weight"].sum(1)


def one_step_inside(self, x):
    """A step of descent in forward, through which the outer gradient flows."""
    own = dict(self.layer.named_parameters())
    gradients = grad(lambda p: functional_call(self.layer, p, (x,)).pow(2).sum())(own)
    return functional_call(self.layer, {name: own[name] - 0.1 * gradients[name] for name in own}, (x,))


def with_no_grad(self, x):
    def of_row(row):
        with torch.no_grad():
            weight = self.layer(row)
        return row * weight

    return grad(lambda x: of_row(x).sum())(x)


TRANSFORMED = {
    "vmap of a lambda": lambda self, x: vmap(lambda row: self.layer(row) * row)(x),
    "vmap of a layer": lambda self, x: torch.vmap(self.layer)(x),
    "vmap made in __init__": lambda self, x: self.mapped(x),
    "vmap with values from outside": lambda self, x: vmap(lambda row, k: row * x.sum() + k, (0, None))(x, self.scale),
    "vmap over another dimension": lambda self, x: vmap(lambda row: row * 2, in_dims=1, out_dims=1, chunk_size=2)(x),
    "vmap and sizes": lambda self, x: vmap(lambda row: row.view(2, row.shape[0] // 2).sum(0).repeat(2))(x),
    "vmap of trees": with_trees,
    "vmap in place": lambda self, x: vmap(lambda row: row.mul_(2))(x * 1.0),
    "vmap in vmap": lambda self, x: vmap(vmap(lambda each: each * x.mean()))(x),
    "grad": lambda self, x: x + grad(lambda r: self.layer(r).tanh().sum())(x),
    "grad of a parameter": lambda self, x: x + grad(lambda w: (x @ w).pow(2).sum())(self.layer.weight)[0],
    "grad_and_value": with_two,
    "jacrev": lambda self, x: vmap(jacrev(lambda row: self.layer(row).tanh()))(x).sum(1),
    "jacfwd": lambda self, x: vmap(jacfwd(lambda row: self.layer(row).tanh()))(x).sum(1),
    "hessian": lambda self, x: vmap(hessian(lambda row: self.layer(row).tanh().sum()))(x).sum(1),
    "jvp": lambda self, x: jvp(lambda r: self.layer(r).tanh(), (x,), (x * 2,))[1],
    "a gradient for each row": by_sample,
    "a step in forward": one_step_inside,
    "vmap over a tensor of the file": lambda self, x: x + vmap(lambda k: (k * x).sum())(NUMBERS),
    "grad by a tensor of the file": lambda self, x: x + grad(lambda k: (self.layer(x) * k).sum())(NUMBERS),
    "jvp along a tensor of the file": lambda self, x: x + jvp(lambda k: self.layer(x * k), (NUMBERS,), (NUMBERS,))[1],
    "jacrev made in __init__": lambda self, x: torch.stack([self.jacobian(x[0]).sum(1)] * 6),
    "no_grad inside": with_no_grad,
    "vjp": lambda self, x: vjp(lambda r: self.layer(r).tanh(), x)[1](x)[0],
    "linearize": lambda self, x: linearize(lambda r: self.layer(r).tanh(), x)[1](x),
    "functionalize": lambda self, x: functionalize(lambda r: self.layer(r).tanh())(x),
    "jacobian": lambda self, x: x + jacobian(lambda r: self.layer(r).tanh().sum(0), x, create_graph=True).sum((0, 1)),
}


class Own(nn.Module):
    """The module of its own that the error advises."""

    def __init__(self, of, middle):
        super().__init__()
        self.layer, self.middle = of.layer, middle
        self.register_buffer("scale", of.scale)
        self.mapped, self.jacobian = vmap(Doubled(of.layer)), jacrev(Doubled(of.layer))

    def forward(self, x):
        return self.middle(self, x)


def kept(middle):
    """The model with these lines in the forward of a module of its own."""
    model = net(lambda self, x: self.own(x))
    model.own = Own(model, middle)
    return model


def copy_of(model, middle):
    """A copy whose functions know the layer of the copy."""
    plain = copy.deepcopy(model)
    plain.own = Own(plain, middle)
    return plain


@pytest.mark.parametrize("with_example", [False, True], ids=["without an example", "with an example"])
@pytest.mark.parametrize("middle", TRANSFORMED.values(), ids=TRANSFORMED)
def test_it_is_refused_and_works_in_a_module_of_its_own(middle, with_example):
    x, target = torch.randn(6, 4), torch.randn(6, 4)
    example = {"example_args": (x, target)} if with_example else {}
    with pytest.raises(TracingError, match="into the forward of a module of its own, without a mark inside"):
        pipeline(net(middle), MSE, **example)
    assert torch.vmap(torch.sin)(torch.zeros(2, requires_grad=True)).requires_grad  # torch is as it was
    model = kept(middle)
    plain = copy_of(model, middle)
    expected = MSE(plain(x), target)
    expected.backward()
    pipe = pipeline(model, MSE, **example)
    torch.testing.assert_close(pipe(x, target).detach(), expected.detach())
    assert_same_gradients(pipe, plain)
    assert_same_state(pipe, plain)


def test_dropout_draws_for_each_row_as_randomness_says():
    model = kept(lambda self, x: vmap(lambda row: F.dropout(row, 0.5, True), randomness="different")(x))
    x, target = torch.randn(6, 4), torch.randn(6, 4)
    pipe = pipeline(model, MSE)
    expected, found = [], []
    for run, losses in ((lambda: MSE(model(x), target), expected), (lambda: pipe(x, target), found)):
        torch.manual_seed(3)
        losses += [float(run().detach()) for _ in range(2)]
    assert found == expected and found[0] != found[1]


def marked(self, x):
    def of_row(row):
        pipe_split()
        return row

    return vmap(of_row)(x)


def leaking(self, x):
    seen = []
    vmap(lambda row: seen.append(row) or row)(x)
    return x + seen[0]


@pytest.mark.parametrize("middle", [marked, leaking])
def test_these_are_refused_too(middle):
    with pytest.raises(TracingError, match="into the forward of a module of its own"):
        pipeline(net(middle), MSE)
