"""A model whose own forward branches on numbers: one stage calls it as a whole, or the error names the mark in the way."""

import pickle
from collections import OrderedDict
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pippy import SplitPoint, annotate_split_points, pipe_split, pipeline
from pippy.errors import BalanceError, MarkError, PippyWarning, TracingError
from pippy.ir.base.trees import map_tensors
from tests.comparisons import assert_same, assert_same_gradients, assert_same_step, twin

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")
X = torch.randn(6, 4, dtype=torch.float64)
BRANCHES = r"test_kept_whole.py:\d+, in forward\n    if x.sum\(\) > 0:\n"


class Net(nn.Module):
    """It branches on its numbers, on an optional input and on a flag; parts have the names that a stage takes for itself."""

    def __init__(self):
        super().__init__()
        self.first, self._model, self.graph = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.drop, self.scale = nn.Dropout(0.5), nn.Parameter(torch.ones(4))

    def forward(self, x, mask=None, *, factor=2.0, negative=False):
        x = self.graph(self.first(x)) * (-factor if negative else factor)
        if x.sum() > 0:
            x = self._model(x) * self.scale
        if mask is not None:
            x = x * mask
        return self.drop(x)


class Marked(Net):
    def forward(self, x):
        x = self.first(x)
        pipe_split()
        if x.sum() > 0:
            x = -x
        return self._model(x)


class MarkedAfter(Net):
    def forward(self, x):
        if x.sum() > 0:
            x = -x
        x = self.first(x)
        pipe_split()
        return self._model(x)


class Branch(nn.Module):
    def forward(self, x):
        return -x if x.sum() > 0 else x


class MarkedBeside(Net):
    """What the errors advise: the branch is in a module of its own."""

    def __init__(self):
        super().__init__()
        self.branch = Branch()

    def forward(self, x):
        x = self.first(x)
        pipe_split()
        return self._model(self.branch(x))


def same_steps(pipe, plain, *calls):
    """The Pipe gives the numbers of the plain model for inputs that take either branch, in training and in evaluation."""
    for training in (True, False):
        pipe.train(training), plain.train(training)
        for sign in (1, -1):
            for named in calls:
                pipe.zero_grad(), plain.zero_grad()
                assert_same_step(pipe, plain, F.mse_loss, (sign * X,), X, **named)


MASK = torch.tensor([1.0, 2.0, 0.0, -1.0])
ROWS = {
    "without an example": ({}, [{}, {"mask": MASK}, {"mask": MASK, "factor": -3.0, "negative": True}]),
    "with an example": ({"example_args": (X, X)}, [{}, {"mask": None, "factor": 2.0}]),
    "with a mask in the example": ({"example_args": (X, MASK, X)}, [{"mask": MASK}, {"mask": 2 * MASK}]),
    "with a constant": ({"concrete_args": {"negative": True}}, [{"negative": True}]),
}


@pytest.mark.parametrize(("options", "calls"), ROWS.values(), ids=ROWS)
def test_a_model_that_branches_itself_is_one_stage_with_the_numbers_of_the_plain_model(options, calls):
    model = Net()
    plain = twin(model)
    with pytest.warns(PippyWarning, match=f"(?s)the Pipe has one stage, which calls Net as a whole.*{BRANCHES}"):
        pipe = pipeline(model, F.mse_loss, **options)
    assert pipe.num_stages == 1 and list(pipe.kept_whole) == [""]
    assert "holds\n" in (table := pipe.draw().table()) and "the model" in table
    same_steps(pipe, plain, *calls)
    same_steps(pickle.loads(pickle.dumps(pipe)), plain, *calls)


@pytest.mark.parametrize("how", [{"num_stages": 2}, {"split": ["_model"]}, {"split": [1, 1]}])
def test_more_stages_of_it_are_refused_with_the_reason(how):
    how = {"split": "parameters", **how}
    with pytest.raises(BalanceError, match=rf"Net cannot be cut into 2 stages.*(?s:.*){BRANCHES}(?s:.*)of its own"):
        pipeline(Net(), **how)


def annotated():
    class Unmarked(Net):
        def forward(self, x):
            x = self.first(x)
            if x.sum() > 0:
                x = -x
            return self._model(x)

    model = Unmarked()
    annotate_split_points(model, {"_model": SplitPoint.BEGINNING})
    return model


