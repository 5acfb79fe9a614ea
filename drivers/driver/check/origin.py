"""Where a difference begins.

`OriginSearch` runs the stages once more in this process, call by call, beside what the workers noted:

    each call, in the order of the graph    1 it took what the calls before it gave?   2 from that, it gave the same as here?
    each forward, with all rows at once     3 it gives the same as for micro-batches?

The first "no" is where the difference begins. If question 3 has it, no worker is wrong: such a stage mixes rows, or counts
them, so that micro-batches do not give what the plain model computes. Without a "no", `by_place` looks at the gradients.

`where_lost` compares the stages with the model, where tracing has lost something: the calls of the modules that both have.

    the model      first ──▶ second ──────▶ third       what a module takes and gives, and the gradients that it gets
    the stages     first ──▶ second ──▶ ? ─▶ third      the first that takes something else is behind what was lost
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from pippy.drivers.base.errors import DriverError
from pippy.drivers.batch.division import Division
from pippy.drivers.compare.alike import alike
from pippy.drivers.compare.digest import digest
from pippy.drivers.driver.check.differences import Apart, Difference
from pippy.drivers.driver.check.witness import HowWitnessed, Witness, whole_input
from pippy.drivers.lowering.flow import RemoteInterpreter, Work
from pippy.drivers.protocol.steps import SeenCall
from pippy.ir.base.errors import StageError
from pippy.ir.base.names import LOSS, named_state, stage_index, stage_name
from pippy.ir.base.trees import children, map_tensors, tensors
from pippy.ir.record.compiled import Compiled
from pippy.ir.record.nodes import map_nodes
from pippy.ir.reference import run_reference
from pippy.ir.run.stage_backward import add_gradients, weighted
from pippy.ir.run.stage_run import StageRun, run_backward, run_stage

_MIXES = "from all rows at once it computes something else than from micro-batches: it mixes rows, or counts them"
_LOSS_MIXES = "the loss of all rows is not the weighted sum of the losses of micro-batches"


@dataclass(frozen=True)
class Origin:
    """Where a difference begins: the stage, what is wrong there, and which workers hold the stage."""

    stage: str
    what: str
    workers: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = f" on {', '.join(self.workers)}" if self.workers else ""
        return f"{self.stage}{where}: {self.what}"


class _Here:
    """The stages, run in this process. ``inputs`` gives an input of the model for a micro-batch; ``numbers`` are those of
    before the step, and ``weights`` those of the losses. ``values`` has what calls gave, by name and micro-batch."""

    def __init__(
        self,
        compiled: Compiled,
        inputs: Callable[[str, int], Any],
        numbers: Mapping[str, torch.Tensor],
        weights: Sequence[float],
    ) -> None:
        self.inputs, self.weights = inputs, weights
        self.nodes = {str(each.target): each for each in compiled.split_gm.graph.find_nodes(op="call_module")}
        self.modules = {name: _copied(compiled, name, numbers) for name in self.nodes}
        self.values: dict[tuple[str, int], Any] = {}
        self.runs: dict[tuple[str, int], StageRun] = {}

    def taken(self, work: Work, microbatch: int) -> list[Any]:
        """What a call is to take: values, or the gradients of its outputs."""
        return [self._taken(each, microbatch, work.phase) for each in work.takes]

    def _taken(self, each: Any, microbatch: int, phase: str) -> Any:
        if phase == "F":
            key = each, microbatch
            return self.values[key] if key in self.values else self.inputs(*key)
        if isinstance(each, tuple):
            return reduce(add_gradients, [self.values[name, microbatch] for name in each], None)
        return weighted(each, self.weights[microbatch])

    def given(self, work: Work, microbatch: int, taken: Sequence[Any]) -> Sequence[Any]:
        """What a call gives, which is run."""
        key, module = (work.call, microbatch), self.modules[work.call]
        gives: Sequence[Any]
        if work.phase == "F":
            leaves = [map_tensors(_own_leaf, value) for value in taken]
            numbers = iter(leaves)
            output = run_stage(work.call, module, map_nodes(lambda _: next(numbers), self.nodes[work.call].args))
            self.runs[key] = StageRun(output, tuple(leaves))
            gives = [output] if len(work.gives) == 1 else list(output)
        else:
            gives = run_backward(work.call, module, self.runs.pop(key), taken if len(taken) > 1 else taken[0])
        self.note(work, microbatch, gives)
        return gives

    def note(self, work: Work, microbatch: int, gives: Sequence[Any]) -> None:
        """Other calls take what this one gave."""
        self.values |= {(name, microbatch): value for name, value in zip(work.gives, gives) if name is not None}


class OriginSearch:
    """Looks for the first call whose numbers are wrong. ``seen`` has what workers noted of a step, and ``numbers`` the
    parameters and buffers before it. Numbers are the same if they differ by less than ``floor``."""

    def __init__(
        self,
        compiled: Compiled,
        division: Division,
        weights: Sequence[float],
        seen: Sequence[SeenCall],
        numbers: Mapping[str, torch.Tensor],
        floor: float,
    ) -> None:
        self.compiled, self.division, self.weights, self.floor = compiled, division, weights, floor
        self.seen = {(each.phase, each.call, each.microbatch): each for each in seen}
        self.numbers, phases = numbers, {each.phase for each in seen}
        every = RemoteInterpreter(compiled).run_until(lambda node: node.op == "output")
        self.works = [each for each in every if each.phase in phases]
        self.forwards = [each for each in self.works if each.phase == "F"]

    def find(self) -> Origin | None:
        """Where the difference begins; None if no call is wrong."""
        with alike(), torch.set_grad_enabled(len(self.works) > len(self.forwards)):
            try:
                return self._of_worker() or self._of_rows()
            except (StageError, DriverError, KeyError):  # it cannot be seen here, and that must not hide the difference
                return None

    def _of_worker(self) -> Origin | None:
        """The first call that is wrong on its worker."""
        here = _Here(self.compiled, self.division.take, self.numbers, self.weights)
        for work in self.works:
            for microbatch in range(self.division.chunks):
                fault = self._fault(here, work, microbatch)
                if fault is not None:
                    return Origin(stage_name(work.stage), ("the loss: " if work.call == LOSS else "") + fault)
        return None

    def _fault(self, here: _Here, work: Work, microbatch: int) -> str | None:
        seen = self.seen.get((work.phase, work.call, microbatch))
        if seen is None or seen.gives is None:
            return None
        if work.phase == "B" and (work.call, microbatch) not in here.runs:  # of a loss over all rows
            here.note(work, microbatch, seen.gives)
            return None
        taken, takes = here.taken(work, microbatch), seen.takes if isinstance(seen.takes, list) else [seen.takes]
        wrong = [name for name, mine, its in zip(work.takes, taken, takes) if not _same(mine, its, self.floor)]
        if wrong and work.phase == "B":
            return f"the gradients that it got for micro-batch {microbatch} are not what was given for it"
        if wrong:
            makers = (stage_name(each.stage) for each in self.forwards if wrong[0] in each.gives)
            return f"micro-batch {microbatch} got another value than {next(makers, 'the call')} gave: {wrong[0]}"
        gives = zip(work.gives, here.given(work, microbatch, taken), seen.gives, strict=True)
        if all(name is None or _same(mine, its, self.floor) for name, mine, its in gives):
            return None
        if work.phase == "B":
            return f"from the same gradients, it gives others for micro-batch {microbatch} than here"
        return f"on the same inputs, its outputs for micro-batch {microbatch} are not what it gives here"

    @torch.no_grad()
    def _of_rows(self) -> Origin | None:
        """The first forward that computes something else for all rows at once."""
        if self.division.sizes is None or not self.division.is_cut:
            return None
        whole = _Here(self.compiled, lambda name, _: whole_input(self.division, name), self.numbers, (1.0,))
        for work in self.forwards:
            calls = [self.seen["F", work.call, microbatch].gives for microbatch in range(self.division.chunks)]
            gives = whole.given(work, 0, whole.taken(work, 0))
            if None not in calls and not all(self._join(parts, its) for *parts, its in zip(*calls, gives)):
                return Origin(stage_name(work.stage), _LOSS_MIXES if work.call == LOSS else _MIXES)
        return None

    def _join(self, parts: Sequence[Any], whole: Any) -> bool:
        """Whether values of micro-batches make that of all rows: one after the other, added up by weights, or all alike."""
        held = children(whole)
        if held is not None:
            return all(self._join(each, item) for *each, item in zip(*(children(each) or () for each in parts), held))
        if not isinstance(whole, torch.Tensor) or all(_same(whole, each, self.floor) for each in parts):
            return True
        if all(each.shape == whole.shape for each in parts):
            total = sum(weight * each for weight, each in zip(self.weights, parts) if weight)
            return _same(whole, total, self.floor)
        dims = (dim for dim, (one, other) in enumerate(zip(whole.shape, parts[0].shape)) if one != other)
        try:
            return _same(whole, torch.cat(list(parts), next(dims, 0)), self.floor)
        except RuntimeError:  # their other dimensions differ
            return False


def by_place(differences: Sequence[Difference]) -> Origin:
    """Where differences begin if no call is wrong: the last stage with wrong gradients, or that of the worst difference. A
    parameter of several stages is added up in the first of them."""
    wrong = [replace(each, stage=each.stage.partition(", ")[0]) for each in differences if each.kind == "gradient"]
    last = max(wrong, key=lambda each: stage_index(each.stage) or 0, default=None)
    if last is not None and last.stage:
        return Origin(last.stage, f"the last stage whose gradient differs, that of {last.name}")
    worst = differences[0]
    if worst.kind == "buffer":
        what = f"its buffer {worst.name} differs after the step; forward may change it once for each micro-batch"
    elif worst.kind == "parameter":
        of_copy = f"{worst.why} of {worst.name} is unlike the first"
        what = of_copy if worst.why else f"its update of {worst.name} differs, although the gradient is right"
    else:
        what = "the merged outputs of its micro-batches are not what the plain model returns"
    return Origin(worst.stage, what)


@dataclass
class _Call:
    """One call of a module: digests of what it takes and gives, and of the gradients of what it gives."""

    takes: list[torch.Tensor]
    gives: list[torch.Tensor]
    gradients: dict[int, torch.Tensor | None]


def where_lost(witness: Witness, division: Division, floor: float) -> Origin | None:
    """Where the stages lose what the model computes for these rows, which are one micro-batch; None if that cannot be seen."""
    compiled = witness.compiled
    modules = {id(module): (stage, name, module) for stage, name, module in _called(compiled)}
    found = [each for _, _, each in modules.values()]
    try:
        plain = _calls(found, lambda: witness.step(division, HowWitnessed()))
        inputs = {name: division.take(name, 0) for name in division.arguments}
        with witness.aside(hooks=True):
            stages = _calls(found, lambda: run_reference(compiled, inputs))
    except Exception:  # an error that explains another one must not hide it
        return None
    before = ""
    for key, call in stages.items():
        stage, name, module = modules[key[0]]
        wanted = plain.get(key)
        shown = f"{name!r} ({type(module).__name__})"
        if wanted is None or not _same(wanted.takes, call.takes, floor):
            behind = f", behind {before}" if before else ""
            return Origin(stage, f"what {shown} takes is not what it takes in the model{behind}")
        if not _same(wanted.gives, call.gives, floor):
            return Origin(stage, f"from the same inputs, {shown} gives something else than in the model")
        before = shown
    for key, call in reversed(stages.items()):
        stage, name, module = modules[key[0]]
        if not _same(plain[key].gradients, call.gradients, floor):
            return Origin(stage, f"the gradient that reaches {name!r} ({type(module).__name__}) is not the model's")
    return None


def _called(compiled: Compiled) -> Iterator[tuple[str, str, nn.Module]]:
    """The modules that stages call: the stage, the user's name, the module."""
    for stage, module in compiled.stages():
        for node in module.graph.find_nodes(op="call_module") if hasattr(module, "graph") else ():
            name = compiled.remap_qualname(f"{stage}.{node.target}")
            yield stage, name, module.get_submodule(str(node.target))


