"""Running stages: leaves, gradients, errors, pickles."""

import copy
import dataclasses
import io
import pickle
import sys

import pytest
import torch
from torch import fx, nn
from torch.utils import _pytree

from pippy import MultiUseParameterConfig, Pipe, pipe_split, pipeline, verify
from pippy.ir.base.errors import SplitError, StageError, TracingError
from pippy.ir.base.node_notes import SOURCE
from pippy.ir.base.trees import children, describe, leaves, map_tensors, tensors, with_children
from pippy.ir.run.stage_backward import add_gradients, stage_backward
from pippy.ir.run.stage_run import as_leaf, run_stage
from tests.ir.linear import OneLinear
from tests.zoo import ExampleCode, Pair, Result, UsedThrice


def test_each_consumer_takes_a_leaf_of_its_own():
    x = torch.ones(2, requires_grad=True) * 2
    one, other = as_leaf(x), as_leaf(x)
    assert one is not other
    assert one.is_leaf
    assert one.requires_grad
    assert one.data_ptr() == x.data_ptr()


def test_a_value_used_twice_is_counted_twice_and_not_four_times():
    x = torch.tensor([3.0], requires_grad=True)
    y = x * 1
    one, other = as_leaf(y), as_leaf(y)
    first = stage_backward(one * 5, torch.ones(1), [one])[0]
    second = stage_backward(other * 7, torch.ones(1), [other])[0]
    assert stage_backward(y, add_gradients(second, first), [x])[0].item() == 12


def test_the_code_of_a_stage_is_generated_once_and_the_top_level_s_once_for_each_pass(monkeypatch):
    """Also when it arrives elsewhere. Code is most of the time that a large graph module takes."""
    graphs, generate = [], fx.Graph.python_code

    def noted(graph, *args, **kwargs):
        graphs.append(graph)
        return generate(graph, *args, **kwargs)

    monkeypatch.setattr(fx.Graph, "python_code", noted)
    pipe = pipeline(UsedThrice(), nn.MSELoss())
    stages = [stage for _, stage in pipe.stages()]
    assert [graphs.count(stage.graph) for stage in stages] == [1] * len(stages)
    assert len(graphs) == len(stages) + 3, "the split, the loss and the backward"
    graphs.clear()
    pickle.loads(pickle.dumps(stages[0]))
    assert len(graphs) == 1


def test_a_split_module_called_by_itself_is_refused_rather_than_counted_twice():
    pipe = pipeline(UsedThrice(), nn.MSELoss())
    with pytest.raises(StageError, match="call the Pipe"):
        pipe.split_gm(torch.randn(6, 8), torch.randn(6, 8))
    assert all(parameter.grad is None for parameter in pipe.parameters())


@pytest.mark.parametrize(
    ("output", "gradients"),
    [
        (lambda x: x * 2, torch.ones(2)),
        (lambda x: (x * 2, 3), [torch.ones(2), None]),
        (lambda x: {"a": [x * 2], "b": None}, ((torch.ones(2),), None)),
        (lambda x: Pair(x, x.sum()), (torch.ones(2), torch.tensor(1.0))),
        (lambda x: Result(x * 2, None), (torch.ones(2), None, None)),
        (lambda x: (x > 0, x.detach(), x * 2), (None, torch.ones(2), torch.ones(2))),
    ],
)
def test_stage_backward_takes_any_structure(output, gradients):
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    (gradient,) = stage_backward(output(x), gradients, [x])
    assert gradient.tolist() == [2.0, 2.0]


def test_stage_backward_without_a_gradient_does_nothing():
    x = torch.ones(2, requires_grad=True)
    assert stage_backward(x * 2, None, [x, 3, torch.ones(1)]) == (None, None, None)


def test_gradients_of_containers_have_their_shape():
    x, y = torch.ones(2, requires_grad=True), torch.ones(2)
    (gradient,) = stage_backward(x * 3, torch.ones(2), [{"a": x, "b": [y, "text"]}])
    assert gradient[0].tolist() == [3.0, 3.0]
    assert gradient[1] is None


class Opaque:
    def __init__(self, tensor):
        self.tensor = tensor


