"""The fake tensors that models run on here, which have a shape, a dtype and a device, but no numbers.

torch has rules for the results of operations on them. Some rules refuse arguments that the operation takes: the rule of
`grouped_mm` takes bfloat16 only. Then the operation itself is called, with zeros.

    torch.mm(x, w)              the rule of torch
    grouped_mm(x, w, offs)      float32: the rule fails, and the operation gives the result
    torch.mm(x, w.T)            both fail: the error of the rule
"""

import logging
import mmap
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)

from pippy.ir.base.trees import map_leaves, map_tensors

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
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
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


def zeros_for(leaf: Any) -> Any:
    """Zeros for a fake tensor, with its strides. On the CPU, where those go that are on no device, nothing is allocated."""
    if not isinstance(leaf, FakeTensor):
        return leaf
    elements = torch._prims_common.compute_required_storage_length(leaf.shape, leaf.stride(), 0)
    if leaf.device.type not in ("cpu", "meta") or not elements:
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device).zero_()
    untouched = mmap.mmap(-1, elements * leaf.element_size(), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(untouched, dtype=leaf.dtype).as_strided(leaf.shape, leaf.stride())
