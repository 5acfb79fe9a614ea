"""`Subject`, the argument of the rules of the IR, and `Fault`, a violation that they yield."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch import fx

from pippy.ir.record.compiled import Compiled
from pippy.ir.record.nodes import ancestors, flat_inputs, is_stage_backward


class Fault(NamedTuple):
    """A violation of a rule, and the node that violates it, or None."""

    node: fx.Node | None
    message: str


Faults = Iterator[Fault]


@dataclass
class Subject:
    """The compiled model to check, with properties that several rules need. Each property is computed once."""

    compiled: Compiled
    before_backward: bool

    @cached_property
    def nodes(self) -> list[fx.Node]:
        return list(self.compiled.split_gm.graph.nodes)

    @cached_property
    def position(self) -> dict[fx.Node, int]:
        return {node: index for index, node in enumerate(self.nodes)}

    @cached_property
    def calls(self) -> list[fx.Node]:
        return [node for node in self.nodes if node.op == "call_module"]

    @cached_property
    def modules(self) -> dict[str, fx.GraphModule]:
        return {name: module for name, module in self.compiled.stages() if isinstance(module, fx.GraphModule)}

    @cached_property
    def loss_node(self) -> fx.Node | None:
        loss = self.compiled.loss
        return next((node for node in self.nodes if loss is not None and node.name == loss.value), None)

    @cached_property
    def live(self) -> list[fx.Node]:
        """The calls that must have a backward, the last first."""
        if self.loss_node is None or self.before_backward:
            return []
        depends = ancestors(self.loss_node)
        return [call for call in reversed(self.calls) if call in depends]

    @cached_property
    def backwards(self) -> dict[fx.Node, fx.Node]:
        """The backward of each call."""
        made = [(node.kwargs.get("stage_output"), node) for node in self.nodes if is_stage_backward(node)]
        return {call: node for call, node in made if isinstance(call, fx.Node)}

    @cached_property
    def contributions(self) -> dict[fx.Node, list[tuple[fx.Node, int]]]:
        """The gradients that are added for each value: for every use a backward and a position in it, the latest use first."""
        found: dict[fx.Node, list[tuple[fx.Node, int]]] = {}
        for call in self.live:
            if call in self.backwards:
                for index, value in enumerate(flat_inputs(call)):
                    found.setdefault(value, []).append((self.backwards[call], index))
        return found


def examined(check: Callable[..., Faults], subject: Subject, *node: fx.Node) -> Faults:
    """The faults that ``check`` finds. If it raises, because the graph is too broken to be read, that is a fault too."""
    try:
        yield from check(subject, *node)
    except Exception as error:  # a malformed graph can raise anything
        yield Fault(next(iter(node), None), f"cannot be checked: {type(error).__name__}: {error}")
