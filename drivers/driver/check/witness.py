"""The witness: the user's own model, which runs a step in this process as the user would run it.

    numbers         those that workers have go into the model's memory, if the workers have others; no version rises
    the step        forward, loss and backward of the whole mini-batch; random numbers are the same for every row
    put back        numbers, gradients, buffers, attributes, training flags, random states

What forward writes to lists, files and loggers stays written.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import BoundArguments
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pippy.drivers.base.errors import DriverError
from pippy.drivers.base.free_memory import free_bytes
from pippy.drivers.batch.division import CutTensor, Division, PerMicrobatch, divided_leaves, map_divided
from pippy.drivers.batch.specs import items_with_paths
from pippy.drivers.compare.alike import alike
from pippy.drivers.compare.tolerance import NARROW, digest, wide_tensors, widened
from pippy.drivers.compare.trial_notes import TrialNotes
from pippy.drivers.driver.check.differences import Apart, ComparedKey, Numbers
from pippy.drivers.driver.check.rows import TriedRows
from pippy.drivers.driver.steps.results import model_output
from pippy.drivers.model.optimizers.stale_models import gradient_here
from pippy.drivers.worker.measure.leave_unchanged import as_now
from pippy.drivers.worker.measure.watch import Watch
from pippy.ir.base.names import LOSS, named_state
from pippy.ir.base.surroundings import Surroundings
from pippy.ir.base.trees import children, map_tensors
from pippy.ir.call.signature import call_signature
from pippy.ir.record.compiled import Compiled
from pippy.ir.run.in_place import Snapshot, snapshot_of_buffers
from pippy.ir.run.random_state import untouched_random_state
from pippy.ir.run.stage_backward import loss_inside


def _plain_call(compiled: Compiled, division: Division, value: Callable[[str], Any]) -> tuple[BoundArguments, Any]:
    """The arguments of the plain model, and the target of the loss, for a mini-batch, or for a part of it. ``value`` gives that
    of an input, by its name in the Pipe."""
    bound, target = call_signature(compiled).bind_partial(), compiled.target_name
    given = {user: value(name) for user, name in division.names.items() if name != target}
    given = {**compiled.concrete_args, **given}
    bound.arguments = {name: given[name] for name in bound.signature.parameters if name in given}
    return bound, None if target is None else value(target)


def whole_input(division: Division, name: str) -> Any:
    """An input of the Pipe for the mini-batch."""
    return map_divided(lambda leaf: _whole(leaf, division), division.arguments[name])


def _whole(leaf: Any, division: Division) -> Any:
    """A value for the whole mini-batch."""
    if isinstance(leaf, CutTensor):
        return leaf.value.detach().requires_grad_(leaf.requires_grad)
    if isinstance(leaf, PerMicrobatch):
        if leaf.dim is None or not all(isinstance(each, torch.Tensor) for each in leaf.values):
            raise DriverError(
                "the plain model cannot be given an argument that is cut by a ChunkSpec of your own, or given "
                "as MicroBatches without rows; give a tensor that is cut by its rows"
            )
        return torch.cat(leaf.values, leaf.dim)
    return leaf.take(0, division)


def copied_inputs(division: Division, device: torch.device, wide: torch.dtype | None) -> Division:
    """The same inputs on a device, where forward may write into them. Numbers of fewer bits are ``wide``, if that is given."""

    def own(value: Any) -> Any:
        copied = map_tensors(lambda each: each.detach().to(device, copy=True), value)
        return wide_tensors(copied, wide)

    def leaf(each: Any) -> Any:
        name = "values" if isinstance(each, PerMicrobatch) else "value"
        return replace(each, **{name: own(getattr(each, name))})

    arguments = {name: map_divided(leaf, value) for name, value in division.arguments.items()}
    return replace(division, arguments=arguments)


@dataclass(frozen=True)
class WitnessStep:
    """The numbers of a step of the witness. ``written`` are the names of the parameters that forward has changed, and ``asked``
    is what it asked of numbers."""

    numbers: dict[ComparedKey, Any]
    written: frozenset[str]
    asked: TrialNotes = field(default_factory=TrialNotes)


@dataclass(frozen=True)
class HowWitnessed:
    """How the witness runs a step.

    Its numbers are digests, and those of the buffers that have changed; or ``whole`` tensors, and those of all buffers. With
    ``weights``, it runs the micro-batches in turn; their losses have these weights, and buffers are left out. With ``wide``, it
    computes in this dtype what it computes in fewer bits. Without ``hooks``, those of parameters are not called.
    """

    trains: bool = True
    whole: bool = False
    weights: Sequence[float] | None = None
    watch: bool = False
    wide: torch.dtype | None = None
    hooks: bool = True


class Witness:
    """The user's model, and the loss function, if there is one. ``numbers`` fetches those that the workers have."""

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Any] | None,
        compiled: Compiled,
        numbers: Callable[[], Mapping[str, Any]],
    ) -> None:
        self.model, self.loss, self.compiled, self.fetch = model, loss, compiled, numbers
        self._written: frozenset[str] | None = None  # the parameters that forward changes, once it has run

    @property
    def _modules(self) -> list[tuple[str, nn.Module]]:
        """The model and the loss, if it is a module, each with what its names begin with."""
        return [("", self.model), *([(f"{LOSS}.", self.loss)] if isinstance(self.loss, nn.Module) else [])]

    def named_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All parameters and buffers, by the names that the Pipe has for them."""
        for prefix, module in self._modules:
            yield from ((f"{prefix}{name}", tensor) for name, tensor in named_state(module))

    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters, each once, by its first name."""
        found: dict[int, tuple[str, nn.Parameter]] = {}
        for name, tensor in self.named_state():
            if isinstance(tensor, nn.Parameter):
                found.setdefault(id(tensor), (name, tensor))
        return dict(found.values())

    def buffers(self) -> dict[str, torch.Tensor]:
        """The buffers, each once, and the tensors that are attributes; not those of batch norms in training, which count."""
        found: dict[int, tuple[str, torch.Tensor]] = {}
        for prefix, root in self._modules:
            for path, module in root.named_modules(remove_duplicate=False):
                counts = isinstance(module, _BatchNorm) and module.training
                held = {} if counts else {**module._buffers, **_attributes(module)}
                for name, each in held.items():
                    if each is not None:
                        found.setdefault(id(each), (f"{prefix}{path}.{name}".replace("..", ".").lstrip("."), each))
        return dict(found.values())

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return next((each.device for _, each in self.named_state()), torch.device("cpu"))

    @contextmanager
    def with_numbers_of_workers(self) -> Iterator[None]:
        """Inside, the model has the numbers that the workers have. No version of a tensor rises."""
        numbers = self.fetch()
        pairs = [(tensor, numbers[name]) for name, tensor in self.named_state() if numbers.get(name) is not None]
        before = [(tensor, tensor.data, tensor.detach().clone()) for tensor, _ in pairs]
        try:
            for tensor, number in pairs:
                _write(tensor, number)
            yield
        finally:
            for tensor, data, number in before:
                tensor.data = data
                _write(tensor, number)

    @contextmanager
    def aside(self, hooks: bool) -> Iterator[None]:
        """Inside, the model may run: random numbers are the same for every row. At the end all is put back."""
        surroundings = Surroundings.current()
        with ExitStack() as stack:
            stack.callback(surroundings.set_process)
            stack.enter_context(untouched_random_state())
            stack.callback(as_now([self.model, self.loss]))
            stack.enter_context(_own_gradients(list(self.parameters().values()), hooks))
            stack.enter_context(alike())
            yield

    def step(self, division: Division, how: HowWitnessed) -> WitnessStep:
        """Run a step, and undo it."""
        division = copied_inputs(division, self.device, how.wide)
        parameters, buffers = self.parameters(), self.buffers()
        watch = Watch(division) if how.watch else None
        with ExitStack() as stack:
            changed = stack.enter_context(self._parameters_left(parameters))
            stack.enter_context(self.aside(how.hooks))
            stack.enter_context(widened([each for _, each in self._modules], how.wide))
            if how.wide is torch.float64:
                stack.enter_context(_in_64_bits(self.device.type))
            before = snapshot_of_buffers(buffers)
            if watch is not None:
                stack.enter_context(watch)
            stack.enter_context(torch.set_grad_enabled(how.trains))
            numbers = self._run(division, how)
            numbers |= self._left_by(parameters, before, how)
        return WitnessStep(numbers, frozenset(changed), *([] if watch is None else [watch.asked()]))

    def rounded_otherwise(self, rows: TriedRows, how: HowWitnessed, right: Numbers) -> Numbers:
        """The right numbers of a step once more, with other rounding: in 64 bits.

        Where these are the bits already, or the model does not take them or would not fit, they are those with the rows turned;
        none if rows cannot be turned.
        """
        uncut, how = how.weights is None, replace(how, watch=False)
        division = rows.divided(1) if uncut else rows.division
        state = [each for _, each in self.named_state()]
        given = [each for name in division.arguments for each in division.whole(name)]
        fits = sum(8 * each.numel() for each in state) < _PART * free_bytes(self.device)
        if fits and any(each.dtype in _FEWER for each in [*state, *given]):
            with suppress(Exception):
                wide = self.step(division, replace(how, wide=torch.float64)).numbers
                if all(_is_near(right[key], each) for key, each in wide.items() if key[0] in ("loss", "output")):
                    return wide
        return self._turned(rows, how) if uncut and _can_be_turned(division) else {}

    def _turned(self, rows: TriedRows, how: HowWitnessed) -> Numbers:
        """The numbers with the rows in the opposite order, which differ by rounding alone."""
        division = rows.divided(1, turned=True)
        return {
            key: each.flip(0) if key[0] == "output" and each.dim() and len(each) == division.rows else each
            for key, each in self.step(division, how).numbers.items()
        }

    @contextmanager
    def _parameters_left(self, parameters: Mapping[str, nn.Parameter]) -> Iterator[list[str]]:
        """Inside, forward may change parameters, as an averaged teacher. Gives the names of those that it has changed.

        The first run copies them all, as changes through ``.data`` are not counted; later runs those that are known to change.
        """
        known = parameters if self._written is None else self._written
        copies = {name: parameters[name].detach().clone() for name in known}
        changed: list[str] = []
        try:
            yield changed
        finally:
            changed += [name for name, each in copies.items() if not _same(parameters[name].detach(), each)]
            for name in changed:
                parameters[name].data.copy_(copies[name])
            self._written = frozenset(changed) | (self._written or frozenset())

    def _left_by(
        self, parameters: Mapping[str, nn.Parameter], before: Snapshot[str], how: HowWitnessed
    ) -> dict[ComparedKey, Any]:
        """The gradients and buffers after a step."""
        shown = (lambda each: each.detach().clone()) if how.whole else digest
        gradients = {name: gradient_here(each) for name, each in parameters.items() if how.trains}
        now = self.buffers()
        changed = [] if how.weights else now if how.whole else [name for name in before.changed(now) if name in now]
        return {
            **{("gradient", name): None if each is None else shown(each) for name, each in gradients.items()},
            **{("buffer", name): shown(now[name]) for name in changed},
        }

    def _run(self, division: Division, how: HowWitnessed) -> dict[ComparedKey, Any]:
        if how.weights is None:
            call = _plain_call(self.compiled, division, partial(whole_input, division))
            loss, outputs = self._call(*call, how.trains, 1.0)
            return ({} if loss is None else {("loss", ""): loss}) | named_outputs(outputs)
        losses = []
        for at, weight in enumerate(how.weights):
            call = _plain_call(self.compiled, division, partial(division.take, microbatch=at))
            losses.append(self._call(*call, how.trains, weight)[0])
        return {("loss", ""): torch.stack([each for each, weight in zip(losses, how.weights) if weight]).sum(0)}

    def _call(self, given: BoundArguments, target: Any, trains: bool, weight: float) -> tuple[Any, Any]:
        """Forward and backward: the loss, multiplied by its weight, and what the model returns."""
        outputs = self.model(*given.args, **given.kwargs)
        loss = self._loss(outputs, target)
        if loss is None:
            return None, outputs
        if trains and weight and loss.requires_grad:
            torch.autograd.backward(loss.sum() if weight == 1 else loss.sum() * weight)
        return loss.detach() * weight, outputs

    def _loss(self, outputs: Any, target: Any) -> Any:
        if self.loss is not None:
            return self.loss(outputs, target)
        return None if self.compiled.loss is None else self._loss_in(model_output(self.compiled), outputs)

    def _loss_in(self, output: Any, value: Any) -> Any:
        """The loss in the output of the model, at the place where the Pipe has it."""
        loss = self.compiled.loss
        if isinstance(output, fx.Node):
            return loss_inside(loss.seed, value) if loss is not None and output.name == loss.value else None
        if isinstance(output, Mapping):
            pairs = [(item, value[key]) for key, item in output.items()]
        else:
            pairs = list(zip(children(output) or (), children(value) or ()))
        return next((found for pair in pairs if (found := self._loss_in(*pair)) is not None), None)


