"""Two graphs of one model, traced under different conditions and compared node by node.

The n-th node of one graph corresponds to the n-th node of the other. Two such nodes are alike if they call the same thing
with the same nodes, in containers of the same shape. Their constants may differ:

    dropout(linear, 0.5, True)      dropout(linear, 0.5, False)     alike: only a constant differs
    dropout(linear, 0.5, True)      relu(linear)                    not alike
"""

from collections.abc import Callable
from typing import Any

from torch import fx

Choose = Callable[[Any, Any], Any]


class _NotAlikeError(Exception):
    """Two arguments differ in more than constants."""


def first_difference(graph: fx.Graph, other: fx.Graph, absent: frozenset[str] = frozenset()) -> fx.Node | None:
    """The first node that is not like its counterpart in the other graph; None if all are.

    The inputs named in ``absent`` count as the constant None.
    """
    pairs = Pairs(graph, other, absent)
    for node, counterpart in pairs:
        if not pairs.alike(node, counterpart):
            return node
    longer = max(pairs.nodes, pairs.others, key=len)
    shorter = min(len(pairs.nodes), len(pairs.others))
    return longer[shorter] if len(longer) > shorter else None


class Pairs:
    """The nodes of two graphs, in pairs."""

    def __init__(self, graph: fx.Graph, other: fx.Graph, absent: frozenset[str] = frozenset()) -> None:
        self.nodes, self.others = _nodes_without(graph, absent), _nodes_without(other, absent)
        self._position = {node: at for nodes in (self.nodes, self.others) for at, node in enumerate(nodes)}

    def __iter__(self) -> Any:
        return zip(self.nodes, self.others)

    def alike(self, node: fx.Node, counterpart: fx.Node) -> bool:
        """Whether two nodes differ in constants at most."""
        if _called(node) != _called(counterpart):
            return False
        try:
            self.merge((node.args, node.kwargs), (counterpart.args, counterpart.kwargs), lambda mine, other: mine)
        except _NotAlikeError:
            return False
        return True

    def merge(self, mine: Any, other: Any, choose: Choose) -> Any:
        """The argument ``mine``, with ``choose(mine, other)`` in place of each of its constants.

        Unlike `fx.node.map_aggregate` this walks through two arguments at once.
        """
        if self._at(mine) is not None or self._at(other) is not None:
            return _require(self._at(mine) == self._at(other), mine)
        match mine, other:
            case ((tuple() | list()), (tuple() | list())):
                _require(len(mine) == len(other))
                items = [self.merge(*pair, choose) for pair in zip(mine, other)]
                return type(mine)(*items) if hasattr(mine, "_fields") else type(mine)(items)
            case dict(), dict():
                _require(mine.keys() == other.keys())
                return {key: self.merge(item, other[key], choose) for key, item in mine.items()}
            case slice(), slice():
                ends = [(getattr(mine, end), getattr(other, end)) for end in ("start", "stop", "step")]
                return slice(*(self.merge(*pair, choose) for pair in ends))
        _require(not isinstance(mine, _CONTAINERS) and not isinstance(other, _CONTAINERS))
        return choose(mine, other)

    def _at(self, argument: Any) -> int | None:
        return self._position.get(argument) if isinstance(argument, fx.Node) else None


_CONTAINERS = (tuple, list, dict, slice)


def _require(alike: bool, argument: Any = None) -> Any:
    if not alike:
        raise _NotAlikeError
    return argument


def _nodes_without(graph: fx.Graph, absent: frozenset[str]) -> list[fx.Node]:
    return [node for node in graph.nodes if not (node.op == "placeholder" and node.target in absent)]


def _called(node: fx.Node) -> tuple[Any, ...]:
    return node.op, node.target, node.meta.get("no_grad")
