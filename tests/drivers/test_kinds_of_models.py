"""Models with parts that tracing treats in a way of their own train on workers as plain PyTorch trains them."""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributions import Normal, kl_divergence
from torch.export import export
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from pippy import pipe_split, pipeline
from pippy.drivers.base.errors import StepError
from pippy.drivers.batch.merge import Sum
from pippy.drivers.driver.drivers import PipelineDriver, PipelineDriver1F1B
from pippy.errors import InputError, PippyWarning
from tests.comparisons import Beside, assert_same, run_plain, twin
from tests.ir.cut.test_ways import MODELS, TARGET, Critic, Net, X, penalized_silently, penalty_of
from tests.ir.trace.test_exported import Blocks, Called, exported, ids, numbers
from tests.ir.trace.test_function_transforms import TRANSFORMED, kept
from tests.ir.trace.test_kept_whole import Net as Branching
from tests.ir.trace.test_kept_whole import X as ROWS

pytestmark = [pytest.mark.usefixtures("in_float64", "seeded"), pytest.mark.filterwarnings("ignore::pippy.PippyWarning")]

WIDTH = 16


def keep_products(context, operator, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if operator is torch.ops.aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE


class Checkpointed(nn.Module):
    """Four checkpointed blocks in as many stages; the first makes what all use."""

    def __init__(self, reentrant=False, selective=None, width=WIDTH):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList([self.block(width) for _ in range(4)])
        self.options = {"use_reentrant": reentrant}
        if selective is not None:
            self.options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, selective)

    def block(self, width):
        return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))

    def forward(self, x):
        shift = self.first(x)
        x = shift.relu()
        for index, block in enumerate(self.blocks):
            if index:
                pipe_split()
            x = x + checkpoint(lambda x, y, block=block: torch.sin(block(x) + y), x, shift, **self.options)
        return x


# Modules whose classes torch makes while the program runs: weight norm, spectral norm, and others of that kind.


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).mT


def symmetric(module):
    parametrize.register_parametrization(module, "weight", Symmetric())
    return module


def old(function):
    def apply(module):
        with pytest.warns(FutureWarning):
            return function(module)

    return apply


NORMS = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "of the user": symmetric,
    "old weight_norm": old(nn.utils.weight_norm),
    "old spectral_norm": nn.utils.spectral_norm,
}


class Normed(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.first, self.second, self.last = norm(nn.Linear(4, 4)), norm(nn.Linear(4, 4)), nn.Linear(4, 4)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        pipe_split()
        x = torch.tanh(self.second(x))
        pipe_split()
        return self.last(x)


# Models that torch.compile and torch.jit were called on, whole and in parts.


class Parted(nn.Module):
    def __init__(self, wrap=lambda part: part):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)
        self.part = wrap(nn.Sequential(nn.Linear(8, 8), nn.Tanh()).double())
        self.double()

    def forward(self, x):
        return self.last(self.part(self.first(x).relu()))


@torch.compile(backend="eager")  # every process that collects tests would import inductor, which takes seconds
def doubled(x):
    return x * 2


@torch.jit.script
def shifted(x, by: float = 1.0):
    if bool(x.sum() > 1000):  # no tracer could follow it
        by = 2.0
    return x + by


class CallsFunctions(Parted):
    def forward(self, x):
        return self.last(shifted(self.part(doubled(self.first(x))), by=0.5))


class CompiledForward(Parted):
    @torch.compile(backend="eager")
    def forward(self, x):
        return self.last(self.part(self.first(x).relu()))


def compiled_in_place(module):
    module.compile(backend="eager")
    return module


def with_compiled_method(model):
    model.forward = torch.compile(model.forward, backend="eager")
    return model


# Each kind of model, beside the plain model.


@dataclass
class Kind:
    """How a model is made, how the plain one is, where that is another, and what both are given."""

    make: Callable[[], nn.Module]
    given: Callable[[], Any] = lambda: torch.randn(2, 6, 4)
    plain: Callable[[], nn.Module] | None = None
    pipe: dict[str, Any] = field(default_factory=dict)
    chunks: int = 3


