"""Where a difference begins: what each call of a stage took and gave on its worker, beside the same step of a copy of the Pipe.

    calls, forwards from the first stage,     1 it took what the other calls give?     2 it gave the same for that?
    then backwards from the last              3 from all rows at once it gives the same?

The first "no" is where the difference begins. If it answers question 3, no worker is wrong: such a stage mixes rows, or counts
them, so that micro-batches do not give what the plain model computes.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from pippy.drivers.batch.division import Division
from pippy.drivers.compare.alike import alike
from pippy.drivers.driver.check.differences import Apart, Difference
from pippy.drivers.driver.check.rows import WholeRows
from pippy.drivers.lowering.flow import RemoteInterpreter, Work
from pippy.drivers.protocol.steps import SeenCall
from pippy.ir.base.names import LOSS, named_state, stage_index, stage_name
from pippy.ir.base.trees import leaves, map_tensors
from pippy.ir.pipe import Pipe, compiled_of
from pippy.ir.reference import run_microbatches
from pippy.ir.run.gradient_hooks import GradientHooks

_MIXED_LOSS = "the loss of all rows is not the weighted sum of the losses of micro-batches"
_MIXES = "from all rows at once it computes something else than from micro-batches: it mixes rows, or counts them"
_Values = tuple[Sequence[Any], Sequence[Any]]
"""What a call takes and gives: for each input, and for each output."""


@dataclass(frozen=True)
class Origin:
    """Where a difference begins: the stage, what is wrong there, and which workers hold the stage."""

    stage: str
    what: str
    workers: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = f" on {', '.join(self.workers)}" if self.workers else ""
        return f"{self.stage}{where}: {self.what}"


class _Step:
    """A step of a copy of a Pipe in this process: its calls, and the gradients that it leaves, by the user's names."""

    def __init__(
        self, pipe: Pipe, numbers: Mapping[str, torch.Tensor], division: Division, weights: Sequence[float] | None
    ) -> None:
        self.calls: dict[tuple[str, str], list[_Values]] = {}  # by phase and call, for each micro-batch
        hooks = {name: GradientHooks.of(each) for name, each in pipe.named_parameters()}
        pipe = copy.deepcopy(pipe)
        parameters = dict(pipe.named_parameters())
        with torch.no_grad():
            for name, tensor in named_state(pipe):
                if name in numbers:
                    tensor.copy_(numbers[name])
        for name, each in parameters.items():
            each.grad = None
            hooks[name].put_on(each)
        inputs = [
            {name: division.take(name, microbatch) for name in division.arguments}
            for microbatch in range(division.chunks)
        ]
        run_microbatches(compiled_of(pipe), inputs, weights, self._note)
        self.gradients = {name: each.grad for name, each in parameters.items()}

    def _note(self, phase: str, call: str, takes: Any, gives: Any) -> None:
        noted = map_tensors(lambda each: each.detach().clone(), (takes, gives))
        self.calls.setdefault((phase, call), []).append((_items(noted[0]), _items(noted[1])))


