"""The gradients that a worker holds for one driver.

A step may fail on another worker after it has ended here. So its gradients stay pending until the controller says, in a later
command, that the step succeeded everywhere. Then they are settled. A gradient is in one of these places:

| place               | gradients of               | from                                                     |
|---------------------|----------------------------|----------------------------------------------------------|
| ``.grad``           | all parameters             | the step that runs now                                   |
| ``pending[i].own``  | all parameters             | a step that may still be given up                        |
| ``pending[i].sums`` | copies, summed over copies | a step or command that may still be given up             |
| ``unsummed``        | copies, each its own       | settled steps                                            |
| ``total``           | all parameters             | settled steps: what users and optimizers see             |

"Copies" are those of replicated parameters, and in replicas of a pipeline all parameters.

                     end_step                settle
    a parameter   .grad ─────▶ pending.own ─────────▶ total

    a copy        .grad ─────▶ pending.own ─────────▶ unsummed ─┐
                                    │                           ▼                   settle
                                    └──────────────────────▶ added up ─▶ pending.sums ─────▶ total, of every copy

The gradients of copies are added up once per update: by the instructions of a step, or in a command of their own; see
gradient_sums.py.

The hooks of a parameter are called at the end of a step, with its gradient in this step: with that of all micro-batches, and of
all copies, which are added up in each step for them. What a hook leaves that is called after the accumulation is then the
gradient, and that of earlier steps is in it.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial

import torch

from pippy.drivers.protocol.state import WorkerHooks
from pippy.drivers.worker.gradients.gradient_sums import AddingUp, Gradient, GradientSums
from pippy.drivers.worker.gradients.hooks import ParameterHooks
from pippy.ir.base.trees import form_and_parts, is_sparse, map_stored, vector_norm
from pippy.ir.run.stage_backward import add_gradients


def unscaled(gradients: Mapping[int, torch.Tensor], scale: float) -> tuple[dict[int, torch.Tensor], list[int]]:
    """Gradients divided by the scale of the loss, and the keys of those that are not finite.

    Those of 16 bits become float32: float16 would lose again what the scale has kept. Others are divided in place, by torch's
    own function for it, so that the numbers are those of `torch.amp.GradScaler`.

    >>> unscaled({7: torch.tensor([8.0]), 9: torch.tensor([torch.inf])}, scale=4.0)
    ({7: tensor([2.]), 9: tensor([inf])}, [9])
    """
    found = {key: gradient.float() if gradient.dtype.itemsize == 2 else gradient for key, gradient in gradients.items()}
    values = {
        key: form_and_parts(gradient)[1][-1] if is_sparse(gradient) else gradient for key, gradient in found.items()
    }
    alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    for each in values.values():
        alike[each.device, each.dtype].append(each)
    inverse = torch.tensor(scale, dtype=torch.float64).reciprocal().float()
    overflowed = [_unscale(each, inverse) for each in alike.values()]
    if any(overflowed):
        return found, [key for key, each in values.items() if not bool(each.isfinite().all())]
    return found, []


@torch.no_grad()
def _unscale(tensors: list[torch.Tensor], inverse: torch.Tensor) -> bool:
    """Multiply tensors of one device and dtype by a number. Returns whether one of them was not finite."""
    device = tensors[0].device
    not_finite = torch.zeros((), dtype=torch.float32, device=device)
    torch._amp_foreach_non_finite_check_and_unscale_(tensors, not_finite, inverse.to(device))
    return bool(not_finite)


@dataclass
class _Pending:
    """What a command that may still be given up did to the gradients, by the id of the parameter.

    ``own`` are new gradients, ``sums`` were added up over all copies. After that, everything is multiplied by ``factor``, and
    clamped between -limit and ``limit``. Those of ``replaced`` take the place of what was there.
    """

    number: int
    own: Mapping[int, Gradient]
    sums: Mapping[int, Gradient] = field(default_factory=dict)
    factor: float = 1.0
    limit: float | None = None
    replaced: Set[int] = frozenset()


class Gradients:
    """The gradients of ``parameters``. ``sums`` adds up those of copies."""

    def __init__(self, parameters: Sequence[torch.Tensor], sums: GradientSums) -> None:
        self.parameters = {id(parameter): parameter for parameter in parameters}
        self.sums, self.copies = sums, sums.copies
        self.total: dict[int, Gradient] = {}
        self.unsummed: dict[int, Gradient] = {}
        self.pending: list[_Pending] = []
        self.wider: dict[int, torch.dtype] = {}  # the dtypes of gradients that an optimizer wants with more bits
        self.nonfinite: list[int] = []  # what was found in the step that runs now
        self.hooks = ParameterHooks(WorkerHooks(), tensor=lambda place: torch.empty(0))

    def zero(self) -> None:
        """Drop all gradients."""
        self.total.clear()
        self.unsummed.clear()
        self.pending.clear()
        self.clear_grad()

    def zero_of(self, parameters: Set[int]) -> None:
        """Drop the gradients of some parameters, given by their ids."""
        self.total, self.unsummed = _without(self.total, parameters), _without(self.unsummed, parameters)
        for command in self.pending:
            command.own, command.sums = _without(command.own, parameters), _without(command.sums, parameters)

    def take_out(self) -> tuple[dict[int, Gradient], dict[int, Gradient]]:
        """Go on without gradients. Gives those of settled steps, for `put_back`; there are no others."""
        assert not self.pending
        held = self.total, self.unsummed
        self.total, self.unsummed = {}, {}
        return held

    def put_back(self, held: tuple[dict[int, Gradient], dict[int, Gradient]]) -> None:
        """Drop all gradients, and have those again that were taken out."""
        self.zero()
        self.total, self.unsummed = held

    def clear_grad(self) -> None:
        """Set `.grad` to None, so that a step or an optimizer starts from nothing."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def set_grad(self, optimized: Mapping[int, torch.Tensor]) -> None:
        """Set `.grad` to the gradients that the user sees, of the tensor that an optimizer has for each parameter."""
        for key, tensor in optimized.items():
            gradient = self.of(key)
            tensor.grad = None if gradient is None else gradient.to(tensor.dtype)

    def held(self) -> list[torch.Tensor]:
        """All gradients that are there, those of steps included that may be given up."""
        every = [self.total, self.unsummed, *(each for step in self.pending for each in (step.own, step.sums))]
        return [gradient for each in every for gradient in each.values() if gradient is not None]

    def of(self, key: int) -> Gradient:
        """The gradient of a parameter, by its id. What pending commands did to it is in it."""
        total = self.total.get(key)
        for command in self.pending:
            new = (command.sums if key in self.copies else command.own).get(key)
            total = new if key in command.replaced else add_gradients(total, new)
            if total is not None and command.factor != 1.0:
                total = total * command.factor
            if total is not None and command.limit is not None:
                total = _clamped(total, command.limit)
        return total

    def of_last_step(self, key: int) -> Gradient:
        """The gradient that the last step has left, of copies that were not added up each its own."""
        last = self.pending[-1]
        return last.sums[key] if key in last.sums else last.own.get(key)

    def begin_step(self, reduce: bool, scale: float | None = None) -> AddingUp | None:
        """A step begins, which trains. With ``reduce``, its instructions add up the gradients of copies. They are divided
        by ``scale``, that of the loss."""
        self.clear_grad()
        self.nonfinite = []
        if not reduce or not self.copies:
            return None
        return AddingUp(self.sums, partial(self._own, scale=scale), partial(self._through_hooks, scale=scale))

    def _own(self, copies: Sequence[int], scale: float | None = None) -> list[tuple[Gradient, bool]]:
        """The gradients of some copies since they were last added up, and whether they are of this step alone."""
        own: dict[int, Gradient] = {key: p.grad for key in copies if (p := self.parameters[key]).grad is not None}
        for key in copies:
            self.parameters[key].grad = None
        if scale is not None and own:
            own = self._unscaled(own, scale)
        return [(self._since_last_sum(key, own), key in own) for key in copies]

    def end_step(self, number: int, adding: AddingUp | None, scale: float | None = None) -> list[int]:
        """Move the gradients of a step from `.grad` to the pending ones, and what it has added up.

        Returns the ids of parameters whose gradients then are not finite.
        """
        own: dict[int, Gradient] = {key: p.grad for key, p in self.parameters.items() if p.grad is not None}
        self.clear_grad()
        hooked = self.hooks.all - self.copies
        whole = {key: self._through_hooks(key, own.pop(key), scale) for key in hooked if key in own}
        if scale is not None:
            own = self._unscaled(own, scale)
        own |= whole
        step = _Pending(number, own, replaced=self.hooks.replacing & whole.keys())
        if adding is not None:
            step.own = _without(own, self.copies)  # of the copies, only the sums are needed
            step.sums = adding.totals
            step.replaced = step.replaced | (self.hooks.replacing & self.copies)
        self.pending.append(step)
        return self.nonfinite

    def _unscaled(self, own: Mapping[int, Gradient], scale: float) -> dict[int, Gradient]:
        """Divide by the scale the gradients of a step of which no hook is to see the sum. Notes those that are not finite."""
        left = {key: gradient for key, gradient in own.items() if key in self.hooks.all}
        found, more = unscaled({key: grad for key, grad in own.items() if grad is not None and key not in left}, scale)
        self.nonfinite += more
        return {**found, **left}

    def _through_hooks(self, key: int, gradient: Gradient, scale: float | None) -> Gradient:
        """What the hooks of a parameter make of the whole gradient of a step, divided by the scale after that."""
        if key not in self.hooks.all:
            return gradient
        before = self.of(key) if key in self.hooks.replacing else None
        if gradient is None:
            return before
        found = self.hooks.accumulated(key, gradient, before, scale)
        if found is None or scale is None:
            return found
        whole, more = unscaled({key: found}, scale)
        self.nonfinite += more
        return whole[key]

    def _since_last_sum(self, key: int, own: Mapping[int, Gradient]) -> Gradient:
        """The gradient of a copy from all steps since its gradients were last added up, the one that ends included."""
        gradient = self.unsummed.get(key)
        for command in self.pending:
            gradient = None if key in command.sums else add_gradients(gradient, command.own.get(key))
        return add_gradients(gradient, own.get(key))

    def begin_reduction(self) -> AddingUp:
        """Begin to add up the gradients of copies, in a command of its own."""
        return AddingUp(self.sums, self._own)

    def end_reduction(self, number: int, adding: AddingUp) -> None:
        """Have what was added up in a command."""
        self.pending.append(_Pending(number, {}, adding.totals))

    def change(self, number: int, factor: float, limit: float | None) -> None:
        """Multiply all gradients, and clamp them, once all workers are known to do so."""
        self.pending.append(_Pending(number, {}, factor=factor, limit=limit))

    def settle(self, through: int) -> None:
        """Settle the commands up to a number: they succeeded on all workers."""
        while self.pending and self.pending[0].number <= through:
            command = self.pending.pop(0)
            for key, gradient in command.own.items():
                if key not in self.copies:
                    self._count(key, gradient, command)
                elif key not in command.sums:
                    _add(self.unsummed, key, gradient)
            for key, gradient in command.sums.items():
                self.unsummed.pop(key, None)
                self._count(key, gradient, command)
            for key, gradient in self.total.items():
                if gradient is not None and command.factor != 1.0:
                    self.total[key] = gradient = self._widened(key, gradient).mul_(command.factor)
                if gradient is not None and command.limit is not None:
                    self.total[key] = _clamped(self._widened(key, gradient), command.limit)

    def _count(self, key: int, gradient: Gradient, command: _Pending) -> None:
        if key in command.replaced:
            self.total[key] = gradient
        else:
            _add(self.total, key, gradient)

    def drop(self, first: int, last: int) -> None:
        """Drop what the commands from ``first`` to ``last`` did: they were given up."""
        self.pending = [command for command in self.pending if not first <= command.number <= last]
        self.clear_grad()

    def _widened(self, key: int, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.to(self.wider.get(key, gradient.dtype))


def norm(gradient: torch.Tensor, norm_type: float) -> torch.Tensor:
    """The norm of a gradient, of one of 16 bits in float32.

    >>> norm(torch.full((2**20,), 1.0, dtype=torch.float16), 2.0)
    tensor(1024.)
    """
    narrow = gradient.dtype in (torch.float16, torch.bfloat16)
    return vector_norm(gradient.float() if narrow else gradient, norm_type)


def _clamped(gradient: torch.Tensor, limit: float) -> torch.Tensor:
    if is_sparse(gradient) and gradient.layout is torch.sparse_coo:
        gradient = gradient.coalesce()  # an element may be stored in several parts
    return map_stored(lambda values: values.clamp(-limit, limit), gradient)


def _without(gradients: Mapping[int, Gradient], parameters: Set[int]) -> dict[int, Gradient]:
    return {key: gradient for key, gradient in gradients.items() if key not in parameters}


def _add(gradients: dict[int, Gradient], key: int, more: Gradient) -> None:
    gradients[key] = add_gradients(gradients.get(key), more)
