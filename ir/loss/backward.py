"""The symbolic backward pass: writes the gradient computation of every stage into the top-level graph.

The pass goes through the graph in reverse, from the loss. There is a rule for each kind of node:

    call_module   one `stage_backward`, which takes the gradients of its outputs and returns one for each of its inputs
    getitem       its gradient is one entry of the list of its stage's output gradients
    placeholder   nothing: the gradient of an input is read from its `.grad`
    several uses  `torch.add` adds their gradients, the latest use first

Only calls that the loss depends on get a backward. The gradient of an output that the loss does not depend on is None.
"""

import operator
from typing import Any

import torch
from torch import fx

from pippy.ir.record.compiled import Compiled, ancestors, flat_inputs, output_items
from pippy.ir.run.stage_backward import SEED, stage_backward


def attach_backward(compiled: Compiled) -> None:
    """Write the backward pass of a Pipe that has a loss."""
    graph = compiled.split_gm.graph
    assert compiled.loss is not None
    loss = next(node for node in graph.nodes if node.name == compiled.loss.value)
    with graph.inserting_before(graph.output_node()):
        write_backward(graph, loss, compiled.loss.seed)
    compiled.split_gm.recompile()


def write_backward(graph: fx.Graph, loss: fx.Node, seed: Any) -> None:
    """Write the backward pass into a top-level graph, where new nodes go: from the loss, whose gradient is ``seed``."""
    _Backward(graph, loss, seed).emit()


class _Backward:
    def __init__(self, graph: fx.Graph, loss: fx.Node, seed: Any) -> None:
        self.graph, self.live = graph, ancestors(loss)
        self.gradients: dict[fx.Node, Any] = {loss: seed}

    def emit(self) -> None:
        for node in reversed(list(self.graph.nodes)):
            if node in self.live and node.op == "call_module":
                self._emit_call(node)

    def _emit_call(self, call: fx.Node) -> None:
        inputs = flat_inputs(call)
        gradients = self._output_gradients(call)
        backward = self.graph.call_function(
            stage_backward,
            kwargs={
                "stage_output": call,
                "output_grads": None if gradients == SEED else gradients,
                "input_values": inputs,
            },
        )
        if all(value.op == "placeholder" for value in inputs):
            return
        for index, value in enumerate(inputs):
            self._accumulate(value, self.graph.call_function(operator.getitem, (backward, index)))

    def _output_gradients(self, call: fx.Node) -> Any:
        items = output_items(call)
        if not items:
            return self.gradients[call]
        return [self.gradients.get(items[index]) if index in items else None for index in range(max(items) + 1)]

    def _accumulate(self, value: fx.Node, gradient: fx.Node) -> None:
        if value.op == "placeholder":
            return
        before = self.gradients.get(value)
        self.gradients[value] = gradient if before is None else self.graph.call_function(torch.add, (before, gradient))
