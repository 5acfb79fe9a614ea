"""Where the balancer allows a cut, the splitter accepts it; what it keeps together needs to be."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from pippy import MultiUseParameterConfig, PippyWarning
from pippy.ir.base.errors import SharedParameterError, SplitError
from pippy.ir.cut.constraints import constraints
from pippy.ir.cut.split import split
from pippy.ir.cut.uses import crossing, mark, marks, operations, scopes
from pippy.ir.trace.trace import trace
from tests.test_random_models import Random, steps
from tests.zoo import exhibits


def unmarked(model):
    """A traced graph without its marks."""
    traced = trace(model)
    erase_marks(traced)
    return traced


def erase_marks(traced):
    for node in marks(traced):
        traced.graph.erase_node(node)


def allowed(traced, config=None):
    forbidden = {number for each in constraints(traced, config) for number in range(each.first + 1, each.last + 1)}
    return [number for number in range(1, len(operations(traced))) if number not in forbidden]


def cut(traced, numbers, config):
    """Cut in front of these operations; splitting leaves the traced graph as it is, and it can be cut again."""
    nodes = operations(traced)
    mark(traced, [nodes[number] for number in numbers])
    try:
        split(traced, config)
    finally:
        erase_marks(traced)


def is_refused(traced, number, config) -> bool:
    try:
        cut(traced, [number], config)
    except (SplitError, SharedParameterError):
        return True
    return False


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(steps, st.lists(st.integers(0, 30), min_size=1, max_size=4), st.sampled_from(MultiUseParameterConfig), st.data())
def test_the_splitter_accepts_every_cut_that_is_allowed(program, outputs, config, data):
    model = Random(program, outputs)
    traced = unmarked(model)
    places = allowed(traced, config)
    if places:
        chosen = data.draw(st.sets(st.sampled_from(places), min_size=1))
        cut(traced, sorted(chosen), config)


def test_in_the_zoo_no_refused_place_is_allowed_and_few_others_are_forbidden():
    """What is forbidden without need lies between a value and its change in place, where a stage would have to copy."""
    needless = total = 0
    for name, exhibit in exhibits.items():
        torch.manual_seed(0)
        model = exhibit()
        traced = unmarked(model)
        allowed_by = {config: allowed(traced, config) for config in MultiUseParameterConfig}
        alike = len({tuple(places) for places in allowed_by.values()}) == 1  # as nothing is shared
        for config, places in list(allowed_by.items())[: 1 if alike else None]:
            for number in range(1, len(operations(traced))):
                refused = is_refused(traced, number, config)
                assert not (refused and number in places), (name, number)
                total += 1
                needless += not refused and number not in places
    assert total > 250
    assert needless < total / 10


class Whole(nn.Module):
    """Changes something in the middle; `first` and `last` are free."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.count: torch.Tensor
        self.register_buffer("count", torch.zeros(()))

    def middle(self, x):
        raise NotImplementedError

    def forward(self, x):
        return self.last(self.middle(self.first(x)))


class NormTwice(Whole):
    def middle(self, x):
        return self.norm(torch.relu(self.norm(x)))


class Counts(Whole):
    def middle(self, x):
        x = x * (self.count + 1)
        self.count += 1
        return torch.relu(x)


class ChangesAView(Whole):
    def middle(self, x):
        y = torch.relu(x)
        y[:, 0].mul_(2)
        return y


class ChangesItsInput(Whole):
    def forward(self, x):
        y = self.first(x)
        x.clamp_(min=0)
        return self.last(torch.relu(y) + x)


class ChangesWhatALeafReads(Whole):
    def middle(self, x):
        self.norm.running_mean.add_(1)
        return self.norm(torch.relu(x))


def test_what_is_changed_stays_with_those_who_would_not_see_it():
    together = [(each.first, each.last) for each in constraints(trace_silently(ChangesItsInput()))]
    assert together == [(0, 3)]  # first, clamp_, relu, add
    model = ChangesWhatALeafReads().eval()
    traced = trace_silently(model)
    names = [node.name for node in operations(traced)]
    assert names == ["first", "add_", "relu", "norm", "last"]
    assert [(each.first, each.last) for each in constraints(traced)] == [(1, 3)]


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (NormTwice(), "a module changes norm.running_mean at each call"),
        (Counts(), "changes count in place"),
        (ChangesAView(), "changes getitem in place"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_must_stay_together_says_why(model, why):
    traced = trace_silently(model)
    found = constraints(traced)
    assert any(why in each.why for each in found)
    names = [node.name for node in operations(traced)]
    places = allowed(traced)
    assert names.index("last") in places
    assert max(each.last for each in found) < names.index("last")
    assert min(each.first for each in found) >= 1


def trace_silently(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PippyWarning)
        return trace(model)


def test_a_parameter_that_is_to_be_transmitted_stays_with_the_leaf_that_has_it():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
            self.c.weight = self.a.weight

        def forward(self, x):
            return self.c(self.b(self.a(x)))

    transmit = {"a.weight": MultiUseParameterConfig.TRANSMIT}
    traced = trace(Tied())
    assert (allowed(traced), allowed(traced, transmit)) == ([1, 2], [])


def test_a_parameter_with_a_hook_may_be_copied():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU())
    model[2].weight = model[0].weight
    model[0].weight.register_hook(lambda gradient: gradient)
    assert allowed(trace(model)) == [1, 2, 3]


def test_a_tensor_that_wants_a_gradient_and_is_no_parameter_is_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU())
    shared = torch.ones(4, requires_grad=True)
    for layer in (model[0], model[2]):
        layer.register_buffer("shared", shared)
    with pytest.raises(SharedParameterError, match=r"0\.shared requires a gradient.*Register it as an nn\.Parameter"):
        allowed(trace(model))


def test_what_crosses():
    class Skip(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))

        def forward(self, x):
            early = x @ self.weight
            y = torch.relu(early)
            y = F.gelu(y)
            return (y + early) @ self.weight

    traced = trace(Skip())
    matmul, relu, gelu, *_ = operations(traced)
    # Before relu: what x @ weight gave, and the weight, which the last operation needs too.
    assert crossing(traced) == [0, 2, 3, 3, 2]
    sizes = dict.fromkeys(operations(traced), 10)
    assert crossing(traced, sizes) == [0, 10 + 64, 20 + 64, 20 + 64, 10 + 64]
    assert crossing(traced, sizes, MultiUseParameterConfig.REPLICATE) == [0, 10, 20, 20, 10]


def test_calls_of_modules_are_told_apart():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x):
            return torch.relu(self.lin(x))

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Block()

        def forward(self, x):
            return self.block(self.block(x))

    found = scopes(trace(Twice()))
    blocks = [numbers for (_, path), (kind, numbers) in found.items() if kind is Block]
    assert blocks == [[0, 1], [2, 3]]
