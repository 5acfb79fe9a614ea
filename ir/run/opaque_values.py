"""Objects that pass from stage to stage as constants, since they are neither tensors nor containers.

A tensor inside one would keep its gradient in one process and lose it between two, so none may require a gradient.
"""

from collections.abc import Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch

from pippy.ir.base.errors import StageError
from pippy.ir.base.trees import leaves

CONSTANTS = (str, bytes, bool, int, float, complex, type(None), torch.Size, torch.dtype, torch.device, slice, range)
_WITHOUT_VALUES = (*CONSTANTS, type, FunctionType, MethodType, ModuleType)


def check_opaque(value: Any) -> None:
    """Raise if a tensor somewhere inside an object requires a gradient.

    >>> check_opaque(object())
    """
    hidden = [name for name, tensor in _tensors(value) if tensor.requires_grad]
    if hidden:
        raise StageError(
            f"a {type(value).__name__} passes from stage to stage and holds tensors that require a gradient, in "
            f"{hidden}, which the pipeline cannot see; make it a dataclass, a tuple or a dict, or register it with "
            "torch.utils._pytree.register_pytree_node"
        )


def check_opaque_leaves(value: Any) -> None:
    """`check_opaque` for all objects in a value."""
    for leaf in leaves(value):
        if not isinstance(leaf, (torch.Tensor, *CONSTANTS)):
            check_opaque(leaf)


def _tensors(value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors that an object refers to, through attributes, lists, dicts and other objects, with the way to each."""
    seen, pending = {id(value)}, list(_items(value, ""))
    while pending:
        name, item = pending.pop(0)
        if isinstance(item, torch.Tensor):
            yield name, item
        elif id(item) not in seen and not isinstance(item, _WITHOUT_VALUES):
            seen.add(id(item))
            pending += _items(item, name)


def _items(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"{name}[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"{name}[{index}]", item) for index, item in enumerate(value))
    elif isinstance(value, (set, frozenset)):
        yield from ((name, item) for item in value)
    slots = [slot for kind in type(value).__mro__ for slot in _slots(kind) if hasattr(value, slot)]
    attributes = {**{slot: getattr(value, slot) for slot in slots}, **getattr(value, "__dict__", {})}
    yield from ((f"{name}.{key}" if name else str(key), item) for key, item in attributes.items())


def _slots(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)
