"""The graphs of one driver's model: that of the Pipe, and those that are made when a call fails a guard of all others.

    a call, cut into micro-batches         rows 0 to 7 │ rows 8 to 15 │ row 16
    the graph of each: as known, or the    graph 0       graph 0        graph 1: a new one, traced for this micro-batch
    first whose guards hold for its inputs
    parts, one program after the other     F0.0 F0.1 …                  F0.0 …

Guards on inputs are asked before anything is sent. What a stage has asked of its own values is known when it has run: where
micro-batches have new sizes, the step is `unsure`, and if a guard fails the workers go back, and it runs again by other graphs.
"""

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx

from pippy.drivers.base.errors import StepError
from pippy.drivers.batch.divide_call import divide_unguarded, failed_guard
from pippy.drivers.batch.division import CutTensor, Division, PerMicrobatch, divided_leaves
from pippy.drivers.driver.steps.programs import DriverPrograms
from pippy.drivers.driver.steps.results import model_output
from pippy.drivers.placement.placed_pipe import PlacedPipe
from pippy.drivers.protocol.programs import AddGraph
from pippy.drivers.protocol.state import TensorLocation
from pippy.drivers.session.driver_commands import DriverCommands
from pippy.drivers.wire.pickling import pickle_by_value
from pippy.ir.base.errors import GuardError, InputError, PippyError
from pippy.ir.base.trees import leaves
from pippy.ir.call.signature import own_call
from pippy.ir.other_graphs import OtherGraph, graph_for
from pippy.ir.pipe import Pipe, compiled_of, follow_training_flags, model_of
from pippy.ir.record.compiled import Compiled, map_nodes
from pippy.ir.run.functions import CHECKS, check_fixed

_log = logging.getLogger(__name__)
MOST = 8  # graphs of one driver
_KNOWN = 4096  # sizes of micro-batches


@dataclass(eq=False)
class StepGraph:
    """A graph of the model on the workers of a driver: its Pipe, placed as that of the driver is, and its programs.

    ``why`` is the guard that others failed; it is empty for graph 0. ``held`` is that of `OtherGraph`, and ``given`` names the
    arguments that its example gave.
    """

    number: int
    pipe: Pipe
    placed: PlacedPipe
    programs: DriverPrograms
    given: frozenset[str]
    why: str = ""
    held: Mapping[str, Mapping[int, tuple[str, str]]] = field(default_factory=dict)
    is_sent: bool = False

    @property
    def compiled(self) -> Compiled:
        """What was compiled."""
        return compiled_of(self.pipe)

    @cached_property
    def asks_in_stages(self) -> bool:
        """Whether a stage may find that forward would go on in another way."""
        stages = (stage for _, stage in self.compiled.stages())
        return any(node.target in CHECKS for stage in stages for node in stage.graph.nodes)

    @cached_property
    def asks_for_rows(self) -> bool:
        """Whether a stage asks how many rows there are: the check of such a value has the rows of the example."""
        stages = (stage for _, stage in self.compiled.stages())
        nodes = (node for stage in stages for node in stage.graph.nodes if node.target is check_fixed)
        return any(len(node.args) > 3 for node in nodes)

    @cached_property
    def returned(self) -> tuple[Any, list[str]]:
        """What a step gives, with the numbers of values in it, and the names of these values."""
        names: list[str] = []
        loss = self.compiled.loss
        if loss is not None:
            names += [name for node, name in self.placed.value_names.items() if node.name == loss.value]

        def number(node: fx.Node) -> Any:
            if node.op == "placeholder":
                return str(node.target)
            names.append(self.placed.value_names[node])
            return len(names)

        return (map_nodes(number, model_output(self.compiled)), loss and loss.seed), names

    def load(self, commands: DriverCommands) -> None:
        """Send the workers the stages of this graph, unless they have them."""
        if self.number and not self.is_sent:
            commands.call({worker: self._message(worker) for worker in self.placed.workers})
            self.is_sent = True

    def _message(self, worker: int) -> AddGraph:
        calls, constant = self.placed.calls_on(worker), self.compiled.qualnames.read_by_several
        held = {key: TensorLocation(*place) for call in calls for key, place in self.held[call].items()}
        modules = pickle_by_value({call: self.compiled.stage(call) for call in calls}, held, own=held)
        return AddGraph(self.number, modules, {call: tuple(constant[call]) for call in calls if call in constant})

    def forget(self) -> None:
        """Note that workers may have lost the stages and programs."""
        self.is_sent = False
        self.programs.sent.clear()

    def flags(self) -> Mapping[int, Any]:
        """The flags of its stages, by worker."""
        follow_training_flags(self.pipe)
        return self.placed.flags()

    def __str__(self) -> str:
        return f"graph {self.number}: " + (self.why or "that of the Pipe")