def compiled(make, plain=Parted):
    """Parts that are compiled by a backend that takes no time, and plain the same without."""
    example = torch.ones(2, 4).double(), torch.ones(2, 2).double()
    pipe = {"num_stages": 2, "example_args": example}
    return Kind(make, lambda: (torch.randn(6, 4), torch.randn(6, 2)), plain, pipe)


def transformed(name, chunks):
    """A function that a transform of torch.func runs."""
    pipe = {"example_args": (torch.ones(6, 4).double(),) * 2}
    return Kind(lambda: kept(TRANSFORMED[name]), pipe=pipe, chunks=chunks)


def wide():
    return torch.randn(2, 12, WIDTH)


OPERATORS = [torch.ops.aten.addmm.default, torch.ops.aten.mm.default]
OF_ROWS = [name for name in MODELS if "parameter" not in name and name not in ("inner loop", "of two values")]
KINDS = {
    "checkpointed, reentrant": Kind(lambda: Checkpointed(reentrant=True), wide),
    "checkpointed": Kind(Checkpointed, wide),
    "checkpointed by a policy": Kind(lambda: Checkpointed(selective=keep_products), wide),
    "checkpointed by a list": Kind(lambda: Checkpointed(selective=OPERATORS), wide),
    "vmap with values from outside": transformed("vmap with values from outside", 1),  # it sums over the rows
    "a gradient for each row": transformed("a gradient for each row", 2),
    "hessian": transformed("hessian", 2),
    **{
        f"{name} in forward": Kind(partial(Net, MODELS[name]), lambda: (X.clone(), TARGET), pipe={"num_stages": 2})
        for name in OF_ROWS
    },
    **{name: Kind(partial(Normed, norm), chunks=1) for name, norm in NORMS.items()},
    "torch.compile(model)": compiled(lambda: torch.compile(Parted(), backend="eager")),
    "model.compile()": compiled(lambda: compiled_in_place(Parted())),
    "a compiled part": compiled(*[lambda: Parted(partial(torch.compile, backend="eager"))] * 2),
    "a part compiled in place": compiled(lambda: Parted(compiled_in_place)),
    "compiled and scripted functions": compiled(CallsFunctions, CallsFunctions),
    "a compiled forward": compiled(CompiledForward),
    "a compiled forward set on the instance": compiled(lambda: with_compiled_method(Parted())),
    "a scripted part": compiled(lambda: Parted(torch.jit.script)),
    "a traced part": compiled(lambda: Parted(lambda part: torch.jit.trace(part, torch.randn(2, 8).double()))),
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("where", "schedule"), [("cluster", "1f1b"), ("threads", "zb_h1")])
def test_it_trains_as_the_plain_model(name, where, schedule, request):
    """Gradients of two steps add up; then the parameters change."""
    kind, made = KINDS[name], []
    for make in (kind.plain or kind.make, kind.make):
        torch.manual_seed(3)
        made.append(make())
    both = Beside(request.getfixturevalue(where), made[1], plain=made[0], pipe=kind.pipe, schedule=schedule)
    both.optimize(torch.optim.SGD, lr=0.1)
    for _ in range(2):
        both.run(kind.chunks, *kind.given())
        both.step(kind.chunks, *kind.given())
        both.update()
    both.same_state()
    both.driver.close()


