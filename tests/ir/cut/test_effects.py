"""What changes in place, and what its memory is: as torch has it."""

import copy
import operator
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from pippy import PippyWarning, pipe_split, pipeline
from pippy.ir.base.errors import SplitError
from pippy.ir.cut.effects import find_mutations
from pippy.ir.trace.trace import trace


@fx.wrap
def wrapped_view(value):
    return value.view(-1)


class Reversed(torch.autograd.Function):
    """Turns gradients around, as for adversarial training: its result is a view."""

    @staticmethod
    def forward(ctx, value):
        return value.view_as(value)

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


class ViewThenChange(nn.Module):
    """The plain model sees the change through the view."""

    def __init__(self, view, cuts=(True, True)):
        super().__init__()
        self.view, self.cuts = view, cuts

    def forward(self, x):
        value = torch.sin(x)
        view = self.view(value)
        if self.cuts[0]:
            pipe_split()
        value.add_(1)
        if self.cuts[1]:
            pipe_split()
        return view * 2


VIEWS = {
    "view": lambda value: value.view(-1),
    "reshape_as": lambda value: value.reshape_as(value),
    "plus": lambda value: +value,
    "positive": lambda value: value.positive(),
    "torch.positive": lambda value: torch.positive(value),
    "linalg.diagonal": lambda value: torch.linalg.diagonal(value),
    "resolve_conj": lambda value: value.resolve_conj(),
    "sum_to_size": lambda value: value.sum_to_size(3, 3),
    "unsafe_chunk": lambda value: torch.unsafe_chunk(value, 2)[0],
    "flatten(input=)": lambda value: torch.flatten(input=value),
    "split(tensor=)": lambda value: torch.split(tensor=value, split_size_or_sections=2)[0],
    "broadcast_tensors": lambda value: torch.broadcast_tensors(torch.zeros(3), value)[1],
    "einsum": lambda value: torch.einsum("ij->ji", value),
    "unbind": lambda value: value.unbind()[1],
    "getattr": lambda value: value.mT,
    "float": lambda value: value.float(),
    "dropout": lambda value: F.dropout(value, 0.0),
    "aten": lambda value: torch.ops.aten.view.default(value, [9]),
    "aten packet": lambda value: torch.ops.aten.slice(value, 0, 1),
    "wrapped": lambda value: wrapped_view(value),
    "autograd.Function": lambda value: Reversed.apply(value),
}


def quietly(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PippyWarning)
        return pipeline(model, output_loss_value_spec=False)


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_change_that_a_view_of_another_stage_would_not_show(view):
    with pytest.raises(SplitError, match="in place, which another stage made"):
        quietly(ViewThenChange(view))


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_the_change_and_the_view_in_one_stage(view):
    model, x = ViewThenChange(view, cuts=(False, True)), torch.randn(3, 3)
    torch.testing.assert_close(quietly(model)(x), model(x))


NORMS = {
    "batch_norm": lambda self, y: F.batch_norm(y, self.mean, self.variance),
    "training": lambda self, y: F.batch_norm(y, self.mean, self.variance, training=self.training),
    "keywords": lambda self, y: F.batch_norm(y, running_mean=self.mean, running_var=self.variance, training=True),
    "torch.batch_norm": lambda self, y: torch.batch_norm(
        y, None, None, self.mean, self.variance, True, 0.1, 1e-5, False
    ),
}


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_a_norm_gives_new_memory_that_the_next_stage_may_change(norm):
    """Its result counted as a view of its statistics, so the next stage took no copy of what it changed in place."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.relu = nn.Linear(3, 3), nn.ReLU(inplace=True)
            self.register_buffer("mean", torch.zeros(3))
            self.register_buffer("variance", torch.ones(3))

        def forward(self, x):
            y = norm(self, self.first(x))
            pipe_split()
            return self.relu(y) + self.mean

    model, x = Model(), torch.randn(4, 3)
    plain = copy.deepcopy(model)
    loss = pipeline(model, lambda output, target: ((output - target) ** 2).mean())(x, torch.tensor(1.0))
    expected = ((plain(x) - 1) ** 2).mean()
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(model.first.weight.grad, plain.first.weight.grad)
    torch.testing.assert_close(model.mean, plain.mean)


def roots_of_last(model, *names):
    graph = fx.symbolic_trace(model).graph
    *_, last, _ = graph.nodes
    return [root.name for root in find_mutations(graph, dict(model.named_parameters()))[1][last]]


NEW = {
    "sin": lambda value: torch.sin(value),
    "method": lambda value: value.softmax(-1),
    "operator": lambda value: value + value,
    "linear": lambda value: F.linear(value, value),
    "matmul": lambda value: value @ value,
    "python function of torch": lambda value: F.normalize(value),
    "relu": lambda value: F.relu(value),
    "cat": lambda value: torch.cat([value, value]),
    "clone": lambda value: value.clone(),
    "size": lambda value: value.size(0),
    "shape": lambda value: value.shape,
    "statistics": lambda value: F.batch_norm(value, value[0], value[1], training=False),
}


@pytest.mark.parametrize("function", NEW.values(), ids=NEW)
def test_results_with_memory_of_their_own(function):
    class Model(nn.Module):
        def forward(self, x):
            return function(x)

    assert roots_of_last(Model()) != ["x"]


def changed(function):
    class Model(nn.Module):
        def forward(self, x):
            return function(x)

    traced = trace(Model())
    return [mutation.root.name for mutation in find_mutations(traced.graph, traced.attributes)[0]]


CHANGES = {
    "method": lambda x: x.mul_(2),
    "operator": lambda x: operator.iadd(x, 1),
    "setitem": lambda x: x.__setitem__(0, 1),
    "function": lambda x: torch.relu_(x),
    "inplace": lambda x: F.relu(x, inplace=True),
    "input=": lambda x: torch.relu_(input=x),
    "out": lambda x: torch.sin(torch.ones(3), out=x),
    "init": lambda x: nn.init.ones_(x),
    "aten": lambda x: torch.ops.aten.add_.Tensor(x, x),
    "a view": lambda x: x.t().reshape_as(x).add_(1),
}


@pytest.mark.parametrize("function", CHANGES.values(), ids=CHANGES)
def test_changes_in_place(function):
    assert set(changed(function)) == {"x"}


@pytest.mark.parametrize("name", ["requires_grad_", "detach_", "sort", "size"])
def test_what_changes_no_number(name):
    assert changed(lambda x: getattr(x, name)()) == []


@fx.wrap
def either(one, other):
    return other


@fx.wrap
def fill_(value):
    return value.zero_()


def test_a_function_whose_name_says_that_it_changes_a_parameter():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x):
            with torch.no_grad():
                fill_(self.weight)
            return x * self.weight

    traced = trace(Model())
    assert [str(each.root.target) for each in find_mutations(traced.graph, traced.attributes)[0]] == ["weight"]


def test_a_function_that_nobody_knows_may_return_any_of_its_arguments():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x, y):
            return either(x, (y, self.weight))

    assert roots_of_last(Model()) == ["x", "y"]
