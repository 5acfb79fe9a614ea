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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product, zip_longest
from typing import Any

import torch
from torch import nn

from pippy.drivers.batch.division import Division
from pippy.drivers.compare.alike import alike
from pippy.drivers.compare.tolerance import digest
from pippy.drivers.driver.check.differences import Apart, Difference
from pippy.drivers.driver.check.witness import HowWitnessed, Witness, whole_input
from pippy.drivers.lowering.flow import RemoteInterpreter, Work
from pippy.drivers.protocol.steps import SeenCall
from pippy.ir.base.names import LOSS, named_state, stage_index, stage_name
from pippy.ir.base.trees import children, map_tensors, tensors
from pippy.ir.pipe import Pipe, compiled_of
from pippy.ir.record.compiled import Compiled
from pippy.ir.reference import run_microbatches, run_reference
from pippy.ir.run.copies import follow_owners

Calls = dict[tuple[str, str, int], SeenCall]  # by the phase, the call and the micro-batch

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


class OriginSearch:
    """Looks for the first call whose numbers are wrong. ``seen`` has what workers noted of a step, and ``numbers`` the
    parameters and buffers before it. Numbers are the same if they differ by less than ``floor``."""

    def __init__(
        self,
        pipe: Pipe,
        division: Division,
        weights: Sequence[float],
        seen: Sequence[SeenCall],
        numbers: Mapping[str, torch.Tensor],
        floor: float,
    ) -> None:
        self.pipe, self.division, self.weights, self.numbers, self.floor = pipe, division, weights, numbers, floor
        self.seen = {(each.phase, each.call, each.microbatch): each for each in seen}
        self.works = RemoteInterpreter(compiled_of(pipe)).run_until(lambda node: node.op == "output")

    def find(self) -> Origin | None:
        """Where the difference begins; None if no call is wrong."""
        with alike(), torch.set_grad_enabled(any(phase == "B" for phase, _, _ in self.seen)):
            try:
                return self._of_worker() or self._of_rows()
            except Exception:  # an error that explains a difference must not hide it
                return None

    def _calls(self, microbatches: Sequence[Mapping[str, Any]], weights: Sequence[float]) -> Calls:
        """What calls take and give in this process, with the numbers of before the step."""
        pipe, calls, counts = copy.deepcopy(self.pipe), Calls(), Counter[tuple[str, str]]()
        with torch.no_grad():
            for name, tensor in named_state(pipe):
                if name in self.numbers:
                    tensor.copy_(self.numbers[name])
        follow_owners(compiled_of(pipe).copies())

        def note(phase: str, call: str, takes: Any, gives: Any) -> Any:
            key = phase, call, counts[phase, call]
            counts[phase, call] += 1
            if key in self.seen and self._is_of_all_rows(call):
                return self.seen[key].gives if phase == "B" else gives
            calls[key] = SeenCall(*key, *map_tensors(lambda each: each.detach().clone(), (takes, gives)))
            return gives

        run_microbatches(compiled_of(pipe), microbatches, weights, note)
        return calls

    def _is_of_all_rows(self, call: str) -> bool:
        """Whether a call is a loss that workers compute once, over all micro-batches."""
        return self.seen["F", call, 0].gives is None

    def _of_worker(self) -> Origin | None:
        """The first call that is wrong on its worker."""
        chunks = range(self.division.chunks)
        inputs = [{name: self.division.take(name, each) for name in self.division.arguments} for each in chunks]
        here = self._calls(inputs, self.weights)
        for work, microbatch in product(self.works, chunks):
            key = work.phase, work.call, microbatch
            fault = self._fault(work, here[key], self.seen[key]) if key in here and key in self.seen else None
            if fault is not None:
                of = "the loss: " if work.call == LOSS else ""
                return Origin(stage_name(work.stage), of + fault)
        return None

    def _fault(self, work: Work, here: SeenCall, seen: SeenCall) -> str | None:
        of = f"of micro-batch {here.microbatch}"
        taken = zip(work.takes, _items(here.takes), _items(seen.takes), strict=True)
        wrong = [name for name, mine, its in taken if not _same(mine, its, self.floor)]
        if wrong:
            return f"what it got {of} is not what was given for it: {wrong[0]}"
        given = zip(work.gives, _given(work, here), seen.gives, strict=True)
        if all(name is None or _same(mine, its, self.floor) for name, mine, its in given):
            return None
        what = "gradients, it gives others" if work.phase == "B" else "inputs, it gives other outputs"
        return f"from the same {what} {of} than here"

    @torch.no_grad()
    def _of_rows(self) -> Origin | None:
        """The first forward that computes something else for all rows at once."""
        if self.division.sizes is None or not self.division.is_cut:
            return None
        whole = self._calls([{name: whole_input(self.division, name) for name in self.division.arguments}], (1.0,))
        for work in self.works:
            if (work.phase, work.call, 0) not in whole or self._is_of_all_rows(work.call):
                continue
            calls = [self.seen["F", work.call, microbatch].gives for microbatch in range(self.division.chunks)]
            given = zip(*calls, _given(work, whole["F", work.call, 0]), strict=True)
            if not all(self._join(parts, its) for *parts, its in given):
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


