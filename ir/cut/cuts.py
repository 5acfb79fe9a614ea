"""What the balancer reads from a traced graph: its marks, the values that cross a cut, and the calls of modules."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn

from pippy.ir.base.marks import pipe_split
from pippy.ir.base.node_notes import MODULE_CALLS
from pippy.ir.base.trees import nbytes
from pippy.ir.cut.params import MultiUseParamSpec, config_by_tensor, is_to_replicate
from pippy.ir.cut.uses import operations, uses_of_tensors
from pippy.ir.record.traced import Traced

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