class OriginSearch:
    """Looks for the first call whose numbers are wrong. ``seen`` has what workers noted of a step, ``numbers`` the parameters
    and buffers before it, and ``gradients`` those that it left."""

    def __init__(
        self,
        pipe: Pipe,
        division: Division,
        weights: Sequence[float],
        seen: Iterable[SeenCall],
        numbers: Mapping[str, torch.Tensor],
        gradients: Mapping[str, Any],
        floor: float,
    ) -> None:
        self.compiled, self.weights, self.floor = compiled_of(pipe), weights, floor
        self.seen = {(each.phase, each.call, each.microbatch): each for each in seen}
        self.gradients = gradients
        self.is_single = any(each.gives is None for each in self.seen.values())
        self.largest = max((Apart.of(each, None).size for each in gradients.values() if each is not None), default=0.0)
        with alike():
            self.parts, self.whole = _Step(pipe, numbers, division, weights), None
            if division.is_cut and division.sizes is not None:
                with suppress(Exception):  # the model may take no other number of rows
                    self.whole = _Step(pipe, numbers, WholeRows(division).divided(1), None)

    def find(self) -> Origin | None:
        """Where the difference begins; None if no call is wrong."""
        works = RemoteInterpreter(self.compiled).run_until(lambda node: node.op == "output")
        makers = {name: stage_name(each.stage) for each in works if each.phase == "F" for name in each.gives if name}
        for work in works:
            fault = self._fault(work, makers)
            if fault is not None:
                return Origin(stage_name(work.stage), fault)
        return None

    def _fault(self, work: Work, makers: Mapping[str, str]) -> str | None:
        of, backward = "the loss: " if work.call == LOSS else "", work.phase == "B"
        for rows, (seen_takes, seen_gives), (takes, gives) in self._pairs(work):
            for name, given, wanted in zip(work.takes, seen_takes, takes):
                if not self._alike(given, wanted):
                    if backward:
                        return f"{of}the gradients that it got for {rows} are not what was given for it"
                    return f"{of}{rows} got another value than {makers.get(name, 'the call')} gave: {name}"
            if not all(map(self._alike, seen_gives, gives)):
                if backward:
                    return f"{of}from the same gradients, it gives others for {rows} than here"
                return f"{of}on the same inputs, its outputs for {rows} are not what it gives here"
        return self._mixed(work) or (self._wrong_gradient(work) if backward else None)

    def _pairs(self, work: Work) -> Iterator[tuple[str, _Values, _Values]]:
        """What a call took and gave on its worker, and here: for each micro-batch. Backward from one loss, for all rows."""
        key = work.phase, work.call
        seen = [self.seen.get((*key, microbatch)) for microbatch in range(len(self.parts.calls.get(key, [])))]
        found = [
            (_items(each.takes), _items(each.gives)) for each in seen if each is not None and each.gives is not None
        ]
        if len(found) < len(seen):
            return
        if not (self.is_single and work.phase == "B"):
            yield from (
                (f"micro-batch {at}", *pair) for at, pair in enumerate(zip(found, self.parts.calls.get(key, [])))
            )
        elif self.whole is not None and found:
            (whole,) = self.whole.calls[key]
            takes, gives = (
                [_for_all_rows(each, like) for each, like in zip(zip(*its), likes)]
                for its, likes in zip(zip(*found), whole)
            )
            yield "all rows", (takes, gives), whole

    def _mixed(self, work: Work) -> str | None:
        """The fault if a call is not the same for all rows at once; None if it is, or if that cannot be said."""
        key, backward = (work.phase, work.call), work.phase == "B"
        if self.whole is None or (self.is_single and (backward or work.call == LOSS)) or key not in self.parts.calls:
            return None
        weights = None if backward else self.weights
        for given, wanted in zip(zip(*(gives for _, gives in self.parts.calls[key])), self.whole.calls[key][0][1]):
            if not self._alike(_for_all_rows(given, wanted, weights), wanted):
                if backward:
                    return "from all rows at once its backward gives other gradients than from micro-batches"
                return _MIXED_LOSS if work.call == LOSS else _MIXES
        return None

    def _wrong_gradient(self, work: Work) -> str | None:
        """The fault if a gradient of a parameter is wrong, of those that no earlier stage uses."""
        for name in self._first_used(work.call) if not self.is_single else ():
            mine = self.parts.gradients.get(name)
            if name in self.gradients and not self._same_gradient(mine, self.gradients[name]):
                return f"the gradient of {name} is not the sum of those that its micro-batches give"
            if self.whole is not None and not self._same_gradient(mine, self.whole.gradients.get(name)):
                return f"its backward of all rows at once gives {name} another gradient than the sum over micro-batches"
        return None

    def _first_used(self, call: str) -> list[str]:
        """The parameters that a call uses, and no earlier call."""
        calls = [str(node.target) for node in self.compiled.split_gm.graph.find_nodes(op="call_module")]
        names = {
            each: [self._users(each, local) for local, _ in self.compiled.stage(each).named_parameters()]
            for each in calls
        }
        before = {name for each in calls[: calls.index(call)] for name in names[each]}
        return [name for name in names[call] if name not in before]

    def _users(self, call: str, local: str) -> str:
        name = f"{call}.{local}" if call == LOSS else self.compiled.remap_qualname(f"{call}.{local}")
        return self.compiled.qualnames.canonical.get(name, name)

    def _same_gradient(self, one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
        """Whether two gradients of a parameter are equal but for rounding. One that should be 0 is rounding alone."""
        apart = Apart.of(one, other)
        return apart.off <= self.floor * max(apart.size, self.largest / 10)

    def _alike(self, one: Any, other: Any) -> bool:
        """Whether two values are equal but for rounding. None, for a gradient that is not needed, is like any."""
        return all(
            Apart.of(mine, its).share <= self.floor
            for mine, its in zip(leaves(one), leaves(other))
            if isinstance(mine, torch.Tensor) and isinstance(its, torch.Tensor)
        )


def by_place(differences: Sequence[Difference]) -> Origin:
    """Where differences begin if no call is wrong: the last stage with wrong gradients, or that of the worst difference."""
    wrong = [each for each in differences if each.kind == "gradient" and each.stage]
    if wrong:
        last = max(wrong, key=lambda each: stage_index(each.stage.rpartition(", ")[2]) or 0)
        return Origin(last.stage.rpartition(", ")[2], f"the last stage whose gradient differs, that of {last.name}")
    worst = differences[0]
    if worst.why and worst.kind == "parameter":
        return Origin(worst.stage, f"{worst.why} of {worst.name} is unlike the first")
    what = {
        "buffer": f"its buffer {worst.name} differs after the step; forward may change it once for each micro-batch",
        "parameter": f"its update of {worst.name} differs, although the gradient is right",
    }
    return Origin(
        worst.stage,
        what.get(worst.kind, "the merged outputs of its micro-batches are not what the plain model returns"),
    )


def _items(given: Any) -> list[Any]:
    """What a call takes or gives, for each input or output."""
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _for_all_rows(parts: Sequence[Any], like: Any, weights: Sequence[float] | None = None) -> list[Any]:
    """The numbers for all rows, of those for micro-batches, as the leaves of ``like``. None stands for what cannot be said."""
    return [_joined(each, its, weights) for its, *each in zip(leaves(like), *map(leaves, parts))]


def _joined(parts: Sequence[Any], like: Any, weights: Sequence[float] | None) -> torch.Tensor | None:
    """Rows joined; or, of what has none, the sum by ``weights``. None if that cannot be said.

    >>> _joined([torch.ones(2, 1), torch.zeros(1, 1)], torch.ones(3, 1), (0.5, 0.5)).shape
    torch.Size([3, 1])
    >>> _joined([torch.tensor(4.0), torch.tensor(2.0)], torch.tensor(3.1), (0.5, 0.5))
    tensor(3.)
    """
    if not all(isinstance(each, torch.Tensor) for each in (like, *parts)):
        return None
    if all(each.shape == like.shape for each in parts):
        if weights is not None and all(torch.equal(each, parts[0]) for each in parts):
            return parts[0]
        pairs = zip(parts, weights or [1.0] * len(parts))
        return torch.stack([each * by for each, by in pairs if by]).sum(0) if like.is_floating_point() else None
    for dim in range(like.dim()):
        rest = {(*each.shape[:dim], *each.shape[dim + 1 :]) for each in (like, *parts)}
        if len(rest) == 1 and sum(each.shape[dim] for each in parts) == like.shape[dim]:
            return torch.cat(list(parts), dim)
    return None
