"""F, I and W of a joint graph: each operation is in one of them, I waits for nothing of W, and what is missing is found."""

import operator

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pippy.ir.base.errors import StageError
from pippy.ir.halves.joint import FakeInputs, joint_graph, storage_of, value_bytes
from pippy.ir.halves.pieces import Pieces, quick_code


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.wide, self.back = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return x + self.back(F.gelu(self.wide(self.norm(x)))).relu_()


class Polynomial(nn.Module):
    """The activation of GPT-2, between two layers: quick operations, and two that are not."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        x = self.first(x)
        return self.last(0.5 * x * (1 + torch.tanh(0.8 * (x + 0.04 * x.pow(3)))))


class Pictures(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))


class Words(nn.Module):
    """A table of words that is looked up beside the input, and an RMS norm."""

    def __init__(self):
        super().__init__()
        self.table, self.norm, self.gate = nn.Embedding(5, 8), nn.RMSNorm(8), nn.Linear(8, 8, bias=False)

    def forward(self, x):
        x = self.norm(x + self.table(torch.arange(4)))
        return F.silu(self.gate(x)) * x


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


MADE = {
    "layers": (Layers, (4, 8)),
    "activation": (Polynomial, (4, 8)),
    "pictures": (Pictures, (3, 2, 4, 4)),
    "words": (Words, (4, 8)),
}
# The parameters whose gradients I computes by the way: in the operation that gives the gradient of its input.
BY_THE_WAY = {
    "layers": ["norm.weight", "norm.bias"],
    "activation": [],
    "pictures": ["1.weight", "1.bias"],
    "words": [],
}


@pytest.fixture(scope="module", params=MADE)
def made(request):
    model, shape = MADE[request.param]
    return request.param, *joint_of(model(), torch.randn(shape, requires_grad=True))


def test_w_gives_the_gradient_of_every_parameter(made):
    name, joint, names = made
    cut = Pieces(joint)
    assert cut.backward_weight.outputs == joint.held_gradients and None not in joint.held_gradients
    by_the_way = computed(cut.backward_input)
    assert [each for each, node in zip(names, joint.held_gradients) if node.name in by_the_way] == BY_THE_WAY[name]


def bytes_of(nodes):
    """Each storage once."""
    return sum(
        {storage_of(node): value_bytes(node) or 0 for node in sorted(nodes, key=lambda x: value_bytes(x) or 0)}.values()
    )


def test_the_backward_of_a_convolution_is_one_operation_in_b_and_one_in_each_half():
    joint, _ = joint_of(Pictures(), torch.randn(3, 2, 4, 4, requires_grad=True))
    cut = Pieces(joint)
    masks = [
        [node.args[-1] for node in piece.module.graph.nodes if "convolution_backward" in node.name]
        for piece in (cut.backward, cut.backward_input, cut.backward_weight)
    ]
    assert masks == [[[True, True, True]], [[True, False, False]], [[False, True, True]]]


# What F keeps, and what I hands to W, each beside what it is without a cut. By hand: F keeps the input (128 bytes), the result
# of the first layer and that of tanh (512 each), where 9 results of 512 bytes are read. I hands on the input, the gradient of
# the output (128), the activation, which it computes again for W alone, and its gradient (512 each).
BYTES = {"activation": (1152, 4736, 1280, 1280)}


def test_no_more_is_kept_than_all_that_is_read(made):
    name, joint, _ = made
    cut, plain = Pieces(joint), Pieces(joint, keeps_all=True)
    found = tuple(map(bytes_of, (cut.kept, plain.kept, cut.handed, plain.handed)))
    assert found[0] <= found[1] and found[2] <= found[3]
    assert found == BYTES.get(name, found)


def check_i(cut):
    """I computes nothing of the backward that only parameters need."""
    joint = cut.joint
    need, stack = set(), [node for node in joint.given_gradients if node is not None]
    while stack:
        node = stack.pop()
        if node not in need:
            need.add(node)
            stack.extend(joint.needed_by(node))
    need |= {user for node in need for user in node.users if user.target is operator.getitem}
    assert computed(cut.backward_input) <= {node.name for node in need | joint.forward}


def test_no_operation_of_w_is_in_i(made):
    _, joint, _ = made
    check_i(Pieces(joint))
    in_w = computed(Pieces(joint).backward_weight) - computed(Pieces(joint).backward_input)
    moved = [node for node in joint.module.graph.nodes if node.name in in_w and node not in joint.forward]
    assert moved
    for node in moved:
        mutant = Pieces(joint)
        inside = mutant._inside | mutant._closure([node], {*mutant._given_to_backward, *joint.held}, joint.forward)
        mutant.__dict__["_inside"] = inside
        mutant.__dict__["handed"] = [*mutant.handed, node]
        with pytest.raises(AssertionError):
            check_i(mutant)


def test_a_value_that_is_not_handed_on_is_found(made):
    _, joint, _ = made
    handed = Pieces(joint).handed
    for lost in handed:
        mutant = Pieces(joint)
        mutant.__dict__["handed"] = [node for node in handed if node is not lost]
        with pytest.raises(StageError, match="a fault of the cut"):
            mutant.backward_weight  # noqa: B018


def test_what_is_handed_on_is_no_more_than_all_that_w_reads(layers):
    """Views are computed again in W, so each piece of memory is handed on once."""
    joint, _ = layers
    cut = Pieces(joint)
    w = [node for node in joint.module.graph.nodes if node.name in computed(cut.backward_weight)]
    read = {each for node in w for each in node.all_input_nodes} | set(joint.held_gradients)
    plain = read.difference(w, joint.held)
    assert sum(map(value_bytes, cut.handed)) <= sum(value_bytes(each) or 0 for each in plain)


def test_a_cut_that_keeps_too_little_is_found(made):
    _, joint, _ = made
    kept = Pieces(joint).kept
    assert len(kept) >= 3
    for lost in kept:
        with pytest.raises(StageError, match="a fault of the cut"):
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


CONVOLUTIONS = {
    "2d": (lambda: nn.Conv2d(4, 6, 3, padding=1), (2, 4, 9, 9)),
    "without bias": (lambda: nn.Conv2d(4, 6, 3, stride=2, bias=False), (2, 4, 9, 9)),
    "in groups": (lambda: nn.Conv2d(4, 4, 3, groups=4), (2, 4, 9, 9)),
    "dilated": (lambda: nn.Conv2d(4, 6, 3, dilation=2), (2, 4, 9, 9)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2), (2, 4, 9, 9)),
    "1d": (lambda: nn.Conv1d(4, 6, 3), (2, 4, 17)),
    "3d": (lambda: nn.Conv3d(2, 3, 3), (1, 2, 5, 5, 5)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_w_computes_the_weights_of_convolutions_to_the_bit(name, dtype):
    make, shape = CONVOLUTIONS[name]
    module, x = make().to(dtype), torch.randn(shape).to(dtype).requires_grad_()
    output = module(x)
    gradient = torch.randn_like(output)
    expected = torch.autograd.grad(output, [x, *module.parameters()], gradient)
    pieces = Pieces(joint_of(module, x)[0])
    targets = [
        [node.target for node in each.module.graph.nodes] for each in (pieces.backward_input, pieces.backward_weight)
    ]
    assert [each.count(torch.ops.aten.convolution_backward.default) for each in targets] == [1, 1]
    values = {node: each.detach() for node, each in zip(pieces.joint.held, module.parameters())}
    values |= {pieces.joint.given[0]: x.detach(), pieces.joint.tangents[0]: gradient}
    found = {}
    for piece in (pieces.forward, pieces.backward_input, pieces.backward_weight):
        made = quick_code(piece)([values[node] for node in piece.inputs])
        found |= dict(zip(piece.outputs, made))
        values |= found
    made = [found[node] for node in (*pieces.joint.given_gradients, *pieces.joint.held_gradients)]
    assert all(map(torch.equal, expected, made))
