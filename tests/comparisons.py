"""Comparing a Pipe, and a driver, with the plain model."""

import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from pippy import Pipe, PipelineDriver, PipelineDriver1F1B, pipeline
from pippy.drivers.protocol.state import GiveState
from pippy.ir.base.trees import leaves, map_tensors


def fresh_inputs(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same inputs as leaves of their own."""
    return map_tensors(lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad), inputs)


def find_loss(output: Any, spec: Any) -> torch.Tensor:
    """The loss in what a model returns beside it."""
    if isinstance(spec, tuple):
        return output[spec.index(True)]
    if isinstance(output, dict):
        return output["loss"]
    return output[spec] if isinstance(spec, int) else getattr(output, spec)


def run_plain(model: nn.Module, loss_fn: Any, spec: Any, inputs: tuple[Any, ...], target: Any, seed: int = 1) -> Any:
    """One training step without a pipeline. Returns what the Pipe should return."""
    torch.manual_seed(seed)
    output = model(*inputs)
    loss = loss_fn(output, target) if loss_fn is not None else find_loss(output, spec)
    loss.backward()
    return map_tensors(torch.Tensor.detach, loss if loss_fn is not None else output)


def assert_same(actual: Any, expected: Any, what: str) -> None:
    actual_leaves, expected_leaves = list(leaves(actual)), list(leaves(expected))
    assert len(actual_leaves) == len(expected_leaves), what
    for mine, theirs in zip(actual_leaves, expected_leaves):
        if isinstance(theirs, torch.Tensor):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12, msg=lambda text: f"{what}: {text}")
        else:
            assert mine == theirs, what


def assert_same_gradients(pipe: Pipe, plain: nn.Module) -> None:
    """Every copy of every parameter has the plain model's gradient, or none where that has none."""
    for name, parameter in plain.named_parameters(remove_duplicate=False):
        places = pipe.stage_qualnames(name)
        for place in places:
            assert_same_gradient(
                pipe.split_gm.get_parameter(place).grad, parameter.grad, f"gradient of {name} at {place}"
            )
        assert places or parameter.grad is None, f"{name} is used, but is in no stage"


def assert_same_gradient(mine: torch.Tensor | None, theirs: torch.Tensor | None, what: str) -> None:
    assert (mine is None) == (theirs is None), f"{what}: {mine} instead of {theirs}"
    if mine is not None:
        assert_same(mine, theirs, what)


def assert_same_state(pipe: Pipe, plain: nn.Module) -> None:
    """The state dicts agree in names, order and values; buffers that are not saved agree too."""
    mine, theirs = pipe.state_dict(), plain.state_dict()
    assert list(mine) == list(theirs)
    assert_same(mine, theirs, "state")
    for name, buffer in plain.named_buffers():
        for place in pipe.stage_qualnames(name):
            assert_same(pipe.split_gm.get_buffer(place), buffer, f"buffer {name} at {place}")


def assert_same_step(
    pipe: Pipe, plain: nn.Module, loss_fn: Any, inputs: tuple[Any, ...], target: Any, seed: int = 1, **named: Any
) -> None:
    """A step of a Pipe is that of the plain model: the loss, the gradients and the state, whose numbers add up."""
    torch.manual_seed(seed)
    expected = loss_fn(plain(*inputs, **named), target)
    expected.backward()
    torch.manual_seed(seed)
    assert_same(pipe(*inputs, target, **named), expected.detach(), "loss")
    assert_same_gradients(pipe, plain)
    assert_same_state(pipe, plain)


def twin(model: nn.Module) -> nn.Module:
    """A copy to run without a pipeline."""
    return copy.deepcopy(model)


def assert_same_training(driver, optimizer, plain, ours, chunks, ids, target):
    """Three steps of a driver are those of a plain model with an optimizer of its own: each loss, and the state at the end."""
    for _ in range(3):
        loss = driver.run(chunks, ids, target)
        optimizer.step()
        optimizer.zero_grad()
        expected = F.cross_entropy(plain(ids), target)
        expected.backward()
        ours.step()
        ours.zero_grad()
        torch.testing.assert_close(loss, expected.detach())
    state = driver.state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value)


def assert_loss(found: torch.Tensor, expected: torch.Tensor, **tolerance: Any) -> None:
    """The loss of a driver's step is that of the plain model, which has its gradients then."""
    expected.backward()
    torch.testing.assert_close(found, expected.detach(), **tolerance)


def strictly(tensor: torch.Tensor, tolerance: dict[str, Any]) -> dict[str, Any]:
    """The tolerance that was given; if none was, that of sums in another order in float64, or torch's own."""
    return tolerance or ({"rtol": 1e-10, "atol": 1e-13} if tensor.dtype is torch.float64 else {})


