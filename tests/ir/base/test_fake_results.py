"""What is known of values is found once for operations that do the same work; no value is another's because of that."""

import copy

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from pippy import PipeTracer, pipe_split, pipeline
from pippy.ir.trace.recording import _RecordUntraced

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.lin, self.drop = nn.LayerNorm(4), nn.Linear(4, 8), nn.Dropout(0.1)

    def forward(self, x):
        a, b = self.lin(self.norm(x)).split(x.shape[1], dim=1)
        return x + nn.functional.dropout(self.drop(a * b), 0.1, self.training)


def test_equal_blocks_are_computed_once(monkeypatch):
    """Also in the other mode; for another number of rows there is one more computation of each."""
    dispatch, calls = FakeTensorMode.dispatch, []

    def counted(self, *args, **kwargs):
        calls.append(args)
        return dispatch(self, *args, **kwargs)

    monkeypatch.setattr(FakeTensorMode, "dispatch", counted)
    counts = []
    for blocks in (2, 12):
        calls.clear()
        pipeline(nn.Sequential(*(Block() for _ in range(blocks))), split="parameters", num_stages=2, example_args=(X,))
        counts.append(len(calls))
    assert counts[1] <= counts[0]


X = torch.randn(3, 4, dtype=torch.float64)


def test_what_records_is_not_asked_for_what_a_result_depends_on(monkeypatch):
    """Of each tensor: it was half of the time that a model of transformers was traced in."""
    record, asked = _RecordUntraced.__torch_function__, set()

    def noted(self, function, types, args=(), kwargs=None):
        asked.add(function)
        return record(self, function, types, args, kwargs)

    monkeypatch.setattr(_RecordUntraced, "__torch_function__", noted)
    pipeline(nn.Sequential(Block(), Block()), split="parameters", num_stages=2, example_args=(X,))
    assert torch.Tensor.untyped_storage in asked, "it is asked for other things"
    assert not {torch.Tensor.is_conj, torch.Tensor.is_neg} & asked


class Transposes(nn.Module):
    """Two equal sums, of which one is transposed in place: by a method, or by a part that is kept whole."""

    def __init__(self, part=None):
        super().__init__()
        self.first, self.second, self.part = nn.Linear(4, 4), nn.Linear(4, 4), part

    def forward(self, x):
        x = self.first(x)
        a, b = x + 1, x + 1
        alias = a.contiguous()
        if self.part is None:
            a.t_()
        else:
            self.part(a)
        pipe_split()
        sizes = [each.shape[0] - each.shape[1] for each in (a, b, alias)]
        scale = sum(10**index * (2 if size > 0 else 1) for index, size in enumerate(sizes))
        return self.second(a.t() * b).sum() * scale


class Part(nn.Module):
    def forward(self, a):
        a.t_()
        return a.sum()


class KeepsParts(PipeTracer):
    def is_leaf_module(self, m, module_qualified_name):
        return isinstance(m, Part) or super().is_leaf_module(m, module_qualified_name)


@pytest.mark.parametrize("part", [None, Part()], ids=["method", "part"])
def test_a_tensor_whose_shape_changes_in_place_is_no_other(part):
    model = Transposes(part)
    plain = copy.deepcopy(model)
    pipe = pipeline(model, example_args=(X,), tracer=KeepsParts)
    torch.testing.assert_close(pipe(X), plain(X))
