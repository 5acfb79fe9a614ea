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
from typing import Any

from torch import fx, nn

from pippy.ir.base.node_notes import MODULE_PATH, copy_place
from pippy.ir.run.functions import by_mode
from pippy.ir.trace.compare_graphs import Pairs, is_same_constant
from pippy.ir.trace.tracing_thread import is_tracing


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
