"""A step of the plain model in this process, on a copy that has the numbers of the workers."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import BoundArguments
from typing import Any

import torch
from torch import fx, nn

from pippy.drivers.base.errors import DriverError
from pippy.drivers.batch.division import CutTensor, Division, PerMicrobatch, map_divided
from pippy.drivers.batch.specs import items_with_paths
from pippy.drivers.compare.alike import alike
from pippy.drivers.driver.check.differences import ComparedKey
from pippy.drivers.driver.check.plain_optimizer import PlainOptimizer
from pippy.drivers.driver.steps.asked_outputs import model_output
from pippy.drivers.worker.state.forward_state import Before
from pippy.ir.base.names import LOSS, named_state
from pippy.ir.base.trees import children, map_tensors
from pippy.ir.call.signature import call_signature
from pippy.ir.record.compiled import Compiled
from pippy.ir.run.gradient_hooks import deep_copy
from pippy.ir.run.stage_backward import loss_inside


@dataclass(frozen=True)
class PlainCall:
    """The arguments of the plain model, and the target of the loss, of one mini-batch."""

    arguments: BoundArguments
    target: Any

    @classmethod
    def of(cls, compiled: Compiled, division: Division, turned: bool = False) -> "PlainCall":
        """The arguments of a mini-batch that was divided. With ``turned``, its rows are in the opposite order."""
        bound = call_signature(compiled).bind_partial()
        for user, name in division.names.items():
            if user != compiled.target_name:
                bound.arguments[user] = whole_input(division, name, turned)
        bound.arguments = {
            name: bound.arguments[name] for name in bound.signature.parameters if name in bound.arguments
        }
        for name, value in compiled.concrete_args.items():
            bound.arguments.setdefault(name, value)
        target = compiled.target_name
        return cls(bound, None if target is None else whole_input(division, target, turned))

    def to(self, device: torch.device) -> "PlainCall":
        """The same on a device."""
        bound = copy.copy(self.arguments)
        bound.arguments = map_tensors(lambda each: each.to(device), dict(bound.arguments))
        return PlainCall(bound, map_tensors(lambda each: each.to(device), self.target))


def whole_input(division: Division, name: str, turned: bool = False) -> Any:
    """An input of the Pipe for the mini-batch. With ``turned``, its rows are in the opposite order."""
    return map_divided(lambda leaf: _whole(leaf, turned), division.arguments[name])


def _whole(leaf: Any, turned: bool) -> Any:
    """A value for the whole mini-batch."""
    if isinstance(leaf, CutTensor):
        return leaf.value.flip(leaf.dim) if turned else leaf.value
    if isinstance(leaf, PerMicrobatch):
        if leaf.dim is None or not all(isinstance(each, torch.Tensor) for each in leaf.values):
            raise DriverError(
                "check() cannot give the plain model an argument that is cut by a ChunkSpec of your own, or given "
                "as MicroBatches; give a tensor that is cut by its rows"
            )
        joined = torch.cat(leaf.values, leaf.dim)
        return joined.flip(leaf.dim) if turned else joined
    return leaf.value


class PlainModel:
    """A copy of the user's model, and of its loss, with other numbers. The user's model does not change."""

    def __init__(self, model: nn.Module, compiled: Compiled, numbers: Mapping[str, torch.Tensor]) -> None:
        self.compiled = compiled
        losses = [] if compiled.loss_module is None else [compiled.loss_module]
        try:
            self.model, *copied = deep_copy([model, *losses])
        except Exception as error:
            raise DriverError(
                "check() compares with a copy of the model, but the model cannot be copied: copy.deepcopy(model) "
                f"raises {type(error).__name__}: {error}"
            ) from error
        self.loss: nn.Module | None = copied[0] if copied else None
        with torch.no_grad():
            for name, tensor in self.named_state():
                if name in numbers:
                    tensor.copy_(numbers[name])
        self.before = Before([each for part in (self.model, *copied) for each in part.modules()], None)

    def named_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All parameters and buffers, by the names that the Pipe has for them."""
        yield from named_state(self.model)
        for name, tensor in () if self.loss is None else named_state(self.loss):
            yield f"{LOSS}.{name}", tensor

    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters, each once, by its first name."""
        found: dict[int, tuple[str, nn.Parameter]] = {}
        for name, tensor in self.named_state():
            if isinstance(tensor, nn.Parameter):
                found.setdefault(id(tensor), (name, tensor))
        return dict(found.values())

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return next((each.device for _, each in self.named_state()), torch.device("cpu"))

    def step(self, call: PlainCall, trains: bool) -> dict[ComparedKey, Any]:
        """Run a step, and undo it: gives the loss, outputs, gradients and buffers."""
        call, parameters = call.to(self.device), self.parameters()
        try:
            with alike(), torch.set_grad_enabled(trains):
                outputs = self.model(*call.arguments.args, **call.arguments.kwargs)
                loss = self._loss(outputs, call.target)
                if trains:
                    loss.sum().backward()
            numbers: dict[ComparedKey, Any] = {} if loss is None else {("loss", ""): loss.detach().clone()}
            numbers |= named_outputs(outputs)
            numbers |= {("gradient", name): each.grad for name, each in parameters.items() if trains}
            state = {id(each): (name, each) for name, each in [*self.named_state()][::-1]}
            buffers = [(name, each) for name, each in state.values() if not isinstance(each, nn.Parameter)]
            return numbers | {("buffer", name): each.detach().clone() for name, each in buffers[::-1]}
        finally:
            self.before.put_back()
            for each in parameters.values():
                each.grad = None

    def updated(self, optimizers: Sequence[PlainOptimizer], gradients: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """The parameters after a step of the optimizers by these gradients. It is not undone."""
        parameters = self.parameters()
        for name, each in parameters.items():
            gradient = gradients.get(name)
            each.grad = None if gradient is None else gradient.to(each.device, each.dtype)
        for optimizer in optimizers:
            optimizer.step(parameters)
        names = dict.fromkeys(name for each in optimizers for name in each.names)
        return {name: parameters[name].detach() for name in names if name in parameters}

    def _loss(self, outputs: Any, target: Any) -> Any:
        if self.loss is not None:
            return self.loss(outputs, target)
        return None if self.compiled.loss is None else self._loss_in(model_output(self.compiled), outputs)

    def _loss_in(self, output: Any, value: Any) -> Any:
        """The loss in the output of the model, at the place where the Pipe has it."""
        if isinstance(output, fx.Node):
            loss = self.compiled.loss
            return loss_inside(loss.seed, value) if loss is not None and output.name == loss.value else None
        pairs = (
            [(item, value[key]) for key, item in output.items()]
            if isinstance(output, Mapping)
            else zip(output, children(value) or ())
            if isinstance(output, (tuple, list))
            else ()
        )
        return next((inner_loss for each in pairs if (inner_loss := self._loss_in(*each)) is not None), None)


def named_outputs(value: Any, path: str = "output") -> dict[ComparedKey, torch.Tensor]:
    """The tensors that a model returned, by their paths.

    >>> list(named_outputs({"logits": torch.ones(2), "more": (torch.ones(1), None)}))
    [('output', "output['logits']"), ('output', "output['more'][0]")]
    """
    items = items_with_paths(value, path)
    if items is None:
        return {("output", path): value.detach()} if isinstance(value, torch.Tensor) else {}
    return {key: each for inner, item in items for key, each in named_outputs(item, inner).items()}
