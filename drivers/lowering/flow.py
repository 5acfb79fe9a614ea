"""The values that the stages of a Pipe pass to each other in one micro-batch, from the Pipe's graph.

`RemoteInterpreter` goes through the top-level graph node by node, as the reference does. Where the reference computes, it
emits work for the worker that will hold the stage, with the names of the values that the work takes and gives.

    submod_0(x)  ──▶ F0 takes x, gives relu, mm          stage_backward(submod_1) ──▶ B1 takes lin_grad_from_submod_2,
    _loss(lin, target) ──▶ part of F2                                                gives relu_grad_from_submod_1

`_loss` belongs to the stage that makes the last of its inputs: it runs with the forward and the backward of that stage.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from pippy.drivers.base.errors import LoweringError
from pippy.ir.base.names import LOSS, stage_index
from pippy.ir.record.compiled import Compiled, flat_inputs, is_getitem, output_items, seeded
from pippy.ir.run.stage_backward import stage_backward

TOGETHER = "together"  # a call that is not in the graph: it gives several values as one, or the values in such a one


@dataclass(frozen=True)
class Work:
    """One call of a stage, or of `_loss`, forward ("F") or backward ("B"), on one micro-batch.

    ``takes`` and ``gives`` are names of values. A forward takes one value for each input and gives one for each output. A
    backward takes a tuple of gradients for each output, which are added up in this order; for the loss it takes the
    seed in place of a tuple. It gives a gradient for each input, or None if the gradient is not used.
    """

    phase: str
    stage: int
    call: str
    microbatch: int
    takes: tuple[Any, ...]
    gives: tuple[str | None, ...]

    def __str__(self) -> str:
        return f"{self.phase}{self.stage}.{self.microbatch} {self.call}({', '.join(map(str, self.takes))})"


class RemoteInterpreter:
    """Interprets the top-level graph of a Pipe for one micro-batch: it emits work, and does not compute.

    >>> from torch import nn
    >>> from pippy.ir.pipe import Pipe, compiled_of
    >>> pipe = Pipe.from_sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.MSELoss())
    >>> interpreter = RemoteInterpreter(compiled_of(pipe), microbatch=3)
    >>> [str(work) for work in interpreter.run_until(lambda node: node.target == "submod_1")]
    ['F0.3 submod_0(input_1)']
    >>> [str(work) for work in interpreter.run_until(lambda node: node.op == "output")][:2]
    ['F1.3 submod_1(_0)', 'F1.3 _loss(_1, target)']
    """

    def __init__(self, compiled: Compiled, microbatch: int = 0) -> None:
        self.compiled, self.microbatch = compiled, microbatch
        self.nodes = list(compiled.split_gm.graph.nodes)
        self.position = 0
        self.names = value_names(compiled)
        self.gradients: dict[fx.Node, tuple[str, ...]] = {}  # the summands of each gradient node
        self.loss_stage = loss_stage(compiled)

    def run_until(self, predicate: Callable[[fx.Node], bool]) -> list[Work]:
        """Go on until ``predicate`` holds for the next node, or the graph ends. Returns the work up to there."""
        work: list[Work] = []
        while self.position < len(self.nodes) and not predicate(self.nodes[self.position]):
            work += self._step(self.nodes[self.position])
            self.position += 1
        return work

    def _step(self, node: fx.Node) -> Iterator[Work]:
        if node.op == "call_module":
            takes = tuple(self.names[value] for value in flat_inputs(node))
            gives = tuple(self.names[output] for output in outputs_of(node) if output in self.names)
            yield Work("F", self.stage_of(node), str(node.target), self.microbatch, takes, gives)
        elif node.target is stage_backward:
            yield self._backward(node)
        elif node.target is torch.add:
            self.gradients[node] = tuple(name for arg in node.args for name in self.gradients[arg])  # type: ignore[index]

    def _backward(self, node: fx.Node) -> Work:
        call: Any = node.kwargs["stage_output"]
        output_grads: Any = seeded(node.kwargs["output_grads"])
        per_output = output_grads if isinstance(output_grads, (list, tuple)) and output_items(call) else [output_grads]
        takes = tuple(self._gradient(each) for each in per_output)
        gives: list[str | None] = [None] * len(flat_inputs(call))
        silent = self._silent(flat_inputs(call))
        for item in output_items(node).values():
            index = item.args[1]
            value = flat_inputs(call)[index]  # type: ignore[index]
            if value in silent:
                self.gradients[item] = ()
            elif value.op != "placeholder":
                gives[index] = name = self._gradient_name(call, index)  # type: ignore[index, arg-type]
                self.gradients[item] = (name,)
        return Work("B", self.stage_of(call), str(call.target), self.microbatch, takes, tuple(gives))

    def _silent(self, inputs: list[fx.Node]) -> set[fx.Node]:
        """The inputs of a call whose gradient is known to be None, and that need not tell so: another input of the same maker
        has a gradient. Where none has, empty messages tell the maker that the backward has come so far."""
        names = self.compiled.wiring.values
        without = {value for value in inputs if names.get(value.name) in self.compiled.without_gradient}
        telling = {_maker(value) for value in inputs if value not in without}
        return {value for value in without if _maker(value) in telling}

    def _gradient(self, given: Any) -> Any:
        """The summands of a gradient: empty for None. A gradient that is not a node is the seed of the loss."""
        if isinstance(given, fx.Node):
            return self.gradients[given]
        return () if given is None else given

    def _gradient_name(self, call: fx.Node, index: int) -> str:
        """The name of the gradient of a value that one of its uses gives."""
        inputs = flat_inputs(call)
        again = f"_{index}" if inputs[index] in inputs[:index] else ""
        return f"{self.names[inputs[index]]}_grad_from_{call.target}{again}"

    def stage_of(self, call: fx.Node) -> int:
        """The stage that computes a call."""
        index = stage_index(str(call.target))
        return self.loss_stage if index is None else index


def _maker(value: fx.Node) -> Any:
    return value.args[0] if is_getitem(value) else value


def outputs_of(call: fx.Node) -> list[fx.Node]:
    """The nodes that are the outputs of a call, in order."""
    items = output_items(call)
    return [items[index] for index in sorted(items)] or [call]


def value_names(compiled: Compiled) -> dict[fx.Node, str]:
    """The name of every value by its node, with only the letters that the text of a program allows."""
    names = compiled.wiring.values
    nodes = [node for node in compiled.split_gm.graph.nodes if node.name in names]
    return {node: re.sub(r"\W", "_", names[node.name], flags=re.ASCII) for node in nodes}


def loss_stage(compiled: Compiled) -> int:
    """The stage that computes `_loss`: the last stage that makes an input of it; -1 if there is no `_loss`."""
    for node in compiled.split_gm.graph.find_nodes(op="call_module", target=LOSS):
        makers = [value.args[0] if is_getitem(value) else value for value in flat_inputs(node)]
        indices = [stage_index(str(maker.target)) for maker in makers if isinstance(maker, fx.Node)]
        found = [index for index in indices if index is not None]
        if not found:
            raise LoweringError("the loss depends on no stage, so there is nothing to train on workers")
        return max(found)
    return -1


def taken(work: Work) -> Iterator[str]:
    """The names of all values that some work takes."""
    for value in work.takes:
        if isinstance(value, str):
            yield value
        elif isinstance(value, tuple):
            yield from value
