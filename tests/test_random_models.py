"""Random models, cut at random places: a Pipe gives the numbers of the plain model."""

import copy
import functools
import warnings
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from pippy import MultiUseParameterConfig, PippyWarning, pipe_split, pipeline, verify
from pippy.ir.base.errors import SharedParameterError, SplitError
from tests.comparisons import assert_same, assert_same_gradients, assert_same_state

WIDTH = 4

# A step takes one or two earlier values by number, and perhaps one of the model's layers or tensors.
UNARY = ("tanh", "lin", "mm", "scale", "view", "dropout", "detach", "frozen", "iadd", "count", "no_grad")
BINARY = ("add", "mul", "cat", "where", "pair")


def programs(kinds: tuple[str, ...]) -> st.SearchStrategy[list[Any]]:
    """Lists of steps of these kinds."""
    step = st.tuples(
        st.sampled_from(kinds),
        st.integers(0, 30),  # the first operand, counted from the latest value
        st.integers(0, 30),
        st.integers(0, 2),  # which layer or tensor
        st.booleans(),  # whether a cut follows
    )
    return st.lists(step, min_size=3, max_size=14)


steps = programs(UNARY + BINARY)


class Random(nn.Module):
    """Runs a list of steps; the loss is over some of the values."""

    def __init__(self, program: list[Any], outputs: list[int]) -> None:
        super().__init__()
        self.program, self.outputs = program, outputs
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH) / 2) for _ in range(3))
        self.layers[2].weight = self.weights[2]  # tied: by name and inside a leaf
        self.scales = nn.ParameterList(nn.Parameter(torch.rand(WIDTH), requires_grad=index != 1) for index in range(3))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.count: torch.Tensor
        self.register_buffer("count", torch.zeros(()))

    def step(self, kind: str, x: Any, y: Any, which: int) -> Any:
        if kind == "lin":
            return self.layers[which](x)
        if kind == "mm":
            return x @ self.weights[which]
        if kind == "scale":
            return x * self.scales[which]
        if kind == "view":
            return x.view(-1, 2, 2).transpose(1, 2).reshape(x.size(0), WIDTH)
        if kind == "dropout":
            return nn.functional.dropout(x, 0.3, self.training)
        if kind == "detach":
            return x.detach() + 1
        if kind == "frozen":
            return self.frozen(x)
        if kind == "iadd":
            x = x * 1
            x += y
            return x
        if kind == "count":
            self.count.add_(1)
            return x + self.count * 0.1
        if kind == "no_grad":
            with torch.no_grad():
                return torch.tanh(x @ self.weights[which])
        if kind == "cat":
            return torch.cat([x[:, :2], y[:, 2:]], 1)
        if kind == "where":
            return torch.where(x > y, x, y * 0.5)
        if kind == "pair":
            low, high = torch.stack([x, y]).unbind(0)
            return low - high
        return {"tanh": lambda: torch.tanh(x), "add": lambda: x + y, "mul": lambda: x * torch.sigmoid(y)}[kind]()

    def forward(self, x: Any) -> Any:
        values = [torch.sin(x)]
        for kind, one, other, which, cut in self.program:
            operands = values[-1 - one % len(values)], values[-1 - other % len(values)]
            values.append(self.step(kind, *operands, which))
            if cut:
                pipe_split()
        return tuple(values[-1 - index % len(values)] for index in self.outputs)


