"""What `torch.utils.checkpoint` runs in a forward stays a checkpointed part of its stage: same bits, bytes and reruns."""

import copy
import functools
import pickle
import warnings

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from pippy import PipeTracer, SplitPoint, annotate_split_points, pipe_split, pipeline
from pippy.drivers.worker.halves.split_backward import WeightDeferral
from pippy.ir.base.errors import ModeError, SplitError, StageError, TracingError
from tests.comparisons import assert_same_state

pytestmark = pytest.mark.usefixtures("in_float64", "seeded")
WIDTH = 8


class Net(nn.Module):
    """Layers, a call of `part` under torch.utils.checkpoint, and a cut before it and after it."""

    def __init__(self, reentrant=False, **options):
        super().__init__()
        self.first, self.a, self.b, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)
        self.options = {"use_reentrant": reentrant, **options}

    def forward(self, x):
        x = self.first(x)
        pipe_split()
        x = self.run(x)
        pipe_split()
        return self.last(x)

    def run(self, x):
        return checkpoint(self.part, x, **self.options)

    def part(self, x):
        return torch.tanh(self.b(torch.tanh(self.a(x))))


class Draws(Net):
    def part(self, x):
        return F.dropout(self.drop(self.a(x)).tanh(), 0.3, self.training) * torch.rand(WIDTH)


class Normalizes(Net):
    def part(self, x):
        return self.norm(self.b(self.norm(self.a(x)).tanh()))


class Unpacks(Net):
    """Several arguments and results, some no tensors."""

    def run(self, x):
        a, none, b = checkpoint(self.part, x, None, x.detach() * 2, **self.options)
        return a + b if none is None else a

    def part(self, x, none, y):
        return self.a(x), none, torch.tanh(y + self.b.weight.sum() * x)


class Captures(Net):
    """A value, a parameter and a constant that are no arguments, and are used again later."""

    def run(self, x):
        mask, weight = torch.relu(x.detach()), self.a.weight
        x = checkpoint(lambda x: F.linear(x, weight).tanh() * mask + torch.tensor([1.0, 2.0] * 4), x, **self.options)
        return x + mask @ self.a.weight


class Nested(Net):
    def part(self, x):
        y = checkpoint(lambda x: torch.tanh(self.a(x)) + self.b.bias, x, **self.options)
        return checkpoint(super().part, y.sin(), **self.options) + self.b.bias


class WithoutGradients(Net):
    """Gradients switched off inside, around and off and on again."""

    def run(self, x):
        with torch.no_grad():
            scale = checkpoint(lambda x: torch.tanh(self.b(x)), x, **self.options)
            with torch.enable_grad():
                bias = self.b(x).tanh()
        return super().run(x) * scale + bias

    def part(self, x):
        with torch.no_grad():
            y = self.a(x).tanh()
        return self.b(x).tanh() + y


class InSequence(Net):
    def run(self, x):
        layers = [self.a, torch.tanh, self.b, torch.tanh, self.drop, torch.sin]
        return checkpoint_sequential(layers, 3, x, **self.options)


class Dummy(Net):
    """An argument that nobody uses makes the result require a gradient."""

    def forward(self, x):
        x = checkpoint(lambda x, _: self.part(x), x, torch.ones(1, requires_grad=True), **self.options)
        pipe_split()
        return self.last(x)


KINDS = [Net, Draws, Normalizes, Unpacks, Captures, Nested, WithoutGradients, InSequence, Dummy]


class Saved:
    """Counts the bytes that autograd keeps, without those of parameters."""

    def __init__(self, model):
        self.own, self.kept = {each.data_ptr() for each in model.parameters()}, {}

    def bytes(self, call):
        def pack(tensor):
            if tensor.data_ptr() not in self.own:
                self.kept[tensor.data_ptr()] = tensor.nbytes, tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            self.result = call()
        return sum(nbytes for nbytes, _ in self.kept.values())


def calls_of(model):
    calls = dict.fromkeys((name for name, module in model.named_modules() if not [*module.children()]), 0)

    def count(name, *_):
        calls[name] += 1

    for name in calls:
        model.get_submodule(name).register_forward_hook(functools.partial(count, name))
    return calls


