"""What `exps/kept_bytes.py` counts without computing is what stages hold when they run."""

import re
import sys

import torch
from torch import nn

from exps import kept_bytes
from pippy import pipeline
from pippy.drivers.worker.compiled.stage_graphs import StageGraphs
from pippy.ir.pipe import compiled_of


class Gelu(nn.Module):
    """It is written in several quick operations, so that less is kept where these are computed again."""

    def forward(self, x):
        return x * torch.sigmoid(1.702 * x)


def held_bytes(values, model):
    """The bytes of tensors, each storage once, without those of a model's parameters and buffers."""
    own = {each.untyped_storage()._cdata for each in (*model.parameters(), *model.buffers())}
    found = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in values}
    return sum(size for storage, size in found.items() if storage not in own)


def kept_eagerly(stage, inputs):
    """What autograd saves, and the inputs."""
    saved = list(inputs)
    with torch.autograd.graph.saved_tensors_hooks(lambda each: saved.append(each) or each, lambda each: each):
        output = stage(*inputs)
    return output, held_bytes(saved, stage)


def test_what_it_counts_is_what_stages_hold(seeded):
    blocks = [nn.Sequential(nn.Linear(8, 24), Gelu(), nn.LayerNorm(24), nn.Linear(24, 8)) for _ in range(2)]
    x, target = torch.randn(4, 8), torch.randn(4, 8)
    pipe = pipeline(nn.Sequential(*blocks), nn.MSELoss(), split=["1"])
    kept, handed = kept_bytes.kept_bytes(pipe, (x, target), {})
    expected = [0, 0, 0]
    value = x
    for name in ("submod_0", "submod_1", "_loss"):
        stage = compiled_of(pipe).stage(name)
        inputs = [value.detach().requires_grad_(value is not x), *([target] if name == "_loss" else [])]
        value, eager = kept_eagerly(stage, inputs)
        output, run = StageGraphs(name, stage).forward(inputs, halves=True)
        assert torch.equal(output, value)
        expected[0] += held_bytes(run.kept, stage)
        expected[2] += eager
        run.backward_input(torch.ones_like(output))
        expected[1] += held_bytes(run.handed, stage)
    assert [kept.cut, handed.cut, kept.eager] == expected
    assert kept.cut < kept.closure <= kept.eager and handed.cut <= handed.closure


def test_its_table_has_a_row_for_each_model(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["kept_bytes", "encoder", "--stages", "2"])
    kept_bytes.main()
    head, *_, row = capsys.readouterr().out.splitlines()
    assert re.split(r"  +", head.strip()) == [
        "model",
        "F: cut",
        "all read",
        "eager",
        "I to W: cut",
        "all read",
        "eager",
    ]
    name, *figures = row.split()
    cut, closure, eager, *handed = (int(each.replace(",", "")) for each in figures)
    assert name == "encoder" and 0 < cut <= closure < eager and 0 < handed[0] <= handed[1]
