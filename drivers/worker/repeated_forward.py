"""A forward that keeps its inputs only, and is run again for the backward.

    first     runs the stage as ever; its graph is dropped at once, and what it gives is cut from the graph
    again     runs it on the same inputs, with the random numbers, buffers and attributes of the first run; afterwards these
              are as they were before it

The first run makes a graph too: so it takes the same kernels, its outputs require a gradient where they would, and what fails
fails there. Where the first run changes something that earlier ones did not change, nothing is known of how that was: then the
graph is kept, as it is where it changes a parameter.
"""

from collections.abc import Callable, Container, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from pippy.drivers.compare.alike import norms_are_still
from pippy.ir.base.errors import StageError
from pippy.ir.base.trees import describe, map_leaves, map_tensors, tensors
from pippy.ir.run.forward_state import Before, Change, RandomNumbers, RandomNumbersThen, as_before, said
from pippy.ir.run.in_place import Snapshot
from pippy.ir.run.stage_run import as_leaf

RunStage = Callable[[tuple[Any, ...]], Any]  # runs the stage on leaves


@dataclass
class Kept:
    """What is kept of a first run: its inputs, and what it changed, as that was before."""

    inputs: tuple[Any, ...]
    tensors: Snapshot[int]
    changes: Sequence[Change]
    drew: RandomNumbersThen | None
    outputs: list[torch.Tensor] | None  # to compare with, in the first run of all


@dataclass
class _Known:
    """What the forwards of a stage are known to write, with these training flags, and with batch norms still or not."""

    flags: list[bool]
    tensors: set[tuple[int, str]] = field(default_factory=set)
    inputs: set[int] = field(default_factory=set)


class RepeatedForward:
    """The first and second runs of one call of a stage, with the number of the stage."""

    def __init__(self, name: str, module: nn.Module, device: torch.device, stage: int) -> None:
        self.name, self.modules, self.stage = name, list(module.modules()), stage
        self.parameters = list(module.parameters())
        self.random = RandomNumbers(self.modules, device)
        self.known: _Known | None = None

    def first(self, inputs: tuple[Any, ...], outside: Sequence[bool], run: RunStage) -> tuple[Any, Kept | None]:
        """Run the stage. Gives its outputs, and what is kept to run it again.

        Of inputs, only those from ``outside`` are kept. None if the stage cannot be run again from these.
        """
        flags = [*(module.training for module in self.modules), norms_are_still()]
        known = self.known if self.known is not None and self.known.flags == flags else None
        own = tuple(map_leaves(lambda leaf: leaf, value) if is_own else None for value, is_own in zip(inputs, outside))
        tensors_given = dict(enumerate(tensors(own)))
        given = Snapshot(tensors_given, [each for each in tensors_given if known is None or each in known.inputs])
        before = Before(self.modules, None if known is None else known.tensors)
        random, weights = self.random.now(), Snapshot(dict(enumerate(self.parameters)))
        with said("checkpointing"):
            outputs = run(inputs)
        changes, written, complete = before.changes()
        changed = set(given.changed())
        first_of_all = known is None
        known = self.known = known or _Known(flags)
        known.tensors |= written
        known.inputs |= changed
        if not complete or not changed <= given.copies.keys() or weights.changed():
            return outputs, None
        numbers = iter(tensors_given)
        inputs = tuple(map_tensors(lambda _: _as_given(given, changed, next(numbers)), value) for value in own)
        compared = [each.detach().clone() for each in tensors(outputs)] if first_of_all else None
        drew = None if random.is_now() else random
        return outputs, Kept(inputs, Snapshot(dict(enumerate(tensors(inputs)))), changes, drew, compared)

    def again(self, kept: Kept, inputs: Sequence[Any], run: RunStage) -> Any:
        """Run the stage once more, and give its outputs. ``inputs`` has those that do not come from outside."""
        if kept.tensors.changed():
            raise StageError(
                f"another stage has changed an input of {self.name} in place, so the forward cannot be computed again with "
                "the input that it had. What to do: use the operation that makes a new tensor there, or leave stage "
                f"{self.stage} out of checkpoint=, in a dict of the other stages"
            )
        both = tuple(as_leaf(other if mine is None else mine) for mine, other in zip(kept.inputs, inputs, strict=True))
        with ExitStack() as stack:
            if kept.drew is not None:
                stack.enter_context(kept.drew.in_force())
            stack.enter_context(as_before(kept.changes))
            stack.enter_context(said("recomputing"))
            outputs = run(both)
        self._compare(kept, outputs)
        return outputs

    def _compare(self, kept: Kept, outputs: Any) -> None:
        if kept.outputs is None:
            return
        found = [each.detach() for each in tensors(outputs)]
        if len(found) == len(kept.outputs) and all(map(_as_good_as_equal, kept.outputs, found)):
            return
        raise StageError(
            f"{self.name} returns something else when its forward is computed again: {describe(outputs)}. The "
            "forward depends on more than its inputs, its buffers and the random numbers of torch, numpy and "
            f"Python: on a clock, a file, or an object that it changes. What to do: leave stage {self.stage} out of "
            "checkpoint=, in a dict of the other stages"
        )


def cut(value: Any) -> Any:
    """A value without the graph that made it. Its tensors require a gradient as before."""
    return map_tensors(lambda tensor: tensor.detach().requires_grad_() if tensor.requires_grad else tensor, value)


def _as_given(given: Snapshot[int], changed: Container[int], number: int) -> torch.Tensor:
    tensor = given.tensors[number]
    return given.copies[number].requires_grad_(tensor.requires_grad) if number in changed else tensor


def _as_good_as_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether tensors differ by no more than sums in another order do, as on a GPU."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.dtype.is_floating_point or one.layout is not torch.strided:
        return one.layout is not torch.strided or torch.equal(one, other)
    if torch.equal(one, other):
        return True
    epsilon = 1e3 * torch.finfo(one.dtype).eps
    scale = one.abs().nan_to_num().max().item() if one.numel() else 0.0
    return torch.allclose(one, other, rtol=epsilon, atol=epsilon * scale, equal_nan=True)
