"""The fake tensors that models run on here, which have a shape, a dtype and a device, but no numbers; and results on them.

torch has rules for the results of operations on them. Some rules refuse arguments that the operation takes: the rule of
`grouped_mm` takes bfloat16 only. Then the operation itself is called, with zeros.

    torch.mm(x, w)              the rule of torch
    grouped_mm(x, w, offs)      float32: the rule fails, and the operation gives the result
    torch.mm(x, w.T)            both fail: the error of the rule

Each result is found once: a model is traced in train and in eval mode, its sizes are found for another number of rows, and most
models repeat a block.

    h.split(64, dim=2), h a fake float32[2, 16, 192]        computed
    the same in the next layer, and in the next trace       the tensors that were found before

So values of several nodes are one tensor, but an operation gives its argument only where it returns that. It would be wrong
once an operation changes the shape of such a tensor (`x.t_()`);
then nothing is shared any more, and what was found is found again.

Two operations that have the same key do the same work, on other numbers:

    operation                                               key
    ────────────────────────────────────────────────────────────────────────────────────────────
    torch.relu(x), x a float32[8, 16]                       relu, a float32[8, 16]
    self.layers[3](x), a Linear(16, 4)                      Linear(16, 4), a float32[8, 16]
    a function or a module that is not torch's              none: it may do something else each time
    an operation on a sparse tensor, or on another object   none
"""

import logging
import mmap
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch.fx.immutable_collections import immutable_dict

from pippy.ir.base.trees import map_leaves, map_tensors, tensors

OF_FAKES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    NotImplementedError,
)
_LOG = logging.getLogger(FakeTensorMode.__module__)


class FakeMode(FakeTensorMode):
    """A mode for fake tensors, in which parameters may be real. It logs no errors: they are raised.

    >>> mode, offs = FakeMode(), torch.tensor([1, 3], dtype=torch.int32)
    >>> x, w = mode.from_tensor(torch.ones(3, 4)), mode.from_tensor(torch.ones(2, 4, 8))
    >>> with mode:
    ...     torch.nn.functional.grouped_mm(x, w, offs=offs).shape
    torch.Size([3, 8])
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def dispatch(
        self, func: Any, types: Sequence[type], args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        """What torch's modes have: the result of an operation."""
        was_silent, _LOG.disabled = _LOG.disabled, True
        try:
            return super().dispatch(func, types, args, kwargs or {})
        except RuntimeError as error:
            if isinstance(error, OF_FAKES) or not isinstance(func, torch._ops.OpOverload) or func._schema.is_mutable:
                raise
            return self._of_zeros(func, args, kwargs or {}, error)
        finally:
            _LOG.disabled = was_silent

    def _of_zeros(self, func: Any, args: Any, kwargs: Any, error: RuntimeError) -> object:
        held = [each for each in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        try:
            result = func(*map_leaves(zeros_for, args), **map_leaves(zeros_for, kwargs))
        except Exception:
            raise error from None
        if held and all(each.device.type == "meta" for each in held):
            result = map_tensors(lambda tensor: tensor.to("meta"), result)
        return map_tensors(self.from_tensor, result)


def stand_in(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the mode, without data, that stands for this one: of its shape, strides, dtype and device."""
    if isinstance(tensor, FakeTensor) or tensor.is_inference():  # of another mode, or unusable by autograd
        with mode:
            return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return mode.from_tensor(tensor.detach(), static_shapes=True)


def zeros_for(leaf: Any) -> Any:
    """Zeros for a fake tensor, with its strides. On the CPU, where those go that are on no device, nothing is allocated."""
    if not isinstance(leaf, FakeTensor):
        return leaf
    elements = torch._prims_common.compute_required_storage_length(leaf.shape, leaf.stride(), 0)
    if leaf.device.type not in ("cpu", "meta") or not elements:
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device).zero_()
    untouched = mmap.mmap(-1, elements * leaf.element_size(), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(untouched, dtype=leaf.dtype).as_strided(leaf.shape, leaf.stride())


_SHARED = (torch.Size, int, float, bool, str, type(None), torch.dtype, torch.device)


class ShapeChangedError(Exception):
    """An operation has changed the shape of a tensor that it was given."""


class FakeResults:
    """A mode for fake tensors, and the results that were found in it.

    >>> results = FakeResults()
    >>> x = results.mode.from_tensor(torch.ones(2, 3))
    >>> found = results.of(torch.relu, (x,), {}, lambda: torch.relu(x))
    >>> results.of(torch.relu, (x,), {}, lambda: 1 / 0) is found
    True
    """

    def __init__(self) -> None:
        self._results: dict[Hashable, list[Any]] | None = {}

    @cached_property
    def mode(self) -> FakeMode:
        return FakeMode()

    def of(self, target: Any, args: Any, kwargs: Any, compute: Callable[[], Any]) -> Any:
        """The result of an operation, which ``compute`` gives if it is not known. Raises ShapeChangedError if it cannot be
        shared with others."""
        if self._results is None:
            return compute()
        arguments = list(tensors((args, kwargs)))
        work = work_of(target, args, kwargs) if all(map(_is_shared, arguments)) else None
        for known in self._results.get(work, ()) if work is not None else ():
            if isinstance(known, _Argument):
                return arguments[known.at]
            if not _holds_one_of(known, arguments):
                return known
        before = list(map(_shape, arguments))
        result = compute()
        if before != list(map(_shape, arguments)):
            raise ShapeChangedError
        if work is not None and _is_shared(result):
            at = next((at for at, each in enumerate(arguments) if each is result), None)
            if at is not None or not _holds_one_of(result, arguments):
                self._results.setdefault(work, []).append(result if at is None else _Argument(at))
        return result

    def share_nothing(self) -> None:
        """From now on all results are computed, from fake tensors that are new."""
        self._results = None
        self.__dict__.pop("mode", None)


@dataclass(frozen=True)
class _Argument:
    """Stands for the result of an operation that returns one of the tensors that it is given."""

    at: int


def _holds_one_of(result: Any, given: list[torch.Tensor]) -> bool:
    """Whether one of the tensors is in a result: the operation has returned it, or it was found for others before."""
    return any(each is other for each in tensors(result) for other in given)


def _is_shared(value: Any) -> bool:
    if type(value) in (tuple, list):
        return all(map(_is_shared, value))
    return type(value) in _SHARED or (type(value) is FakeTensor and value.constant is None)


def _shape(tensor: torch.Tensor) -> Any:
    return tensor.shape, tensor.stride() if tensor.layout is torch.strided else None


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