def _calls(modules: Sequence[nn.Module], run: Callable[[], Any]) -> dict[tuple[int, int], _Call]:
    """What calls of these modules take and give while something runs, in their order, by the id of the module and the number
    of the call."""
    calls: dict[tuple[int, int], _Call] = {}
    counts: Counter[int] = Counter()

    def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        taken, given = list(tensors((args, kwargs))), list(tensors(output))
        call = calls[id(module), counts[id(module)]] = _Call(
            [*map(digest, taken)], [*map(digest, given)], dict.fromkeys(range(len(given)))
        )
        counts[id(module)] += 1
        for at, each in enumerate(given):
            if each.requires_grad:
                each.register_hook(lambda gradient, at=at: call.gradients.update({at: digest(gradient)}))

    handles = [each.register_forward_hook(note, with_kwargs=True) for each in modules]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _same(one: Any, other: Any, floor: float) -> bool:
    """Whether two trees of tensors are equal but for rounding. None stands for a gradient of zeros."""
    held, others = children(one), children(other)
    if held is not None or others is not None:
        return all(_same(*pair, floor) for pair in zip_longest(held or (), others or ()))
    compared = all(each is None or isinstance(each, torch.Tensor) for each in (one, other))
    return not compared or Apart.of(one, other).share <= floor


def _copied(compiled: Compiled, call: str, numbers: Mapping[str, torch.Tensor]) -> nn.Module:
    """A copy of a stage that has these numbers, which are by the user's names."""
    module = copy.deepcopy(compiled.stage(call))
    with torch.no_grad():
        for local, tensor in named_state(module):
            name = f"{call}.{local}" if call == LOSS else compiled.remap_qualname(f"{call}.{local}")
            number = numbers.get(compiled.qualnames.canonical.get(name, name))
            if number is not None:
                tensor.copy_(number)
    return module


def _own_leaf(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor, into which a stage may write, and which gets a gradient of its own."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
