"""What a message about balancing says to do works when it is done. Messages whose advice other tests try are not here."""

# mypy: disable-error-code="arg-type"

import copy

import pytest
import torch
from torch import nn

from pippy import PipeTracer, SplitPoint, annotate_split_points, clear_split_points, pipe_split, pipeline
from pippy.errors import BalanceError, InputError
from tests.comparisons import assert_same

pytestmark = [
    pytest.mark.usefixtures("in_float64", "seeded"),
    pytest.mark.filterwarnings("ignore:num_stages=. without example arguments"),
]
X = torch.randn(3, 4, dtype=torch.float64)


class TransformerBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x):
        return torch.relu(self.lin(x))


class KeepsBlocks(PipeTracer):
    def is_leaf_module(self, m, module_qualified_name):
        return isinstance(m, TransformerBlock) or super().is_leaf_module(m, module_qualified_name)


class Marked(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.a(x)
        pipe_split()
        return self.b(x)


def blocks():
    return nn.Sequential(*(TransformerBlock() for _ in range(3)))


def annotated():
    model = blocks()
    annotate_split_points(model, {"1": SplitPoint.BEGINNING})
    return model


def cleared():
    model = annotated()
    clear_split_points(model)
    return model


def lazy():
    return nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4))


def called():
    model = lazy()
    model(X)
    return model


def without_parameters():
    return nn.Sequential(nn.ReLU(), nn.Tanh())


E = {"example_args": (X,)}
ROWS = [
    ("give a number of stages, 1 or more", blocks, {"num_stages": 0}, blocks, {"num_stages": 2}),
    ("give num_stages too", blocks, {"memory_limit": 10**6}, blocks, {"memory_limit": 10**6, "num_stages": 2, **E}),
    ("give one of 'auto', ", blocks, {"split": "even", "num_stages": 2}, blocks, {"split": "auto", "num_stages": 2}),
    ("of names of modules before which to cut", blocks, {"split": 3}, blocks, {"split": ["1", "2"]}),
    ("number of layers of each stage", blocks, {"split": ["1", 2]}, blocks, {"split": [1, 2]}),
    ("give num_stages=2, say", blocks, {"split": "parameters"}, blocks, {"split": "parameters", "num_stages": 2}),
    ("give example_args", blocks, {"split": "time", "num_stages": 2}, blocks, {"split": "time", "num_stages": 2, **E}),
    (
        "split='parameters', which",
        blocks,
        {"split": "size", "num_stages": 2},
        blocks,
        {"split": "parameters", "num_stages": 2},
    ),
    (
        "split='type:TransformerBlock'",
        blocks,
        {"split": "type:", "num_stages": 2},
        blocks,
        {"split": "type:TransformerBlock", "num_stages": 2},
    ),
    ("each number must be 1 or more", blocks, {"split": [3, 0]}, blocks, {"split": [2, 1]}),
    ("leave one of them out", blocks, {"split": ["1"], "num_stages": 3}, blocks, {"split": ["1"]}),
    ("leave one of them out", blocks, {"split": ["1"], "num_stages": 3}, blocks, {"num_stages": 3}),
    (
        "it calls TransformerBlock, Linear",
        blocks,
        {"split": "type:Conv", "num_stages": 2},
        blocks,
        {"split": "type:Linear", "num_stages": 2},
    ),
    ("name one of them", blocks, {"split": ["1", "1.lin"]}, blocks, {"split": ["1.lin"]}),
    ("the stage before it would be empty; leave it out", blocks, {"split": ["0", "1"]}, blocks, {"split": ["1"]}),
    (
        "name that module",
        blocks,
        {"split": ["1.lin"], "tracer": KeepsBlocks},
        blocks,
        {"split": ["1"], "tracer": KeepsBlocks},
    ),
    (
        "whose is_leaf_module says False for it",
        blocks,
        {"split": ["1.lin"], "tracer": KeepsBlocks},
        blocks,
        {"split": ["1.lin"]},
    ),
    ("leave out split and num_stages", Marked, {"num_stages": 2}, Marked, {}),
    ("clear_split_points(model)", annotated, {"num_stages": 2}, cleared, {"num_stages": 2}),
    ("give a tuple of arguments", blocks, {"num_stages": 2, "example_args": X}, blocks, {"num_stages": 2, **E}),
    (
        "give a dict from names of arguments to values",
        blocks,
        {"num_stages": 2, "example_kwargs": [X]},
        blocks,
        {"num_stages": 2, "example_kwargs": {"input": X}},
    ),
    (
        'as in "12GiB", "500MB" or 12 * 2**30',
        blocks,
        {"num_stages": 2, "memory_limit": "8 G", **E},
        blocks,
        {"num_stages": 2, "memory_limit": "12GiB", **E},
    ),
    (
        "4 with the two moments of Adam",
        blocks,
        {"num_stages": 2, "param_scale": -1, **E},
        blocks,
        {"num_stages": 2, "param_scale": 4, **E},
    ),
    (
        "a stage holds at a time, 1 or more",
        blocks,
        {"num_stages": 2, "in_flight": 0, **E},
        blocks,
        {"num_stages": 2, "in_flight": 1, **E},
    ),
    ("Call the model once, then balance it", lazy, {"num_stages": 2}, called, {"num_stages": 2}),
    (
        "split='uniform' counts its operations instead",
        without_parameters,
        {"num_stages": 2},
        without_parameters,
        {"num_stages": 2, "split": "uniform"},
    ),
    (
        "that the model itself can be called with, one micro-batch of them",
        lambda: nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 4)),
        {"num_stages": 2, "example_args": (torch.tensor([7]),)},
        blocks,
        {"num_stages": 2, **E},
    ),
]


@pytest.mark.parametrize(("words", "model", "given", "other_model", "advised"), ROWS, ids=[row[0] for row in ROWS])
def test_what_a_message_says_works(words, model, given, other_model, advised):
    with pytest.raises((BalanceError, InputError)) as caught:
        pipeline(model(), **given)
    assert words in str(caught.value)
    made = other_model()
    plain = copy.deepcopy(made)
    assert_same(pipeline(made, **advised)(X), plain(X), "output")