@pytest.mark.parametrize("reentrant", [True, False])
def test_autocast_around_the_step(threads, reentrant):
    both = Beside(threads, Checkpointed(reentrant).float())
    x, target = torch.randn(2, 8, WIDTH, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        both.run(1, x, target, rtol=0, atol=0)
    both.same_gradients(rtol=1e-2, atol=1e-4)


class Scaled(nn.Module):
    """The loss is linear in the weights, so it is their product with the gradients: if the backward drops what was dropped."""

    def __init__(self, reentrant):
        super().__init__()
        self.first, self.last = nn.Parameter(torch.rand(WIDTH) + 1), nn.Parameter(torch.rand(WIDTH) + 1)
        self.reentrant = reentrant

    def forward(self, x):
        x = checkpoint(self.part, x, self.first, use_reentrant=self.reentrant)
        pipe_split()
        return checkpoint(self.part, x, self.last, use_reentrant=self.reentrant)

    def part(self, x, scale):
        return F.dropout(x * scale)


def mean(output, target):
    return output.mean()


@pytest.mark.parametrize("options", [{}, {"compile": {"backend": "aot_eager"}}], ids=str)
def test_the_backward_drops_the_same_again(threads, options):
    """On one worker: the threads of this process have one random state."""
    for reentrant in (False,) if options else (False, True):
        model, x = Scaled(reentrant), torch.rand(8, WIDTH)
        driver = PipelineDriver(pipeline(model, mean), threads, world_size=1, loss_reduction="mean", **options)
        loss = driver.run(2, x, x)
        for name, gradient in driver.gradients().items():
            torch.testing.assert_close(gradient @ model.get_parameter(name), loss)
        driver.close()


# A loss that differentiates.


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_a_gradient_penalty_is_refused_in_the_loss_and_right_in_forward(cluster, schedule):
    critic = Critic(with_gradient=False)
    with pytest.raises(StepError, match="return it beside the output"):
        PipelineDriver(pipeline(critic, penalized_silently), cluster, schedule=schedule).run(3, X, TARGET)

    def loss_fn(output, target):
        return output[0].mean() + penalty_of(output[1])

    both = Beside(cluster, Critic(with_gradient=True), loss_fn, schedule=schedule)  # as the message advises
    both.step(3, X.clone(), TARGET)
    both.step(3, X.clone(), TARGET)


# Models whose forward makes distributions of torch: what these ask of numbers is asked where the numbers are.


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last, self.scale = nn.Linear(4, 4), nn.Linear(4, 2), nn.Parameter(torch.ones(2))

    def forward(self, x, action):
        chosen = Normal(self.last(torch.tanh(self.first(x))), self.scale, validate_args=True)
        prior = Normal(torch.zeros_like(action), torch.ones_like(action))
        return kl_divergence(chosen, prior).sum(1) - chosen.log_prob(action).sum(1)


@pytest.mark.parametrize("with_example", [False, True])
def test_distributions_in_forward(with_example, threads):
    x, action, target = torch.randn(6, 4), torch.randn(6, 2), torch.randn(6)
    example = (x[:2], action[:2], target[:2]) if with_example else None
    both = Beside(threads, Policy(), pipe={"num_stages": 2, "split": "parameters", "example_args": example})
    both.step(2, x, action, target)
    action[5, 0] = torch.nan
    with pytest.raises(ValueError, match="invalid values"):
        both.plain(x, action)
    with pytest.raises(StepError, match="was given 1 value that is not valid"):
        both.driver.run(2, x, action, target)


# Programs of `torch.export`, on workers.


def test_a_driver_runs_it_with_micro_batches_of_any_size(threads):
    model, program, _, kwargs, _ = exported("language")
    plain = copy.deepcopy(model)
    whole = {"ids": ids(5)}
    expected = run_plain(Called(plain, kwargs), None, "loss", (whole,), None)
    driver = PipelineDriver1F1B(pipeline(program), threads, output_spec={"rows": Sum()})
    for chunks in (1, 3, 5):
        driver.zero_grad()
        result = driver.run(chunks, whole, **kwargs)
        assert_same(result["loss"], expected["loss"], f"loss with {chunks} micro-batches")
        for name, parameter in plain.named_parameters():
            assert_same(driver.get_grad(name), parameter.grad, f"gradient of {name}")
    with pytest.raises(InputError, match=r"size\(\)\[1\] > 3"):
        driver.run(1, {"ids": ids(5, 3)}, **kwargs)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_its_buffers_change_once_in_a_step(checkpoint, threads):
    model, program, _, _, loss_fn = exported("counted")
    both = Beside(threads, program, loss_fn, plain=copy.deepcopy(model), checkpoint=checkpoint)
    for _ in range(2):
        both.zero_grad()
        both.step(2, numbers(4), numbers(4)[:, :1])
    both.same_state()


def test_a_program_of_fixed_rows_runs_micro_batches_of_these(threads):
    model = Blocks()
    program, plain = export(model, (numbers(2),)), copy.deepcopy(model)
    driver = PipelineDriver1F1B(pipeline(program, nn.MSELoss(), num_stages=2, split="parameters"), threads, check=False)
    x, target = numbers(6), numbers(6)
    assert_same(driver.run(3, x, target), run_plain(plain, nn.MSELoss(), None, (x,), target), "loss")
    with pytest.raises(InputError, match=r"x\.size\(0\) is 3; .*it was 2"):
        driver.run(2, x, target)


# A model that one stage calls as a whole trains on a worker as the plain model does, whichever way its forward branches.


def test_its_steps_on_a_worker_are_those_of_the_plain_model(cluster):
    model, branches = Branching().eval(), set()
    start, pipe = twin(model), {"split": "parameters", "num_stages": 1}
    both = Beside(cluster, model, F.mse_loss, pipe=pipe, world_size=1)
    both.optimize(torch.optim.SGD, lr=0.1)
    for sign in (1, -1, 1):
        both.run(1, sign * ROWS, ROWS)
        branches.add(both.plain._model.weight.grad is not None and bool(both.plain._model.weight.grad.any()))
        both.update()
    assert branches == {True, False}
    both.same_state()
    both.driver.copy_to(start)
    assert_same(start.state_dict(), both.plain.state_dict(), "state")


# Layers that are called with other tensors than their own train as in the plain model. Each ran with its own, silently.


class Layered(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.layer, self.other, self.last = (nn.Linear(4, 4) for _ in range(4))
        self.block, self.block2 = (nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(4, 1))

    def forward(self, x):
        return self.last(self.middle(torch.tanh(self.first(x))))


class WithAnothers(Layered):
    def middle(self, x):
        return functional_call(self.layer, dict(self.other.named_parameters()), (x,)) + self.layer(x)


class BlockWithAnothers(Layered):
    def middle(self, x):
        return functional_call(self.block, dict(self.block2.named_parameters()), (x,)) + self.block(x)


def with_made(self, x):
    made = {"weight": self.layer.weight * self.scale, "bias": self.layer.bias}
    return functional_call(self.layer, made, (x,))


class Made(nn.Module):
    def __init__(self, of):
        super().__init__()
        self.layer, self.scale = of.layer, of.scale

    forward = with_made


class WithMade(Layered):
    """In a module of its own, as the error says."""

    def __init__(self):
        super().__init__()
        self.made = Made(self)

    def middle(self, x):
        return self.made(x)


class Assigned(Layered):
    def __init__(self):
        super().__init__()
        del self.layer.weight

    def middle(self, x):
        self.layer.weight = self.other.weight * self.scale
        return self.layer(x)


@pytest.mark.parametrize("kind", [WithAnothers, BlockWithAnothers, WithMade, Assigned])
def test_a_layer_that_is_called_with_other_tensors(kind, threads):
    x, target = torch.randn(6, 4), torch.randn(6, 4)
    pipe = {"num_stages": 2, "split": "parameters", "example_args": (x[:2], target[:2])}
    both = Beside(threads, kind(), pipe=pipe)
    both.run(2, x, target)
    for name, parameter in both.plain.named_parameters():
        gradient = both.driver.get_grad(name)
        assert (gradient is None or not gradient.any()) if parameter.grad is None else gradient is not None, name
        if parameter.grad is not None:
            torch.testing.assert_close(gradient, parameter.grad)


@pytest.mark.parametrize("with_example", [False, True])
def test_a_call_with_computed_tensors_keeps_the_models_own_forward_whole(with_example):
    x = torch.randn(6, 4)
    model = type("InItsOwnForward", (Layered,), {"middle": with_made})()
    with pytest.warns(PippyWarning, match="into the forward of a module of its own"):
        pipe = pipeline(model, nn.MSELoss(), **({"example_args": (x, x)} if with_example else {}))
    assert pipe.num_stages == 1
    torch.testing.assert_close(pipe(x, x), nn.functional.mse_loss(model(x), x))
