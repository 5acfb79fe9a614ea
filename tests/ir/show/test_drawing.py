"""The texts that show a Pipe, laid out."""

import random
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pippy import MultiUseParameterConfig, Pipe, pipe_split, pipeline
from pippy.ir.show.content import DrawnValue, content_of, structure_of
from pippy.ir.show.drawing import Drawing, columns_in_order, last_use
from tests.ir.show.shown import DRAWN, ExampleCode, Guessing, example

X = torch.randn(4, 8)

GRAPH = """
●         x         float32[4, 8] 128 B  ─▶ submod_0
│ ●       target    float32[4, 8] 128 B  ─▶ _loss
▼ │     [submod_0]   64 parameters   512 FLOPs
◆ │       mm_param  float32[8, 8] 256 B  ─▶ submod_1  (parameter)
│ │ ●     relu      float32[4, 8] 128 B  ─▶ submod_1
│ │ │ ●   mm        float32[4, 8] 128 B  ─▶ submod_2
▼ │ ▼ │ [submod_1]   72 parameters   1.0 k FLOPs
● │   │   lin       float32[4, 8] 128 B  ─▶ submod_2
▼ │   ▼ [submod_2]   136 parameters   1.0 k FLOPs
● │       lin_1     float32[4, 8] 128 B  ─▶ _loss
▼ ▼     [_loss]   0 FLOPs
●         _loss     float32[] 4 B        ─▶ output  (loss)
▼       [output]
replicated: lin.weight, lin.bias in submod_1, submod_2; gradients are summed
backward: _loss → submod_2 → submod_1 → submod_0; gradients take the same ways back
"""

TABLE = """
stage      parameters   bytes   buffers   receives   sends   FLOPs   holds
───────────────────────────────────────────────────────────────────────────────────
submod_0           64   256 B       0 B      128 B   512 B     512   mm_param
submod_1           72   288 B       0 B      384 B   128 B   1.0 k   lin
submod_2          136   544 B       0 B      256 B   128 B   1.0 k   mm_param2, lin
_loss               0     0 B       0 B      256 B     4 B       0   MSELoss
───────────────────────────────────────────────────────────────────────────────────
total             200   800 B       0 B    1.0 KiB   772 B   2.6 k
the total counts replicated parameters once
replicated: lin.weight, lin.bias in submod_1, submod_2; gradients are summed
backward: _loss → submod_2 → submod_1 → submod_0; gradients take the same ways back
"""

REPLICATED = """
●     x      ─▶ submod_0
▼   [submod_0]   64 parameters
●     relu   ─▶ submod_1
│ ●   mm     ─▶ submod_2
▼ │ [submod_1]   136 parameters
● │   lin    ─▶ submod_2
▼ ▼ [submod_2]   136 parameters
●     lin_1  ─▶ output
▼   [output]
replicated: mm_param in submod_0, submod_1; gradients are summed
replicated: lin.weight, lin.bias in submod_1, submod_2; gradients are summed
backward: none, as the Pipe has no loss
"""

UNKNOWN = """
●         x        float32[3, 4] 48 B             ─▶ submod_0
▼       [submod_0]   20 parameters   ≥ 96 FLOPs
●         a        float32[3, 4] 48 B             ─▶ submod_1
│ ●       item     unknown (item in submod_0)     ─▶ submod_2
▼ │     [submod_1]   20 parameters   ≥ 96 FLOPs
● │       b        float32[3, 4] 48 B             ─▶ submod_2, output
│ │ ●     nonzero  unknown (nonzero in submod_1)  ─▶ output
▼ ▼ │   [submod_2]   0 parameters   unknown FLOPs
│ ● │     add      unknown (item in submod_0)     ─▶ output
│ │ │ ●   mul      unknown (item in submod_0)     ─▶ output
▼ ▼ ▼ ▼ [output]
backward: none, as the Pipe has no loss
"""


def test_the_text():
    assert str(example().draw(X, X)) == GRAPH.strip()


def test_the_table():
    assert example().draw(X, X).table() == TABLE.strip()


def test_keyword_arguments_are_those_of_the_call():
    assert str(example().draw(x=X, target=X)) == GRAPH.strip()


def test_without_arguments_shapes_are_absent():
    pipe = pipeline(ExampleCode(), multi_use_param_spec=MultiUseParameterConfig.REPLICATE)
    assert str(pipe.draw()) == REPLICATED.strip()
    assert "FLOPs" not in pipe.draw().table()


def test_the_unknown_is_said():
    lines = str(pipeline(Guessing()).draw(torch.randn(3, 4))).splitlines()
    assert lines[:-2] == UNKNOWN.strip().splitlines()
    assert [line.partition(" (")[0] for line in lines[-2:]] == [
        "unknown: item in submod_0: depends on the numbers in a tensor",
        "unknown: nonzero in submod_1: depends on the numbers in a tensor",
    ]


