"""`self.training` in a forward: kept alive in the graph, so that a Pipe follows `train()` and `eval()`.

Symbolic tracing reads the flag once and bakes it in. A model whose forward reads it is therefore traced a second time
with the flag turned over: where the two graphs differ only in constants, each such constant becomes a choice made when
the graph runs; where they differ in structure, the Pipe remembers the mode that it was traced in.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import fx, nn

from pippy.ir.run.functions import by_mode


class TrainingReads:
    """Which modules' `training` flag was read."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []


@contextmanager
def recording_training_reads(inverted: bool = False) -> Iterator[TrainingReads]:
    """Inside, reads of any module's `training` are noted, and answered with the opposite if ``inverted``."""
    reads = TrainingReads()

    def read(module: nn.Module) -> bool:
        reads.modules.append(module)
        return bool(module.__dict__["training"]) ^ inverted

    def write(module: nn.Module, value: bool) -> None:
        module.__dict__["training"] = value

    # A data descriptor on the class is asked before the instance's own dictionary.
    nn.Module.training = property(read, write)  # type: ignore[assignment]
    try:
        yield reads
    finally:
        del nn.Module.training


def flags_after_train(model: nn.Module) -> dict[bool, dict[str, bool]]:
    """What `model.train(mode)` makes of the flags, where it does not just set them all. They are left as they were."""
    modules = dict(model.named_modules())
    if all(type(module).train is nn.Module.train for module in modules.values()):
        return {}
    before, after = {path: module.training for path, module in modules.items()}, {}
    for mode in (True, False):
        model.train(mode)
        after[mode] = {path: module.training for path, module in modules.items() if module.training != mode}
    for path, module in modules.items():
        module.training = before[path]
    return after


def first_difference(graph: fx.Graph, other: fx.Graph, absent: frozenset[str] = frozenset()) -> fx.Node | None:
    """The first node where two graphs differ in more than constants; None where they do not.

    Inputs named in ``absent`` count as the constant None.
    """
    mine, theirs = _Numbered(graph, absent), _Numbered(other, absent)
    for node, twin in zip(mine.nodes, theirs.nodes):
        if mine.shape(node) != theirs.shape(twin):
            return node
    longer = max(mine.nodes, theirs.nodes, key=len)
    return longer[min(len(mine.nodes), len(theirs.nodes))] if len(mine.nodes) != len(theirs.nodes) else None


class _Numbered:
    """A graph whose nodes are told apart by position."""

    def __init__(self, graph: fx.Graph, absent: frozenset[str]) -> None:
        self.nodes = [node for node in graph.nodes if not (node.op == "placeholder" and node.target in absent)]
        self.number = {node: index for index, node in enumerate(self.nodes)}

    def shape(self, node: fx.Node) -> tuple[Any, ...]:
        return node.op, node.target, node.meta.get("no_grad"), self._skeleton((node.args, node.kwargs))

    def _skeleton(self, argument: Any) -> Any:
        """An argument with its constants left out."""
        if isinstance(argument, fx.Node):
            return self.number.get(argument)
        if isinstance(argument, (tuple, list)):
            return [self._skeleton(item) for item in argument]
        if isinstance(argument, dict):
            return {key: self._skeleton(item) for key, item in argument.items()}
        if isinstance(argument, slice):
            return [self._skeleton(item) for item in (argument.start, argument.stop, argument.step)]
        return None


def follow_training(graph: fx.Graph, turned: fx.Graph, flags: Mapping[str, bool]) -> None:
    """Make the constants of ``graph`` that differ in ``turned`` depend on the training flag of their module.

    ``flags`` holds the flags that were read, by the path of the module, as they were for ``graph``. The graphs must agree
    in all but constants.
    """
    for node, twin in zip(list(graph.nodes), list(turned.nodes)):
        choices = _Choices(graph, node, flags)
        args, kwargs = choices.merge(node.args, twin.args), choices.merge(node.kwargs, twin.kwargs)
        if choices.made:
            node.args, node.kwargs = args, kwargs


def _flag_of(node: fx.Node, flags: Mapping[str, bool]) -> str:
    """The innermost module around ``node`` whose flag was read."""
    path = node.meta.get("module_path", "")
    around = [flag for flag in flags if flag == "" or f"{path}.".startswith(f"{flag}.")]
    return max(around, key=len, default=next(iter(flags)))


class _Choices:
    """Replaces the constants of one node that depend on the mode by nodes that choose."""

    def __init__(self, graph: fx.Graph, node: fx.Node, flags: Mapping[str, bool]) -> None:
        self.graph, self.node, self.flags = graph, node, flags
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
        path = _flag_of(self.node, self.flags)
        in_training, in_eval = (mine, turned) if self.flags[path] else (turned, mine)
        with self.graph.inserting_before(self.node):
            flag = self.graph.create_node("get_attr", f"{path}.training".lstrip("."))
            choice = self.graph.call_function(by_mode, (flag, in_training, in_eval))
        for made in (flag, choice):
            made.meta.update({key: self.node.meta[key] for key in ("source", "module_path") if key in self.node.meta})
        return choice
