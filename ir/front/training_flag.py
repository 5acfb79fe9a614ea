"""`self.training` in a forward: kept in the graph, so that a Pipe follows `train()` and `eval()`.

Symbolic tracing reads the flag once and writes its value into the graph as a constant. So a model whose forward reads
the flag is traced twice, the second time with every flag inverted, and the two graphs are compared:

    the model                           F.dropout(x, 0.5, self.training)
    traced in train mode                dropout(x, 0.5, True)
    traced with inverted flags          dropout(x, 0.5, False)

    the graph of the Pipe               training = get_attr("training")
                                        by_mode = by_mode(training, True, False)
                                        dropout(x, 0.5, by_mode)

    the two graphs are                  what the Pipe does
    ──────────────────────────────────────────────────────────────────────────────────────────────
    equal                               the same in both modes
    different in constants              chooses each such constant when it runs, by a `by_mode` node
    different in nodes                  runs in the mode that it was traced in; refuses the other (`Modes.fixed`)
    one only: tracing failed            the same
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import fx, nn

from pippy.ir.front.compare_graphs import Pairs
from pippy.ir.front.tracing_thread import is_tracing
from pippy.ir.run.functions import by_mode


@contextmanager
def recording_training_reads(inverted: Collection[nn.Module] = ()) -> Iterator[list[nn.Module]]:
    """Give a list that collects the modules whose `training` this thread reads. Those of ``inverted`` give the opposite."""
    modules: list[nn.Module] = []
    opposite = {id(module) for module in inverted}

    def record(module: nn.Module, flag: bool) -> bool:
        modules.append(module)
        return flag ^ (id(module) in opposite)

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


def follow_training(graph: fx.Graph, inverted: fx.Graph, flags: Mapping[str, bool]) -> None:
    """Make each constant of ``graph`` that is another one in ``inverted`` depend on the training flag of its module.

    The graphs differ in constants only. ``flags`` holds the flags that were read, by the path of the module, with the
    values that they had for ``graph``.
    """
    pairs = Pairs(graph, inverted)
    for node, counterpart in pairs:
        choices = _Choices(graph, node, flags)
        args = pairs.merge(node.args, counterpart.args, choices.choose)
        kwargs = pairs.merge(node.kwargs, counterpart.kwargs, choices.choose)
        if choices.made:
            node.args, node.kwargs = args, kwargs


class _Choices:
    """The `by_mode` nodes that one node takes in place of constants."""

    def __init__(self, graph: fx.Graph, node: fx.Node, flags: Mapping[str, bool]) -> None:
        self.graph, self.node, self.flags = graph, node, flags
        self.made: list[fx.Node] = []

    def choose(self, constant: Any, inverted: Any) -> Any:
        if type(constant) is type(inverted) and constant == inverted:
            return constant
        path = _innermost_flag(self.node, self.flags)
        in_training, in_eval = (constant, inverted) if self.flags[path] else (inverted, constant)
        with self.graph.inserting_before(self.node):
            flag = self.graph.create_node("get_attr", f"{path}.training".lstrip("."))
            choice = self.graph.call_function(by_mode, (flag, in_training, in_eval))
        for made in (flag, choice):
            made.meta.update({key: self.node.meta[key] for key in ("source", "module_path") if key in self.node.meta})
        self.made.append(choice)
        return choice


def _innermost_flag(node: fx.Node, flags: Mapping[str, bool]) -> str:
    """The path of the innermost module around ``node`` whose flag was read."""
    path = node.meta.get("module_path", "")
    around = [flag for flag in flags if flag == "" or f"{path}.".startswith(f"{flag}.")]
    return max(around, key=len, default=next(iter(flags)))
