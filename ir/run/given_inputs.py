"""Whether a stage changed in place what it was given, where others would see it in the plain model, but not in a Pipe.

Between workers each stage has a copy. In one process they share memory. So that both give the same numbers, or none, it is
looked at before a stage runs and after it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from pippy.ir.base.errors import SharedParameterError, StageError
from pippy.ir.base.source import excerpt_of
from pippy.ir.base.trees import tensors
from pippy.ir.run.shared_tensors import get_tensor
from pippy.ir.run.snapshot import Snapshot, versions_of

NamedInputs = Sequence[tuple[int, str]]  # inputs of a stage, by number and name
_IN_TORCH = ("torch", "_operator", "operator", "builtins", "math")


def input_versions(inputs: Sequence[Any], seen: NamedInputs) -> list[Any]:
    """How often the tensors in these inputs of a stage were changed in place, before it runs or after it.

    >>> x = torch.zeros(2)
    >>> before = input_versions([x], [(0, "x")])
    >>> x += 1
    >>> input_versions([x], [(0, "x")]) == before
    False
    """
    try:  # a snapshot would take longer, and this is done for each computation
        return [
            value._version if type(value := inputs[index]) is torch.Tensor else versions_of(list(tensors(value)))
            for index, _ in seen
        ]
    except RuntimeError:  # a tensor of inference mode
        return [versions_of(list(tensors(inputs[index]))) for index, _ in seen]


def check_inputs(before: list[Any], inputs: Sequence[Any], seen: NamedInputs, stage: str, module: nn.Module) -> None:
    """Raise if an input was changed in place since."""
    now = input_versions(inputs, seen)
    if now != before:
        name = next(name for (_, name), one, other in zip(seen, before, now) if one != other)
        raise StageError(
            f"{stage} changed its input {name!r} in place, in code that tracing does not see. In the plain model, "
            "the change is seen by all code that has this tensor: another stage, the caller, the model itself. A "
            "stage has a copy, so here the change would be lost.\n"
            + "".join(f"{line}\n" for line in _places(module, name))
            + "What to do: use the operation that makes a new tensor there. If no other code needs the change, "
            "pass a copy, value.clone()"
        )


@contextmanager
def check_unchanged(stage: str, module: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """A context that raises at its end if ``module`` has changed one of these tensors, which other stages hold, in place."""
    before = Snapshot({name: get_tensor(module, name) for name in names})
    yield
    changed = before.changed()
    if changed:
        raise SharedParameterError(
            f"{stage} changed {', '.join(map(repr, changed))} in place, which other stages hold too; their copies would "
            "drift apart. Move the split so that one stage makes every use, or give each use a buffer of its own"
        )


def _places(module: nn.Module, name: str) -> Iterator[str]:
    """The lines that hand an input, or a view of it, to code that tracing did not look into."""
    if not isinstance(module, fx.GraphModule):
        yield f"  {module!r}"
        return
    reached = {node for node in module.graph.nodes if node.op == "placeholder" and node.name == name}
    lines = []
    for node in module.graph.nodes:
        if reached.intersection(node.all_input_nodes) and node.op != "output":
            reached.add(node)
            lines += [node] if _is_opaque(node, module) else []
    if lines:
        yield "it is handed to code that was not traced here:"
        yield from dict.fromkeys(map(excerpt_of, lines))


def _is_opaque(node: fx.Node, module: fx.GraphModule) -> bool:
    if node.op == "call_module":
        return not type(module.get_submodule(str(node.target))).__module__.startswith(
            "torch.nn.modules."
        ) or isinstance(module.get_submodule(str(node.target)), nn.Sequential)
    owner = getattr(node.target, "__module__", None) or "torch"
    return node.op == "call_function" and owner.partition(".")[0] not in (*_IN_TORCH, "pippy")
