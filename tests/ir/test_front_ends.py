"""The front end is chosen by itself: torch.export where torch.fx cannot follow the model, and not elsewhere."""

import copy
import pickle

import pytest
import torch
from torch import nn

from pippy import SplitPoint, annotate_split_points, pipe_split, pipeline
from pippy.ir.base.errors import BalanceError, InputError, MarkError, TracingError
from pippy.ir.trace.tracer import PipeTracer
from tests.comparisons import assert_same, assert_same_gradients, run_plain

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")


class Inner(nn.Module):
    """Does in its forward what it is given to do."""

    def __init__(self, act):
        super().__init__()
        self.first, self.second, self.act = nn.Linear(4, 4), nn.Linear(4, 4), act

    def forward(self, x):
        return self.second(self.act(self, x, self.first(x)))


class Marked(Inner):
    def forward(self, x):
        y = self.act(self, x, self.first(x))
        pipe_split()
        return self.second(y)


class Hidden(Inner):
    def forward(self, x):
        y = self.act(self, x, self.first(x))
        hidden_mark()
        return self.second(y)


def hidden_mark():
    pipe_split()


def in_rows(module, x, y):
    return y.tanh().expand(torch.broadcast_shapes(x.shape, (1, 4)))  # it wants numbers, and torch.fx has proxies


def on_numbers(module, x, y):
    return y if y.sum() > 0 else y * 2  # neither can


def example(rows=2):
    return torch.randn(rows, 4), torch.randn(rows, 4)


def check(pipe, model, rows=3):
    inputs, target = (torch.randn(rows, 4),), torch.randn(rows, 4)
    plain = copy.deepcopy(model)
    plain.zero_grad()
    expected = run_plain(plain, nn.MSELoss(), None, inputs, target)
    model.zero_grad()
    assert_same(pipe(*inputs, target), expected, "loss")
    assert_same_gradients(pipe, plain)


@pytest.mark.parametrize(
    "model, options, stages",
    [
        (Marked(in_rows), {}, 2),
        (nn.Sequential(nn.Linear(4, 4), Marked(in_rows)), {}, 2),  # a mark inside a part that fails
        (nn.Sequential(nn.Linear(4, 4), Hidden(in_rows)), {}, 2),
        (nn.Sequential(Inner(in_rows)), {"num_stages": 2}, 2),  # kept whole, it cannot be cut
        (nn.Sequential(nn.ReLU(), Inner(in_rows)), {"split": ["1.second"]}, 2),
    ],
)
def test_export_is_chosen_where_fx_cannot(model, options, stages):
    with pytest.raises((TracingError, MarkError, BalanceError)):
        pipeline(copy.deepcopy(model.double()), nn.MSELoss(), example_args=example(), front_end="fx", **options)
    pipe = pipeline(model, nn.MSELoss(), example_args=example(), **options)
    assert (pipe.num_stages, pipe.front_end) == (stages, "export")
    assert "in_rows" in pipe.why_export and "test_front_ends.py" in pipe.why_export
    assert str(pipe).splitlines()[-1].startswith("# traced by torch.export, since torch.fx could not: ")
    check(pipe, model)
    assert pickle.loads(pickle.dumps(pipe)).why_export == pipe.why_export


def test_fx_is_taken_where_it_can():
    parts = nn.Sequential(nn.Linear(4, 4), Inner(in_rows))
    pipe = pipeline(parts, example_args=example()[:1], num_stages=2)
    assert (pipe.front_end, pipe.why_export, list(pipe.kept_whole)) == ("fx", "", ["1"])
    assert "traced by" not in str(pipe)
    asked = pipeline(Marked(in_rows), example_args=example()[:1], front_end="export")
    assert (asked.front_end, asked.why_export, str(asked).splitlines()[-1]) == (
        "export",
        "",
        "# traced by torch.export",
    )


def test_without_an_example_nothing_else_is_tried():
    with pytest.raises(TracingError, match=r"(?s)ints.*in_rows.*What to do") as caught:
        pipeline(Marked(in_rows))
    assert "torch.export" not in str(caught.value)


def test_both_reasons_are_told_where_both_fail():
    with pytest.raises(TracingError, match=r"(?s)cannot trace Marked.*on_numbers.*What to do.*torch\.export") as caught:
        pipeline(Marked(on_numbers), example_args=example()[:1])
    assert str(caught.value).count("in on_numbers") == 2
    with pytest.raises(BalanceError, match=r"(?s)2 stages.*  0: .*on_numbers.*torch\.export.*on_numbers"):
        pipeline(nn.Sequential(Inner(on_numbers)), example_args=example()[:1], num_stages=2)


def raises(module, x, y):
    raise ValueError("this sequence is too long")


def test_an_error_of_the_model_itself_is_told_once():
    messages = []
    for front_end in (None, "fx"):
        with pytest.raises(TracingError, match="this sequence is too long") as caught:
            pipeline(Marked(raises), example_args=example()[:1], front_end=front_end)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


class OwnProxies(PipeTracer):
    def create_arg(self, a):
        return super().create_arg(a)


class WholeInner(PipeTracer):
    def is_leaf_module(self, m, module_qualified_name):
        return module_qualified_name == "1" or super().is_leaf_module(m, module_qualified_name)


def in_grad_mode(module, x, y):
    return y if torch.is_grad_enabled() else y * 2


def sets_data(module, x, y):
    y.data = y.data * 2
    return y


def same(module, x, y):
    z = module.second(x)
    return y if z is y else y * 2


def unmet():
    model = nn.Sequential(nn.TransformerEncoderLayer(4, 2, 4), Inner(in_rows))
    annotate_split_points(model, {"0.linear1": SplitPoint.END})
    return model


@pytest.mark.parametrize(
    "model, options, error, words",
    [
        (Marked(in_grad_mode), {}, TracingError, "is_grad_enabled"),
        (Marked(sets_data), {}, TracingError, r"\.data"),
        (nn.Sequential(nn.Linear(4, 4), Inner(in_grad_mode)), {"num_stages": 3}, BalanceError, "is_grad_enabled"),
        (unmet(), {}, MarkError, r"0\.linear1"),
        (nn.Sequential(nn.Linear(3, 4), Inner(in_rows)), {}, InputError, "this operation fails"),
        (nn.Sequential(nn.Linear(4, 4), Marked(in_rows)), {"tracer": WholeInner}, MarkError, "kept whole"),
        (Marked(in_rows), {"tracer": OwnProxies}, TracingError, "of ints"),
        (Marked(in_rows), {"num_stages": 2, "front_end": "fx"}, TracingError, "of ints"),
        (Inner(in_rows), {"num_stages": 2, "example_kwargs": {"y": 3}}, InputError, "'y'"),
    ],
)
def test_what_is_no_limit_of_fx_is_refused_at_once(model, options, error, words, monkeypatch):
    monkeypatch.setattr("pippy.ir.front_ends._by_export", lambda *_: pytest.fail("torch.export is tried"))
    with pytest.raises(error, match=words):
        pipeline(model.double(), **{"example_args": example()[:1], **options})
