"""Tensors that several stages hold, as buffers or as replicas: none may change them while it runs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from pippy.ir.errors import SharedParameterError


@contextmanager
def check_unchanged(stage: str, module: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Raise if ``module`` changes one of its tensors called ``names`` in the meantime."""
    versions = {name: get_tensor(module, name)._version for name in names}
    yield
    changed = [name for name, before in versions.items() if get_tensor(module, name)._version != before]
    if changed:
        raise SharedParameterError(
            f"{stage} changed {', '.join(map(repr, changed))} in place, which other stages hold too; their copies would "
            "drift apart. Move the split so that one stage makes every use, or give each use a buffer of its own"
        )


def get_tensor(module: nn.Module, name: str) -> torch.Tensor:
    """The parameter or buffer of ``module`` with a qualified name."""
    path, _, leaf = name.rpartition(".")
    return getattr(module.get_submodule(path), leaf)


def has_gradient_hooks(tensor: torch.Tensor) -> bool:
    """Whether something waits for the whole gradient of a tensor, of which each copy would have a part."""
    return bool(tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None))
