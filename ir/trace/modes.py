"""`self.training` in a forward: kept in the graph, so that a Pipe follows `train()` and `eval()`.

Symbolic tracing reads the flag once and writes its value into the graph as a constant. So a model whose forward reads
flags is traced again with those that `train()` and `eval()` would set, and the graphs are compared:

    the model                           F.dropout(x, 0.5, self.training)
    traced in train mode                dropout(x, 0.5, True)
    traced in eval mode                 dropout(x, 0.5, False)

    the graph of the Pipe               training = get_attr("training")
                                        by_mode = by_mode(training, True, False)
                                        dropout(x, 0.5, by_mode)

    the two graphs are                  what the Pipe does
    ──────────────────────────────────────────────────────────────────────────────────────────────
    equal                               the same in both modes
    different in constants              chooses each such constant when it runs, by `by_mode` nodes
    different in nodes                  refuses the other mode (`Modes.refused`)
    one only: tracing failed            the same

Several flags may bear on a constant, those of children too. They have three settings at most: as the model was traced (a part
of it may be in a mode of its own), after `train()`, and after `eval()`. A flag that tells apart the settings in which the
constant differs decides; the innermost around the operation if it does, and two flags where one is not enough.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Protocol

import torch
from torch import fx, nn

from pippy.ir.base.node_notes import ADDED, GRADIENTS_OFF, MODULE_PATH, copy_place
from pippy.ir.run.checkpointed_parts import is_begin, is_end, results_of_parts
from pippy.ir.run.functions import by_mode
from pippy.ir.trace.tracing_thread import is_tracing

# Two graphs of one model, traced under different conditions and compared node by node.
#
# The n-th node of one graph corresponds to the n-th node of the other. Two such nodes are alike if they call the same thing
# with the same nodes, in containers of the same shape. Their constants may differ:
#
#     dropout(linear, 0.5, True)      dropout(linear, 0.5, False)     alike: only a constant differs
#     dropout(linear, 0.5, True)      relu(linear)                    not alike
#
# Constant tensors must be the same: they have a name in the graph, and their values beside it.
#
# What torch.utils.checkpoint runs gives the same numbers as without it. So a graph with checkpointed parts is like one without;
# the nodes that enclose the parts have no counterpart. If both graphs have parts, these must be the same.


Choose = Callable[[Any, Any], Any]


class _NotAlikeError(Exception):
    """Two arguments differ in more than constants."""


class Recorded(Protocol):
    """What has a graph, and the value of each name in it."""

    graph: fx.Graph
    attributes: dict[str, Any]


def first_difference(
    recorded: Recorded, other: Recorded, absent: frozenset[str] = frozenset(), constants: bool = False
) -> fx.Node | None:
    """The first node that is not like its counterpart in the other graph; None if all are.

    With ``constants``, their constants must be the same too. The inputs named in ``absent`` count as the constant None.
    """
    pairs = Pairs(recorded.graph, other.graph, absent)
    choose = _same_constant if constants else _any_constant
    for node, counterpart in pairs:
        if not pairs.alike(node, counterpart, choose):
            return node
        if node.op == "get_attr" and not _is_same(*(each.attributes[str(node.target)] for each in (recorded, other))):
            return _first_user(node)
    longer = max(pairs.nodes, pairs.others, key=len)
    shorter = min(len(pairs.nodes), len(pairs.others))
    return longer[shorter] if len(longer) > shorter else _first_other_part(pairs, recorded.graph, other.graph)


def paths_that_differ(graph: fx.Graph, other: fx.Graph) -> set[str]:
    """The paths of modules whose own forward calls something else in one graph than in the other; that of the model if it is
    modules that are called.
    """
    mine, theirs = _calls_by_path(graph), _calls_by_path(other)
    return {path for path in {*mine, *theirs} if mine.get(path) != theirs.get(path)}


def _calls_by_path(graph: fx.Graph) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for node in _nodes_without(graph, frozenset()):
        path = "" if node.op == "call_module" else MODULE_PATH.of(node)
        found.setdefault(path, []).append(_called(node))
    return found


def _first_other_part(pairs: "Pairs", graph: fx.Graph, other: fx.Graph) -> fx.Node | None:
    edges, others = list(pairs.edges_of_parts(graph)), list(pairs.edges_of_parts(other))
    for edge, counterpart in zip_longest(edges, others) if others else ():
        if edge is None or counterpart is None or edge[1:] != counterpart[1:]:
            return (edge or counterpart)[0]
    return None


def _first_user(node: fx.Node) -> fx.Node:
    return next(iter(node.users), node)


def _any_constant(mine: Any, other: Any) -> Any:
    return mine


def _same_constant(mine: Any, other: Any) -> Any:
    if isinstance(mine, fx.Node):  # an absent input
        return _require(other is None, mine)
    return _require(is_same_constant(mine, other), mine)


def is_same_constant(mine: Any, other: Any) -> bool:
    """Whether two constants of graphs are of one type and equal."""
    return mine is other or (type(mine) is type(other) and (mine == other or repr(mine) == repr(other) == "nan"))


def _is_same(mine: Any, other: Any) -> bool:
    if mine is other or not isinstance(mine, torch.Tensor) or not isinstance(other, torch.Tensor):
        return mine is other
    alike = (mine.dtype, mine.shape, mine.device) == (other.dtype, other.shape, other.device)
    return alike and torch.allclose(mine.detach(), other.detach(), rtol=0, atol=0, equal_nan=True)


class Pairs:
    """The nodes of two graphs, in pairs."""

    def __init__(self, graph: fx.Graph, other: fx.Graph, absent: frozenset[str] = frozenset()) -> None:
        self.nodes, self.others = _nodes_without(graph, absent), _nodes_without(other, absent)
        self._position = {node: at for nodes in (self.nodes, self.others) for at, node in enumerate(nodes)}
        for results in map(results_of_parts, (graph, other)):
            for node, inside in results.items():
                while inside in results:
                    inside = results[inside]
                if inside in self._position:
                    self._position[node] = self._position[inside]

    def __iter__(self) -> Any:
        return zip(self.nodes, self.others)

    def alike(self, node: fx.Node, counterpart: fx.Node, choose: Choose) -> bool:
        """Whether two nodes differ in constants at most, and ``choose`` refuses none of these."""
        if _called(node) != _called(counterpart):
            return False
        try:
            self.merge((node.args, node.kwargs), (counterpart.args, counterpart.kwargs), choose)
        except _NotAlikeError:
            return False
        return True

    def merge(self, mine: Any, other: Any, choose: Choose) -> Any:
        """The argument ``mine``, with ``choose(mine, other)`` in place of each of its constants.

        Unlike `fx.node.map_aggregate` this walks through two arguments at once.
        """
        here, there = self._at(mine), self._at(other)
        if here is not None or there is not None:
            return _require(here == there, mine)
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

    def edges_of_parts(self, graph: fx.Graph) -> Iterator[tuple[Any, ...]]:
        """The nodes that enclose the checkpointed parts: each with what it calls, its arguments, and where it stands."""
        at = 0
        for node in graph.nodes:
            at = self._position.get(node, at)
            if is_begin(node) or is_end(node):
                arguments = fx.node.map_arg((node.args, node.kwargs), lambda arg: ("node", self._position.get(arg)))
                yield node, node.target, arguments, at

    def _at(self, argument: Any) -> int | None:
        return self._position.get(argument) if isinstance(argument, fx.Node) else None


_CONTAINERS = (tuple, list, dict, slice)


def _require(alike: bool, argument: Any = None) -> Any:
    if not alike:
        raise _NotAlikeError
    return argument


def _nodes_without(graph: fx.Graph, absent: frozenset[str]) -> list[fx.Node]:
    results = results_of_parts(graph)
    return [
        node
        for node in graph.nodes
        if not (node.op == "placeholder" and node.target in absent)
        and not (is_begin(node) or is_end(node) or node in results or ADDED.of(node))
    ]


def _called(node: fx.Node) -> tuple[Any, ...]:
    return node.op, node.target, GRADIENTS_OFF.of(node)


@contextmanager
def recording_training_reads(flags: Mapping[nn.Module, bool] | None = None) -> Iterator[list[nn.Module]]:
    """Give a list that collects the modules whose `training` this thread reads. Those in ``flags`` give what is there."""
    modules: list[nn.Module] = []

    def record(module: nn.Module, flag: bool) -> bool:
        modules.append(module)
        return (flags or {}).get(module, flag)

    with _training_property(record, lambda module, value: module.__dict__.update(training=value)):
        yield modules


@contextmanager
def _training_property(
    read: Callable[[nn.Module, bool], bool], write: Callable[[nn.Module, bool], None]
) -> Iterator[None]:
    """``read`` and ``write`` in place of the flag `training`, for the thread that traces."""

    def get(module: nn.Module) -> bool:
        if "training" not in module.__dict__:  # a scripted module has it elsewhere
            raise AttributeError("training")
        flag = module.__dict__["training"]
        return read(module, bool(flag)) if is_tracing() else flag

    def set_(module: nn.Module, value: bool) -> None:
        if is_tracing():
            write(module, value)
        else:
            module.__dict__["training"] = value

    # Python asks a property of the class before it looks into the module's own dictionary.
    nn.Module.training = property(get, set_)  # type: ignore[assignment]
    try:
        yield
    finally:
        del nn.Module.training


def flags_after_train(model: nn.Module) -> dict[bool, dict[str, bool]]:
    """For each mode, the flags that `model.train(mode)` sets to the other one. The model keeps its flags.

    The result is empty if no module has a `train` of its own, since `nn.Module.train` sets every flag to the mode.
    """
    modules = dict(model.named_modules())
    if all(type(module).train is nn.Module.train for module in modules.values()):
        return {}
    flags: dict[int, bool] = {}
    after = {}
    with _training_property(
        lambda module, flag: flags.get(id(module), flag), lambda module, value: flags.update({id(module): value})
    ):
        for mode in (True, False):
            flags.clear()
            model.train(mode)
            after[mode] = {path: module.training for path, module in modules.items() if module.training != mode}
    return after


@dataclass(frozen=True)
class Setting:
    """The training flags of modules by their paths, and the graph that was traced with them."""

    flags: Mapping[str, bool]
    graph: fx.Graph


def follow_training(settings: Sequence[Setting]) -> None:
    """Make each constant of the first graph that is another one in the others depend on training flags.

    The graphs differ in constants only.
    """
    first = settings[0].graph
    pairs = [Pairs(first, setting.graph) for setting in settings]
    for node, *others in zip(*(each.others for each in pairs)):
        # settings that take the same branches have one graph
        constants = {each: _constants(pair, each) for each, pair in dict(zip((node, *others), pairs)).items()}
        values = [constants[each] for each in (node, *others)]
        if all(is_same_constant(*pair) for other in values for pair in zip(values[0], other)):
            continue
        choices = _Choices(first, node, settings)
        chosen = [choices.choose(list(each)) for each in zip(*values)]
        _set_constants(pairs[0], node, iter(chosen))


def _set_constants(pairs: Pairs, node: fx.Node, constants: Iterator[Any]) -> None:
    arguments = node.args, node.kwargs
    node.args, node.kwargs = pairs.merge(arguments, arguments, lambda *_: next(constants))


def _constants(pairs: Pairs, counterpart: fx.Node) -> list[Any]:
    """The constants among the arguments of a node, in order."""
    constants: list[Any] = []
    arguments = counterpart.args, counterpart.kwargs
    pairs.merge(arguments, arguments, lambda constant, _: constants.append(constant))
    return constants


class _Choices:
    """The `by_mode` nodes that one node takes in place of constants."""

    def __init__(self, graph: fx.Graph, node: fx.Node, settings: Sequence[Setting]) -> None:
        self.graph, self.node, self.settings = graph, node, settings

    def choose(self, values: list[Any]) -> Any:
        """A constant, or a node that gives the value of each setting in it."""
        return self._among(list(zip(self.settings, values)))

    def _among(self, cases: list[tuple[Setting, Any]]) -> Any:
        if all(is_same_constant(value, cases[0][1]) for _, value in cases):
            return cases[0][1]
        path = self._deciding_flag(cases)
        on = self._among([case for case in cases if case[0].flags[path]])
        off = self._among([case for case in cases if not case[0].flags[path]])
        with self.graph.inserting_before(self.node):
            flag = self.graph.create_node("get_attr", f"{path}.training".lstrip("."))
            choice = self.graph.call_function(by_mode, (flag, on, off))
        for added in (flag, choice):
            copy_place(added, self.node)
        return choice

    def _deciding_flag(self, cases: list[tuple[Setting, Any]]) -> str:
        """The flag that divides the cases into two kinds of one value each, or else into any two kinds."""
        paths = [path for path in self._inside_out() if len({setting.flags[path] for setting, _ in cases}) == 2]
        return next((path for path in paths if self._divides(path, cases)), paths[0])

    def _divides(self, path: str, cases: list[tuple[Setting, Any]]) -> bool:
        kinds = [[value for setting, value in cases if setting.flags[path] is flag] for flag in (True, False)]
        return all(is_same_constant(value, kind[0]) for kind in kinds for value in kind)

    def _inside_out(self) -> list[str]:
        """The paths of the flags: first those around the node, the innermost first."""
        path = MODULE_PATH.of(self.node)
        around = {flag for flag in self.settings[0].flags if flag == "" or f"{path}.".startswith(f"{flag}.")}
        return sorted(self.settings[0].flags, key=lambda flag: (flag not in around, -len(flag)))
