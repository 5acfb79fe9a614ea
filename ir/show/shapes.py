"""Shapes, bytes and FLOPs of a Pipe for given arguments, without computing anything: on fake tensors.

Each stage is copied with fake tensors in place of its own and run node by node, so the model's parameters, buffers,
gradients and random state do not change. A node that needs real numbers (`item`, `nonzero`, a branch on a tensor) is
unknown, and so are the nodes that depend on it; all others are known.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from pippy.ir.base.fake_mode import FakeMode, stand_in
from pippy.ir.base.interrupts import heard
from pippy.ir.base.node_notes import SOURCE
from pippy.ir.base.trees import describe, leaves, map_tensors, nbytes
from pippy.ir.call.signature import bind
from pippy.ir.record.compiled import Compiled, forward_nodes, map_nodes, walk
from pippy.ir.run.graph_module import PipeGraphModule
from pippy.ir.run.random_state import untouched_random_state


class UnknownValue:
    """Replaces a value that fake tensors cannot give. It has the first node whose value is unknown, and the reason."""

    def __init__(self, stage: str, node: str, reason: str) -> None:
        self.stage, self.node, self.reason = stage, node, reason

    def __repr__(self) -> str:
        return f"unknown ({self.node} in {self.stage})"

    def explain(self) -> str:
        """The node, its stage and the reason, in one line."""
        return f"{self.node} in {self.stage}: {self.reason}"


@dataclass(frozen=True)
class Amount:
    """A number of bytes or FLOPs; at least that many, if not ``complete``."""

    count: int
    complete: bool = True

    def text(self, unit: Callable[[int], str]) -> str:
        """The amount in ``unit``: after a sign if it is a lower bound, and ``unknown`` if that is zero.

        >>> Amount(2048).text(str), Amount(64, complete=False).text(str), Amount(0, complete=False).text(str)
        ('2048', '≥ 64', 'unknown')
        """
        if not self.complete:
            return f"≥ {unit(self.count)}" if self.count else "unknown"
        return unit(self.count)


def add_amounts(amounts: Iterable[Amount]) -> Amount:
    """The sum, which is a lower bound if one of the amounts is.

    >>> add_amounts([Amount(2), Amount(3, complete=False)])
    Amount(count=5, complete=False)
    """
    every = list(amounts)
    return Amount(sum(each.count for each in every), all(each.complete for each in every))


@dataclass(frozen=True)
class Shape:
    """The shape of a value. ``nbytes`` counts all its tensors; it is None if one of them is unknown."""

    text: str
    nbytes: int | None

    @property
    def size(self) -> Amount:
        """The bytes as an amount, which can be added to others."""
        return Amount(self.nbytes or 0, complete=self.nbytes is not None)


@dataclass
class Shapes:
    """The shape of every value by its node in the top-level graph, the FLOPs of every stage, and the unknown values.

    FLOPs are those of matrix products, convolutions and attention in one forward.
    """

    values: dict[str, Shape] = field(default_factory=dict)
    flops: dict[str, Amount] = field(default_factory=dict)
    unknown: list[UnknownValue] = field(default_factory=list)


def propagate(compiled: Compiled, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Shapes:
    """The shapes that the values of a forward would have. Arguments are those of the Pipe, the loss's target included.

    >>> from torch import nn
    >>> from pippy.ir.pipe import Pipe
    >>> pipe = Pipe.from_sequential(nn.Sequential(nn.Linear(2, 5), nn.ReLU()))
    >>> shapes = propagate(pipe, [torch.zeros(3, 2)], {})
    >>> shapes.values["submod_0"], shapes.flops["submod_0"]
    (Shape(text='float32[3, 5]', nbytes=60), Amount(count=60, complete=True))
    """
    return propagate_inputs(compiled, bind(compiled, args, kwargs))


def propagate_inputs(compiled: Compiled, inputs: Mapping[str, Any]) -> Shapes:
    """The same for the inputs of the graph, by name."""
    with heard(), untouched_random_state(), torch.inference_mode(False), torch.enable_grad():
        return _Propagation(compiled, inputs, FakeMode()).run()


def propagate_values(compiled: Compiled, inputs: Mapping[str, Any]) -> dict[fx.Node, Any]:
    """The values of the forward part of the graph as fake tensors, each by its node; `UnknownValue` in place of some."""
    with heard(), untouched_random_state(), torch.inference_mode(False), torch.enable_grad():
        propagation = _Propagation(compiled, inputs, FakeMode())
        propagation.run()
    return propagation.values


def measure(value: Any) -> Shape:
    """The shape of a real or fake value.

    >>> measure({"a": torch.zeros(2, dtype=torch.int64), "b": 3})
    Shape(text='dict(int64[2], 3)', nbytes=16)
    """
    if unknown_in(value) is not None:
        return Shape(describe(value), None)
    return Shape(describe(value), nbytes(value))


def unknown_in(value: Any) -> UnknownValue | None:
    """The first unknown inside a value."""
    return next((leaf for leaf in leaves(value) if isinstance(leaf, UnknownValue)), None)


class _Propagation:
    """One walk over the forward part of the top-level graph."""

    def __init__(self, compiled: Compiled, inputs: Mapping[str, Any], mode: FakeTensorMode) -> None:
        self.compiled, self.inputs, self.mode, self.shapes = compiled, inputs, mode, Shapes()
        self.values: dict[fx.Node, Any] = {}

    def run(self) -> Shapes:
        walk(forward_nodes(self.compiled.split_gm.graph), self._value, self.values)
        return self.shapes

    def _value(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            value = map_tensors(partial(stand_in, self.mode), self.inputs[node.name])
        elif node.op == "call_module":
            value = self._call(node)
        else:
            value = self.values[node.args[0]]  # type: ignore[index]
            value = value if isinstance(value, UnknownValue) else value[node.args[1]]
        if node.name in self.compiled.wiring.values:
            self.shapes.values[node.name] = measure(value)
        return value

    def _call(self, node: fx.Node) -> Any:
        name, args = str(node.target), map_nodes(self.values.__getitem__, node.args)
        run = _StageOnFakes(name)
        with FlopCounterMode(display=False) as counter:
            outputs = run.run(self.compiled.stage(name), self.mode, args)
        complete = not run.unknown and unknown_in(args) is None
        self.shapes.flops[name] = Amount(counter.get_total_flops(), complete)
        self.shapes.unknown += run.unknown
        return outputs


class _StageOnFakes:
    """Runs one stage on fake tensors. ``unknown`` has the values that became unknown in it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.unknown: list[UnknownValue] = []

    def run(self, module: nn.Module, mode: FakeTensorMode, args: Sequence[Any]) -> Any:
        try:
            with FakeCopyMode(mode):
                module = copy.deepcopy(module)
        except Exception as error:
            return self._unknown(type(module).__name__, f"cannot be copied: {_reason(error)}")
        with mode, torch.enable_grad():
            return self._run_graph(module, args) if isinstance(module, PipeGraphModule) else self._try(module, args)

    def _run_graph(self, module: PipeGraphModule, args: Sequence[Any]) -> Any:
        values: dict[fx.Node, Any] = {}
        inputs, interpreter = iter(args), fx.Interpreter(module, garbage_collect_values=False)

        def value(node: fx.Node) -> Any:
            return next(inputs) if node.op == "placeholder" else self._node(interpreter, node, values)

        return walk(module.graph.nodes, value, values)

    def _node(self, interpreter: fx.Interpreter, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
        before = unknown_in([values[each] for each in node.all_input_nodes])
        if before is not None:
            return before
        args, kwargs = map_nodes(values.__getitem__, (node.args, node.kwargs))
        try:
            return getattr(interpreter, node.op)(node.target, args, kwargs)
        except Exception as error:
            return self._unknown(node.name, _reason(error) + _at(node))

    def _try(self, module: nn.Module, args: Sequence[Any]) -> Any:
        before = unknown_in(args)
        if before is not None:
            return before
        try:
            return module(*args)
        except Exception as error:
            return self._unknown(type(module).__name__, _reason(error))

    def _unknown(self, node: str, reason: str) -> UnknownValue:
        self.unknown.append(UnknownValue(self.name, node, reason))
        return self.unknown[-1]


def _reason(error: Exception) -> str:
    """The first line of an error. If the error is about missing numbers, it is put in words that a user knows."""
    if "DataDependent" in type(error).__name__ or "DynamicOutputShape" in type(error).__name__:
        return f"depends on the numbers in a tensor ({str(error).partition(' ')[0].removesuffix('.default')})"
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first}"


def _at(node: fx.Node) -> str:
    where = SOURCE.of(node)
    return f", at {where}" if where is not None else ""