@pytest.mark.parametrize("name", DRAWN)
def test_the_figures_are_the_modules(name):
    pipe, args = DRAWN[name]()
    stages = content_of(pipe, args).stages
    for stage, module in pipe.stages():
        assert stages[stage].parameters == sum(p.numel() for p in module.parameters())
        assert stages[stage].parameter_bytes == sum(p.nbytes for p in module.parameters())
        assert stages[stage].buffer_bytes == sum(b.nbytes for b in module.buffers())


def test_what_is_sent_is_received_or_returned():
    pipe, args = DRAWN["four"]()
    content = content_of(pipe, args)
    values, boxes, output = content.structure.values, content.structure.boxes, len(content.structure.boxes) - 1
    sizes: dict[DrawnValue, Any] = {value: content.shapes.values[value.node].nbytes for value in values}
    given = sum([sizes[value] * len(value.users) for value in values if boxes[value.source].kind == "input"])
    returned = sum([sizes[value] for value in values if output in value.users])
    forwards = [stage.forward for stage in content.stages.values()]
    assert (
        sum(each.sends.count for each in forwards) + given == sum(each.receives.count for each in forwards) + returned
    )


class Odd(nn.Module):
    """A value that leaves unused stages out of the backward, an unused input, a buffer that travels."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x, unused=3):
        self.count.add_(1)
        x = self.lin(x)
        pipe_split()
        side = x.detach().sum()
        pipe_split()
        return {"loss": x.sum() * self.count, "side": side}


def test_what_is_odd_is_said():
    text = str(pipeline(Odd()).draw(torch.randn(3, 4)))
    assert re.search(r"unused +3 +unused", text)
    assert "(buffer count)" in text
    assert "(loss)" in text
    assert "backward: submod_2 → submod_0; gradients take the same ways back; none in submod_1" in text


def test_a_long_backward_is_cut_short():
    pipe, _ = DRAWN["twelve"]()
    assert "backward: _loss → submod_11 → … → submod_1 → submod_0; gradients" in str(pipe.draw())


def test_a_tied_parameter_that_travels_is_an_edge_to_each_user():
    pipe, _ = DRAWN["twelve"]()
    structure = structure_of(pipe)
    (embed,) = [value for value in structure.values if value.kind == "parameter"]
    assert (structure.boxes[embed.source].name, [structure.boxes[user].name for user in embed.users]) == (
        "submod_0",
        ["submod_11"],
    )


def test_every_edge_of_the_graph_is_there():
    for pipe, _ in (make() for make in DRAWN.values()):
        structure = structure_of(pipe)
        edges = {(value.node, structure.boxes[user].name) for value in structure.values for user in value.users}
        calls = [node for node in pipe.split_gm.graph.nodes if node.op in ("call_module", "output")]
        assert edges == {(arg.name, str(call.target)) for call in calls for arg in call.all_input_nodes}


def some_values(seed):
    choose = random.Random(seed)
    sources = [choose.randrange(9) for _ in range(15)]
    return [
        DrawnValue(
            f"v{i}", f"v{i}", "value", source, tuple(sorted(choose.sample(range(source + 1, 11), choose.randrange(3))))
        )
        for i, source in enumerate(sources)
        if source < 8
    ]


@pytest.mark.parametrize("seed", range(20))
def test_values_in_one_column_do_not_meet(seed):
    values = some_values(seed)
    columns = columns_in_order(values)
    assert set(columns) == set(values)
    for one in values:
        for other in values:
            if one != other and columns[one] == columns[other] and one.users and other.users:
                assert last_use(one) <= other.source or last_use(other) <= one.source


def test_looking_does_not_change_a_pipe():
    pipe = example()
    before = str(pipe)
    one, other = pipe.draw(X, X), pipe.draw(X, X)
    assert str(one) == repr(other)
    for show in (Drawing.table, Drawing.mermaid, Drawing.svg, Drawing._repr_html_):
        assert show(one) == show(other)
    assert str(pipe) == before
    assert all(parameter.grad is None for parameter in pipe.parameters())


def test_a_sequential_of_modules_that_nobody_can_trace():
    pipe = Pipe.from_sequential(nn.Sequential(nn.GRU(4, 4), nn.Identity()))
    assert "(float32[2, 3, 4], float32[1, 3, 4]) 144 B" in str(pipe.draw(torch.randn(2, 3, 4)))


def test_the_page_shows_what_its_code_prints(capsys):
    page = (Path(__file__).parents[3] / "docs/seeing.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(code, {"__name__": "seeing"})
    drawing = re.findall(r"(?:^    .*\n)+", page.partition("## The drawing in text")[2], re.MULTILINE)[0]
    assert capsys.readouterr().out.startswith(textwrap.dedent(drawing))


def test_a_lazy_module_has_no_size_yet():
    lazy = nn.LazyLinear(3)
    pipe = Pipe.from_sequential(nn.Sequential(lazy, nn.Linear(3, 3)))
    assert [stage.parameters for stage in content_of(pipe, [torch.randn(2, 4)]).stages.values()] == [0, 12]
    assert lazy.has_uninitialized_params()
