"""A stage as flat graphs is the stage to the bit: outputs, gradients, buffers, random numbers. If not, it is refused."""

import copy
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from pippy.drivers.worker.compiled.stage_graphs import StageGraphs
from pippy.ir.base.errors import StageError
from pippy.ir.base.trees import leaves, tensors
from pippy.ir.halves import adding_up
from pippy.ir.run.stage_backward import stage_backward
from pippy.ir.run.stage_run import as_leaf


@pytest.fixture(autouse=True)
def adds_up_all_sizes(monkeypatch):
    """Pieces add up the gradients of these small parameters, too."""
    monkeypatch.setattr(adding_up, "_WORTH_IT", 0)


class Block(nn.Module):
    """Attention, norms, and views of one product."""

    def __init__(self, width=8, heads=2):
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.back = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.back(F.gelu(self.wide(x)))


class Embeds(nn.Module):
    """An embedding whose weight is tied to the projection, and an input without gradients."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.norm(self.embed(tokens)))


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x):
        return F.max_pool2d(F.relu_(self.norm(self.conv(x))), 2)


class InPlace(nn.Module):
    """Changes what it has made, and a buffer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("largest", torch.zeros(8))

    def forward(self, x):
        y = self.linear(x)
        y[:, 0] = 1
        y *= self.largest.sum() + 2
        self.seen += 1
        torch.maximum(self.largest, x.detach().amax(0), out=self.largest)
        return y, self.largest


class Several(nn.Module):
    """Takes and gives containers, constants, and values that nothing follows."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.unused = nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(2, 2)
        self.two.bias.requires_grad_(False)

    def forward(self, pair, rate):
        x, y = pair["x"], pair["y"]
        return {"sum": self.one(x) + self.two(y) * rate, "mask": x > 0, "n": 3}, y.detach(), self.one(y).tanh()


class Drops(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        x = F.dropout(self.linear(x).transpose(0, 1), 0.4, self.training).transpose(0, 1)
        return F.dropout(x, 0.2, self.training) + torch.rand_like(x)


class Checkpointed(nn.Module):
    """A part that torch.utils.checkpoint computes again in the backward."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))

    def forward(self, x):
        return checkpoint(self.layers, x, use_reentrant=False) + x


class Disabled(nn.Linear):
    @torch.compiler.disable
    def forward(self, x):
        return super().forward(x)


@torch.compile(backend="eager")
def doubled(x):
    return x.tanh() * 2


class CallsCompiled(nn.Linear):
    def forward(self, x):
        return doubled(super().forward(x))


def floats(*shape):
    return torch.randn(*shape, dtype=torch.float64).requires_grad_()


