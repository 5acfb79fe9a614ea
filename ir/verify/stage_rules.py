"""The rules for the stages: what their graphs may contain, and which stages must hold each tensor of the user's model."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from pippy.ir.base.errors import NameLookupError
from pippy.ir.base.marks import pipe_split
from pippy.ir.base.names import LOSS, named_state
from pippy.ir.record.compiled import Compiled
from pippy.ir.run.stage_backward import stage_backward


class Fault(NamedTuple):
    """A violation of a rule, and the node of the top-level graph that violates it, or None."""

    node: fx.Node | None
    message: str


FoundFaults = Iterator[Fault]


def examined(check: Callable[[Compiled], FoundFaults], compiled: Compiled) -> FoundFaults:
    """The faults that ``check`` finds. If it raises, because the graph is too broken to be read, that is a fault too."""
    try:
        yield from check(compiled)
    except Exception as error:  # a malformed graph can raise anything
        yield Fault(None, f"cannot be checked: {type(error).__name__}: {error}")


def check_stage_graphs(compiled: Compiled) -> FoundFaults:
    """A stage uses only its inputs and the tensors and modules that it holds. It has no mark and no backward, and its last
    node is its output."""
    for name, module in compiled.stages():
        if not isinstance(module, fx.GraphModule):
            yield Fault(None, f"{name} is a {type(module).__name__}, not a graph module")
            continue
        seen: set[fx.Node] = set()
        for node in module.graph.nodes:
            yield from (Fault(None, f"{name}: {node.name} {fault}") for fault in _node_faults(module, node, seen))
            seen.add(node)
        if not seen or node.op != "output":
            yield Fault(None, f"{name}: the graph must end in its output")


def _node_faults(module: nn.Module, node: fx.Node, seen: set[fx.Node]) -> list[str]:
    faults = [f"uses {arg.name}, which is not there yet" for arg in node.all_input_nodes if arg not in seen]
    if node.op == "call_function" and node.target in (pipe_split, stage_backward):
        faults.append("has no place in a stage")
    if node.op in ("call_module", "get_attr") and not _has(module, str(node.target)):
        faults.append(f"names {node.target!r}, which the stage does not hold")
    if node.op == "placeholder" and (node.target != node.name or any(each.op != "placeholder" for each in seen)):
        faults.append("is an input, so it must come first and be named after its value")
    return faults


def _has(module: Any, target: str) -> bool:
    for atom in target.split("."):
        if not hasattr(module, atom):
            return False
        module = getattr(module, atom)
    return True


def check_names(compiled: Compiled) -> FoundFaults:
    """Every tensor of the user's model is in one stage, or is recorded as copies in several, or as unused."""
    names = compiled.qualnames
    actual: dict[str, list[str]] = {}
    for stage, module in compiled.stages():
        for local, tensor in named_state(module):
            canonical = _canonical(compiled, f"{stage}.{local}")
            if canonical is None and isinstance(tensor, nn.Parameter):
                yield Fault(None, f"{stage}.{local} is no parameter of the model's")
            if canonical is not None and not any(p.startswith(f"{stage}.") for p in actual.get(canonical, ())):
                actual.setdefault(canonical, []).append(f"{stage}.{local}")
    for canonical in sorted(set(names.canonical.values())):
        recorded = [place for place in names.places.get(canonical, ()) if not place.startswith(f"{LOSS}.")]
        if recorded != actual.get(canonical, []):
            yield Fault(None, f"{canonical!r} is in {actual.get(canonical, [])}, but is written down for {recorded}")
        if bool(names.places.get(canonical)) == (canonical in names.unused):
            yield Fault(None, f"{canonical!r} must be in a stage, or among the unused, and not both")
    unknown = (set(names.places) | set(names.unused)) - set(names.canonical.values())
    unknown |= set(names.saved) - set(names.canonical)
    if unknown:
        yield Fault(None, f"the model has no parameter or buffer named {sorted(unknown)}")


def _canonical(compiled: Compiled, place: str) -> str | None:
    try:
        return compiled.qualnames.canonical.get(compiled.remap_qualname(place))
    except NameLookupError:
        return None


def check_sharing(compiled: Compiled) -> FoundFaults:
    """No two stages hold the same parameter. Copies are in `replicated_params`, with equal shapes and dtypes."""
    holders: dict[int, list[str]] = {}
    for stage, module in compiled.split_gm.named_children():
        for name, parameter in module.named_parameters():
            holders.setdefault(id(parameter), []).append(f"{stage}.{name}")
    for places in holders.values():
        if len(places) > 1:
            yield Fault(None, f"{' and '.join(places)} are one and the same parameter; each stage must have a copy")
    written = Counter(
        frozenset(f"{stage}.{name}" for stage, name in group.items()) for group in compiled.replicated_params
    )
    wanted = Counter(frozenset(places) for places in _copied(compiled))
    for group_places in written - wanted:
        yield Fault(None, f"replicated_params has {sorted(group_places)}, which are not the copies of one parameter")
    for group_places in wanted - written:
        yield Fault(None, f"{sorted(group_places)} are copies of one parameter; replicated_params does not say so")
    for group in compiled.replicated_params:
        yield from _check_copies(compiled, group)


def _copied(compiled: Compiled) -> list[tuple[str, ...]]:
    """The stage-local names of each tensor that can have a gradient and is in several stages."""
    state = dict(named_state(compiled.split_gm))
    copied = []
    for places in compiled.qualnames.places.values():
        held = [state.get(place) for place in places]
        if len(places) > 1 and any(
            isinstance(each, nn.Parameter) or (each is not None and each.requires_grad) for each in held
        ):
            copied.append(places)
    return copied


def _check_copies(compiled: Compiled, group: dict[str, str]) -> FoundFaults:
    state = dict(named_state(compiled.split_gm))
    held = [state.get(f"{stage}.{name}") for stage, name in group.items()]
    if any(tensor is None for tensor in held):
        return  # check_sharing has yielded a fault for it
    if len({_likeness(tensor) for tensor in held}) > 1:
        yield Fault(None, f"the copies {group} differ in shape or dtype")


def _likeness(tensor: torch.Tensor | None) -> tuple[Any, ...]:
    assert tensor is not None
    return tuple(tensor.shape), tensor.dtype  # the values, and requires_grad, follow the owner when the Pipe runs


STAGE_RULES: tuple[Callable[[Compiled], FoundFaults], ...] = (check_stage_graphs, check_names, check_sharing)
