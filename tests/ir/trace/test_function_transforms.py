"""Functions that torch.func transforms, called in a model's own forward. They were refused there."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn import functional as F

from pippy import pipe_split, pipeline
from pippy.errors import TracingError
from tests.comparisons import assert_same_gradients, assert_same_state

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")
MSE = nn.MSELoss()


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


FOLLOWED = {
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
}
BOTH = pytest.mark.parametrize("with_example", [False, True], ids=["without an example", "with an example"])


@BOTH
@pytest.mark.parametrize("middle", FOLLOWED.values(), ids=FOLLOWED)
def test_it_trains_as_the_plain_model(middle, with_example):
    model, x, target = net(middle), torch.randn(6, 4), torch.randn(6, 4)
    plain = copy.deepcopy(model)
    plain.mapped = vmap(Doubled(plain.layer))  # a copy has the function of the other
    expected = MSE(plain(x), target)
    expected.backward()
    pipe = pipeline(model, MSE, **({"example_args": (x, target)} if with_example else {}))
    torch.testing.assert_close(pipe(x, target).detach(), expected.detach())
    assert_same_gradients(pipe, plain)
    assert_same_state(pipe, plain)


def test_dropout_draws_for_each_row_as_randomness_says():
    model = net(lambda self, x: vmap(lambda row: F.dropout(row, 0.5, True), randomness="different")(x))
    x, target = torch.randn(6, 4), torch.randn(6, 4)
    pipe = pipeline(model, MSE)
    expected, found = [], []
    for run, losses in ((lambda: MSE(model(x), target), expected), (lambda: pipe(x, target), found)):
        torch.manual_seed(3)
        losses += [float(run().detach()) for _ in range(2)]
    assert found == expected and found[0] != found[1]


def kept(middle):
    """The model with these lines in the forward of a module of its own."""

    class Own(nn.Module):
        def __init__(self, of):
            super().__init__()
            self.layer = of.layer
            self.jacobian = jacrev(Doubled(self.layer))

        forward = middle

    model = net(lambda self, x: self.own(x))
    model.own = Own(model)
    return model


def with_no_grad(self, x):
    def of_row(row):
        with torch.no_grad():
            weight = self.layer(row)
        return row * weight

    return grad(lambda x: of_row(x).sum())(x)


def with_vjp(self, x):
    return vjp(lambda r: self.layer(r).tanh(), x)[1](x)[0]


REFUSED = {
    "torch.func.vjp returns a function": with_vjp,
    "torch.func.jacrev was called outside of forward": lambda self, x: torch.stack([self.jacobian(x[0]).sum(1)] * 6),
    "torch.no_grad() is entered inside": with_no_grad,
}


@BOTH
@pytest.mark.parametrize(("words", "middle"), REFUSED.items(), ids=REFUSED)
def test_what_is_refused_works_in_a_module_of_its_own(words, middle, with_example):
    x, target = torch.randn(6, 4), torch.randn(6, 4)
    example = {"example_args": (x, target)} if with_example else {}
    with pytest.raises(TracingError, match=words.replace("(", r"\(").replace(")", r"\)")) as info:
        pipeline(net(middle), MSE, **example)
    assert "move the lines that make and call the transformed function into the forward of a module of its own" in str(
        info.value
    )
    model = kept(middle)
    plain = copy.deepcopy(model)
    plain.own.jacobian = jacrev(Doubled(plain.own.layer))
    expected = MSE(plain(x), target)
    expected.backward()
    pipe = pipeline(model, MSE, **example)
    torch.testing.assert_close(pipe(x, target).detach(), expected.detach())
    assert_same_gradients(pipe, plain)


def marked(self, x):
    def of_row(row):
        pipe_split()
        return row

    return vmap(of_row)(x)


def leaking(self, x):
    seen = []
    vmap(lambda row: seen.append(row) or row)(x)
    return x + seen[0]


def checkpointed(self, x):
    return grad(lambda x: torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=False).sum())(x)


@pytest.mark.parametrize(
    ("words", "middle"),
    {
        "pipe_split() is called inside": marked,
        "is used outside without being returned": leaking,
        "torch.utils.checkpoint is called inside": checkpointed,
    }.items(),
)
def test_these_are_refused_too(words, middle):
    with pytest.raises(TracingError, match="What to do: move the lines") as info:
        pipeline(net(middle), MSE)
    assert words in str(info.value)
    assert torch.vmap(torch.sin)(torch.zeros(2, requires_grad=True)).requires_grad  # torch is as it was
