"""Calls of functions that `torch.func` has transformed, in a form that a graph can call.

The function is a graph of its own, for it computes something else than the nodes around it: one row, say.

    in forward                                    in the graph
    ───────────────────────────────────────────   ──────────────────────────────────────────────────────────────
    torch.vmap(lambda row: row @ self.w + y)(x)   vmap = vmap((x,), {}, (w, y))
                                                  the graph of the function:  row, w, y  ──▶  row @ w + y

What the function uses from outside, parameters among it, are arguments of the node: `captured`. No transform acts on it.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree

from pippy.ir.run.graph_module import PipeGraphModule, empty_graph_module
from pippy.ir.run.may_draw import Draws, function_draws, method_draws


def call_transformed(
    transform: str, options: Mapping[str, Any], function: Callable[..., Any], args: Sequence[Any], kwargs: Any
) -> Any:
    """Call ``function`` as a transform of `torch.func` changes it.

    >>> call_transformed("grad", {"argnums": 0}, lambda x: x**2, (torch.tensor(3.0),), {})
    tensor(6.)
    """
    if transform == "jvp":  # it calls the function at once
        return torch.func.jvp(function, *args, **options)
    return getattr(torch.func, transform)(function, **options)(*args, **kwargs)


class TransformedFunction:
    """A call by `call_transformed`, whose function is ``graph``.

    ``arguments`` is what the function is given, with a number for each leaf. The leaves at ``places`` are the first
    inputs of the graph. Its others are what was captured.
    """

    def __init__(
        self, transform: str, options: Mapping[str, Any], graph: fx.Graph, arguments: Any, places: Sequence[int]
    ) -> None:
        self.transform, self.options, self.arguments, self.places = transform, dict(options), arguments, tuple(places)
        self.spec = _pytree.tree_structure(arguments)
        self.module = empty_graph_module()
        self.module.graph = graph
        self.__name__ = self.__qualname__ = transform
        self.__module__ = "transformed"  # generated code has what is not torch's among its globals

    def __call__(self, args: Any, kwargs: Any, captured: Sequence[Any]) -> Any:
        def function(*args: Any, **kwargs: Any) -> Any:
            leaves = self.spec.flatten_up_to((args, kwargs))
            return self.module.forward(*(leaves[place] for place in self.places), *captured)

        return call_transformed(self.transform, self.options, function, args, kwargs)

    @cached_property
    def draws(self) -> Draws:
        """From which generators the function may draw."""
        nodes = self.module.graph.nodes
        return Draws.of(
            [function_draws(node.target) for node in nodes if node.op == "call_function"]
            + [method_draws(str(node.target)) for node in nodes if node.op == "call_method"]
        )

    @cached_property
    def _contents(self) -> tuple[Any, ...]:
        numbers = {node: number for number, node in enumerate(self.module.graph.nodes)}
        nodes = [
            (node.op, node.target if node.op.startswith("call") else "", _numbered(node.args, numbers))
            + (_numbered(node.kwargs, numbers),)
            for node in numbers
        ]
        return self.transform, self.options, self.arguments, self.places, nodes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TransformedFunction) and self._contents == other._contents

    def __hash__(self) -> int:
        return hash((self.transform, self.places, len(self.module.graph.nodes)))

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (self.transform, self.options, self.module, self.arguments, self.places)


class _Number(int):
    """The number of a node, in the place of the node."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Number) and int(self) == int(other)

    __hash__ = int.__hash__


def _numbered(argument: Any, numbers: Mapping[fx.Node, int]) -> Any:
    return fx.node.map_arg(argument, lambda node: _Number(numbers[node]))


def _rebuilt(
    transform: str, options: Mapping[str, Any], module: PipeGraphModule, arguments: Any, places: Sequence[int]
) -> TransformedFunction:
    return TransformedFunction(transform, options, module.graph, arguments, places)