# A module, its inputs, and the gradients of its outputs.
CASES = {
    "checkpointed": (lambda: Checkpointed(), lambda: [floats(3, 8)], lambda: torch.randn(3, 8).double()),
    "attention": (lambda: Block(), lambda: [floats(2, 5, 8)], lambda: torch.randn(2, 5, 8).double()),
    "blocks": (
        lambda: nn.Sequential(Block(), Block()),
        lambda: [floats(2, 5, 8)],
        lambda: torch.randn(2, 5, 8).double(),
    ),
    "tied": (lambda: Embeds(), lambda: [torch.randint(11, (4, 3))], lambda: torch.randn(4, 3, 11).double()),
    "batch norm": (lambda: Normed(), lambda: [floats(2, 3, 6, 6)], lambda: torch.randn(2, 4, 3, 3).double()),
    "evaluated": (lambda: Normed().eval(), lambda: [floats(2, 3, 6, 6)], lambda: torch.randn(2, 4, 3, 3).double()),
    "no gradient in": (lambda: Block(), lambda: [floats(2, 5, 8).detach()], lambda: torch.randn(2, 5, 8).double()),
    "in place": (lambda: InPlace(), lambda: [floats(3, 8)], lambda: [torch.randn(3, 8).double(), None]),
    "containers": (
        lambda: Several(),
        lambda: [{"x": floats(3, 8), "y": floats(3, 8)}, 0.5],
        lambda: [(torch.randn(3, 4).double(), None, None), None, None],
    ),
    "two outputs": (
        lambda: Several(),
        lambda: [{"x": floats(3, 8), "y": floats(3, 8).detach()}, 0.5],
        lambda: [(torch.randn(3, 4).double(), None, None), None, torch.randn(3, 4).double()],
    ),
    "gradient with other strides": (
        lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh()),
        lambda: [floats(3, 8)],
        lambda: torch.randn(8, 3).double().t(),
    ),
    "gradient of one number": (
        lambda: nn.Linear(8, 8),
        lambda: [floats(3, 8)],
        lambda: torch.ones(1, 1).double().expand(3, 8),
    ),
    "drops": (lambda: Drops(), lambda: [floats(4, 8)], lambda: torch.randn(4, 8).double()),
    "recurrent": (  # its gates are views that are changed in place: on other strides they would round differently
        lambda: nn.GRU(8, 8, batch_first=True),
        lambda: [floats(3, 5, 8)],
        lambda: [torch.randn(3, 5, 8).double(), torch.randn(1, 3, 8).double()],
    ),
    "calls a compiled function": (
        lambda: CallsCompiled(8, 8),
        lambda: [floats(3, 8)],
        lambda: torch.randn(3, 8).double(),
    ),
    "loss": (lambda: nn.MSELoss(), lambda: [floats(4, 8), floats(4, 8).detach()], lambda: 0.25),
}


def same(one, other):
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other) and one.requires_grad == other.requires_grad
    else:
        assert one == other


@pytest.mark.parametrize("way", ["backward", "halves"])
@pytest.mark.parametrize("name", CASES)
def test_to_the_bit(name, way):
    make, make_inputs, make_gradients = CASES[name]
    torch.manual_seed(0)
    plain = make().double()
    stage = copy.deepcopy(plain)
    graphs = StageGraphs("stage", stage)
    inputs, gradients = make_inputs(), make_gradients()
    for turn in range(3):
        own, other = (tuple(map(as_leaf, inputs)) for _ in range(2))
        torch.manual_seed(turn)
        expected = plain(*own)
        after = torch.rand(2)
        wanted = stage_backward(expected, gradients, own)
        torch.manual_seed(turn)
        made = graphs.forward(other)
        assert made is not None, graphs.said()
        outputs, run = made
        assert torch.equal(torch.rand(2), after), "drew as many random numbers"
        for one, each in zip(leaves(expected), leaves(outputs), strict=True):
            same(one, each)
        if way == "halves":
            found = run.backward_input(gradients)
            if any(each.requires_grad for each in tensors(inputs)):
                assert turn or all(each.grad is None for each in stage.parameters()), "W makes all of these"
            run.backward_weight()
        else:
            found = run.backward(gradients)
        for one, each in zip(leaves(wanted), leaves(tuple(found)), strict=True):
            assert (one is None and each is None) or torch.equal(one, each)
        for (parameter, one), each in zip(plain.named_parameters(), stage.parameters()):
            assert (one.grad is None) == (each.grad is None), parameter
            assert one.grad is None or (torch.equal(one.grad, each.grad) and one.grad.stride() == each.grad.stride())
        for (buffer, one), each in zip(plain.named_buffers(), stage.buffers()):
            assert torch.equal(one, each), buffer
    assert graphs.said() == "graphs for 1 form of inputs"


class Changes(nn.Linear):
    """A layer that a test gives another forward."""

    def __init__(self, does):
        super().__init__(8, 8)
        self.does, self.count = does, 0

    def forward(self, x):
        return self.does(self, super().forward(x))


def counts(module, y):
    module.count += 1
    return y * module.count


def replaces(module, y):
    module.register_buffer("kept", y.detach()) if "kept" not in module._buffers else setattr(module, "kept", y.detach())
    return y


