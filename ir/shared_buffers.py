"""Buffers that several stages read: each stage holds one, so none may change it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from pippy.ir.errors import SharedParameterError


@contextmanager
def held_constant(stage: str, module: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Raise if ``module`` changes one of its buffers called ``names`` in the meantime."""
    versions = {name: module.get_buffer(name)._version for name in names}
    yield
    changed = [name for name, before in versions.items() if module.get_buffer(name)._version != before]
    if changed:
        raise SharedParameterError(
            f"{stage} changed {', '.join(map(repr, changed))} in place, which other stages hold too; their copies would "
            "drift apart. Move the split so that one stage makes every use, or give each use a buffer of its own"
        )
