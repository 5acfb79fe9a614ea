"""Where stages begin to compute something else than the model: the calls of the modules that both have are compared.

the model      first ──▶ second ──────▶ third            what each module takes and gives, and the gradients that it gets
the stages     first ──▶ second ──▶ ? ─▶ third           the first that takes something else is behind what was lost
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from pippy.drivers.batch.division import Division
from pippy.drivers.compare.tolerance import digest
from pippy.drivers.driver.check.differences import Apart
from pippy.drivers.driver.check.origin import Origin
from pippy.drivers.driver.check.witness import HowWitnessed, Witness
from pippy.ir.base.trees import tensors
from pippy.ir.reference import run_reference

_Key = tuple[int, int]  # the id of a module, and which of its calls it is


@dataclass
class _Call:
    """One call of a module: digests of what it takes and gives, and of the gradients of what it gives."""

    takes: list[torch.Tensor]
    gives: list[torch.Tensor]
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)

    def note(self, at: int, gradient: torch.Tensor) -> None:
        """Note the gradient of a tensor that it gives."""
        self.gradients[at] = digest(gradient)


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
        if wanted is None or not _alike(wanted.takes, call.takes, floor):
            behind = f", behind {before}" if before else ""
            return Origin(stage, f"what {shown} takes is not what it takes in the model{behind}")
        if not _alike(wanted.gives, call.gives, floor):
            return Origin(stage, f"from the same inputs, {shown} gives something else than in the model")
        before = shown
    for key, call in reversed(stages.items()):
        stage, name, module = modules[key[0]]
        if not _alike_gradients(plain[key].gradients, call.gradients, floor):
            return Origin(stage, f"the gradient that reaches {name!r} ({type(module).__name__}) is not the model's")
    return None


def _called(compiled: Any) -> Iterator[tuple[str, str, nn.Module]]:
    """The modules that stages call: the stage, the user's name, the module."""
    for stage, module in compiled.stages():
        for node in module.graph.find_nodes(op="call_module") if hasattr(module, "graph") else ():
            name = compiled.remap_qualname(f"{stage}.{node.target}")
            yield stage, name, module.get_submodule(str(node.target))


def _calls(modules: Sequence[nn.Module], run: Callable[[], Any]) -> dict[_Key, _Call]:
    """What calls of these modules take and give while something runs, in their order."""
    calls: dict[_Key, _Call] = {}
    counts: Counter[int] = Counter()

    def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        call = calls[id(module), counts[id(module)]] = _Call(
            [digest(each) for each in tensors((args, kwargs))], [digest(each) for each in tensors(output)]
        )
        counts[id(module)] += 1
        for at, each in enumerate(tensors(output)):
            if each.requires_grad:
                each.register_hook(lambda gradient, at=at: call.note(at, gradient))

    handles = [each.register_forward_hook(note, with_kwargs=True) for each in modules]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _alike(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor], floor: float) -> bool:
    return len(one) == len(other) and all(Apart.of(*pair).share <= floor for pair in zip(one, other))


def _alike_gradients(one: Mapping[int, torch.Tensor], other: Mapping[int, torch.Tensor], floor: float) -> bool:
    return all(Apart.of(one.get(at), other.get(at)).share <= floor for at in one.keys() | other.keys())
