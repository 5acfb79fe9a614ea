"""Computes in 32 bits what a model computes in 16: with few bits, a part of a gradient that is lost looks like rounding."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import nn

from pippy.ir.base.names import named_state
from pippy.ir.base.trees import map_tensors

NARROW = (torch.float16, torch.bfloat16)
Tree = TypeVar("Tree")


@contextmanager
def widened(modules: Iterable[nn.Module], wide: bool = True) -> Iterator[None]:
    """Inside, the parameters and buffers of modules that have 16 bits have 32. Nothing happens unless ``wide``.

    >>> linear = nn.Linear(2, 2).bfloat16()
    >>> with widened([linear]):
    ...     linear(torch.ones(1, 2)).dtype
    torch.float32
    >>> linear.weight.dtype
    torch.bfloat16
    """
    found = {id(each): each for module in modules for _, each in named_state(module)} if wide else {}
    before = [(each, each.data) for each in found.values() if each.dtype in NARROW]
    try:
        for each, data in before:
            each.data = data.float()
        yield
    finally:
        for each, data in before:
            each.grad = None
            each.data = data


def wide_tensors(tree: Tree) -> Tree:
    """A tree with tensors of 32 bits in place of those of 16."""
    return map_tensors(lambda each: each.float() if each.dtype in NARROW else each, tree)