def check(model, x, **options):
    """Trains a step as the plain model does. Returns the Pipe."""
    plain, target = copy.deepcopy(model), torch.randn(len(x), WIDTH)
    calls, plain_calls = calls_of(model), calls_of(plain)
    torch.manual_seed(1)
    expected = F.mse_loss(plain(x), target)
    expected.backward()
    pipe = pipeline(model, F.mse_loss, **options)
    torch.manual_seed(1)
    assert torch.equal(pipe(x, target), expected)
    for (name, own), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (own.grad is None) == (theirs.grad is None), name
        assert own.grad is None or torch.equal(own.grad, theirs.grad), name
    assert_same_state(pipe, plain)
    assert calls == plain_calls
    return pipe


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_bits_bytes_and_reruns_are_those_of_the_plain_model(kind, reentrant):
    model, x = kind(reentrant), torch.randn(6, WIDTH)
    plain, untrained = copy.deepcopy(model), pipeline(copy.deepcopy(model))
    kept = [Saved(each).bytes(lambda each=each: each(x)) for each in (untrained, plain)]
    assert kept[0] == kept[1]
    stage = untrained.split_gm.submod_1
    assert pickle.loads(pickle.dumps(stage)).code == copy.deepcopy(stage).code == stage.code
    assert list(untrained.state_dict()) == list(plain.state_dict())
    check(model, x)


def test_little_is_kept():
    """Traced through, it kept 12 times as much."""

    class Wide(Net):
        def part(self, x):
            for _ in range(6):
                x = torch.tanh(self.a(x))
            return x

        def run(self, x):
            return x + super().run(x.sin())

    model, x = Wide(), torch.randn(32, WIDTH)
    assert Saved(model).bytes(lambda: pipeline(model)(x)) <= 4 * x.nbytes


def test_a_part_is_printed_as_a_function():
    stage = pipeline(Captures()).split_gm.submod_1
    assert "def forward(self, first):\n" in str(stage)
    assert str(stage).partition("def part")[2].splitlines() == [
        "(first, *, a_weight = a_weight, relu = relu):",
        "        linear = torch._C._nn.linear(first, a_weight);  first = None",
        "        tanh = linear.tanh();  linear = None",
        "        mul = tanh * relu;  tanh = None",
        "        _tensor_constant0 = self._tensor_constant0",
        "        add = mul + _tensor_constant0;  mul = _tensor_constant0 = None",
        "        return add",
        "    add = torch.utils.checkpoint.checkpoint(part, first, use_reentrant=False);  part = first = None",
        "    matmul = relu @ a_weight;  relu = a_weight = None",
        "    add_1 = add + matmul;  add = matmul = None",
        "    return add_1",
    ]


# Marks


class Marked(Net):
    def part(self, x):
        x = self.a(x)
        pipe_split()
        return self.b(x)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_mark_inside_is_refused_with_its_line(reentrant):
    with pytest.raises(
        SplitError, match=r"(?s)a mark lies inside .*    pipe_split\(\).*return checkpoint\(self.part, x"
    ):
        pipeline(Marked(reentrant))


class TwoCalls(Net):
    """The remedy."""

    def run(self, x):
        x = checkpoint(self.a, x, **self.options)
        pipe_split()
        return checkpoint(self.b, x, **self.options)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("point", SplitPoint)
