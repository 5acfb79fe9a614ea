"""What `is` says of traced values: the model is traced again with other things in place of stand-ins, and graphs are compared.

    supposed (`suppositions.py`)     if the graph is another one then, forward asks, and
    ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
    known values themselves          that graph is taken; what is fixed in it is checked in each run
    inputs are one object            a call with one object for both is refused
    None in place of a result        the result is checked in each run: it is not None
    a result is its argument,        refused, with the line
      other attributes
    a flag is not its default        the flag is fixed
    an input is its default          a call that leaves the input out is refused

Graphs are compared by what they compute with tensors: `x.dtype` is a node in one of them, and a constant in the other.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn

from pippy.ir.base.errors import PippyError
from pippy.ir.base.node_notes import ADDED, GRADIENTS_OFF, copy_notes
from pippy.ir.base.operations import is_in_place
from pippy.ir.base.trees import UNKNOWN, tensors
from pippy.ir.record.compiled import map_nodes
from pippy.ir.run.functions import CHECKS, check_not_none
from pippy.ir.trace.arguments import Call, fails_for_none, without_inputs
from pippy.ir.trace.questions import asked
from pippy.ir.trace.suppositions import POSSIBLE, Supposition, is_of_pippy, is_single, may_be_none, may_be_one, origin
from pippy.ir.trace.tracing_thread import not_tracing

Trace = Callable[[Call], Any]
_WITH_COPIES = (int, float, complex, tuple, list, dict)  # classes of defaults that are not the only value equal to them


@dataclass
class Identities:
    """What a model asks by `is`.

    ``different`` has pairs of inputs that must not be one object, ``one`` those that must be. ``other_than`` has the
    defaults of inputs that must be something else.
    """

    recorded: Any
    call: Call
    trace: Trace
    root: nn.Module
    one: list[tuple[str, str]] = field(default_factory=list)
    different: list[tuple[str, str]] = field(default_factory=list)
    other_than: dict[str, Any] = field(default_factory=dict)

    def find(self) -> None:
        """Trace again as often as it takes. Afterwards ``recorded`` and ``call`` are those to go on with."""
        known, same = self._has_known(), self._has_unknown()
        inputs = frozenset(name for pair in self._pairs() for name in pair)
        if (known or same or inputs) and self._differs(Supposition(known, same, inputs)):
            if known:
                self._suppose_known()
            if inputs and self._differs(Supposition(known, inputs=inputs)):
                self.different = list(self._pairs())
            if same and (difference := self._differs(Supposition(known, same=True))):
                raise asked("forward() asks what a traced value is (is), which tracing cannot answer", difference)
        self._suppose_nothing()
        self._suppose_attributes()

    def fix_flags(self) -> None:
        """Fix the inputs with a flag for their default for which forward does something else where it is the other one."""
        for name, value in self.call.known_inputs.items():
            if type(value) is bool and not self.call.is_example:
                inputs = {**self.call.known_inputs, name: not value}
                if self._differs(Supposition(known=True), replace(self.call, known_inputs=inputs)):
                    node = next(each for each in self._inputs() if each.target == name)
                    ADDED.put(self.recorded.values.fix(node, value), True)

    def find_defaults(self) -> None:
        """Find the defaults with which forward does something else than with other values that are equal."""
        parameters = self.call.signature.parameters
        inputs = [] if self.call.is_example else [str(node.target) for node in self._inputs()]
        defaults = {name: parameters[name].default for name in inputs if name in parameters}
        defaults = {name: default for name, default in defaults.items() if type(default) in _WITH_COPIES}
        if defaults and self._asks_for_defaults(defaults):
            alone = {
                name: defaults[name]
                for name in defaults
                if len(defaults) == 1 or self._asks_for_defaults({name: defaults[name]})
            }
            self.other_than = alone or defaults

    def _asks_for_defaults(self, defaults: Mapping[str, Any]) -> bool:
        equal = replace(self.call, known_inputs={**self.call.known_inputs, **defaults})
        same = without_inputs(self.call, defaults)
        traces = []
        for call in (same, equal):
            try:
                traces.append(self.trace(call))
            except PippyError:
                return bool(traces)  # forward fails, but not with the default
        return _first_difference(traces[0], traces[1], self.call.supposition) is not None and self._repeats

    def _inputs(self) -> list[fx.Node]:
        return list(self.recorded.graph.find_nodes(op="placeholder"))

    def _has_known(self) -> bool:
        values, nodes = self.recorded.values, list(self.recorded.graph.nodes)
        known = Supposition(known=True)
        return any(is_single(node, values) or origin(node, known, values) is not node for node in nodes)

    def _has_unknown(self) -> bool:
        values, same = self.recorded.values, Supposition(same=True)
        return any(origin(node, same, values) is not node for node in self.recorded.graph.nodes)

    def _pairs(self) -> Iterator[tuple[str, str]]:
        nodes = self._inputs()
        for at, node in enumerate(nodes):
            for other in nodes[at + 1 :]:
                if may_be_one(node, other, self.recorded.values):
                    yield str(node.target), str(other.target)

    def _suppose_known(self) -> None:
        supposition = Supposition(known=True)
        call = replace(self.call, supposition=supposition)
        recorded = self.trace(call)
        if _first_difference(self.recorded, recorded, supposition) is None or not self._repeats:
            return
        self.recorded, self.call = recorded, call
        values, nodes = recorded.values, self._inputs()
        for node in nodes:
            first = origin(node, supposition, values)
            if first is not node:
                self.one.append((str(first.target), str(node.target)))

    def _suppose_nothing(self) -> None:
        """Have each result checked for which forward does something else if it is None. Others may be None."""
        names = [node.name for node in self.recorded.graph.nodes if self._may_be_none(node)]
        if not names or not self._differs_with_nothing(names):
            return
        alone = [name for name in names if len(names) == 1 or self._differs_with_nothing([name])]
        for node in list(self.recorded.graph.nodes):
            if node.name in (alone or names):
                with self.recorded.graph.inserting_after(node):
                    check = self.recorded.graph.call_function(check_not_none, (node, self.call.is_example))
                copy_notes(check, node)
                ADDED.put(check, True)

    def _differs_with_nothing(self, names: list[str]) -> bool:
        return self._differs(Supposition(self.call.supposition.known, nothing=frozenset(names))) is not None

    def _may_be_none(self, node: fx.Node) -> bool:
        is_unknown = self.recorded.values.of(node) is UNKNOWN and not any(
            fails_for_none(user, node) for user in node.users if user.target not in CHECKS
        )
        return is_unknown and node.op not in ("placeholder", "output", "get_attr") and may_be_none(node, self.root)

    def _suppose_attributes(self) -> None:
        names = [name for name in self.recorded.asked_by_name.attributes if name in POSSIBLE]
        for turn in range(max((len(POSSIBLE[name]) for name in names), default=0)):
            difference = self._differs(Supposition(self.call.supposition.known, turn=turn), ignoring_errors=True)
            if difference is not None:
                what = " or ".join(f".{name}" for name in sorted(names))
                raise asked(f"forward() asks what {what} of a traced value is, which tracing cannot answer", difference)

    def _differs(self, supposition: Supposition, call: Call | None = None, ignoring_errors: bool = False) -> Any:
        """The first node that differs if something is supposed, or why it cannot be traced then; None if none does."""
        try:
            other = self.trace(replace(call or self.call, supposition=supposition))
        except PippyError as error:
            return None if ignoring_errors else error
        difference = _first_difference(self.recorded, other, supposition)
        return difference if difference is not None and self._repeats else None

    @cached_property
    def _repeats(self) -> bool:
        """Whether another trace gives the same graph if nothing else is supposed: not if forward reads a clock."""
        supposition = self.call.supposition
        return _first_difference(self.recorded, self.trace(self.call), supposition) is None


def _first_difference(recorded: Any, other: Any, supposition: Supposition) -> fx.Node | None:
    pairs = itertools.zip_longest(_View(recorded, supposition).rows(), _View(other, supposition).rows())
    for (node, row), (counterpart, other_row) in (
        (mine or (None, None), theirs or (None, None)) for mine, theirs in pairs
    ):
        if not _is_alike(row, other_row):
            return node if node is not None else counterpart
    return None


def _is_alike(mine: Any, other: Any) -> bool:
    if isinstance(mine, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(mine) == len(other) and all(map(_is_alike, mine, other))
    if type(mine) is not type(other):
        return False
    if isinstance(mine, dict):
        return mine.keys() == other.keys() and all(_is_alike(value, other[key]) for key, value in mine.items())
    if isinstance(mine, torch.Tensor):
        return mine is other
    return mine is other or bool(mine == other) or repr(mine) == repr(other) == "nan"


@dataclass(frozen=True)
class _At:
    """What stands for a node in a row: its place among the rows, or its name."""

    place: int | str


class _View:
    """What a graph computes with tensors, as rows that can be compared with those of another."""

    def __init__(self, recorded: Any, supposition: Supposition) -> None:
        self.graph, self.values, self.supposition = recorded.graph, recorded.values, supposition
        self.places: dict[fx.Node, _At] = {}
        self.constants: dict[fx.Node, Any] = {}

    def rows(self) -> Iterator[tuple[fx.Node, Any]]:
        """A row for each node that computes something, in order."""
        count = itertools.count()
        for node in self.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self.places[node] = _At(f"{node.op} {node.target}")
            if self._constant(node) is not UNKNOWN and not self._is_call(node):
                continue
            if node.op in ("placeholder", "get_attr") or is_of_pippy(node):
                continue
            self.places[node] = _At(next(count))
            called = node.op, node.target, GRADIENTS_OFF.of(node)
            yield node, (*called, self._argument(node.args), self._argument(node.kwargs))

    def _is_call(self, node: fx.Node) -> bool:
        return node.op in ("call_module", "output") or is_in_place(node.target)

    def _constant(self, node: fx.Node) -> Any:
        """The value of a node that is no tensor, as far as it is known or supposed."""
        if node not in self.constants:
            self.constants[node] = self._find(node)
        return self.constants[node]

    def _find(self, node: fx.Node) -> Any:
        if node.name in self.supposition.nothing:
            return None
        value = self.values.of(node)
        if value is not UNKNOWN:
            return UNKNOWN if any(True for _ in tensors(value)) or node.op == "get_attr" else value
        if getattr(node.target, "__name__", "") == "getattr":
            supposed = self.supposition.of_attribute(str(node.args[1]))
            if supposed is not UNKNOWN:
                return supposed
        return self._compute(node)

    def _compute(self, node: fx.Node) -> Any:
        """What a function gives for constants that are supposed."""
        inputs = node.all_input_nodes
        if node.op != "call_function" or not inputs or any(self._constant(each) is UNKNOWN for each in inputs):
            return UNKNOWN
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._constant)
        try:
            with not_tracing():
                value = node.target(*args, **kwargs)  # type: ignore[operator]
        except Exception:  # what the function raises for what is supposed
            return UNKNOWN
        return UNKNOWN if any(True for _ in tensors(value)) else value

    def _argument(self, argument: Any) -> Any:
        return map_nodes(self._at, argument)

    def _at(self, node: fx.Node) -> Any:
        constant = self._constant(node)
        if constant is not UNKNOWN:
            return constant
        first = origin(node, self.supposition, self.values)
        return self.places.get(first, _At(first.name))
