"""F, I and W of a joint graph: each operation is in one of them, I waits for nothing of W, and what is missing is found."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pippy.ir.base.errors import StageError
from pippy.ir.halves.joint import FakeInputs, joint_graph, storage_of
from pippy.ir.halves.pieces import Pieces
from pippy.ir.halves.quick_code import quick_code
from pippy.ir.halves.smallest_cut import value_bytes


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.wide, self.back = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return x + self.back(F.gelu(self.wide(self.norm(x)))).relu_()


def joint_of(module, *given):
    fakes = FakeInputs()
    names = dict(module.named_parameters())

    def forward(held, inputs):
        return [torch.func.functional_call(module, dict(zip(names, held)), tuple(inputs))]

    inputs = [fakes.of(each) for each in given]
    with fakes.mode:
        tangents = [torch.empty_like(each) for each in forward([fakes.of(p) for p in names.values()], inputs)]
    return joint_graph(forward, [fakes.of(p) for p in names.values()], inputs, tangents), list(names)


@pytest.fixture(scope="module")
def layers():
    return joint_of(Layers(), torch.randn(4, 8, requires_grad=True))


def computed(piece):
    return {node.name for node in piece.module.graph.nodes if node.op == "call_function"}


def test_each_heavy_operation_is_in_one_piece(layers):
    joint, _ = layers
    cut = Pieces(joint)
    pieces = [computed(each) for each in (cut.forward, cut.backward_input, cut.backward_weight)]
    again = {node.name for node in joint.module.graph.nodes if joint.repeats(node)}
    for one in range(3):
        for other in range(one):
            assert pieces[one] & pieces[other] <= again
    products = [sum(name.startswith(("mm", "addmm")) for name in piece) for piece in pieces]
    assert products == [2, 2, 2]
    assert pieces[1] | pieces[2] == computed(cut.backward) or pieces[1] | pieces[2] > computed(cut.backward)


def test_w_gives_the_gradient_of_every_parameter_and_i_makes_those_of_the_norm_by_the_way(layers):
    joint, names = layers
    cut = Pieces(joint)
    assert cut.backward_weight.outputs == joint.held_gradients and None not in joint.held_gradients
    by_the_way = [name for name, node in zip(names, joint.held_gradients) if node in cut.handed]
    assert by_the_way == ["norm.weight", "norm.bias"]


def test_what_is_handed_on_is_no_more_than_all_that_w_reads(layers):
    """Views are computed again in W, so each piece of memory is handed on once."""
    joint, _ = layers
    cut = Pieces(joint)
    w = [node for node in joint.module.graph.nodes if node.name in computed(cut.backward_weight)]
    read = {each for node in w for each in node.all_input_nodes} | set(joint.held_gradients)
    plain = read.difference(w, joint.held)
    assert sum(map(value_bytes, cut.handed)) <= sum(value_bytes(each) or 0 for each in plain)


def test_a_cut_that_keeps_too_little_is_found(layers):
    joint, _ = layers
    kept = Pieces(joint).kept
    assert len(kept) >= 4
    for lost in kept:
        with pytest.raises((StageError, KeyError)):
            Pieces(joint, [node for node in kept if node is not lost]).backward  # noqa: B018


def test_a_value_that_is_written_in_place_is_not_computed_again(layers):
    joint, _ = layers
    relu = next(node for node in joint.module.graph.nodes if "relu_" in str(node.target))
    assert not joint.repeats(relu) and relu in joint.touched
    assert storage_of(relu) in map(storage_of, Pieces(joint).kept), "what relu_ has written is read in the backward"


def test_quick_code_computes_the_same_and_calls_torch_s_own_functions(layers):
    joint, _ = layers
    piece = Pieces(joint).backward
    values = [torch.randn(node.meta["val"].shape) for node in piece.inputs]
    code = quick_code(piece)
    given = list(values)
    with torch.no_grad():
        for one, other in zip(piece.module(list(values)), code(given), strict=True):
            assert one is other is None or torch.equal(one, other)
    assert given == [], "a value is freed after it was read last"
    targets = {node.target for node in code.__self__.graph.nodes}
    assert torch.mm in targets and not targets & {torch.ops.aten.mm.default, torch.ops.aten.detach.default}
