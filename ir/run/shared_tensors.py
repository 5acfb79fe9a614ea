"""Tensors that several stages hold: buffers, and copies of replicated parameters. A stage must not change them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pippy.ir.base.errors import SharedParameterError


@contextmanager
def check_unchanged(stage: str, module: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """A context that raises at its end if ``module`` has changed one of these tensors in place."""
    versions = {name: get_tensor(module, name)._version for name in names}
    yield
    changed = [name for name, before in versions.items() if get_tensor(module, name)._version != before]
    if changed:
        raise SharedParameterError(
            f"{stage} changed {', '.join(map(repr, changed))} in place, which other stages hold too; their copies would "
            "drift apart. Move the split so that one stage makes every use, or give each use a buffer of its own"
        )


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