@dataclass(frozen=True)
class GraphPart:
    """The micro-batches from ``first`` to before ``end`` of a step, which go by one graph."""

    graph: StepGraph
    first: int
    end: int


@dataclass(frozen=True, eq=False)
class StepPlan:
    """By which graphs the micro-batches of a step go. ``divisions`` has the mini-batch for each graph, by its number.

    ``sizes`` are all that a guard may ask of the inputs, for each micro-batch. In an ``unsure`` plan a stage may find that
    forward would go on in another way.
    """

    parts: tuple[GraphPart, ...]
    divisions: Mapping[int, Division]
    sizes: tuple[Any, ...] = ()
    unsure: bool = False

    @property
    def graph(self) -> StepGraph:
        """The graph of the first micro-batches."""
        return self.parts[0].graph

    @property
    def division(self) -> Division:
        """The mini-batch, as the first graph takes it."""
        return self.divisions[self.graph.number]

    @property
    def is_plain(self) -> bool:
        """Whether all goes by the Pipe's own graph."""
        return len(self.parts) == 1 and not self.graph.number

    @cached_property
    def is_of_other_rows(self) -> bool:
        """Whether micro-batches go by graphs that were made for their numbers of rows: all rows may go by another."""
        if self.is_plain or not self.division.is_cut:
            return False
        graph = self.graph
        asks = len(self.parts) > 1 or graph.asks_for_rows
        return asks or failed_guard(graph.compiled, self.division.uncut()) is not None

    def inputs(self, part: GraphPart, whole: Division | None = None) -> Division:
        """The micro-batches of a part, numbered from 0."""
        division = self.divisions[part.graph.number] if whole is None else whole
        return division if len(self.parts) == 1 else division.between(part.first, part.end)

    def renames(self) -> list[dict[str, str]]:
        """For each part, the names that the first graph has for what it returns."""
        own = self.graph.returned[1]
        return [dict(zip(part.graph.returned[1], own)) for part in self.parts]


