"""What is noted at nodes is declared in one file; and nothing else is there after tracing and cutting."""

import ast
from pathlib import Path

import pytest
import torch
from torch import nn

from pippy import PipeSplitWrapper, SplitPoint, pipeline
from pippy.ir.base import node_notes
from pippy.ir.base.node_notes import NodeNote
from pippy.ir.cut.plan import make_plan
from pippy.ir.trace.arguments import Example
from pippy.ir.trace.exported import module_of
from pippy.ir.trace.sequential import trace_sequential
from pippy.ir.trace.trace import trace
from tests.test_layering import ROOT, own_files

NOTES = [each for each in vars(node_notes).values() if isinstance(each, NodeNote)]
DECLARED = ROOT / "ir/base/node_notes.py"
OF_MODULES = ROOT / "ir/run/may_draw.py"  # it has notes of a graph module, not of a node


def undeclared(path):
    """The lines of a file that go to `meta` themselves, or declare a note."""
    for node in ast.walk(ast.parse(Path(path).read_text())):
        called = node.func if isinstance(node, ast.Call) else None
        called = called.value if isinstance(called, ast.Subscript) else called
        if (isinstance(node, ast.Attribute) and node.attr == "meta") or (
            isinstance(called, ast.Name) and called.id == "NodeNote"
        ):
            yield f"{path}:{node.lineno}"


def test_notes_are_declared_in_one_file():
    others = set(own_files().values()) - {DECLARED, OF_MODULES}
    assert [line for path in sorted(others) for line in undeclared(path)] == []
    assert len({note.key for note in NOTES}) == len(NOTES)


@pytest.mark.parametrize(
    "code", ["node.meta['x'] = 1", "found = node.meta.get('source')", "X = NodeNote[int]('x')", "X = NodeNote('x', 0)"]
)
def test_an_undeclared_note_is_seen(code, tmp_path):
    (tmp_path / "pass.py").write_text(f"import torch\n{code}\n")
    assert list(undeclared(tmp_path / "pass.py")) == [f"{tmp_path / 'pass.py'}:2"]


def test_every_note_has_its_row():
    rows = [line.split()[0] for line in node_notes.__doc__.splitlines() if line.startswith("    ")][2:]
    assert rows == [name for name, each in vars(node_notes).items() if isinstance(each, NodeNote)]


class Several(nn.Module):
    """It assigns a buffer, draws, computes without gradients and with whole numbers, and asks for its training flag."""

    def __init__(self):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2)
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x):
        with torch.no_grad():
            self.count = self.count + 1
            at = torch.arange(x.shape[0])
        x = self.drop(self.first(x))
        x = x * 2 if self.training else x
        return self.last(x)[at]


def noted(graph):
    return {key for node in graph.nodes for key in node.meta}


def marked():
    return nn.Sequential(nn.Linear(4, 4), PipeSplitWrapper(Several(), SplitPoint.BEGINNING))


def test_nodes_have_declared_notes_only():
    model, x = marked(), torch.ones(3, 4)
    example = Example.of(model, (x,), {}, False)
    traced = [trace(model), trace(model, example=example), trace_sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))]
    for each in traced:
        make_plan(each, None)
    traced.append(trace(module_of(torch.export.export(nn.Linear(4, 2), (x,)))))
    found = set().union(*(noted(each.graph) for each in traced))
    assert found <= {note.key for note in NOTES}
    assert {"source", "module_path", "no_grad", "row_sizes", "no_gradient", "layer", "stage"} <= found


def test_nodes_of_stages_keep_their_place_only():
    pipe = pipeline(marked(), example_args=(torch.ones(3, 4),))
    assert set().union(*(noted(stage.graph) for _, stage in pipe.stages())) == {"source", "module_path"}
