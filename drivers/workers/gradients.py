"""The gradients that a worker holds for one driver.

During a step `.grad` starts from nothing, so that a step that fails can be forgotten; a step's gradients count once the
controller says that it succeeded everywhere. The gradients of the copies of a replicated parameter are added up once per
update, worker to worker:

    copy on worker 2 ──part──▶ first copy's worker: adds the parts in the order of the stages ──sum──▶ every copy's worker
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from pippy.drivers.control.messages import ReplicatedParameter
from pippy.drivers.transport.interface import Transport
from pippy.ir.run.stage_backward import add_gradients

Gradient = torch.Tensor | None
FIRST_SLOT = 1 << 24  # of the replicated parameters; no program has as many values


@dataclass
class _Step:
    """What a command that may still be given up did to the gradients, by parameter.

    ``fresh`` came new, ``sums`` were added up over all copies, and then everything was multiplied by ``factor``.
    """

    number: int
    fresh: Mapping[int, Gradient]
    sums: Mapping[int, Gradient] = field(default_factory=dict)
    factor: float = 1.0


class Gradients:
    """``parameters`` are all of a worker's by id; ``groups`` every replicated parameter, its local copies as tensors."""

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        groups: Sequence[tuple[ReplicatedParameter, Mapping[int, torch.Tensor]]],
        index: int,
        transport: Transport,
    ) -> None:
        self.parameters = {id(parameter): parameter for parameter in parameters}
        self.groups, self.index, self.transport = groups, index, transport
        self.copies = {id(tensor) for _, local in groups for tensor in local.values()}
        self.total: dict[int, Gradient] = {}  # what counts
        self.parts: dict[int, Gradient] = {}  # of copies: what has not been added up yet
        self.steps: list[_Step] = []
        self.adding = False  # up, the gradients of the copies: for messages

    def zero(self) -> None:
        """Forget all gradients."""
        self.total.clear()
        self.parts.clear()
        self.steps.clear()
        self.hide()

    def hide(self) -> None:
        """Let `.grad` start from nothing."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def expose(self) -> None:
        """Put what counts into `.grad`."""
        for key, parameter in self.parameters.items():
            parameter.grad = self.of(key)

    def end_step(self, number: int, reduce: bool) -> None:
        """Set the gradients of a step aside, until it is settled or dropped."""
        fresh = {key: p.grad for key, p in self.parameters.items() if p.grad is not None}
        step = _Step(number, fresh)
        if reduce:
            step.sums = self._sums(number, {key: self._part(key, fresh) for key in self.copies})
        self.steps.append(step)
        self.hide()

    def _part(self, key: int, fresh: Mapping[int, Gradient]) -> Gradient:
        """What a copy has gathered since its gradients were last added up."""
        part = self.parts.get(key)
        for step in self.steps:
            part = None if key in step.sums else add_gradients(part, step.fresh.get(key))
        return add_gradients(part, fresh.get(key))

    def of(self, key: int) -> Gradient:
        """The gradient of a parameter, by its id, with what the command that is being carried out added up."""
        total = self.total.get(key)
        for step in self.steps:
            total = add_gradients(total, step.sums.get(key))
        return total

    def settle(self, through: int) -> None:
        """Count the gradients of all steps up to a number."""
        self.adding = False
        while self.steps and self.steps[0].number <= through:
            step = self.steps.pop(0)
            for key, gradient in step.fresh.items():
                if key not in self.copies:
                    _add(self.total, key, gradient)
                elif key not in step.sums:
                    _add(self.parts, key, gradient)
            for key, gradient in step.sums.items():
                self.parts.pop(key, None)
                _add(self.total, key, gradient)
            self._multiply(step.factor)

    def drop(self, first: int, last: int) -> None:
        """Forget what the commands from a number to another did."""
        self.steps = [step for step in self.steps if not first <= step.number <= last]
        self.hide()

    def reduce(self, number: int) -> None:
        """Add up what the copies have gathered."""
        sums = self._sums(number, {key: self.parts.get(key) for key in self.copies})
        self.steps.append(_Step(number, {}, sums))

    def scale(self, number: int, factor: float) -> None:
        """Multiply all gradients, once it is known that all workers do."""
        self.steps.append(_Step(number, {}, factor=factor))

    def _multiply(self, factor: float) -> None:
        if factor != 1.0:
            for gradient in self.total.values():
                if gradient is not None:
                    gradient.mul_(factor)

    def _sums(self, number: int, parts: Mapping[int, Gradient]) -> dict[int, Gradient]:
        """The sum over the copies of each replicated parameter, for every copy that is here."""
        self.adding = True  # until the next command; whoever explains a failure asks
        for slot, (group, local) in enumerate(self.groups):
            owner = group.copies[0][0]
            for copy, tensor in local.items():
                if owner != self.index:
                    self.transport.send(owner, (number, FIRST_SLOT + slot, copy), parts[id(tensor)])
        sums: dict[int, Gradient] = {}
        for owned in (True, False):  # what others wait for first
            for slot, (group, local) in enumerate(self.groups):
                if local and (group.copies[0][0] == self.index) == owned:
                    total = self._add_up(number, slot, parts) if owned else self._receive_sum(number, slot)
                    for tensor in local.values():
                        sums[id(tensor)] = None if total is None else total.clone()
        return sums

    def named(self, slot: int, copy: int) -> str:
        """What a slot of `_sums` carries, and from whom it comes."""
        group = self.groups[slot - FIRST_SLOT][0]
        if copy < len(group.copies):
            return f"the gradient of copy {copy} of {group.name!r}, from worker {group.copies[copy][0]}"
        return f"the sum of the gradients of {group.name!r}, from worker {group.copies[0][0]}"

    def _add_up(self, number: int, slot: int, parts: Mapping[int, Gradient]) -> Gradient:
        group, local = self.groups[slot]
        total: Gradient = None
        for copy, (worker, _) in enumerate(group.copies):
            here = copy in local
            part = parts[id(local[copy])] if here else self.transport.receive((number, FIRST_SLOT + slot, copy), worker)
            total = add_gradients(total, part)
        for worker in sorted({worker for worker, _ in group.copies} - {self.index}):
            self.transport.send(worker, (number, FIRST_SLOT + slot, len(group.copies) + worker), total)
        return total

    def _receive_sum(self, number: int, slot: int) -> Gradient:
        copies = self.groups[slot][0].copies
        return self.transport.receive((number, FIRST_SLOT + slot, len(copies) + self.index), copies[0][0])


def _add(gradients: dict[int, Gradient], key: int, more: Gradient) -> None:
    gradients[key] = add_gradients(gradients.get(key), more)
