"""What a message about balancing says to do works when it is done. Messages whose advice other tests try are not here."""

# mypy: disable-error-code="arg-type"

import copy
from typing import Any

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
TWO = {"num_stages": 2}
ROWS: list[tuple[Any, ...]] = [
    ("give a number of stages, 1 or more", {"num_stages": 0}, TWO),
    ("give num_stages too", {"memory_limit": 10**6}, {"memory_limit": 10**6, **TWO, **E}),
    ("give one of 'auto', ", {"split": "even", **TWO}, {"split": "auto", **TWO}),
    ("of names of modules before which to cut", {"split": 3}, {"split": ["1", "2"]}),
    ("number of layers of each stage", {"split": ["1", 2]}, {"split": [1, 2]}),
    ("give num_stages=2, say", {"split": "parameters"}, {"split": "parameters", **TWO}),
    ("give example_args", {"split": "time", **TWO}, {"split": "time", **TWO, **E}),
    ("split='parameters', which", {"split": "size", **TWO}, {"split": "parameters", **TWO}),
    ("split='type:TransformerBlock'", {"split": "type:", **TWO}, {"split": "type:TransformerBlock", **TWO}),
    ("each number must be 1 or more", {"split": [3, 0]}, {"split": [2, 1]}),
    ("leave one of them out", {"split": ["1"], "num_stages": 3}, {"split": ["1"]}),
    ("leave one of them out", {"split": ["1"], "num_stages": 3}, {"num_stages": 3}),
    ("it calls TransformerBlock, Linear", {"split": "type:Conv", **TWO}, {"split": "type:Linear", **TWO}),
    ("name one of them", {"split": ["1", "1.lin"]}, {"split": ["1.lin"]}),
    ("the stage before it would be empty; leave it out", {"split": ["0", "1"]}, {"split": ["1"]}),
    ("name that module", {"split": ["1.lin"], "tracer": KeepsBlocks}, {"split": ["1"], "tracer": KeepsBlocks}),
    ("whose is_leaf_module says False for it", {"split": ["1.lin"], "tracer": KeepsBlocks}, {"split": ["1.lin"]}),
    ("leave out split and num_stages", TWO, {}, Marked),
    ("clear_split_points(model)", TWO, TWO, annotated, cleared),
    ("give a tuple of arguments", {**TWO, "example_args": X}, {**TWO, **E}),
    (
        "give a dict from names of arguments to values",
        {**TWO, "example_kwargs": [X]},
        {**TWO, "example_kwargs": {"input": X}},
    ),
    (
        'as in "12GiB", "500MB" or 12 * 2**30',
        {**TWO, "memory_limit": "8 G", **E},
        {**TWO, "memory_limit": "12GiB", **E},
    ),
    ("4 with the two moments of Adam", {**TWO, "param_scale": -1, **E}, {**TWO, "param_scale": 4, **E}),
    ("a stage holds at a time, 1 or more", {**TWO, "in_flight": 0, **E}, {**TWO, "in_flight": 1, **E}),
    ("Call the model once, then balance it", TWO, TWO, lazy, called),
    ("split='uniform' counts its operations instead", TWO, {**TWO, "split": "uniform"}, without_parameters),
    (
        "that the model itself can be called with, one micro-batch of them",
        {**TWO, "example_args": (torch.tensor([7]),)},
        {**TWO, **E},
        lambda: nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 4)),
        blocks,
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_what_a_message_says_works(row):
    """A row has the words, the options that they are said of, and the advised ones; then the models, if not ``blocks``."""
    words, given, advised, *models = row
    model, other_model = (models or [blocks])[0], (models or [blocks])[-1]
    with pytest.raises((BalanceError, InputError)) as caught:
        pipeline(model(), **given)
    assert words in str(caught.value)
    made = other_model()
    plain = copy.deepcopy(made)
    assert_same(pipeline(made, **advised)(X), plain(X), "output")
