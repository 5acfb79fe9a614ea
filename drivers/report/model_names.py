"""What the user calls the stages and the values of a program: the modules that a stage computes, and where a value is made."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from pippy.ir.base.names import stage_index
from pippy.ir.base.node_notes import MODULE_PATH
from pippy.ir.record.compiled import Compiled, is_getitem

GRADIENT = "_grad_from_"  # between the name of a value and the stage that its gradient comes from
SHOWN_RUNS = 3  # runs of modules that are written out


@dataclass(frozen=True)
class ModelNames:
    """The modules of each stage, and the module that makes each value.

    >>> names = ModelNames(("embed", "blocks.0"), {"add_2": "blocks.0"})
    >>> names.stage(1), names.value("add_2_grad_from_submod_3")
    ('stage 1 (blocks.0)', 'gradient of add_2 (blocks.0)')
    >>> ModelNames().stage(1), ModelNames().value("add_2")
    ('stage 1', 'add_2')
    """

    stages: tuple[str, ...] = ()
    values: Mapping[str, str] = field(default_factory=dict)

    def stage(self, number: int) -> str:
        """The number of a stage, with its modules."""
        modules = self.modules(number)
        return f"stage {number} ({modules})" if modules else f"stage {number}"

    def modules(self, number: int) -> str:
        """The modules of a stage; empty if they are not known."""
        modules = self.stages[number] if number < len(self.stages) else ""
        return f"module {modules}" if modules.isdigit() else f"modules {modules}" if modules[:1].isdigit() else modules

    def value(self, name: str) -> str:
        """The name of a value or of its gradient, with the module that makes the value."""
        value, gradient, _ = name.partition(GRADIENT)
        made = f" ({self.values[value]})" if self.values.get(value) else ""
        return f"gradient of {value}{made}" if gradient else f"{value}{made}"


NAMELESS = ModelNames()


def model_names(compiled: Compiled) -> ModelNames:
    """The names of a model's stages and values.

    >>> from torch import nn
    >>> from pippy import Pipe
    >>> from pippy.ir.pipe import compiled_of
    >>> pipe = Pipe.from_sequential(nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Linear(2, 2)))
    >>> model_names(compiled_of(pipe))
    ModelNames(stages=('0', '1'), values={'_0': '0', '_1': '1'})
    """
    paths = [[_path(node) for node in stage.graph.nodes] for _, stage in compiled.stages()]
    stages_of: dict[str, set[int]] = {}  # the stages in which each module is
    for stage, modules in enumerate(paths):
        for path in modules:
            for prefix in _prefixes(path):
                stages_of.setdefault(prefix, set()).add(stage)
    stages = (
        dict.fromkeys(
            next((prefix for prefix in _prefixes(path) if len(stages_of[prefix]) == 1), path) for path in modules
        )
        for modules in paths
    )
    return ModelNames(tuple(_listed(each for each in modules if each) for modules in stages), _made_in(compiled))


def _path(node: fx.Node) -> str:
    if node.op in ("placeholder", "output"):
        return ""
    return MODULE_PATH.of(node) or (str(node.target) if node.op == "call_module" else "")


def _prefixes(path: str) -> Iterator[str]:
    """The names of the modules around one, and of itself, the outermost first.

    >>> list(_prefixes("blocks.0.up"))
    ['blocks', 'blocks.0', 'blocks.0.up']
    """
    parts = path.split(".") if path else []
    return (".".join(parts[: length + 1]) for length in range(len(parts)))


def _listed(modules: Iterable[str]) -> str:
    """Names of modules in a short line: of those that are numbered in a row, the first and the last.

    >>> _listed(["embed", "blocks.0", "blocks.1", "blocks.2", "norm", "head"])
    'embed, blocks.0 to blocks.2, norm, …'
    >>> _listed(["0", "1"])
    '0, 1'
    """
    runs: list[list[str]] = []
    for module in modules:
        parent, _, last = module.rpartition(".")
        before, _, previous = runs[-1][-1].rpartition(".") if runs else ("", "", "")
        follows = runs and last.isdigit() and previous.isdigit() and before == parent and int(last) == int(previous) + 1
        if follows:
            runs[-1].append(module)
        else:
            runs.append([module])
    texts = [text for run in runs for text in ([f"{run[0]} to {run[-1]}"] if len(run) > 2 else run)]
    return ", ".join([*texts[:SHOWN_RUNS], *(["…"] if len(texts) > SHOWN_RUNS else [])])


def _made_in(compiled: Compiled) -> dict[str, str]:
    """For each value that stages make, the module that makes it."""
    paths = {}
    for node in compiled.split_gm.graph.nodes:
        name = compiled.wiring.values.get(node.name)
        source: Any = node.args[0] if is_getitem(node) else node
        if name is None or source.op != "call_module" or stage_index(str(source.target)) is None:
            continue
        outputs = compiled.stage_outputs(str(source.target))
        maker = outputs[node.args[1]] if is_getitem(node) else outputs
        if isinstance(maker, fx.Node):
            paths[name] = _path(maker)
    return {name: path for name, path in paths.items() if path}
