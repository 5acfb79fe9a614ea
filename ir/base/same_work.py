"""Keys of operations: two that have the same key do the same work, on other numbers.

operation                                               key
────────────────────────────────────────────────────────────────────────────────────────────
torch.relu(x), x a float32[8, 16]                       relu, a float32[8, 16]
self.layers[3](x), a Linear(16, 4)                      Linear(16, 4), a float32[8, 16]
a function or a module that is not torch's              none: it may do something else each time
an operation on a sparse tensor, or on another object   none
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.immutable_collections import immutable_dict

_PLAIN = (int, float, complex, bool, str, bytes, type(None), type(...), torch.dtype, torch.device, torch.Size)
_PLAIN_OF_TORCH = (torch.memory_format, torch.layout)
_DICTS = (dict, OrderedDict, immutable_dict)
_TENSORS = (torch.Tensor, nn.Parameter, FakeTensor)
_OWNERS = ("torch", "_operator", "builtins", "math", "pippy")
# What a module has beside its own attributes; hooks are called with it, and may do anything.
_HOOKS = (
    "_backward_pre_hooks _backward_hooks _forward_hooks _forward_hooks_with_kwargs _forward_hooks_always_called "
    "_forward_pre_hooks _forward_pre_hooks_with_kwargs"
).split()
_OF_STATE_DICTS = frozenset(
    """_non_persistent_buffers_set _is_full_backward_hook _state_dict_hooks _state_dict_pre_hooks
    _load_state_dict_pre_hooks _load_state_dict_post_hooks""".split()
)


class _NoKey(Exception):
    """Raised for an operation that may do other work each time."""


def work_of(target: Callable[..., Any] | str | nn.Module, args: Any, kwargs: Any) -> Hashable | None:
    """The key of the call of a function, of a method by its name, or of a module; None if it has none.

    >>> import copy
    >>> x = torch.zeros(2, 3)
    >>> work_of(torch.relu, (x,), {}) == work_of(torch.relu, (torch.ones(2, 3),), {})
    True
    >>> work_of(torch.relu, (x,), {}) == work_of(torch.relu, (x.double(),), {})
    False
    >>> work_of(nn.Linear(3, 4), (x,), {}) == work_of(nn.Linear(3, 4), (x,), {})
    True
    >>> work_of(copy.copy, (x,), {}) is None
    True
    """
    try:
        return _called(target), tuple(map(_key, args)), _key(kwargs), torch.is_grad_enabled()
    except _NoKey:
        return None


def tensor_key(tensor: torch.Tensor) -> Hashable:
    """All of a tensor that an operation can depend on, but its numbers. Raises if there may be more."""
    if type(tensor) not in _TENSORS or tensor.layout is not torch.strided or tensor.is_quantized:
        raise _NoKey
    return (
        type(tensor),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.device,
        tensor.requires_grad,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def _called(target: Callable[..., Any] | str | nn.Module) -> Hashable:
    if isinstance(target, nn.Module):
        return _module_key(target)
    if isinstance(target, str):
        return target
    if (getattr(target, "__module__", None) or "torch").partition(".")[0] not in _OWNERS:
        raise _NoKey
    return target


def _module_key(module: nn.Module) -> Hashable:
    if not type(module).__module__.startswith("torch.nn.modules.") or any(vars(module).get(name) for name in _HOOKS):
        raise _NoKey
    attributes = (
        (name, _key(value))
        for name, value in vars(module).items()
        if name not in _OF_STATE_DICTS and name not in _HOOKS
    )
    return type(module), tuple(attributes)


def _key(value: Any) -> Hashable:
    kind = type(value)
    if kind in _PLAIN or kind in _PLAIN_OF_TORCH:
        return kind, value
    if isinstance(value, torch.Tensor):
        return tensor_key(value)
    if isinstance(value, (tuple, list)):
        return kind, tuple(map(_key, value))
    if kind in _DICTS:
        return tuple((name, _key(item)) for name, item in value.items())
    if kind is slice:
        return kind, _key(value.start), _key(value.stop), _key(value.step)
    if isinstance(value, nn.Module):
        return _module_key(value)
    raise _NoKey
