"""The parts of a graph that `torch.utils.checkpoint` runs: autograd keeps what they are given, and runs them once more.

A part stays a run of nodes, so that all passes see its operations; two nodes enclose it. Where a stage is run, its code
has the part as a function, and calls that as the user did:

    the nodes of a stage                          its code
    ──────────────────────────────────────────    ──────────────────────────────────────────────────────────────
    part = begin_part(x, use_reentrant=False)     def part(x):
    linear = self.linear(x)                           linear = self.linear(x)
    tanh = torch.tanh(linear)                         tanh = torch.tanh(linear)
    checkpoint = end_part(part)                       return tanh
                                                  tanh = torch.utils.checkpoint.checkpoint(part, x, use_reentrant=False)

With ``use_reentrant=True`` autograd knows of the arguments and of what the part returns, and of nothing else; so `end_part`
takes that too, and its value is the result.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from torch import fx

from pippy.ir.run.functions import own_copy

REENTRANT = "use_reentrant"


def begin_part(*inputs: Any, **options: Any) -> None:
    """The beginning of a checkpointed part, with the arguments of `torch.utils.checkpoint.checkpoint`."""


def end_part(part: None, *result: Any) -> Any:
    """The end of a checkpointed part; with ``use_reentrant=True``, what the part returns."""
    return result[0] if result else None


class BeginPart:
    """`begin_part` for a call with ``context_fn``, which a graph cannot have among its arguments."""

    def __init__(self, context_fn: Callable[[], Any]) -> None:
        self.context_fn = context_fn
        self.__name__ = self.__qualname__ = begin_part.__name__

    def __call__(self, *inputs: Any, **options: Any) -> None:
        begin_part(*inputs, **options)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BeginPart) and _is_same(self.context_fn, other.context_fn)

    def __hash__(self) -> int:
        return hash(BeginPart)


def _is_same(function: Any, other: Any) -> bool:
    """Whether two functions do the same. A lambda in forward is another function in each call."""
    if isinstance(function, functools.partial) and isinstance(other, functools.partial):
        same_arguments = (function.args, function.keywords) == (other.args, other.keywords)
        return same_arguments and _is_same(function.func, other.func)
    if isinstance(function, FunctionType) and isinstance(other, FunctionType):
        return _parts(function) == _parts(other)
    return function == other


def _parts(function: FunctionType) -> tuple[Any, ...]:
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    return function.__code__, function.__defaults__, function.__kwdefaults__, cells


def is_begin(node: fx.Node) -> bool:
    """Whether a checkpointed part begins with a node."""
    return node.op == "call_function" and (node.target is begin_part or isinstance(node.target, BeginPart))


def is_end(node: fx.Node) -> bool:
    """Whether a checkpointed part ends with a node."""
    return node.op == "call_function" and node.target is end_part


def results_of_parts(graph: fx.Graph) -> dict[fx.Node, Any]:
    """The nodes that stand for what reentrant parts return, and what that is inside: the value of `end_part`, or its items."""
    results: dict[fx.Node, Any] = {}
    for end in graph.find_nodes(op="call_function", target=end_part):
        for result in end.args[1:]:
            if isinstance(result, tuple):
                results.update({each: result[each.args[1]] for each in end.users if each.target is operator.getitem})
            else:
                results[end] = result
    return results


@dataclass(frozen=True)
class Part:
    """A checkpointed part of a graph: its first and its last node, and those between them."""

    begin: fx.Node
    end: fx.Node
    nodes: tuple[fx.Node, ...]

    @property
    def is_reentrant(self) -> bool:
        """Whether it is a call with ``use_reentrant=True``."""
        return bool(self.begin.kwargs[REENTRANT])

    @property
    def inputs(self) -> list[fx.Node]:
        """The values that are arguments of the call, each once."""
        return list(dict.fromkeys(each for each in self.begin.args if isinstance(each, fx.Node)))

    def captured(self) -> list[fx.Node]:
        """The other values from outside that the part uses."""
        inside = {*self.nodes, *self.inputs}
        used = [value for node in (*self.nodes, self.end) for value in node.all_input_nodes if value is not self.begin]
        return [value for value in dict.fromkeys(used) if value not in inside]

    def outputs(self) -> list[fx.Node]:
        """The nodes inside whose values are used outside. The result of a reentrant part is none of them."""
        inside = {*self.nodes, self.end}
        return [node for node in self.nodes if not inside.issuperset(node.users)]


def parts_of(nodes: Sequence[fx.Node]) -> list[Part]:
    """The checkpointed parts of a graph. A part comes before those inside of it."""
    order = {node: index for index, node in enumerate(nodes)}
    ends = {end.args[0]: end for end in nodes if is_end(end)}
    return [
        Part(begin, ends[begin], tuple(nodes[order[begin] + 1 : order[ends[begin]]]))
        for begin in nodes
        if begin in ends
    ]


def fetch_before_parts(graph: fx.Graph) -> None:
    """Get tensors of the model before a part, if they are used in it and after it: no part returns them."""
    moved: set[fx.Node] = set()
    for part in parts_of(list(graph.nodes)):
        inside, before = {*part.nodes, part.end}, part.begin
        for node in reversed(part.nodes):
            if _fetches(node) and node not in moved and not inside.issuperset(node.users):
                before.prepend(node)
                before = node
                inside.discard(node)
                moved.add(node)


def _fetches(node: fx.Node) -> bool:
    return node.op == "get_attr" or (node.target is own_copy and node.args[0].op == "get_attr")  # type: ignore[union-attr]
