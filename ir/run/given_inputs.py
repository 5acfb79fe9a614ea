"""Whether a stage changed in place what it was given, where others would see it in the plain model, but not in a Pipe.

Between workers each stage has a copy. In one process they share memory. So that both give the same numbers, or none, the
versions of tensors are compared, before a stage runs and after it.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn

from pippy.ir.base.errors import StageError
from pippy.ir.base.source import excerpt_of
from pippy.ir.base.trees import tensors

NamedInputs = Sequence[tuple[int, str]]  # inputs of a stage, by number and name
_IN_TORCH = ("torch", "_operator", "operator", "builtins", "math")


def versions(inputs: Sequence[Any], seen: NamedInputs) -> Sequence[Any]:
    """How often each of these inputs has been changed in place so far.

    >>> x = torch.zeros(2)
    >>> before = versions([x], seen=[(0, "x")])
    >>> x.add_(1)
    tensor([1., 1.])
    >>> before == versions([x], seen=[(0, "x")])
    False
    """
    try:
        return [
            value._version
            if type(value := inputs[index]) is torch.Tensor
            else [tensor._version for tensor in tensors(value)]
            for index, _ in seen
        ]
    except RuntimeError:  # torch does not count the changes of a tensor that was made in inference mode
        return ()


def check_versions(
    before: Sequence[Any], inputs: Sequence[Any], seen: NamedInputs, stage: str, module: nn.Module
) -> None:
    """Raise if an input has another version than ``before``."""
    if not before:
        return
    after = versions(inputs, seen)
    if after != before:
        name = next(name for (_, name), old, new in zip(seen, before, after) if old != new)
        raise StageError(
            f"{stage} changed its input {name!r} in place, in code that tracing does not see. In the plain model, "
            "the change is seen by all code that has this tensor: another stage, the caller, the model itself. A "
            "stage has a copy, so here the change would be lost.\n"
            + "".join(f"{line}\n" for line in _places(module, name))
            + "What to do: use the operation that makes a new tensor there. If no other code needs the change, "
            "pass a copy, value.clone()"
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
