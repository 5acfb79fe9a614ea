"""A piece adds gradients to sums as soon as they are computed, to the bit; products for sums can be parted from it."""

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from pippy.ir.base.node_notes import FAKE_VALUE
from pippy.ir.halves import adding_up as module
from pippy.ir.halves.adding_up import adding_up, without_sums
from pippy.ir.halves.pieces import Piece, Pieces, TakesAList, quick_code
from tests.ir.halves.test_pieces import MADE, Layers, joint_of


@pytest.fixture
def all_sizes(monkeypatch):
    monkeypatch.setattr(module, "_WORTH_IT", 0)


def values_of(nodes):
    torch.manual_seed(0)
    return [torch.randn(FAKE_VALUE.of(each).shape).as_strided_(*form(FAKE_VALUE.of(each))) for each in nodes]


def form(value):
    return value.shape, value.stride()


def run_in_parts(piece, values):
    parted = without_sums(piece)
    given, taken = ([values[at] for at in places] for places in (parted.passed, parted.kept))
    results = parted.rest.module(given)
    made = len(parted.sums.inputs) - len(taken)
    quick_code(parted.sums)([*taken, *results[len(results) - made :]])
    return results[: len(results) - made]


WAYS = {
    "as it is": lambda piece, values: piece.module(values),
    "quick": lambda piece, values: quick_code(piece)(values),
    "in parts": run_in_parts,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("half", ["backward", "backward_weight"])
@pytest.mark.parametrize("name", MADE)
def test_sums_are_those_of_the_gradients_to_the_bit(all_sizes, name, half, way):
    model, shape = MADE[name]
    joint, _ = joint_of(model(), torch.randn(shape, requires_grad=True))
    plain = getattr(Pieces(joint), half)
    piece = adding_up(plain, joint.held)
    assert list(piece.sums.values()) == list(range(len(joint.held)))
    values = values_of(piece.inputs)
    begin = len(values) - len(piece.sums)
    sums = values[begin:]
    expected = plain.module([each.clone() for each in values[:begin]])
    totals = [total + gradient for total, gradient in zip(sums, expected[len(expected) - len(sums) :], strict=True)]
    results = WAYS[way](piece, list(values))
    for mine, theirs in zip([*results, *sums], [*expected[: -len(sums)], *[None] * len(sums), *totals], strict=True):
        assert (mine is None and theirs is None) or torch.equal(mine, theirs)


def test_a_gradient_is_added_right_behind_its_operation_and_a_small_one_is_an_output():
    joint, names = joint_of(Layers(), torch.randn(4, 8, requires_grad=True))
    plain = Pieces(joint).backward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_WORTH_IT", 32 * 8 * 4)  # bytes of the two weights
        piece = adding_up(plain, joint.held)
    assert [names[at] for at in piece.sums.values()] == ["wide.weight", "back.weight"]
    nodes = list(piece.module.graph.nodes)
    for node in nodes:
        if node.target is torch.ops.aten.add_.Tensor and node.args[0].name.startswith("sum_of"):
            assert nodes[nodes.index(node) - 1] is node.args[1]
    outputs = dict(zip(names, nodes[-1].args[0][len(joint.given) :]))
    assert [name for name, each in outputs.items() if each is None] == ["wide.weight", "back.weight"]
    assert not adding_up(plain, joint.held).sums and without_sums(plain) is None


def test_what_is_parted_are_the_products_of_weights(all_sizes):
    """The sums of biases are left to the compiler, and what they are computed from."""
    joint, _ = joint_of(
        nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)), torch.randn(4, 8, requires_grad=True)
    )
    parted = without_sums(adding_up(Pieces(joint).backward, joint.held))
    targets = [str(node.target) for node in parted.sums.module.graph.nodes if node.op == "call_function"]
    assert targets.count("aten.mm.default") == 2 and targets.count("aten.add_.Tensor") == 4
    assert {*targets} <= {"aten.mm.default", "aten.add_.Tensor", "aten.t.default", "aten.view.default"}
    rest = [str(node.target) for node in parted.rest.module.graph.nodes]
    assert rest.count("aten.mm.default") == 2 and "aten.add_.Tensor" not in rest


def test_what_is_changed_in_place_is_added_when_it_is_whole_and_read_when_it_was(all_sizes):
    aten, graph = torch.ops.aten, fx.Graph()
    with FakeTensorMode():
        a = graph.placeholder("a")
        product = graph.call_function(aten.mm.default, (a, a))
        early = graph.call_function(aten.mm.default, (a, product))
        doubled = graph.call_function(aten.mul_.Tensor, (product, 2.0))
        other = graph.call_function(aten.mm.default, (a, product))
        held = [fx.Graph().placeholder(name) for name in ("first", "second")]
        value = torch.empty(3, 3)
        for node in (a, early, other, *held):
            FAKE_VALUE.put(node, torch.empty(3, 3))
        FAKE_VALUE.put(product, value)
        FAKE_VALUE.put(doubled, value)
    graph.output([other, product, early])
    graph.set_codegen(TakesAList())
    piece = adding_up(Piece(fx.GraphModule(nn.Module(), graph), [a], [other, product, early]), held)
    for way in WAYS.values():
        x, total, second = torch.randn(3, 3), torch.ones(3, 3), torch.ones(3, 3)
        results = way(piece, [x, total, second])
        assert torch.equal(total, 1 + 2 * (x @ x)) and torch.equal(results[0], x @ (2 * (x @ x)))
        assert torch.equal(second, 1 + x @ (x @ x))
