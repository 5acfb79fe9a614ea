"""Finds in a traced graph what forward asked of its inputs alone, so that it can be checked before a call runs."""

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import fx

from pippy.ir.base.operations import is_in_place
from pippy.ir.call.input_checks import InputChecks, Method, ValueReference
from pippy.ir.run.functions import check_fixed

_HOMES = ("_operator", "builtins", "math")
_METHODS = frozenset(
    "dim element_size get get_device is_complex is_floating_point nelement ndimension numel size".split()
)


def asked_of(graph: fx.Graph, is_tensor: Callable[[fx.Node], bool], of_rows: Mapping[fx.Node, int]) -> InputChecks:
    """The calls of `check_fixed` in a traced graph that depend on its inputs alone, and compute nothing with tensors.

    Those ``of_rows`` are given the number of rows of the example.
    """
    known: set[fx.Node] = set()
    checks: list[fx.Node] = []
    for node in graph.nodes:
        if node.op == "placeholder" or (node.all_input_nodes and known.issuperset(node.all_input_nodes)):
            if node.target is check_fixed:
                checks.append(node)
            elif node.op == "placeholder" or _is_cheap(node, is_tensor(node)):
                known.add(node)
    needed = _with_inputs(checks)
    steps = [node for node in graph.nodes if node in needed and node.op != "placeholder"]
    calls = [(node, (*node.args, of_rows[node]) if node in of_rows else node.args) for node in steps]
    return InputChecks(tuple((node.name, _function(node), *_named((args, node.kwargs))) for node, args in calls))


def _is_cheap(node: fx.Node, is_tensor: bool) -> bool:
    if node.target in (getattr, operator.getitem):
        return True
    if is_tensor or node.op == "call_method":
        return not is_tensor and node.target in _METHODS
    function: Any = node.target
    return node.op == "call_function" and function.__module__ in _HOMES and not is_in_place(function)


def _with_inputs(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    reached: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in reached:
            reached.add(node)
            pending += node.all_input_nodes
    return reached


def _function(node: fx.Node) -> Callable[..., Any]:
    return node.target if callable(node.target) else Method(node.target)


def _named(arguments: Any) -> Any:
    return fx.node.map_arg(
        arguments, lambda node: ValueReference(node.target if node.op == "placeholder" else node.name)
    )
