"""Tensors of a stage that its layers may change in place at each call, while other micro-batches are on their way.

a layer hands its buffer out            the next stage gets a copy, as it would on another worker
the backward needs the buffer           autograd finds that it has changed since, and the error says which it is
"""

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn

from pippy.ir.base.trees import map_tensors
from pippy.ir.run.shared_tensors import memory_of

_OTHER_VERSION = re.compile(r"modified by an inplace operation: \[\S+ \[(.*?)\]\].* is at version (\d+)")


def memory_of_layers(module: nn.Module) -> frozenset[int]:
    """The memory of the buffers, and of other tensors, that layers of the user's own hold, which tracing did not look into."""
    return frozenset(
        memory for _, tensor in _tensors_of_layers(module, own_layers=True) if (memory := memory_of(tensor)) is not None
    )


def apart_from(memory: frozenset[int], value: Any) -> Any:
    """``value`` with copies of the tensors inside it that are of this memory.

    >>> held = torch.zeros(2)
    >>> out = apart_from(frozenset([memory_of(held)]), (held[:1], 7))
    >>> held += 1
    >>> out
    (tensor([0.]), 7)
    """
    return map_tensors(lambda tensor: tensor.clone() if memory_of(tensor) in memory else tensor, value)


def changed_since(module: nn.Module, error: Exception) -> str | None:
    """What to do if a backward failed because a tensor that it needs has changed; None if it failed otherwise."""
    match = _OTHER_VERSION.search(str(error))
    if match is None:
        return None
    shape, version = match.groups()
    names = [
        f"{name!r}{owner}"
        for name, owner, tensor in _named(module)
        if tensor._version == int(version) and ", ".join(map(str, tensor.shape)) == shape
    ]
    which = " or ".join(dict.fromkeys(names)) or "a tensor that the stage holds"
    return (
        f"What to do: {which} was changed in place by the forward of a later micro-batch, and this backward needs it as it was "
        "before; compute with a copy, self.name.clone(), or take a schedule with one micro-batch (chunks=1)"
    )


def _named(module: nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    for name, tensor in _tensors_of_layers(module, own_layers=False):
        holder = module.get_submodule(name.rpartition(".")[0])
        yield name, "" if is_of_torch(holder) else f" (of {type(holder).__name__})", tensor


def _tensors_of_layers(module: nn.Module, own_layers: bool) -> Iterator[tuple[str, torch.Tensor]]:
    for path, part in module.named_modules():
        if own_layers and is_of_torch(part):
            continue
        for name, value in {**part._buffers, **part.__dict__}.items():
            if isinstance(value, torch.Tensor):
                yield f"{path}.{name}".lstrip("."), value


def is_of_torch(module: nn.Module) -> bool:
    """Whether a module is torch's own, or a graph."""
    return isinstance(module, fx.GraphModule) or type(module).__module__.startswith("torch.")