def loss_of(outputs: Any, target: Any) -> torch.Tensor:
    """Depends on the first half of the outputs only."""
    return sum(((output - target) ** 2).mean() for output in outputs[: (len(outputs) + 1) // 2])


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(
    programs(UNARY + BINARY),
    st.lists(st.integers(0, 30), min_size=1, max_size=4),
    st.sampled_from(MultiUseParameterConfig),
)
def test_random_models_cut_at_random(program, outputs, config):
    torch.manual_seed(0)
    model = Random(program, outputs).double()
    plain, x = copy.deepcopy(model), torch.randn(3, WIDTH, dtype=torch.float64)
    expected = expected_step(plain, x)
    try:
        pipe = quiet_pipeline(model, config)
    except (SplitError, SharedParameterError) as refusal:  # a buffer that two stages change cannot be cut
        assert "in place" in str(refusal)
        return
    if expected is None:  # nothing in the loss requires a gradient
        return
    torch.manual_seed(1)
    assert_same(pipe(x, torch.tensor(0.5)), expected, "loss")
    assert_same_gradients(pipe, plain)
    assert_same_state(pipe, plain)
    verify(pipe)


def expected_step(plain: nn.Module, x: torch.Tensor) -> torch.Tensor | None:
    torch.manual_seed(1)
    loss = loss_of(plain(x), torch.tensor(0.5))
    if not loss.requires_grad:
        return None
    loss.backward()
    return loss.detach()


def quiet_pipeline(model, config):

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PippyWarning)  # some programs have no cut, or end in one
        return pipeline(model, loss_of, multi_use_param_spec=config)


class Checkpointed(Random):
    """Runs groups of steps under torch.utils.checkpoint, some inside of others."""

    def __init__(self, program: list[Any], outputs: list[int], sizes: list[int], reentrant: bool) -> None:
        super().__init__(program, outputs)
        self.sizes, self.reentrant = sizes, reentrant

    def forward(self, x: Any) -> Any:
        values, program = [torch.sin(x)], list(self.program)
        for size in self.sizes:
            group, program = program[:size], program[size:]
            values = self.group(values, group, size % 3)
            if group and group[-1][-1]:
                pipe_split()
        return tuple(values[-1 - index % len(values)] for index in self.outputs)

    def group(self, values: list[Any], program: list[Any], depth: int) -> Any:
        if not depth:
            for kind, one, other, which, _ in program:
                operands = values[-1 - one % len(values)], values[-1 - other % len(values)]
                values = [*values, self.step(kind, *operands, which)]
            return values
        if self.reentrant:
            return [*values, *checkpoint(self.part, len(values), program, depth, *values, use_reentrant=True)]
        part = functools.partial(self.part, len(values), program, depth, *values)
        return [*values, *checkpoint(lambda _: part(), values[-1], use_reentrant=False)]

    def part(self, known: int, program: list[Any], depth: int, *values: Any) -> Any:
        inner = self.group(list(values), program[: len(program) // 2], depth - 1)
        return tuple(self.group(inner, program[len(program) // 2 :], 0)[known:])


@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow])
@given(
    programs(UNARY + BINARY),
    st.lists(st.integers(0, 30), min_size=1, max_size=4),
    st.lists(st.integers(1, 5), min_size=3, max_size=6),
    st.booleans(),
    st.sampled_from(MultiUseParameterConfig),
)
def test_random_models_that_checkpoint(program, outputs, sizes, reentrant, config):
    torch.manual_seed(0)
    model = Checkpointed(program, outputs, sizes, reentrant).double()
    plain, x = copy.deepcopy(model), torch.randn(3, WIDTH, dtype=torch.float64, requires_grad=True)
    try:
        expected = expected_step(plain, x)
    except RuntimeError:  # torch itself cannot run it again: a buffer has changed, or a result has no gradient
        return
    try:
        pipe = quiet_pipeline(model, config)
    except (SplitError, SharedParameterError) as refusal:
        assert "in place" in str(refusal)
        return
    if expected is None:
        return
    torch.manual_seed(1)
    assert_same(pipe(x, torch.tensor(0.5)), expected, "loss")
    if reentrant:  # torch runs the backward of a result that the loss does not use, with zeros
        for parameter in (*pipe.split_gm.parameters(), *plain.parameters()):
            parameter.grad = parameter.grad if parameter.grad is not None and parameter.grad.any() else None
    else:
        assert_same_state(pipe, plain)
    assert_same_gradients(pipe, plain)
    verify(pipe)