class Twice(nn.Module):
    """Gives one tensor twice, and reads a dict by its keys."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, pair):
        y = self.one(pair["x"]) + self.two(pair["y"])
        return y, y


def test_one_tensor_given_twice_and_dicts_in_another_order():
    stage = Twice()
    plain, graphs = copy.deepcopy(stage), StageGraphs("stage", stage)
    x, y, gradients = torch.randn(4, 8), torch.randn(4, 8), [torch.randn(4, 8), torch.randn(4, 8)]
    for pair in ({"x": x, "y": y}, {"y": x, "x": y}):
        expected = plain(pair)
        stage_backward(expected, gradients, [])
        outputs, run = graphs.forward([pair])
        run.backward(gradients)
        assert all(map(torch.equal, expected, outputs))
        for one, other in zip(plain.parameters(), stage.parameters()):
            assert torch.equal(one.grad, other.grad)
    assert len(graphs.forms) == 2


def notes_gradients(module, y):
    """A hook that keeps the gradient: in a graph it would run once, and keep a tensor without data."""
    if y.requires_grad:
        y.register_hook(lambda gradient: setattr(module, "seen", gradient))
    return y.tanh()


class DrawsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.rand_like(gradient)


class Odd:
    """A value that no graph gives."""


class CheckpointedNorm(nn.Module):
    """It counts what it normalizes when it is computed again, too."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        return checkpoint(self.norm, x, use_reentrant=False)


REFUSED = {
    "changes its attribute count": counts,
    "changes its attribute kept": replaces,
    "changes its attribute seen": notes_gradients,
    "gives a Odd": lambda module, y: (y, Odd()),
    "draws random numbers in its backward": lambda module, y: DrawsInBackward.apply(y),
    "asks for the values of tensors": lambda module, y: y if y.sum() > 0 else -y,
    "changes a parameter in place": lambda module, y: y + module.bias.detach().add_(1).sum(),
}


def refused(module, *inputs):
    """Why a stage has no graphs. It is as before afterwards."""
    graphs = StageGraphs("stage", module)
    before = {name: (each, each.clone()) for name, each in module.state_dict(keep_vars=True).items()}
    assert graphs.forward(inputs) is None and graphs.forward(inputs) is None
    for name, each in module.state_dict(keep_vars=True).items():
        assert each is before[name][0] and torch.equal(each, before[name][1])
    return graphs.said().removeprefix("eager: it ")


@pytest.mark.parametrize("why", REFUSED)
def test_what_no_graph_would_do_is_refused(why):
    module = Changes(REFUSED[why])
    assert why in refused(module, torch.randn(3, 8, requires_grad=True))
    assert module.count == 0


def test_more_that_is_refused():
    x = torch.randn(3, 8)
    hooked = nn.Sequential(nn.Linear(8, 8))
    hooked[0].register_forward_hook(lambda *_: None)
    assert refused(hooked, x) == "has hooks on 0, which a graph would not run"
    assert (
        refused(nn.Linear(8, 8), x.to_sparse())
        == "is given a tensor that is not a plain one (sparse_coo float32[3, 8])"
    )
    assert refused(nn.ReLU(inplace=True), x) == "changes in place what it is given"
    assert refused(nn.Identity(), [Odd()]) == "is given a Odd"
    disabled = nn.Sequential(Disabled(8, 8))
    assert refused(disabled, x) == "has 0 marked by torch.compiler.disable"
    assert refused(CheckpointedNorm(), x.clone().requires_grad_()) == "changes a buffer in its backward"


