"""What operations do besides giving their result: they change tensors in place, and they draw random numbers.

Between stages a value is a copy: what one stage changes in place, no other stage sees. The plain model may rely on
seeing it; so every in-place operation is found before the model is cut.

    what a node calls                        who says what it changes, and what its result may share memory with
    ─────────────────────────────────────    ───────────────────────────────────────────────────────────────────
    an operation that is known               ir/base/operations.py
    the end of a checkpointed part           its result is what the part returns
    anything else, a module of the user's    nobody: the result may be a view of every argument. What it changes is found
      own among them                           when it runs: see ir/run/in_place.py

An operation that may draw has a name in the model, which it keeps wherever the model is cut:

    layers.0.dropout          the call of this module
    layers.0.dropout#1        the second call of it
    layers.0:dropout          the first call of a function `dropout` in the forward of layers.0
    layers.0:dropout#1        the second one
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.nn.utils.parametrize import type_before_parametrizations

from pippy.ir.base.node_notes import DRAWS, MODULE_PATH
from pippy.ir.base.operations import (
    Effect,
    changed_by_name,
    drops_nothing,
    effect_of,
    module_changes,
    module_shares,
    name_of,
)
from pippy.ir.record.compiled import Traced
from pippy.ir.run.batch_norm import DeferredBatchNorm
from pippy.ir.run.checkpointed_parts import is_begin, is_end
from pippy.ir.run.may_draw import Draws, function_draws, method_draws, module_draws

Roots = dict[fx.Node, tuple[fx.Node, ...]]


@dataclass(frozen=True)
class Mutation:
    """``node`` changes ``target`` in place; ``root`` is a value whose memory that may be."""

    node: fx.Node
    target: fx.Node
    root: fx.Node


def find_mutations(graph: fx.Graph, attributes: Mapping[str, Any]) -> tuple[list[Mutation], Roots]:
    """All in-place changes in program order, and for every node the values whose memory it may share: itself, if none."""
    roots: Roots = {}
    mutations = []
    for node in graph.nodes:
        effect = _effect(node, attributes)
        mutations += [Mutation(node, target, root) for target in _nodes(effect.changed) for root in roots[target]]
        views = [each for each in _nodes(effect.shared) if not _is_no_tensor(each, attributes)]
        shared = dict.fromkeys(root for each in views for root in roots[each])
        roots[node] = tuple(shared) or (node,)
    return mutations, roots


def _nodes(arguments: Sequence[Any]) -> list[fx.Node]:
    found: dict[fx.Node, None] = {}
    fx.node.map_arg(tuple(arguments), lambda node: found.setdefault(node))
    return list(found)


def _is_no_tensor(node: fx.Node, attributes: Mapping[str, Any]) -> bool:
    return node.op == "get_attr" and not isinstance(attributes[str(node.target)], torch.Tensor)


def _effect(node: fx.Node, attributes: Mapping[str, Any]) -> Effect:
    arguments = [*node.args, *node.kwargs.values()]
    if is_begin(node) or is_end(node):
        return Effect([], arguments[1:] if is_end(node) else [])
    if node.op == "call_module":
        return _of_module(attributes[str(node.target)], arguments, attributes)
    if node.op not in ("call_method", "call_function"):
        return Effect()
    known = effect_of(node.target, node.args, node.kwargs)
    if known is not None:
        return known
    shared = [each for each in _nodes(arguments) if node.op == "call_method" or not _is_parameter(each, attributes)]
    return Effect(changed_by_name(node.target, arguments), shared)


def _of_module(module: nn.Module, given: list[Any], attributes: Mapping[str, Any]) -> Effect:
    changed = given[:1] if module_changes(module) else []
    if _is_of_torch(module):
        return Effect(changed, given[:1] if module_shares(module) else [])
    tensors = [each for each in _nodes(given) if each.op != "get_attr" or _is_no_tensor(each, attributes)]
    return Effect(changed, [*changed, *tensors])


def _is_of_torch(module: nn.Module) -> bool:
    """Whether all code of a module is torch's, so that it is known what it does, or acts as that does."""
    kind = type_before_parametrizations(module)
    if kind is DeferredBatchNorm:
        return True
    return kind.__module__.startswith(("torch.nn.", "torch.ao.")) and (
        not isinstance(module, nn.Sequential) or all(map(_is_of_torch, module))
    )


def _is_parameter(node: fx.Node, attributes: Mapping[str, Any]) -> bool:
    """Whether a node gets a parameter. None is changed through an unknown function's view of it: autograd forbids that."""
    return node.op == "get_attr" and isinstance(attributes[str(node.target)], nn.Parameter)


def name_draws(traced: Traced) -> None:
    """Note at each node that may draw, its name and whether Python's generators are meant too."""
    counts = Counter[str]()
    for node in traced.graph.nodes:
        draws = _draws(node, traced.attributes)
        if draws is not Draws.NOTHING:
            name = _name(node)
            number = counts[name]
            counts[name] += 1
            DRAWS.put(node, (f"{name}#{number}" if number else name, draws is Draws.PYTHONS_TOO))


def _draws(node: fx.Node, attributes: Mapping[str, Any]) -> Draws:
    if is_begin(node) or is_end(node) or _is_never(node):
        return Draws.NOTHING
    if node.op == "call_module":
        return module_draws(attributes[str(node.target)])
    if node.op == "call_method":
        return method_draws(str(node.target))
    return function_draws(node.target) if node.op == "call_function" and callable(node.target) else Draws.NOTHING


def _is_never(node: fx.Node) -> bool:
    """Whether a node is a dropout of nothing."""
    return node.op == "call_function" and drops_nothing(node.target, node.args, node.kwargs)  # type: ignore[arg-type]


def _name(node: fx.Node) -> str:
    if node.op == "call_module":
        return str(node.target)
    return f"{MODULE_PATH.of(node)}:{name_of(node.target)}"
