"""What is read from a traced graph before it is cut, and the marks that are put into it.

Read are its operations, the tensors that they use, its marks, and the values that cross a cut.

Another graph of a model is marked so that each of its stages uses only tensors that one stage of a Pipe has (`mark_alike`):

    the Pipe, which trains      [ wte  h.0  h.1 ]  [ h.2  h.3 ]  [ ln_f  lm_head ]
    the graph of a token          wte  h.0  h.1  |   h.2  h.3  |   ln_f  lm_head

An operation goes to the stage that has its parameters and buffers, and one without them to the stage of the operation before
it. Of a tensor that several stages have, the next one counts.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _NormBase

from pippy.ir.base.errors import GenerationError, PippyError
from pippy.ir.base.marks import pipe_split
from pippy.ir.base.names import first_names, named_state, stage_index
from pippy.ir.base.node_notes import MODULE_CALLS
from pippy.ir.base.trees import nbytes
from pippy.ir.cut.params import MultiUseParamSpec, TensorUses, config_by_tensor, is_to_replicate
from pippy.ir.record.compiled import Compiled, Traced


def is_operation(node: fx.Node) -> bool:
    """Whether a node computes something; inputs, attributes and marks have no stage of their own."""
    return node.op.startswith("call_") and node.target is not pipe_split


def operations(traced: Traced) -> list[fx.Node]:
    """The nodes that compute something, in order. A cut lies before one of them."""
    return [node for node in traced.graph.nodes if is_operation(node)]


def is_constant(node: fx.Node) -> bool:
    """Whether a node gets a tensor that tracing itself put on the model."""
    return node.op == "get_attr" and str(node.target).rpartition(".")[2].startswith("_tensor_constant")


def uses_of_tensors(traced: Traced) -> dict[int, TensorUses]:
    """Which operations use each parameter and buffer, in the order of the model; keys are ids of the tensors."""
    number = {node: index for index, node in enumerate(operations(traced))}
    tensors = {id(tensor): tensor for _, tensor in named_state(traced.model)}
    uses = {key: TensorUses(name, tensors[key]) for key, name in first_names(traced.model).items()}
    for node in traced.graph.nodes:
        users = [node] if node in number else [user for user in node.users if user in number]
        if node.op == "get_attr":
            tensor = traced.attributes[str(node.target)]
            if isinstance(tensor, torch.Tensor):  # not a training flag, of which each stage has its own
                by_name = uses.setdefault(id(tensor), TensorUses(str(node.target), tensor)).by_name
                by_name.extend(number[user] for user in users)
        elif node.op == "call_module":
            for name, tensor in _state(traced.attributes[str(node.target)]):
                uses.setdefault(id(tensor), TensorUses(f"{node.target}.{name}", tensor)).by_leaf.append(number[node])
        for tensor in () if is_constant(node) else traced.reached(node):
            uses[id(tensor)].by_leaf.extend(number[user] for user in users)
    return uses


def _state(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def running_statistics(modules: Iterable[nn.Module]) -> set[int]:
    """The ids of the buffers that norms among some modules change whenever they are called in training mode."""
    norms = (each for each in modules if isinstance(each, _NormBase) and each.track_running_stats)
    return {id(buffer) for norm in norms for buffer in norm.buffers()}


_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def marks(traced: Traced) -> list[fx.Node]:
    """The marks in a traced graph."""
    return list(traced.graph.find_nodes(op="call_function", target=pipe_split))


def mark(traced: Traced, before: Iterable[fx.Node]) -> None:
    """Put a mark before each of these operations of a traced graph. There may be none."""
    traced.balanced = True
    for node in before:
        with traced.graph.inserting_before(node):
            traced.graph.call_function(pipe_split)


def crossing(traced: Traced, sizes: Mapping[fx.Node, int] | None = None, spec: MultiUseParamSpec = None) -> list[int]:
    """The bytes of the values that cross a cut before each operation; without ``sizes``, the number of these values.

    A value crosses a cut if it is made before the cut and used after it. ``sizes`` has the bytes of each value. A value
    that goes further than the next stage counts at each cut on its way. Inputs do not count, since the controller sends
    them to every stage that uses them. A parameter that is used by name on both sides counts, unless it is replicated.
    """
    steps = [0] * (len(operations(traced)) + 1)
    for made, users, size in _travelling_values(traced, sizes, spec):
        steps[made + 1] += size
        steps[users[-1] + 1] -= size
    return _running_sums(steps[:-1])


def _travelling_values(
    traced: Traced, sizes: Mapping[fx.Node, int] | None = None, spec: MultiUseParamSpec = None
) -> Iterator[tuple[int, list[int], int]]:
    """The values that may go to other stages: the operation that makes each, the later ones that use it, and its bytes.

    Without ``sizes``, each counts 1.
    """
    nodes = operations(traced)
    number = {node: index for index, node in enumerate(nodes)}
    for made, node in enumerate(nodes):
        users = sorted({number[user] for user in node.users if user in number})
        if users and users[-1] > made:
            yield made, users, 1 if sizes is None else sizes.get(node, 0)
    for uses, tensor in travelling_parameters(traced, spec):
        if len(uses) > 1:
            yield uses[0], uses[1:], 1 if sizes is None else nbytes(tensor)


def travelling_parameters(traced: Traced, spec: MultiUseParamSpec = None) -> Iterator[tuple[list[int], torch.Tensor]]:
    """The operations that use a parameter, for each that goes from the first of them to the others if these are cut apart."""
    config = config_by_tensor(traced.model, spec)
    for key, uses in uses_of_tensors(traced).items():
        if (
            uses.by_name
            and not uses.by_leaf
            and uses.tensor.requires_grad
            and not is_to_replicate(config.get(key), spec)
        ):
            yield uses.all, uses.tensor


def inside_lists(traced: Traced) -> list[int]:
    """In how many calls of modules of a `nn.ModuleList`, `nn.Sequential` or `nn.ModuleDict` a cut before each operation lies.

    >>> from torch import nn
    >>> from pippy.ir.trace.trace import trace
    >>> block = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    >>> inside_lists(trace(nn.Sequential(block, nn.Sequential(nn.Linear(4, 4), nn.ReLU()))))
    [0, 1, 0, 1]
    """
    steps = [0] * (len(operations(traced)) + 1)
    lists = {name for name, module in traced.model.named_modules() if isinstance(module, _LISTS)}
    for (_, path), (_, numbers) in scopes(traced).items():
        owner = path.rpartition(".")[0]
        if path and owner in lists:
            steps[numbers[0] + 1] += 1
            steps[numbers[-1] + 1] -= 1
    return _running_sums(steps[:-1])


def _running_sums(steps: Iterable[int]) -> list[int]:
    total, sums = 0, []
    for step in steps:
        total += step
        sums.append(total)
    return sums


def scopes(traced: Traced) -> dict[tuple[str, str], tuple[Any, list[int]]]:
    """The calls of modules while tracing: (name of the call, name of the module) → its class and its operations.

    A module that was called twice is there twice. A module comes before the modules inside it.
    """
    calls: dict[tuple[str, str], tuple[Any, list[int]]] = {}
    for index, node in enumerate(operations(traced)):
        stack = dict(MODULE_CALLS.of(node) or {})
        if node.op == "call_module" and not stack:
            module = traced.attributes[str(node.target)]
            stack = {f"{node.target}@{node.name}": (str(node.target), type(module))}
        for call, (path, kind) in stack.items():
            calls.setdefault((call, path), (kind, []))[1].append(index)
    return calls


class _UsedBefore(Exception):
    """Raised for a tensor that the other graph uses in an earlier stage."""


def holders(compiled: Compiled, name: str) -> dict[int, str]:
    """The stages that have a tensor of the model, with its name there; empty if none does."""
    names = compiled.qualnames
    places = [place.partition(".") for place in names.places.get(names.canonical.get(name, name), ())]
    return {index: local for stage, _, local in places if (index := stage_index(stage)) is not None}


def copied_parameters(compiled: Compiled) -> list[str]:
    """The parameters of which several stages have copies, so that another graph finds them there."""
    return [compiled.remap_qualname(".".join(next(iter(group.items())))) for group in compiled.replicated_params]


def mark_alike(
    traced: Traced, compiled: Compiled, error: type[PippyError] = GenerationError, do: str = "generate"
) -> list[int]:
    """Mark a traced graph. Returns the stage of ``compiled`` that each of its stages belongs to.

    Raises an ``error`` that says what the model cannot ``do``, if it uses its tensors in another order.
    """
    nodes, stages = operations(traced), [0]
    marks = []
    uses = _uses_by_operation(traced)
    for at, node in enumerate(nodes):
        try:
            wanted = [_next_holder(compiled, each, at, stages[-1]) for each in uses.get(at, ())]
        except _UsedBefore as fault:
            raise error(f"the model cannot {do} as it is cut: it {fault}") from None
        stage = max((each for each in wanted if each is not None), default=stages[-1])
        if stage > stages[-1]:
            stages.append(stage)
            marks.append(node)
    if marks and marks[0] is nodes[0]:
        del marks[0], stages[0]
    mark(traced, marks)
    return stages


def _uses_by_operation(traced: Traced) -> Mapping[int, list[TensorUses]]:
    found: dict[int, list[TensorUses]] = {}
    for uses in uses_of_tensors(traced).values():
        for at in uses.all:
            found.setdefault(at, []).append(uses)
    return found


def _next_holder(compiled: Compiled, uses: TensorUses, at: int, now: int) -> int | None:
    """The first stage from ``now`` on that has a tensor; None if any stage may compute the operation with number ``at``."""
    holding = sorted(holders(compiled, uses.name))
    later = [stage for stage in holding if stage >= now]
    if later:
        return later[0]
    if not holding or at not in uses.by_leaf:
        return None  # no stage has it, so that it goes along; or it travels as a value, from the stage that has it
    raise _UsedBefore(
        f"uses {uses.name!r} of stage {holding[-1]} after stage {now}, but "
        "in training it uses it before; cut the Pipe between the layers of the model"
    )


def held_tensors(
    cut: Compiled,
    stages: list[int],
    compiled: Compiled,
    error: type[PippyError] = GenerationError,
    do: str = "generate",
) -> dict[int, tuple[str, str]]:
    """Where ``compiled`` has each tensor of the model that a stage of ``cut`` uses: by its id, its stage and its name there.

    Raises an ``error`` that says what the model cannot ``do``, if another stage has it.
    """
    places: dict[int, tuple[str, str]] = {}
    for index, (_, module) in enumerate(cut.stages()):
        for local, tensor in named_state(module):
            user_name = cut.remap_qualname(f"submod_{index}.{local}")
            there = holders(compiled, user_name)
            if stages[index] in there:
                places[id(tensor)] = f"submod_{stages[index]}", there[stages[index]]
            elif there:
                raise error(
                    f"the model cannot {do} as it is cut: stage {stages[index]} of the Pipe needs "
                    f"{user_name!r}, which only stage {', '.join(map(str, there))} has; cut the Pipe between the "
                    "layers of the model"
                )
    return places