def test_each_form_of_inputs_and_each_mode_has_graphs_of_its_own():
    stage = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    graphs = StageGraphs("stage", stage)
    x = torch.randn(4, 8, requires_grad=True)
    for given in (x, x[:2].detach(), x.detach(), torch.randn(8, 4).t()):
        for _ in range(2):
            graphs.forward([given])
    assert len(graphs.forms) == 4
    stage.eval()
    assert torch.equal(graphs.forward([x])[0], stage(x))
    stage[0].weight.requires_grad_(False)
    outputs, run = graphs.forward([x])
    run.backward(torch.ones(4, 8))
    assert stage[0].weight.grad is None and stage[0].bias.grad is not None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(graphs.forward([x])[0], stage(x))
    assert len(graphs.forms) == 7


def test_a_kept_value_that_is_changed_is_found():
    graphs = StageGraphs("stage", nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    x = torch.randn(4, 8)
    for change in ("input", "output", "gradient"):
        given, gradient = x.clone().requires_grad_(), torch.ones(4, 8)
        output, run = graphs.forward([given])
        if change == "gradient":
            run.backward_input(gradient)
        with torch.no_grad():
            {"input": given, "output": output, "gradient": run.handed[-1] if run.handed else x}[change].mul_(2)
        with pytest.raises(StageError, match="needs was changed in place since the forward"):
            run.backward(gradient) if change != "gradient" else run.backward_weight()


def test_a_run_keeps_what_its_backward_reads_and_not_its_output():
    graphs = StageGraphs("stage", nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)))
    x = torch.randn(4, 8, requires_grad=True)
    output, run = graphs.forward([x])
    kept = [each.data_ptr() for each in run.kept]
    assert output.data_ptr() not in kept and x.data_ptr() in kept
    assert sum(each.numel() for each in run.kept) == 3 * 4 * 8, "the input, and what the GELU takes and gives"
    run.backward_input(torch.ones(4, 8))
    assert run.kept == [] and sum(each.numel() for each in run.handed) == 4 * 4 * 8
    run.backward_weight()
    assert run.handed == []


@pytest.mark.parametrize("way", ["backward", "backward_input"])
def test_what_is_kept_is_held_by_the_piece_alone_while_that_runs(monkeypatch, way):
    """So it is freed where the piece has read it last; only what W reads, too, stays."""
    graphs = StageGraphs("stage", nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)))
    x = torch.randn(4, 8, requires_grad=True)
    run = graphs.forward([x])[1]
    before_gelu = next(at for at, node in enumerate(run.form.cut.kept) if node.name == "addmm")
    kept = weakref.ref(run.kept[before_gelu])
    call, freed = run.form.call, []

    def watched(piece, values):
        copies = [each.detach() for each in values]
        values.clear()
        freed.append(kept() is None)
        return call(piece, copies)

    monkeypatch.setattr(run.form, "call", watched)
    getattr(run, way)(torch.ones(4, 8))
    assert freed == [True]


GIVEN = {
    "hook": lambda weight: weight.register_hook(lambda gradient: 2 * gradient),
    "hook behind": lambda weight: weight.register_post_accumulate_grad_hook(lambda each: (each.grad.mul_(3), None)[1]),
    "other strides": lambda weight: setattr(weight, "grad", torch.ones(8, 8).t()),
    "a gradient that requires one": lambda weight: setattr(weight, "grad", torch.ones(8, 8, requires_grad=True)),
}


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("given", GIVEN)
def test_a_gradient_that_autograd_does_more_with_is_added_by_it(given, halves):
    stage = nn.Linear(8, 8, bias=False)
    plain = copy.deepcopy(stage)
    for each in (stage, plain):
        GIVEN[given](each.weight)
    graphs = StageGraphs("stage", stage)
    for _ in range(2):
        x = torch.randn(4, 8, requires_grad=True)
        run = graphs.forward([x], halves=halves)[1]
        if halves:
            run.backward_input(torch.ones(4, 8))
            run.backward_weight()
        else:
            run.backward(torch.ones(4, 8))
        plain(x).sum().backward()
    assert torch.equal(stage.weight.grad, plain.weight.grad)
    assert stage.weight.grad.stride() == plain.weight.grad.stride()