MARK = r"  \S+test_kept_whole.py:\d+, in forward\n    pipe_split\(\)$"
MARKS = {
    "before": (Marked, rf"Marked is not called .*this mark is inside.*\n{MARK}"),
    "after": (MarkedAfter, rf"MarkedAfter is not called .*this mark is inside.*\n{MARK}"),
    "in a part": (lambda: nn.Sequential(nn.Linear(4, 4), Marked()), rf"'1' \(Marked\) is not called .*\n{MARK}"),
    "on a part": (annotated, r"Unmarked is not called .*\n  the mark on '_model' \(Linear\)$"),
}


@pytest.mark.parametrize(("make", "said"), MARKS.values(), ids=MARKS)
@pytest.mark.parametrize("options", [{}, {"example_args": (X,)}], ids=["without an example", "with an example"])
def test_the_error_names_the_mark_that_stands_in_the_way(make, said, options):
    with pytest.raises(TracingError, match=f"(?s){BRANCHES}.*{said}"):
        pipeline(make(), **options)


def test_with_the_branch_in_a_module_of_its_own_the_mark_may_stay():
    model = MarkedBeside()
    plain = twin(model)
    pipe = pipeline(model, F.mse_loss)
    assert pipe.num_stages == 2 and list(pipe.kept_whole) == ["branch"]
    same_steps(pipe, plain, {})


def test_a_mark_in_a_function_that_only_running_finds_is_no_mark_that_is_lost():
    def marks():
        pipe_split()

    class Hidden(Net):
        def forward(self, x):
            x = self.first(x)
            if x.sum() > 0:
                x = -x
            marks()
            return self._model(x)

    with pytest.raises(MarkError, match=r"inside a Hidden, .* cannot be traced: .*test_kept_whole.py:\d+, in forward"):
        pipeline(Hidden(), example_args=(X,))


class SetsDefault(nn.Module):
    def forward(self, x):
        torch.set_default_dtype(torch.float32)
        made = torch.ones(4) + (1 if x.sum() > 0 else 2)
        torch.set_default_dtype(torch.float64)
        return x * made


@pytest.mark.parametrize("inside", [False, True])
def test_what_a_forward_had_set_when_it_was_given_up_is_set_back(inside):
    """A dtype that it left made the next operation of the model one "which a traced graph cannot hold"."""
    model = nn.Sequential(SetsDefault(), nn.Linear(4, 4)) if inside else SetsDefault()
    plain = twin(model)
    pipe = pipeline(model, split="uniform", num_stages=1)
    assert list(pipe.kept_whole) == (["0"] if inside else [""]) and torch.get_default_dtype() == torch.float64
    assert_same(pipe(X), plain(X), "output")


class ReturnsItsLoss(Net):
    """As models of Hugging Face; ``kind`` is what holds the loss."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x, labels=None):
        output = super().forward(x)
        return self.kind(loss=F.mse_loss(output, labels), logits=output, parts=(output, [x]))


@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor
    parts: tuple


@pytest.mark.parametrize("kind", [dict, Output, OrderedDict])
def test_the_loss_that_a_model_returns_is_found_in_what_an_example_gives(kind):
    model = ReturnsItsLoss(kind)
    plain = twin(model)
    with pytest.warns(PippyWarning, match="calls ReturnsItsLoss as a whole"):
        pipe = pipeline(model, example_kwargs={"x": X, "labels": X})
    for sign in (1, -1):
        pipe.zero_grad(), plain.zero_grad()
        torch.manual_seed(1)
        given = pipe(x=sign * X, labels=X)
        torch.manual_seed(1)
        expected = plain(sign * X, X)
        (expected.loss if kind is Output else expected["loss"]).backward()
        assert type(given) is type(expected)
        assert_same(given, map_tensors(torch.Tensor.detach, expected), "output")
        assert_same_gradients(pipe, plain)


def test_a_model_of_any_number_of_inputs_is_called_as_a_whole_with_an_example_only():
    class Many(Net):
        def forward(self, *xs):
            return super().forward(xs[0]) + xs[1]

    with pytest.raises(TracingError, match=r"(?s)control flow.*give example_args"):
        pipeline(Many())
    model = Many().eval()
    assert_same(pipeline(model, example_args=(X, X), split="uniform", num_stages=1)(X, X), model(X, X), "output")