def named_outputs(value: Any, path: str = "output") -> dict[ComparedKey, torch.Tensor]:
    """The tensors that a model returned, by their paths.

    >>> list(named_outputs({"logits": torch.ones(2), "more": (torch.ones(1), None)}))
    [('output', "output['logits']"), ('output', "output['more'][0]")]
    """
    items = items_with_paths(value, path)
    if items is None:
        return {("output", path): value.detach()} if isinstance(value, torch.Tensor) else {}
    return {key: each for inner, item in items for key, each in named_outputs(item, inner).items()}


_FEWER = (*NARROW, torch.float32)
_PART = 0.25  # of the free memory, for parameters of 64 bits
_NEAR = 5e-2  # of the size: what is further away was not the same computation


def _is_near(right: torch.Tensor, wide: torch.Tensor) -> bool:
    return Apart.of(right, wide).share <= _NEAR


@contextmanager
def _in_64_bits(device: str) -> Iterator[None]:
    """Inside, tensors are made with 64 bits where forward does not say with how many, and nothing is cast to fewer."""
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        with torch.autocast("cpu", enabled=False), torch.autocast(device, enabled=False):
            yield
    finally:
        torch.set_default_dtype(before)


def _can_be_turned(division: Division) -> bool:
    """Whether the rows can come in another order."""
    held = [leaf for value in division.arguments.values() for leaf in divided_leaves(value)]
    cut = [leaf for leaf in held if isinstance(leaf, CutTensor)]
    pieces = any(isinstance(leaf, PerMicrobatch) for leaf in held)
    return (
        division.sizes is not None
        and bool(cut)
        and not pieces
        and all(each.value.layout is torch.strided for each in cut)
    )


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one, other) if one.layout is torch.strided else torch.equal(digest(one), digest(other))


def _attributes(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: each for name, each in vars(module).items() if isinstance(each, torch.Tensor)}


def _write(tensor: torch.Tensor, number: torch.Tensor) -> None:
    """Put numbers into the memory of a tensor. Its version stays."""
    if tensor.shape == number.shape:
        tensor.data.copy_(number)
    else:  # forward has resized it, as observers do
        tensor.data = number.to(tensor.device)


@contextmanager
def _own_gradients(parameters: list[nn.Parameter], hooks: bool) -> Iterator[None]:
    """Inside, parameters begin without gradients; afterwards they have those of before. ``hooks`` says if theirs are called."""
    gradients = [(each, gradient_here(each)) for each in parameters]
    held: list[Any] = [] if hooks else [*parameters]
    called = [own for each in held for own in (each._backward_hooks, each._post_accumulate_grad_hooks) if own]
    before = [dict(each) for each in called]
    try:
        for own in called:
            own.clear()
        for each, _ in gradients:
            each.grad = None
        yield
    finally:
        for each, gradient in gradients:
            each.grad = gradient
        for own, functions in zip(called, before):
            own.update(functions)
