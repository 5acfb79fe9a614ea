"""The top-level graph, made again from the stages, the wiring and the loss. The one that a Pipe has must be the same.

of what                    is made
──────────────────────────────────────────────────────────────────────────────────────────────────────────────
the inputs in the wiring   placeholders, in their order; the loss's target is one of them
the stages, in order       call_module submod_i of the values that its inputs are named after; a getitem for each
                           output, where it has several
the outputs, the target    call_module _loss, with a loss function; and the output
the loss                   for each call that the loss depends on a stage_backward, a getitem for each gradient, and
                           torch.add for the gradients of a value with several uses
"""

import operator
from collections.abc import Iterator, Mapping
from itertools import groupby, zip_longest
from typing import Any

from torch import fx

from pippy.ir.base.names import LOSS, stage_name
from pippy.ir.loss.backward import write_backward
from pippy.ir.record.compiled import Compiled
from pippy.ir.record.nodes import is_getitem
from pippy.ir.record.wiring import ValueName
from pippy.ir.verify.stage_rules import Fault, FoundFaults


class _CannotMakeError(Exception):
    """What is recorded does not make a graph."""


def check_top_level(compiled: Compiled, before_backward: bool) -> FoundFaults:
    """The top-level graph is the one that the stages, the wiring and the loss make. Gives the first difference."""
    graph = compiled.split_gm.graph
    try:
        graph.lint()  # each node has a name of its own, and comes after the nodes that it uses
        expected = _Made(compiled)
        expected.finish(before_backward)
    except (_CannotMakeError, RuntimeError) as error:
        yield Fault(None, str(error))
        return
    same: dict[fx.Node, fx.Node] = {}
    yield from _first_difference(graph, expected.graph, same)
    if len(same) == len(expected.graph.nodes):
        yield from _check_values(compiled, {same[node].name: name for name, node in expected.values.items()})


class _Made:
    """The graph that is made, and the values in it by their names."""

    def __init__(self, compiled: Compiled) -> None:
        self.compiled, self.graph = compiled, fx.Graph()
        self.values: dict[str, fx.Node] = {}
        for name in compiled.wiring.inputs:
            self._put(name, self.graph.create_node("placeholder", name, name=name))
        for index, (name, stage) in enumerate(compiled.stages()):
            if name != stage_name(index) or not isinstance(stage, fx.GraphModule):
                raise _CannotMakeError(f"{name} is a {type(stage).__name__}; it must be stage {index}, a graph module")
            self._call(name, stage)

    def _put(self, name: str, node: fx.Node) -> None:
        if name in self.values:
            raise _CannotMakeError(
                f"{self.values[name]} and {node} stand for the value {name}; two values need two names"
            )
        self.values[name] = node

    def _value(self, name: str, of: str) -> fx.Node:
        if name not in self.values:
            raise _CannotMakeError(f"{of} takes the value {name}, which no input is, and no earlier stage makes")
        return self.values[name]

    def _call(self, name: str, stage: fx.GraphModule) -> None:
        inputs = [self._value(each.name, name) for each in stage.graph.find_nodes(op="placeholder")]
        call = self.graph.create_node("call_module", name, tuple(inputs), name=name)
        outputs = self.compiled.stage_outputs(name)
        if isinstance(outputs, fx.Node):
            self._put(outputs.name, call)
            return
        for index, output in enumerate(outputs):
            self._put(output.name, self.graph.call_function(operator.getitem, (call, index)))

    def finish(self, before_backward: bool) -> None:
        """Add the call of the loss, the output and the backward."""
        loss, target = self.compiled.loss, self.compiled.target_name
        output = fx.node.map_aggregate(
            self.compiled.wiring.outputs,
            lambda each: self._value(each, "the output") if isinstance(each, ValueName) else each,
        )
        has_function = loss is not None and loss.value == LOSS
        if has_function != (self.compiled.loss_module is not None):
            raise _CannotMakeError("the module _loss must be there if, and only if, the Pipe has a loss function")
        if has_function:
            arguments = output, self._value(str(target), LOSS)
            output = self.graph.create_node("call_module", LOSS, arguments, name=LOSS)
            self._put(LOSS, output)
        last = self.graph.output(output)
        if loss is not None:
            name = self.compiled.wiring.values.get(loss.value)
            if name not in self.values:
                raise _CannotMakeError(f"the loss is the value of {loss.value!r}, which the graph does not have")
            if not before_backward:
                with self.graph.inserting_before(last):
                    write_backward(self.graph, self.values[name], loss.seed)


def _first_difference(graph: fx.Graph, expected: fx.Graph, same: dict[fx.Node, fx.Node]) -> FoundFaults:
    """Where a graph is not the one that was made. The nodes until there are put into ``same``, by those that were made."""
    for node, wanted in zip_longest(_in_order(graph), _in_order(expected)):
        if wanted is None:
            yield Fault(node, "has no place in the graph")
            return
        if node is None or _content(node) != _content(wanted, same):
            yield Fault(node, f"must be {_text(wanted, same)}")
            return
        same[wanted] = node


def _in_order(graph: fx.Graph) -> Iterator[fx.Node]:
    """The nodes. What is taken out of a value in one row is sorted: its order has no meaning."""
    for _, group in groupby(list(graph.nodes), lambda node: node.args[:1] if is_getitem(node) else node):
        yield from sorted(group, key=lambda node: str(node.args[1:]))


def _content(node: fx.Node, same: Mapping[fx.Node, fx.Node] | None = None) -> tuple[Any, ...]:
    """All that a node of a graph is, with the nodes that it uses by their names in the graph that is checked."""
    args, kwargs = _arguments(node, same)
    named = node.name if node.op in ("placeholder", "call_module") else ""
    return node.op, named, "" if node.op == "placeholder" else node.target, repr(args), repr(kwargs)


def _text(node: fx.Node, same: Mapping[fx.Node, fx.Node]) -> str:
    args, kwargs = _arguments(node, same)
    return text_of_node(node, args, kwargs)


def _arguments(node: fx.Node, same: Mapping[fx.Node, fx.Node] | None) -> tuple[Any, Any]:
    arguments = node.args, node.kwargs
    return arguments if same is None else fx.node.map_arg(arguments, same.__getitem__)


def text_of_node(node: fx.Node, args: Any, kwargs: Any) -> str:
    """A node with these arguments, as text."""
    if node.op == "placeholder":
        return node.name
    if node.op == "output":
        return f"return {', '.join(map(str, args))}"
    arguments = [str(arg) for arg in args] + [f"{name}={value}" for name, value in kwargs.items()]
    target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", node.target)
    return f"{node.name} = {target}({', '.join(arguments)})"


def _check_values(compiled: Compiled, wanted: Mapping[str, str]) -> FoundFaults:
    """Every value is recorded under its name."""
    recorded, nodes = compiled.wiring.values, {node.name: node for node in compiled.split_gm.graph.nodes}
    for name in dict.fromkeys((*wanted, *recorded)):
        if wanted.get(name) != recorded.get(name):
            yield Fault(
                nodes.get(name), f"stands for the value {wanted.get(name)}, but is recorded as {recorded.get(name)}"
            )