def test_a_mark_at_the_edge_cuts_beside_the_part(point, reentrant):
    assert check(TwoCalls(reentrant), torch.randn(3, WIDTH)).num_stages == 4

    class Unmarked(Unpacks):
        def forward(self, x):
            return self.last(checkpoint(self.run, self.first(x), **self.options).sin())

        def part(self, x, none, y):
            return self.a(x), None, self.b(x)

    model = Unmarked(reentrant)
    annotate_split_points(model, {"a" if point is SplitPoint.BEGINNING else "b": point})
    with pytest.raises(SplitError, match="a mark lies inside"):  # of the outer part, which computes more
        pipeline(model)
    model.forward = None
    del model.forward
    type(model).forward = lambda self, x: self.last(self.run(self.first(x)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe = check(model, torch.randn(3, WIDTH))
    assert pipe.num_stages == 2
    assert ("a.weight" in dict(pipe.split_gm.submod_0.named_parameters())) is (point is SplitPoint.END)


@pytest.mark.parametrize("reentrant", [True, False])
def test_the_balancer_cuts_beside_parts(reentrant):
    class Chain(Net):
        def forward(self, x):
            for _ in range(3):
                x = checkpoint(self.part, x.sin(), **self.options)
            return x

        def part(self, x):
            return x.cos().sin().cos().sin()

    for stages in (2, 3):
        pipe = pipeline(Chain(reentrant), num_stages=stages, split="uniform")
        assert [stage.code.count("def part") for _, stage in pipe.stages()] == [3 // stages] * (stages - 1) + [
            3 - 3 // stages * (stages - 1)
        ]


# What is said of a call


@pytest.mark.parametrize(
    "options",
    [{"preserve_rng_state": False}, {"determinism_check": "none"}, {"early_stop": False}],
    ids=str,
)
def test_options_of_the_call(options):
    (name,) = options
    pipe = check(Normalizes(**options), torch.randn(6, WIDTH))
    assert f"part, first, use_reentrant=False, {name}={options[name]!r})" in pipe.split_gm.submod_1.code


NEWER = pytest.mark.skipif(not hasattr(torch.utils.checkpoint, "_make_checkpoint_wrapper"), reason="torch is older")


@NEWER
def test_the_option_of_newer_torch():
    pipe = check(Normalizes(respect_saved_tensors_hooks=True), torch.randn(6, WIDTH))
    assert "use_reentrant=False, respect_saved_tensors_hooks=True)" in pipe.split_gm.submod_1.code


class Decorates(Net):
    def run(self, x):
        return checkpoint(use_reentrant=False)(self.part)(x)


@NEWER
def test_the_decorator_of_newer_torch():
    assert "use_reentrant=False)" in check(Decorates(), torch.randn(6, WIDTH)).split_gm.submod_1.code


def test_early_stop_of_a_region_in_forward():
    class Stops(Normalizes):
        def run(self, x):
            with set_checkpoint_early_stop(False):
                return super().run(x)

    assert "early_stop=False" in check(Stops(), torch.randn(6, WIDTH)).split_gm.submod_1.code


def keep_products(context, operator, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if operator is torch.ops.aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE


class Selects(Net):
    """A function of forward's own, another in each trace."""

    def run(self, x):
        return checkpoint(
            self.part, x, context_fn=lambda: create_selective_checkpoint_contexts(keep_products), **self.options
        )


@pytest.mark.parametrize("local", [True, False])
def test_context_fn(local):
    contexts = functools.partial(create_selective_checkpoint_contexts, keep_products)
    model, x = Selects() if local else Net(context_fn=contexts), torch.randn(6, WIDTH)
    pipe = check(model, x)
    assert "context_fn=" in pipe.split_gm.submod_1.code
    if not local:
        kept = [Saved(each).bytes(lambda each=each: each(x)) for each in (pipeline(copy.deepcopy(model)), model)]
        assert kept[0] == kept[1]
        pickle.loads(pickle.dumps(pipeline(Net(context_fn=contexts)).split_gm.submod_1))(x)


class Refused(Net):
    def run(self, x):
        return self.part(checkpoint(lambda x: {"x": self.a(x)}, x, **self.options)["x"])


class Leaves(Net):
    def run(self, x):
        def part(x):
            y = self.a(x)
            left.append(y)
            return y.sin()

        left = []
        return checkpoint(part, x, **self.options) + left[0]


class OfTheValue(Net):
    def run(self, x):
        return checkpoint(self.part, x, context_fn=lambda: (x.sin(), x.cos()), **self.options)


@pytest.mark.parametrize(
    ("kind", "reentrant", "message"),
    [
        (Refused, True, r"(?s)returns a dict of tensors.*return self.part\(checkpoint\("),
        (Leaves, True, r"(?s)is used outside without being returned.*y = self.a\(x\)"),
        (OfTheValue, False, r"(?s)uses a traced value.*return checkpoint\(self.part, x"),
        (functools.partial(Net, determinism_check="all"), False, r"(?s)determinism_check='all'.*checkpoint\(self.part"),
    ],
)
def test_what_cannot_be_followed_is_refused_with_the_line(kind, reentrant, message):
    with pytest.raises(TracingError, match=message):
        pipeline(kind(reentrant))
    torch.compile(torch.neg, backend="eager")(torch.ones(2))  # then torch runs `checkpoint` in a function of its own
    with pytest.raises(TracingError, match=message):
        pipeline(kind(reentrant))


@pytest.mark.parametrize("kind", [Refused, Leaves])
def test_the_advice_is_right(kind):
    check(kind(False), torch.randn(3, WIDTH))


# How a stage runs


@pytest.mark.parametrize("reentrant", [True, False])
def test_an_error_in_a_part_names_the_line(reentrant):
    class Fails(Net):
        def part(self, x):
            y = self.a(x).tanh()
            return y.view(3, -1, 5)

    with pytest.raises(StageError, match=r"(?s)forward of submod_1 failed.*return y.view\(3, -1, 5\)"):
        pipeline(Fails(reentrant))(torch.randn(6, WIDTH))


class FailsTheSecondTime(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 2:
            raise ArithmeticError("not again")
        return x


@pytest.mark.parametrize("reentrant", [True, False])
def test_an_error_in_the_second_run_of_a_part_names_the_line(reentrant):
    class Twice(Net):
        def __init__(self, reentrant):
            super().__init__(reentrant)
            self.leaf = FailsTheSecondTime()

        def part(self, x):
            x = self.leaf(self.a(x))
            return x.tanh()

    class Leaf(PipeTracer):
        def is_leaf_module(self, module, name):
            return name == "leaf" or super().is_leaf_module(module, name)

    pipe, x = pipeline(Twice(reentrant), F.mse_loss, tracer=Leaf), torch.randn(6, WIDTH)
    with pytest.raises(
        StageError, match=r"(?s)backward of submod_1 failed.*not again\n[^\n]*\n +x = self.leaf\(self.a\(x\)\)\n"
    ):
        pipe(x, x)


@pytest.mark.parametrize("reentrant", [True, False])
def test_halves_of_a_backward(reentrant):
    stage, plain = pipeline(Captures(reentrant)).split_gm.submod_1, None
    x = torch.randn(6, WIDTH, requires_grad=True)
    plain, deferral = copy.deepcopy(stage), WeightDeferral(stage, at_least=0)
    with deferral.recording([x]) as deferred:
        output = stage(x)
    (grad,) = deferred.backward_input(output, torch.ones_like(output), [x])
    deferred.run()
    own = x.detach().requires_grad_()
    plain(own).sum().backward()
    torch.testing.assert_close(grad, own.grad)
    for mine, theirs in zip(stage.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize("reentrant", [True, False])
def test_autocast_and_no_grad(reentrant):
    model, x = Nested(reentrant).float(), torch.randn(6, WIDTH, dtype=torch.float32)
    plain, target = copy.deepcopy(model), torch.randn(6, WIDTH, dtype=torch.float32)
    pipe = pipeline(model, F.mse_loss)
    with torch.autocast("cpu", torch.bfloat16):
        expected = F.mse_loss(plain(x), target)
        expected.backward()
        assert torch.equal(pipe(x, target), expected)
        for own, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert own.grad is theirs.grad is None or torch.equal(own.grad, theirs.grad)
    with torch.no_grad():
        assert torch.equal(pipe(x, target), F.mse_loss(plain(x), target))


# Training flags


class InTraining(Net):
    """As many models have it: checkpoints in training only."""

    def run(self, x):
        if self.training:
            return super().run(x)
        return self.part(x)


class UnpacksInTraining(Unpacks):
    def run(self, x):
        y = x.detach() * 2
        if self.training:
            a, _, b = checkpoint(self.part, x, None, y, **self.options)
        else:
            a, _, b = self.part(x, None, y)
        return a + b


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kind", [InTraining, UnpacksInTraining])
def test_a_model_that_checkpoints_in_training_only(kind, reentrant):
    model, x = kind(reentrant), torch.randn(6, WIDTH)
    pipe, plain = check(model, x), copy.deepcopy(model).eval()
    pipe.eval()
    assert torch.equal(pipe(x, x), F.mse_loss(plain(x), x))
    with pytest.raises(ModeError, match="make another Pipe from the model in train"):  # it would not be checkpointed
        pipeline(kind(reentrant).eval(), F.mse_loss).train()(x, x)


@pytest.mark.parametrize("tracer", [fx.Tracer, PipeTracer])
@pytest.mark.parametrize("reentrant", [True, False])
def test_tracers(tracer, reentrant):
    check(Unpacks(reentrant), torch.randn(6, WIDTH), tracer=tracer)
