"""Tensors of modules by their names, and the memory that tensors are in."""

from typing import Any

import torch
from torch import nn


def get_tensor(module: nn.Module, name: str) -> torch.Tensor:
    """The parameter or buffer of ``module`` with this qualified name."""
    path, _, leaf = name.rpartition(".")
    return getattr(module.get_submodule(path), leaf)


def memory_of(value: Any) -> int | None:
    """What tensors have in common that share memory; None for what is no tensor with strides."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    try:
        return value.untyped_storage()._cdata
    except (NotImplementedError, ValueError):  # a tensor of torch.func, which wraps another; a lazy parameter
        return None
