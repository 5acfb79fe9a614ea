"""Cutting a model: in its code, by name, by wrapper; and what that must leave alone."""

import copy
import pickle
import threading

import pytest
import torch
from torch import nn

from pippy import (
    Pipe,
    PipeSplitWrapper,
    PipeTracer,
    PippyWarning,
    SplitPoint,
    annotate_split_points,
    clear_split_points,
    pipe_split,
    pipeline,
)
from pippy.ir.base.errors import MarkError
from pippy.ir.base.marks import annotated_modules, recording_splits
from tests.ir.linear import OneLinear


class Block(OneLinear):
    def forward(self, x):
        return torch.relu(self.lin(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = Block()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.last = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def stage_of(pipe: Pipe, name: str) -> str:
    (place,) = pipe.stage_qualnames(name)
    return place.partition(".")[0]


def everything_visible(model: nn.Module) -> tuple:
    modules = [(name, type(module), str(module)) for name, module in model.named_modules(remove_duplicate=False)]
    return modules, [*model.state_dict()], [name for name, _ in model.named_parameters()], str(model)


def test_annotated_modules_are_cut_at_the_side_that_is_named():
    model = Net()
    annotate_split_points(model, {"blocks.1": SplitPoint.BEGINNING, "blocks.2.lin": SplitPoint.END})
    pipe = pipeline(model)
    stages = [
        stage_of(pipe, f"{name}.weight") for name in ("first.lin", "blocks.0.lin", "blocks.1.lin", "blocks.2.lin")
    ]
    assert stages == ["submod_0", "submod_0", "submod_1", "submod_1"]
    assert [node.target for node in pipe.stage(2).graph.nodes if node.op == "call_function"] == [torch.relu]


def test_annotations_add_up_over_several_calls():
    model = Net()
    for index in range(3):
        annotate_split_points(model, {f"blocks.{index}": SplitPoint.BEGINNING})
    assert pipeline(model).num_stages == 4


def test_both_sides_of_a_module_can_be_cut():
    model = Net()
    annotate_split_points(model, {"blocks.1": SplitPoint.BEGINNING})
    annotate_split_points(model, {"blocks.1": SplitPoint.END})
    pipe = pipeline(model)
    assert pipe.num_stages == 3
    assert stage_of(pipe, "blocks.1.lin.weight") == "submod_1"


@pytest.mark.parametrize("marked", ["annotated", "wrapped"])
def test_marks_change_nothing_that_a_user_sees(marked):
    model, x = Net(), torch.randn(2, 4)
    before, output = everything_visible(model), model(x)
    if marked == "annotated":
        annotate_split_points(model, {"blocks.1": SplitPoint.BEGINNING})
    else:
        model.blocks[1] = PipeSplitWrapper(model.blocks[1], PipeSplitWrapper.SplitPoint.BEGINNING)
    assert everything_visible(model) == before
    pipe = pipeline(model)
    assert pipe.num_stages == 2
    assert everything_visible(model) == before
    assert torch.equal(model(x), output)
    assert [*pipe.state_dict()] == before[1]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_marks_survive_copying(copied):
    model = Net()
    annotate_split_points(model, {"blocks.1": SplitPoint.BEGINNING})
    assert pipeline(copied(model)).num_stages == 2


def test_marks_can_be_taken_away():
    model = Net()
    annotate_split_points(model, {"blocks.1": SplitPoint.BEGINNING, "last": SplitPoint.BEGINNING})
    clear_split_points(model)
    assert not list(annotated_modules(model))
    with pytest.warns(PippyWarning, match="has no mark"):
        assert pipeline(model).num_stages == 1


def test_a_module_called_twice_is_cut_at_each_call():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Block()

        def forward(self, x):
            return self.block(self.block(torch.sin(x)))

    model = Twice()
    annotate_split_points(model, {"block": SplitPoint.BEGINNING})
    assert pipeline(model).num_stages == 3


def test_adjacent_marks_are_one_cut():
    class Adjacent(nn.Module):
        def forward(self, x):
            x = torch.sin(x)
            pipe_split()
            pipe_split()
            return torch.cos(x)

    assert pipeline(Adjacent()).num_stages == 2


def test_a_parameter_read_before_a_cut_and_used_after_it_lives_where_it_is_used():
    class Early(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))

        def forward(self, x):
            weight = self.weight
            x = torch.sin(x)
            pipe_split()
            return x @ weight

    assert pipeline(Early()).stage_qualnames("weight") == ("submod_1.weight",)


def test_a_mark_after_the_last_operation_is_ignored_and_said():
    model = Net()
    annotate_split_points(model, {"blocks.0": SplitPoint.END, "last": SplitPoint.END})
    with pytest.warns(PippyWarning, match="cuts nothing off"):
        assert pipeline(model).num_stages == 2


def test_a_mark_before_the_first_operation_is_refused_with_its_line():
    class Leading(nn.Module):
        def forward(self, x):
            pipe_split()
            return torch.sin(x)

    with pytest.raises(
        MarkError, match=r"before its first operation(.|\n)*test_marks.py:\d+, in forward\n +pipe_split\(\)"
    ):
        pipeline(Leading())


@pytest.mark.parametrize("name", ["first", "first.lin"])
def test_a_module_that_begins_the_model_cannot_be_cut_off_at_its_beginning(name):
    model = Net()
    annotate_split_points(model, {name: SplitPoint.BEGINNING})
    with pytest.raises(MarkError, match="before its first operation"):
        pipeline(model)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"blocks.7": SplitPoint.END}, "no module named 'blocks.7'; did you mean 'blocks.2'"),
        ({"block.1.lin": SplitPoint.END}, "did you mean 'blocks.1.lin'"),
        ({"zzz": SplitPoint.END}, "see model.named_modules"),
        ({"": SplitPoint.END}, "names the whole model"),
    ],
)
def test_a_wrong_annotation_is_refused_before_any_mark_is_made(spec, words):
    model = Net()
    with pytest.raises(MarkError) as caught:
        annotate_split_points(model, {"blocks.2": SplitPoint.END, **spec})
    assert words in str(caught.value)
    assert not list(annotated_modules(model))


def test_what_is_no_module_cannot_be_marked():
    with pytest.raises(MarkError, match=r"takes an nn\.Module; this is a function"):
        annotate_split_points(lambda x: x, {})
    with pytest.raises(MarkError, match="this is a str"):
        PipeSplitWrapper("layer", SplitPoint.END)


class LeafBlocks(PipeTracer):
    def is_leaf_module(self, m, module_qualified_name):
        return isinstance(m, Block) or super().is_leaf_module(m, module_qualified_name)


def test_a_mark_inside_a_leaf_is_refused():
    model = Net()
    annotate_split_points(model, {"blocks.1.lin": SplitPoint.END})
    with pytest.raises(MarkError, match=r"never called: 'blocks\.1\.lin'.*is_leaf_module"):
        pipeline(model, tracer=LeafBlocks)


def test_a_marked_module_that_forward_does_not_call_is_refused():
    class Unused(Net):
        def forward(self, x):
            return self.last(self.first(x))

    model = Unused()
    annotate_split_points(model, {"blocks.1": SplitPoint.END})
    with pytest.raises(MarkError, match=r"never called: 'blocks\.1'"):
        pipeline(model)


def test_other_threads_do_not_notice_a_recording():
    calls, seen = [], []
    with recording_splits(lambda: calls.append(1)):
        thread = threading.Thread(target=lambda: seen.append(pipe_split()))
        thread.start()
        thread.join()
        assert (calls, seen) == ([], [None])
        pipe_split()
    pipe_split()
    assert calls == [1]
