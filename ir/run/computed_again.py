"""Whether a forward will be computed again for its backward, or is: layers of the user's own may ask."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Now(threading.local):
    checkpointing = recomputing = False


_now = _Now()


def is_checkpointing() -> bool:
    """Whether this forward keeps its inputs only, and will be computed again (`checkpoint=` of a driver). For your own layers.

    While a model is traced, this is refused: ask in a leaf module.

    >>> is_checkpointing()
    False
    """
    return is_now("checkpointing")


def is_recomputing() -> bool:
    """Whether this forward is computed again, for its backward (`checkpoint=` of a driver). For your own layers.

    A layer that counts its calls should not count this one. While a model is traced, this is refused: ask in a leaf module.

    >>> import torch
    >>> class Counting(torch.nn.Module):
    ...     calls = []
    ...     def forward(self, x):
    ...         if not is_recomputing():
    ...             self.calls.append(len(x))
    ...         return x
    >>> Counting()(torch.zeros(3)).shape, Counting.calls
    (torch.Size([3]), [3])
    """
    return is_now("recomputing")


def is_now(what: str) -> bool:
    """Whether a forward of this thread is that, "checkpointing" or "recomputing"."""
    return getattr(_now, what)


@contextmanager
def said(name: str) -> Iterator[None]:
    """Inside, a forward of this thread is that."""
    before = getattr(_now, name)
    setattr(_now, name, True)
    try:
        yield
    finally:
        setattr(_now, name, before)