class DriverGraphs:
    """The graphs of one driver; ``made`` places another one. ``specs`` say how arguments are cut."""

    def __init__(
        self,
        first: StepGraph,
        specs: tuple[Any, Any, bool],
        made: Callable[[OtherGraph, int, frozenset[str], str], StepGraph],
    ) -> None:
        self.all, self.specs, self.made = [first], specs, made
        self.known: dict[Any, int] = {}  # the graph that has run micro-batches of these sizes
        self.failed: set[tuple[Any, int]] = set()
        self.why: dict[Any, PippyError] = {}  # what a stage has found

    def forget(self) -> None:
        """Drop all graphs but that of the Pipe: the script has changed something."""
        del self.all[1:]
        self._forget_sizes()

    def _forget_sizes(self) -> None:
        for each in (self.known, self.failed, self.why):
            each.clear()

    def lost(self) -> None:
        """Note that a worker has lost what it was given."""
        for graph in self.all[1:]:
            graph.forget()

    def plan(self, chunks: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> StepPlan:
        """By which graphs a step goes. Raises a `GuardError` if none can be made for a micro-batch."""
        first, call = self.all[0], _Call(self, chunks, args, kwargs)
        try:
            division = call.division(first)
            is_sure = len(self.all) == 1 and not first.asks_in_stages and failed_guard(first.compiled, division) is None
            if is_sure or division.loads:
                return StepPlan((GraphPart(first, 0, division.chunks),), {0: division})
        except InputError:
            if call.bound is None:
                raise
        return self._plan(call)

    def _plan(self, call: "_Call") -> StepPlan:
        sizes, parts = call.sizes(), list[GraphPart]()
        by_size = {size: self._graph(call, sizes.index(size), size) for size in dict.fromkeys(sizes)}
        for at, graph in enumerate(map(by_size.__getitem__, sizes)):
            if parts and parts[-1].graph is graph:
                parts[-1] = replace(parts[-1], end=at + 1)
            else:
                parts.append(GraphPart(graph, at, at + 1))
        used = {each.graph.number: call.division(each.graph) for each in parts}
        unknown = {graph for size, graph in by_size.items() if self.known.get(size) != graph.number}
        unsure = any(graph.asks_in_stages for graph in unknown)
        return StepPlan(tuple(parts), used, tuple(sizes), unsure)

    def _graph(self, call: "_Call", at: int, size: Any) -> StepGraph:
        """The graph for a micro-batch: the one that has run such sizes, or the first whose guards hold, or a new one."""
        why: Exception | None = self.why.get(size)
        for graph in sorted(self.all, key=lambda each: each.number != self.known.get(size)):
            if (size, graph.number) not in self.failed:
                fault = call.fault(graph, at)
                if fault is None:
                    return graph
                why = why or fault
        assert why is not None
        return self._make(call, at, why)

    def _make(self, call: "_Call", at: int, why: Exception) -> StepGraph:
        if len(self.all) >= MOST:
            raise _not_made(why, f"the driver has {MOST} already, and makes no more") from why
        try:
            _log.info("the model is traced again, by the graph %d: %s", len(self.all), _reason(why))
            found = graph_for(self.all[0].pipe, *call.example(at))
            graph = self.made(found, len(self.all), frozenset(call.own.arguments), _reason(why))
            if graph.returned[0] != self.all[0].returned[0]:
                raise GuardError("the model would return something of another form")
            fault = call.fault(graph, at)
            if fault is not None:
                raise fault
        except PippyError as error:
            raise _not_made(why, error) from error
        self.all.append(graph)
        return graph

    def accept(self, plan: StepPlan) -> None:
        """Note that these micro-batches have run by these graphs."""
        if len(self.known) > _KNOWN:
            self._forget_sizes()
        for part in plan.parts:
            self.known.update(dict.fromkeys(plan.sizes[part.first : part.end], part.graph.number))

    def reject(self, plan: StepPlan, at: int, error: PippyError) -> None:
        """Note that a stage has found that forward would go on in another way for a micro-batch."""
        part = next(each for each in plan.parts if each.first <= at < each.end)
        self.failed.add((plan.sizes[at], part.graph.number))
        self.why[plan.sizes[at]] = error


@dataclass
class _Call:
    """A call that is planned: its division for each graph, made once."""

    graphs: DriverGraphs
    chunks: int
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    divisions: dict[int, Division] = field(default_factory=dict)

    @cached_property
    def bound(self) -> dict[str, Any] | None:
        """The arguments by the names that the model has for them; None if it does not take them, or is not here."""
        first = self.graphs.all[0]
        model = model_of(first.pipe)
        return None if model is None else own_call(first.compiled, model, self.args, self.kwargs)

    def division(self, graph: StepGraph) -> Division:
        """The mini-batch as a graph takes it. Raises an `InputError` if it does not."""
        if graph.number not in self.divisions:
            kwargs = {**self.kwargs, **self._left_out(graph)}
            made = divide_unguarded(graph.compiled, self.chunks, self.args, kwargs, *self.graphs.specs)
            self.divisions[graph.number] = made
        return self.divisions[graph.number]

    def fault(self, graph: StepGraph, at: int) -> InputError | None:
        """The guard on inputs that a micro-batch fails, of a graph; None if there is none."""
        try:
            return failed_guard(graph.compiled, self.division(graph), at)
        except InputError as error:
            return error

    def _left_out(self, graph: StepGraph) -> dict[str, Any]:
        """The model's own defaults of arguments that the call leaves out, and that the graph's example gave."""
        names = [name for name in graph.compiled.concrete_args if name in graph.given]
        model = model_of(graph.pipe)
        if not names or model is None or self.bound is None:
            return {}
        parameters = inspect.signature(model.forward).parameters
        return {
            name: parameters[name].default
            for name in names
            if name not in self.bound and name in parameters and parameters[name].default is not inspect.Parameter.empty
        }

    @cached_property
    def own(self) -> Division:
        """The mini-batch as the model itself takes it: arguments by the model's names."""
        first, specs = self.graphs.all[0], self.graphs.specs
        if self.bound is None:
            return self.division(first)
        return divide_unguarded(first.compiled, self.chunks, self.args, self.kwargs, *specs, values=self.bound)

    def sizes(self) -> list[Any]:
        """For each micro-batch all that a guard may ask of inputs, but for the numbers in tensors."""
        division = self.divisions.get(0) or self.own  # the first was made, if the Pipe's graph takes the call
        held = [leaf for value in division.arguments.values() for leaf in divided_leaves(value)]
        same = tuple(division.arguments), tuple(map(_asked_of, held))
        pieces = [leaf for leaf in held if isinstance(leaf, PerMicrobatch)]

        def of_microbatch(at: int) -> tuple[Any, ...]:
            return tuple(tuple(map(_asked, leaves(each.values[at]))) for each in pieces)

        return [(same, division.sizes and division.sizes[at], of_microbatch(at)) for at in range(division.chunks)]

    def example(self, at: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of one micro-batch, as the model takes them, with the target."""
        first = self.graphs.all[0]
        model, target = model_of(first.pipe), first.compiled.target_name
        if model is None:
            return (), {}  # nothing can be traced
        bound = inspect.signature(model.forward).bind_partial()
        given = self.bound or {}
        first_names = {id(given[name]): name for name in reversed([*given])}  # one object stays one
        taken = {name: self.own.take(name, at) for name in self.own.arguments}
        found = {name: taken[first_names[id(given[name])]] if name in given else taken[name] for name in taken}
        bound.arguments = {name: found[name] for name in bound.signature.parameters if name in found}
        return bound.args, {**bound.kwargs, **({target: found[target]} if target is not None else {})}


def _asked_of(leaf: Any) -> Any:
    if isinstance(leaf, CutTensor):
        shape = tuple(leaf.value.shape)
        return type(leaf), leaf.dim, shape[: leaf.dim] + shape[leaf.dim + 1 :], leaf.value.dtype, leaf.requires_grad
    if isinstance(leaf, PerMicrobatch):
        return type(leaf), leaf.dim
    return type(leaf), _asked(leaf.held()), getattr(leaf, "requires_grad", False)


def _asked(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    return value if isinstance(value, (bool, int, float, str, type(None), torch.dtype)) else type(value)


def _reason(why: Exception) -> str:
    """The guard that failed, in a line or two."""
    failure = why.failure if isinstance(why, StepError) else None
    text = str(why) if failure is None else failure.guard
    return text.partition("What to do:")[0].rstrip("\n ;").replace("\n", "")


def _not_made(why: Exception, reason: object) -> PippyError:
    """The error for a call that fails a guard of all graphs, and for which no other can be made."""
    text = f"{why}\nNo other graph of the model could be made for this call: {reason}"
    if not isinstance(why, StepError):
        return GuardError(text)
    error = StepError(text)
    error.failure, error.worker = why.failure, why.worker
    return error
