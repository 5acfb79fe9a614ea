"""Where a difference begins: each call of a stage runs once more in this process, with the inputs that it had on its worker.

    forwards, from the first stage    1 its inputs are what other calls gave?   2 its outputs are the same here?
                                      3 they are the same for all rows at once?
    backwards, from the last          the same for gradients; and do those of parameters add up to what the workers have?

The first "no" is where the difference begins. If it answers question 3, no worker is wrong: such a stage mixes rows, or counts
them, so that micro-batches do not give what the plain model computes.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import nn

from pippy.drivers.base.errors import DriverError
from pippy.drivers.batch.division import Division
from pippy.drivers.compare.alike import alike
from pippy.drivers.driver.check.differences import Apart, Difference
from pippy.drivers.driver.check.joined import NotJoined, joined_gradient, joined_rows
from pippy.drivers.driver.check.witness import whole_input
from pippy.drivers.lowering.flow import RemoteInterpreter, Work
from pippy.drivers.protocol.steps import SeenCall
from pippy.ir.base.errors import StageError
from pippy.ir.base.names import LOSS, named_state, stage_index, stage_name
from pippy.ir.base.trees import children, leaves, map_tensors, with_children
from pippy.ir.record.compiled import Compiled
from pippy.ir.record.nodes import map_nodes
from pippy.ir.run.gradient_hooks import GradientHooks
from pippy.ir.run.stage_backward import add_gradients, weighted
from pippy.ir.run.stage_run import StageRun, as_leaf, run_backward, run_stage


@dataclass(frozen=True)
class Origin:
    """Where a difference begins: the stage, what is wrong there, and which workers hold the stage."""

    stage: str
    what: str
    workers: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = f" on {', '.join(self.workers)}" if self.workers else ""
        return f"{self.stage}{where}: {self.what}"


class _Replay:
    """One call of a stage in this process: its outputs, and the gradients of its inputs if it has a backward."""

    def __init__(
        self, compiled: Compiled, module: nn.Module, work: Work, taken: Sequence[Any], output_grads: Any
    ) -> None:
        node = next(iter(compiled.split_gm.graph.find_nodes(op="call_module", target=work.call)))
        inputs = [as_leaf(value) for value in taken]
        numbers = iter(inputs)
        args = map_nodes(lambda node: next(numbers), node.args)
        with torch.set_grad_enabled(output_grads is not None):
            output = run_stage(work.call, module, args)
            self.outputs = [output] if len(work.gives) == 1 else list(output)
            self.outputs = [map_tensors(lambda tensor: tensor.detach().clone(), each) for each in self.outputs]
            self.gradients: Sequence[Any] = ()
            if output_grads is not None:
                self.gradients = run_backward(work.call, module, StageRun(output, tuple(inputs)), output_grads)


class OriginSearch:
    """Looks for the first call whose numbers are wrong. ``seen`` has what workers noted of a step, ``numbers`` the parameters
    and buffers before it, ``gradients`` those that it left, and ``hooks`` the hooks of parameters."""

    def __init__(
        self,
        compiled: Compiled,
        division: Division,
        weights: Sequence[float],
        seen: Sequence[SeenCall],
        numbers: Mapping[str, torch.Tensor],
        gradients: Mapping[str, Any],
        hooks: Mapping[str, GradientHooks],
        floor: float,
    ) -> None:
        self.compiled, self.division, self.weights, self.floor = compiled, division, weights, floor
        self.numbers, self.gradients, self.hooks = numbers, gradients, hooks
        self.seen = {(each.phase, each.call, each.microbatch): each for each in seen}
        every = RemoteInterpreter(compiled).run_until(lambda node: node.op == "output")
        self.forwards = [each for each in every if each.phase == "F"]
        self.backwards = {each.call: each for each in every if each.phase == "B"}
        self.maker = {name: (work, at) for work in self.forwards for at, name in enumerate(work.gives)}
        self.wholes: dict[str, Any] = {}  # what calls give for all rows at once
        self.whole_inputs: dict[str, list[Any]] = {}
        self.largest = max((Apart.of(each, None).size for each in gradients.values() if each is not None), default=0.0)
        self.totals: dict[str, Any] = {}  # of gradients of parameters, over the stages so far
        self.holders: dict[str, set[str]] = {}

    def find(self) -> Origin | None:
        """Where the difference begins; None if no call is wrong."""
        with alike():
            for work in self.forwards:
                fault = self._forward_fault(work)
                if fault is not None:
                    return Origin(self._stage(work), fault)
            for work in self.forwards:
                for name in self._parameter_names(work.call).values():
                    self.holders.setdefault(name, set()).add(work.call)
            for work in reversed(self.forwards):
                fault = self._backward_fault(work) if work.call in self.backwards else None
                if fault is not None:
                    return Origin(self._stage(work), fault)
        return None

    def _stage(self, work: Work) -> str:
        """The stage of a call: the loss is computed with the last one that it needs."""
        return stage_name(work.stage)

    # Forwards

    def _forward_fault(self, work: Work) -> str | None:
        module = self._module(work.call)
        for microbatch in range(self.division.chunks):
            seen = self.seen.get(("F", work.call, microbatch))
            if seen is None or seen.gives is None:
                return None
            for name, value in zip(work.takes, seen.takes):
                wanted = self._given_to(name, microbatch)
                if wanted is not None and not _equal(wanted, value):
                    return f"{_of(work)}micro-batch {microbatch} got another value than {self._origin_of(name)} gave: {name}"
            outputs = _Replay(self.compiled, module, work, seen.takes, None).outputs
            if not self._alike(outputs, seen.gives):
                return f"{_of(work)}on the same inputs, its outputs for micro-batch {microbatch} are not what it gives here"
        return self._mixed(work)

    def _given_to(self, name: str, microbatch: int) -> Any:
        """The right value for an input of a call: an input of the model, or what another call gave."""
        if name not in self.maker:
            return self.division.take(name, microbatch)
        work, at = self.maker[name]
        seen = self.seen.get(("F", work.call, microbatch))
        return None if seen is None or seen.gives is None else seen.gives[at]

    def _origin_of(self, name: str) -> str:
        return stage_name(self.maker[name][0].stage) if name in self.maker else "the call"

    def _mixed(self, work: Work) -> str | None:
        """The fault if the call is not the same for all rows at once; None if it is."""
        if self.division.sizes is None or not self.division.is_cut:
            return None
        calls = [self.seen["F", work.call, microbatch] for microbatch in range(self.division.chunks)]
        try:
            taken = self.whole_inputs[work.call] = [
                joined_rows([each.takes[at] for each in calls], self._whole(name), self.weights)
                for at, name in enumerate(work.takes)
            ]
            outputs = _Replay(self.compiled, self._module(work.call), work, taken, None).outputs
        except (NotJoined, StageError, KeyError, DriverError):  # then nothing can be said
            return None
        self.wholes |= {name: value for name, value in zip(work.gives, outputs) if name is not None}
        with suppress(NotJoined):
            wanted = [
                joined_rows([each.gives[at] for each in calls], output, self.weights)
                for at, output in enumerate(outputs)
            ]
            if self._alike(outputs, wanted):
                return None
        if work.call == LOSS:
            return "the loss of all rows is not the weighted sum of the losses of micro-batches"
        return "from all rows at once it computes something else than from micro-batches: it mixes rows, or counts them"

    def _mixed_backward(self, work: Work, parts: nn.Module) -> str | None:
        """The fault if gradients of parameters differ for all rows at once. ``parts`` has the sums over micro-batches."""
        calls = [self.seen["B", work.call, microbatch] for microbatch in range(self.division.chunks)]
        output_grads, module = [], self._module(work.call)
        try:
            outputs = [self.wholes[name] for name in work.gives if name is not None]
            for at, (name, output) in enumerate(zip(self.backwards[work.call].takes, outputs, strict=True)):
                gradients = [_items(each.takes)[at] for each in calls]
                output_grads.append(joined_gradient(gradients, output) if isinstance(name, tuple) else name)
            taken = [_wanting(value, calls[0].gives[at]) for at, value in enumerate(self.whole_inputs[work.call])]
            _Replay(self.compiled, module, work, taken, output_grads if len(output_grads) > 1 else output_grads[0])
        except (NotJoined, StageError, KeyError, DriverError):  # then nothing can be said
            return None
        for (local, one), other in zip(module.named_parameters(), parts.parameters(), strict=True):
            if not self._same_gradient(one.grad, other.grad):
                name = self._users(work.call, local)
                return f"its backward of all rows at once gives {name} another gradient than the sum over micro-batches"
        return None

    def _whole(self, name: str) -> Any:
        """A value for all rows at once: an input, or what a call gives for all rows."""
        return self.wholes[name] if name in self.maker else whole_input(self.division, name)

    # Backwards

    def _backward_fault(self, work: Work) -> str | None:
        module, backward = self._module(work.call), self.backwards[work.call]
        for microbatch in range(self.division.chunks):
            forward, seen = (self.seen.get((phase, work.call, microbatch)) for phase in "FB")
            if forward is None or seen is None or forward.gives is None:
                return None
            wanted = self._gradients_for(backward, microbatch)
            if not self._alike(_items(seen.takes), wanted):
                return (
                    f"{_of(work)}the gradients that it got for micro-batch {microbatch} are not what was given for it"
                )
            taken = [_wanting(value, gradient) for value, gradient in zip(forward.takes, seen.gives)]
            replay = _Replay(self.compiled, module, work, taken, seen.takes)
            needed = [
                None if gradient is None else mine for mine, gradient in zip(replay.gradients, seen.gives, strict=True)
            ]
            if not self._alike(needed, list(seen.gives)):
                return f"{_of(work)}from the same gradients, it gives others for micro-batch {microbatch} than here"
        return self._wrong_sum(work.call, module) or self._mixed_backward(work, module)

    def _gradients_for(self, backward: Work, microbatch: int) -> list[Any]:
        """The gradients of a call's outputs: what the calls that use these outputs gave."""
        return [
            reduce(add_gradients, [self._gradient(name, microbatch) for name in each], None)
            if isinstance(each, tuple)
            else weighted(each, self.weights[microbatch])
            for each in backward.takes
        ]

    def _gradient(self, name: str, microbatch: int) -> Any:
        for call, work in self.backwards.items():
            if name in work.gives:
                seen = self.seen.get(("B", call, microbatch))
                return None if seen is None else seen.gives[work.gives.index(name)]
        return None

    def _wrong_sum(self, call: str, module: nn.Module) -> str | None:
        """The fault if the gradients of a stage's parameters are not the sum over micro-batches, and over copies."""
        parameters = dict(module.named_parameters())
        for local, name in self._parameter_names(call).items():
            self.totals[name] = add_gradients(self.totals.get(name), parameters[local].grad)
            copies = self.holders[name]
            copies.discard(call)
            total, hooks = self.totals[name], self.hooks.get(name)
            if hooks and total is not None and not copies:
                total = hooks.accumulated(parameters[local], total)
            if not copies and name in self.gradients and not self._same_gradient(total, self.gradients[name]):
                return f"the gradient of {name} is not the sum of those that its micro-batches give"
        return None

    # Of both

    def _module(self, call: str) -> nn.Module:
        """A copy of a stage with the parameters and buffers of before the step."""
        module = copy.deepcopy(self.compiled.stage(call))
        with torch.no_grad():
            for local, tensor in named_state(module):
                name = self._users(call, local)
                if name in self.numbers:
                    tensor.copy_(self.numbers[name])
        return module

    def _users(self, call: str, local: str) -> str:
        name = f"{call}.{local}" if call == LOSS else self.compiled.remap_qualname(f"{call}.{local}")
        return self.compiled.qualnames.canonical.get(name, name)

    def _parameter_names(self, call: str) -> dict[str, str]:
        return {local: self._users(call, local) for local, _ in self.compiled.stage(call).named_parameters()}

    def _same_gradient(self, one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
        """Whether two gradients of a parameter are equal but for rounding. One that should be 0 is rounding alone."""
        apart = Apart.of(one, other)
        return apart.off <= self.floor * max(apart.size, self.largest / 10)

    def _alike(self, one: Any, other: Any) -> bool:
        """Whether two trees of tensors are equal but for rounding. None stands for a gradient of zeros."""
        mine, theirs = list(_flat(one)), list(_flat(other))
        if len(mine) != len(theirs):
            return not any(map(_matters, [*mine, *theirs])) if not (mine and theirs) else False
        return all(self._same(each, its) for each, its in zip(mine, theirs))

    def _same(self, one: Any, other: Any) -> bool:
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            return Apart.of(one, other).share <= self.floor
        if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
            number, tensor = (other, one) if isinstance(one, torch.Tensor) else (one, other)
            return not _matters(tensor) if number is None else bool((tensor == number).all())
        return one is None or other is None or one == other


def by_place(differences: Sequence[Difference]) -> Origin:
    """Where differences begin if no call is wrong: the last stage with wrong gradients, or that of the worst difference."""
    wrong = [each for each in differences if each.kind == "gradient" and each.stage]
    if wrong:
        last = max(wrong, key=lambda each: stage_index(each.stage.rpartition(", ")[2]) or 0)
        return Origin(last.stage.rpartition(", ")[2], f"the last stage whose gradient differs, that of {last.name}")
    worst = differences[0]
    what = {
        "buffer": f"its buffer {worst.name} differs after the step; forward may change it once for each micro-batch",
        "parameter": f"its update of {worst.name} differs, although the gradient is right",
    }
    if worst.why and worst.kind == "parameter":
        return Origin(worst.stage, f"{worst.why} of {worst.name} is unlike the first")
    return Origin(
        worst.stage,
        what.get(worst.kind, "the merged outputs of its micro-batches are not what the plain model returns"),
    )


def _of(work: Work) -> str:
    return "the loss: " if work.call == LOSS else ""


def _items(given: Any) -> list[Any]:
    """The gradients of a call's outputs, one for each."""
    return list(given) if isinstance(given, list) else [given]


def _flat(tree: Any) -> Iterator[Any]:
    return leaves(tree)


def _matters(each: Any) -> bool:
    return isinstance(each, torch.Tensor) and bool(each.count_nonzero())


def _equal(one: Any, other: Any) -> bool:
    """Whether two values have the same numbers, to the bit."""
    pairs = zip(leaves(one), leaves(other))
    return all(
        not Apart.of(mine, its).off
        for mine, its in pairs
        if isinstance(mine, torch.Tensor) and isinstance(its, torch.Tensor)
    )


def _wanting(value: Any, gradient: Any) -> Any:
    """A value whose tensors require a gradient where ``gradient`` has one."""
    if isinstance(value, torch.Tensor):
        wants = gradient is not None and value.is_floating_point()
        return value.detach().requires_grad_(wants)
    held = children(value)
    if held is None or gradient is None:
        return value
    return with_children(value, [_wanting(item, item_gradient) for item, item_gradient in zip(held, gradient)])