def assert_gradients(driver: Any, plain: nn.Module, **tolerance: Any) -> None:
    """Each parameter of a driver has the plain model's gradient, or none where that has none."""
    found = driver.gradients()
    used = [name for name, parameter in plain.named_parameters() if parameter.grad is not None]
    for name in dict.fromkeys([*found, *used]):
        mine, theirs = found[name], plain.get_parameter(name).grad
        assert (mine is None) == (theirs is None), name
        if mine is not None and theirs is not None:
            assert mine.layout == theirs.layout, name
            pair = mine.to_dense(), theirs.to_dense()
            torch.testing.assert_close(*pair, msg=lambda text: f"{name}: {text}", **strictly(theirs, tolerance))  # noqa: B023


def assert_state(driver: Any, plain: nn.Module, **tolerance: Any) -> None:
    """The state of a driver is the plain model's: names, their order, and values."""
    mine, theirs = driver.state_dict(), plain.state_dict()
    assert list(mine) == list(theirs)
    torch.testing.assert_close(dict(mine), dict(theirs), **(tolerance or {"rtol": 1e-9, "atol": 1e-12}))


def copies_of(driver: Any, name: str) -> list[torch.Tensor]:
    """The tensors that the workers have of a replicated parameter."""
    places = driver.placed.locations(name)
    assert len(places) > 1
    return [driver.commands.call({worker: GiveState((place,))})[worker].tensors[place] for worker, place in places]


def update(*optimizers: Any) -> None:
    """Each of these makes its step, and drops the gradients."""
    for each in optimizers:
        each.step()
        each.zero_grad()


def assert_bits(mine: Any, theirs: Any) -> None:
    """The same names, and under each the same tensor, bit for bit, or none."""
    assert list(mine) == list(theirs)
    for name, tensor in mine.items():
        assert (tensor is None) == (theirs[name] is None), name
        assert tensor is None or torch.equal(tensor, theirs[name]), (
            f"{name}: off by {(tensor - theirs[name]).abs().max()}"
        )


class Beside:
    """A driver, and the plain model beside it: both are given the same, and must give the same.

    ``plain`` is the plain model where a copy of the model would not do; ``pipe`` has the options of `pipeline()`; all others
    are the driver's, which is a `PipelineDriver` where they name a schedule.
    """

    def __init__(
        self,
        cluster: Any,
        model: Any,
        loss: Any = nn.MSELoss(),  # noqa: B008
        kind: Any = None,
        plain: Any = None,
        pipe: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.model, self.loss = model, loss
        self.plain: Any = twin(model) if plain is None else plain
        self.pipe = pipeline(model, loss, **(pipe or {}))
        kind = kind or (PipelineDriver if "schedule" in options else PipelineDriver1F1B)
        self.driver = kind(self.pipe, cluster, **options)
        self.optimizers: list[Any] = []

    def optimize(self, kind: Any, **options: Any) -> Any:
        """Both have such an optimizer. Returns that of the driver."""
        self.optimizers += [
            self.driver.instantiate_optimizer(kind, **options),
            kind(self.plain.parameters(), **options),
        ]
        return self.optimizers[-2]

    def run(self, chunks: int, *given: Any, plain: Any = None, **tolerance: Any) -> Any:
        """A step: the same loss. The last of ``given`` is the target, if there is a loss function. Returns the loss.

        ``plain`` are the plain model's arguments, if they are others.
        """
        loss = self.driver.run(chunks, *given)
        inputs = plain or given
        expected = self.plain(*inputs) if self.loss is None else self.loss(self.plain(*inputs[:-1]), inputs[-1])
        in_float64 = {"rtol": 1e-12, "atol": 1e-14} if loss.dtype is torch.float64 else {}
        assert_loss(loss, expected, **(tolerance or in_float64))
        return loss

    def step(self, chunks: int, *given: Any, plain: Any = None, **tolerance: Any) -> None:
        """A step: the same loss, and the same gradients, which add up over steps."""
        self.run(chunks, *given, plain=plain, **tolerance)
        self.same_gradients(**tolerance)

    def same_gradients(self, **tolerance: Any) -> None:
        assert_gradients(self.driver, self.plain, **tolerance)

    def same_state(self, **tolerance: Any) -> None:
        assert_state(self.driver, self.plain, **tolerance)

    def zero_grad(self) -> None:
        self.driver.zero_grad()
        self.plain.zero_grad()

    def update(self, zero_grad: bool = True) -> None:
        """All optimizers make their step, and drop the gradients."""
        for each in self.optimizers:
            each.step()
            if zero_grad:
                each.zero_grad()