class MakesOpaque(nn.Module):
    def forward(self, x):
        return Opaque(x)


class TakesOpaque(nn.Module):
    def forward(self, value):
        return value.tensor


def test_a_gradient_that_would_be_lost_inside_an_object_is_an_error():
    pipe = Pipe.from_sequential(nn.Sequential(nn.Linear(2, 2), MakesOpaque(), TakesOpaque()), nn.MSELoss())
    with pytest.raises(StageError, match=r"a Opaque passes from stage to stage .*\['tensor'\].*make it a dataclass"):
        pipe(torch.ones(1, 2), torch.ones(1, 2))


@pytest.mark.parametrize(
    "value",
    [
        (1, [torch.ones(2)]),
        {"a": torch.ones(1), "b": {"c": 2}},
        Pair(1, torch.ones(2)),
        Result(torch.ones(1), None),
        [],
        (),
    ],
)
def test_trees_are_taken_apart_and_put_together(value):
    assert describe(with_children(value, children(value))) == describe(value)
    assert type(map_tensors(torch.clone, value)) is type(value)
    doubled = map_tensors(lambda tensor: tensor * 2, value)
    assert [tensor.sum() * 2 for tensor in tensors(value)] == [tensor.sum() for tensor in tensors(doubled)]


def test_sizes_and_frozen_dataclasses():
    @dataclasses.dataclass(frozen=True)
    class Frozen:
        x: torch.Tensor

    assert list(leaves(torch.Size([2, 3]))) == [torch.Size([2, 3])]
    assert map_tensors(torch.neg, Frozen(torch.ones(1))).x == -1


class OwnDict(dict):
    pass


class OwnList(list):
    pass


@pytest.mark.parametrize("value", [Result(torch.ones(1), None), OwnDict(a=torch.ones(1)), OwnList([torch.ones(1)])])
def test_containers_that_torch_takes_for_one_leaf(value):
    """That is why `ir/base/trees.py` does not use torch's pytrees alone."""
    assert _pytree.tree_leaves(value) == [value]
    assert list(tensors(value)) == [torch.ones(1)]


class Breaks(OneLinear):
    def forward(self, x):
        x = self.lin(x)
        pipe_split()
        y = x.view(2, -1)
        return y + torch.ones(17)


def test_an_error_in_a_stage_names_stage_line_and_shapes():
    with pytest.raises(StageError) as caught:
        pipeline(Breaks())(torch.randn(3, 4))
    text = str(caught.value)
    assert text.startswith("forward of submod_1 failed: RuntimeError: The size of tensor a (6) must match")
    assert "return y + torch.ones(17)" in text
    assert "inputs: float32[3, 4]" in text


class BadBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("no backward here")


