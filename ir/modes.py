"""`self.training` in a forward: kept alive in the graph, so that a Pipe follows `train()` and `eval()`.

Symbolic tracing reads the flag once and bakes it in. A model whose forward reads it is therefore traced a second time
with the flag turned over: where the two graphs differ only in constants, each such constant becomes a choice made when
the graph runs; where they differ in structure, the Pipe remembers the mode that it was traced in.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import fx, nn


class TrainingReads:
    """Which modules' `training` flag was read."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []


@contextmanager
def watched_training(turned_over: bool = False) -> Iterator[TrainingReads]:
    """Inside, reads of any module's `training` are noted, and answered with the opposite if ``turned_over``."""
    reads = TrainingReads()

    def read(module: nn.Module) -> bool:
        reads.modules.append(module)
        return bool(module.__dict__["training"]) ^ turned_over

    def write(module: nn.Module, value: bool) -> None:
        module.__dict__["training"] = value

    # A data descriptor on the class is asked before the instance's own dictionary.
    nn.Module.training = property(read, write)  # type: ignore[assignment]
    try:
        yield reads
    finally:
        del nn.Module.training


def by_mode(training: bool, in_training: Any, in_eval: Any) -> Any:
    """The value for the mode that the model is in.

    >>> by_mode(False, 0.1, 0.0)
    0.0
    """
    return in_training if training else in_eval


def first_difference(graph: fx.Graph, other: fx.Graph) -> fx.Node | None:
    """The first node where two graphs differ in more than constants; None where they do not."""
    nodes, others = list(graph.nodes), list(other.nodes)
    for node, twin in zip(nodes, others):
        if _shape_of(node) != _shape_of(twin):
            return node
    if len(nodes) != len(others):
        return (nodes if len(nodes) > len(others) else others)[min(len(nodes), len(others))]
    return None


def _shape_of(node: fx.Node) -> tuple[Any, ...]:
    inputs = [arg.name for arg in node.all_input_nodes]
    return node.op, node.target, node.name, inputs, node.meta.get("no_grad"), _skeleton((node.args, node.kwargs))


def _skeleton(argument: Any) -> Any:
    """An argument with its constants left out."""
    if isinstance(argument, fx.Node):
        return argument.name
    if isinstance(argument, (tuple, list)):
        return [_skeleton(item) for item in argument]
    if isinstance(argument, dict):
        return {key: _skeleton(item) for key, item in argument.items()}
    if isinstance(argument, slice):
        return [_skeleton(item) for item in (argument.start, argument.stop, argument.step)]
    return None


def follow_training(graph: fx.Graph, turned: fx.Graph, training: bool, flags: list[str]) -> None:
    """Make the constants of ``graph`` that differ in ``turned`` depend on the training flag of their module.

    ``flags`` holds the paths of the modules whose flag was read. The graphs must agree in all but constants.
    """
    for node, twin in zip(list(graph.nodes), list(turned.nodes)):
        choices = _Choices(graph, node, training, _flag_of(node, flags))
        args, kwargs = choices.merge(node.args, twin.args), choices.merge(node.kwargs, twin.kwargs)
        if choices.made:
            node.args, node.kwargs = args, kwargs


def _flag_of(node: fx.Node, flags: list[str]) -> str:
    """The innermost module around ``node`` whose flag was read."""
    path = node.meta.get("module_path", "")
    around = [flag for flag in flags if flag == "" or f"{path}.".startswith(f"{flag}.")]
    return max(around, key=len, default=flags[0])


class _Choices:
    """Replaces the constants of one node that depend on the mode by nodes that choose."""

    def __init__(self, graph: fx.Graph, node: fx.Node, training: bool, flag: str) -> None:
        self.graph, self.node, self.training = graph, node, training
        self.target = f"{flag}.training".lstrip(".")
        self.made = 0

    def merge(self, mine: Any, turned: Any) -> Any:
        if isinstance(mine, fx.Node):
            return mine
        if isinstance(mine, (tuple, list)):
            merged = [self.merge(item, other) for item, other in zip(mine, turned)]
            return type(mine)(*merged) if hasattr(mine, "_fields") else type(mine)(merged)
        if isinstance(mine, dict):
            return {key: self.merge(item, turned[key]) for key, item in mine.items()}
        if isinstance(mine, slice):
            ends = [(getattr(mine, end), getattr(turned, end)) for end in ("start", "stop", "step")]
            return slice(*(self.merge(*pair) for pair in ends))
        return mine if type(mine) is type(turned) and mine == turned else self._choice(mine, turned)

    def _choice(self, mine: Any, turned: Any) -> fx.Node:
        self.made += 1
        in_training, in_eval = (mine, turned) if self.training else (turned, mine)
        with self.graph.inserting_before(self.node):
            flag = self.graph.create_node("get_attr", self.target)
            choice = self.graph.call_function(by_mode, (flag, in_training, in_eval))
        for made in (flag, choice):
            made.meta.update({key: self.node.meta[key] for key in ("source", "module_path") if key in self.node.meta})
        return choice