def where_lost(witness: Witness, division: Division, floor: float) -> Origin | None:
    """Where the stages lose what the model computes for these rows, which are one micro-batch; None if that cannot be seen."""
    compiled = witness.compiled
    modules = {module: (stage, name) for stage, name, module in _called(compiled)}
    try:
        plain = _noted(modules, lambda: witness.step(division, HowWitnessed()))
        inputs = {name: division.take(name, 0) for name in division.arguments}
        with witness.aside(hooks=True):
            stages = _noted(modules, lambda: run_reference(compiled, inputs))
    except Exception:  # an error that explains another one must not hide it
        return None
    forward = [each for each in stages if each[2] != _GRADIENT]
    backward = [each for each in (*plain, *stages) if each[2] == _GRADIENT]
    before = ""
    for key in dict.fromkeys([*forward, *backward]):
        stage, shown = modules[key[0]]
        if not _same(plain.get(key), stages.get(key), floor):
            behind = f", behind {before}" if before and key[2] == _TAKES else ""
            return Origin(stage, key[2].format(shown=shown) + behind)
        before = shown
    return None


_TAKES = "what {shown} takes is not what it takes in the model"
_GIVES = "from the same inputs, {shown} gives something else than in the model"
_GRADIENT = "the gradient that reaches {shown} is not the model's"


def _called(compiled: Compiled) -> Iterator[tuple[str, str, nn.Module]]:
    """The modules that stages call: the stage, the user's name and the class, the module."""
    for stage, module in compiled.stages():
        for node in module.graph.find_nodes(op="call_module") if hasattr(module, "graph") else ():
            called, name = module.get_submodule(str(node.target)), compiled.remap_qualname(f"{stage}.{node.target}")
            yield stage, f"{name!r} ({type(called).__name__})", called


def _noted(modules: Iterable[nn.Module], run: Callable[[], Any]) -> dict[tuple[nn.Module, int, str, int], Any]:
    """Digests of what calls of these modules take and give while something runs, and of the gradients of what they give. In
    their order, by the module, the number of the call, the text for a fault, and the number of the tensor."""
    noted: dict[tuple[nn.Module, int, str, int], Any] = {}
    counts: Counter[nn.Module] = Counter()

    def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        call, given = (module, counts[module]), list(tensors(output))
        counts[module] += 1
        noted[*call, _TAKES, 0] = [*map(digest, tensors((args, kwargs)))]
        noted[*call, _GIVES, 0] = [*map(digest, given)]
        for at, each in enumerate(given):
            if each.requires_grad:
                key = *call, _GRADIENT, at
                each.register_hook(lambda gradient, key=key: noted.update({key: digest(gradient)}))

    handles = [each.register_forward_hook(note, with_kwargs=True) for each in modules]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return noted


def _same(one: Any, other: Any, floor: float) -> bool:
    """Whether two trees of tensors are equal but for rounding. None stands for a gradient of zeros."""
    held, others = children(one), children(other)
    if held is not None or others is not None:
        return all(_same(*pair, floor) for pair in zip_longest(held or (), others or ()))
    compared = all(each is None or isinstance(each, torch.Tensor) for each in (one, other))
    return not compared or Apart.of(one, other).share <= floor


def _items(given: Any) -> list[Any]:
    """What a call took: one item for each value, or for each output whose gradient it took."""
    return given if isinstance(given, list) else [given]


def _given(work: Work, call: SeenCall) -> Sequence[Any]:
    """What a call gave: one item for each output, or for each input."""
    return call.gives if len(work.gives) > 1 or work.phase == "B" else [call.gives]