class BreaksBackward(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.out = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = BadBackward.apply(self.lin(x))
        pipe_split()
        return self.out(x)


def test_an_error_in_a_backward_names_stage_lines_and_shapes_and_the_next_run_is_right():
    model = BreaksBackward()
    pipe = pipeline(model, nn.MSELoss())
    x = torch.randn(3, 4)
    with pytest.raises(StageError) as caught:
        pipe(x, x)
    text = str(caught.value)
    assert text.startswith("backward of submod_0 failed: ValueError: no backward here")
    assert "x = BadBackward.apply(self.lin(x))" in text
    assert "their gradients: float32[3, 4]" in text


class FailsOnce(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.fail = nn.Linear(8, 8), True

    def forward(self, x):
        if self.fail:
            raise ValueError("once")
        return self.lin(x)


@pytest.mark.parametrize("config", MultiUseParameterConfig)
def test_after_an_error_gradients_and_modes_are_as_before(config):
    model = ExampleCode()
    plain, x = copy.deepcopy(model), torch.randn(6, 8)
    pipe = pipeline(model, nn.MSELoss(), multi_use_param_spec=config)
    pipe(x, x)
    before = [None if p.grad is None else p.grad.clone() for p in (t for group in pipe.copies() for t in group)]
    with pytest.raises(StageError, match="backward of _loss"):
        failing = pipeline(plain, nn.MSELoss(reduction="none"), multi_use_param_spec=config)
        failing(x, x)
    with pytest.raises(StageError):
        pipe(torch.randn(6, 7), x)
    after = [p.grad for group in pipe.copies() for p in group]
    assert all(torch.equal(one, other) for one, other in zip(before, after))
    assert torch.is_grad_enabled()


class RaisesWithoutGradients(nn.Module):
    def forward(self, x):
        x = torch.sin(x)
        pipe_split()
        with torch.no_grad():
            return x.view(7)


def test_a_stage_that_raises_without_gradients_leaves_them_on():
    with pytest.raises(StageError):
        pipeline(RaisesWithoutGradients())(torch.ones(3))
    assert torch.is_grad_enabled()


class Chain(nn.Module):
    def __init__(self, length):
        super().__init__()
        self.length, self.lin = length, nn.Linear(2, 2)

    def forward(self, x):
        x = self.lin(x)
        pipe_split()
        for _ in range(self.length):
            x = x + 0.5
        return x


@pytest.mark.timeout(60)
def test_a_long_stage_pickles_without_recursion_and_prints_at_once():
    """Two seconds are enough. To shorten the names of files took time with the square of the length: a minute and a half."""
    limit = sys.getrecursionlimit()
    pipe, x = pipeline(Chain(1000), nn.MSELoss()), torch.randn(3, 2)
    try:
        sys.setrecursionlimit(200 + len_of_stack())
        again = pickle.loads(pickle.dumps(pipe))
        stage = pickle.loads(pickle.dumps(pipe.stage(1)))
    finally:
        sys.setrecursionlimit(limit)
    verify(again)
    assert str(again) == str(pipe)
    assert str(stage) == str(pipe.stage(1))
    assert torch.equal(again(x, x), pipe(x, x))
    assert torch.equal(again.get_grad("lin.weight"), pipe.get_grad("lin.weight"))


def len_of_stack():
    frame, count = sys._getframe(), 0
    while frame is not None:
        frame, count = frame.f_back, count + 1
    return count


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda pipe: pickle.loads(pickle.dumps(pipe)), lambda pipe: saved_and_loaded(pipe)]
)
def test_a_copied_pipe_is_another_one(copied):
    pipe, x = pipeline(UsedThrice(), nn.MSELoss()), torch.randn(6, 8)
    again = copied(pipe)
    verify(again)
    assert torch.equal(again(x, x), pipe(x, x))
    assert all(mine is not theirs for mine, theirs in zip(again.parameters(), pipe.parameters()))
    source = SOURCE.of(next(node for node in again.stage(1).graph.nodes if node.name == "b"))
    assert source.code == "y = self.b(shared) + shared"


def saved_and_loaded(pipe):
    file = io.BytesIO()
    torch.save(pipe, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_from_sequential_takes_what_cannot_be_traced():
    class Branches(OneLinear):
        def forward(self, x):
            return self.lin(x) if x.sum() > 0 else -x

    model, x = nn.Sequential(Branches(), nn.ReLU(), Branches()), torch.rand(2, 4)
    pipe = Pipe.from_sequential(model)
    assert pipe.num_stages == 3
    assert torch.equal(pipe(x), model(x))
    assert pipe.stage_qualnames("2.lin.weight") == ("submod_2.2.lin.weight",)


def test_from_sequential_shares_a_repeated_child():
    layers = [nn.Linear(4, 4) for _ in range(3)]
    pipe = Pipe.from_sequential(nn.Sequential(*layers, layers[0]), nn.MSELoss())
    assert pipe.replicated_params == [
        {"submod_0": "0.weight", "submod_3": "3.weight"},
        {"submod_0": "0.bias", "submod_3": "3.bias"},
    ]


def test_from_sequential_refuses_what_it_cannot_cut():
    with pytest.raises(TracingError, match=r"takes an nn\.Sequential or a list of layers; this is a Linear"):
        Pipe.from_sequential(nn.Linear(1, 1))
    with pytest.raises(SplitError, match="there are no layers"):
        Pipe.from_sequential(nn.Sequential())


def test_run_stage_passes_keywords():
    assert run_stage("stage", nn.Identity(), (torch.ones(1),)) == 1
