"""What Python was told of the inputs while forward was traced. It is checked before a call runs, or sends anything.

forward                         the graph                       checked before the call
──────────────────────────────────────────────────────────────────────────────────────────────
if x.shape[1] > 512:            check_fixed(gt, False, line)    yes: it depends on the input alone
for row in h.unbind():          check_fixed(len_1, 4, line)     no: the stage that computes h checks it
"""

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

_HOMES = ("_operator", "builtins", "math")
_METHODS = frozenset(
    "dim element_size get get_device is_complex is_floating_point nelement ndimension numel size".split()
)
_CHANGING = frozenset(
    "delitem setitem iadd iand iconcat ifloordiv ilshift imatmul imod imul ior ipow irshift isub ixor".split()
)


@dataclass(frozen=True)
class Asked:
    """Nodes that compute what was told of inputs, and check it: plain data, in order.

    ``steps`` has for each its name, its function and its arguments, in which a `Value` stands for an input or an earlier step.
    """

    inputs: tuple[str, ...] = ()
    steps: tuple[tuple[str, Callable[..., Any], Any, Any], ...] = ()

    def check(self, inputs: Mapping[str, Any]) -> None:
        """Raise an `InputError` if the inputs, by their names, are others than forward was traced for."""
        values = dict(inputs)
        for name, function, args, kwargs in self.steps:
            filled, named = fx.node.map_aggregate((args, kwargs), lambda each: _filled(each, values))
            values[name] = function(*filled, **named)


class Value(str):
    """The name of an input or a step, in the arguments of another."""

    __slots__ = ()


def _filled(argument: Any, values: Mapping[str, Any]) -> Any:
    return values[argument] if isinstance(argument, Value) else argument


def asked_of(graph: fx.Graph, check: Callable[..., None], is_tensor: Callable[[fx.Node], bool]) -> Asked:
    """The calls of ``check`` in a traced graph that depend on its inputs alone, and compute nothing with tensors."""
    known: set[fx.Node] = set()
    checks: list[fx.Node] = []
    for node in graph.nodes:
        if node.op == "placeholder" or (node.all_input_nodes and known.issuperset(node.all_input_nodes)):
            if node.target is check:
                checks.append(node)
            elif node.op == "placeholder" or _is_cheap(node, is_tensor(node)):
                known.add(node)
    needed = _with_inputs(checks)
    steps = [node for node in graph.nodes if node in needed and node.op != "placeholder"]
    return Asked(
        tuple(str(node.target) for node in graph.nodes if node in needed and node.op == "placeholder"),
        tuple((node.name, _function(node), *_named((node.args, node.kwargs))) for node in steps),
    )


def _is_cheap(node: fx.Node, is_tensor: bool) -> bool:
    if node.target in (getattr, operator.getitem):
        return True
    if is_tensor or node.op == "call_method":
        return not is_tensor and node.target in _METHODS
    function: Any = node.target
    return node.op == "call_function" and function.__module__ in _HOMES and function.__name__ not in _CHANGING


def _with_inputs(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += node.all_input_nodes
    return found


def _function(node: fx.Node) -> Callable[..., Any]:
    return node.target if callable(node.target) else _Method(node.target)


class _Method:
    """A method, called by its name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(value, self.name)(*args, **kwargs)


def _named(arguments: Any) -> Any:
    return fx.node.map_arg(arguments, lambda node: Value(node.target if node.op == "placeholder" else node.name))
