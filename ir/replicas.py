"""The copies of replicated parameters: alike before each run, and each with the whole gradient after it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from pippy.ir.stage_backward import add_gradients

Copies = Sequence[torch.Tensor]


def follow_owners(groups: Sequence[Copies]) -> None:
    """Make every copy equal to the first, which is the model's own: an optimizer or a loaded state may have changed it."""
    with torch.no_grad():
        for owner, *copies in groups:
            for copy in copies:
                copy.requires_grad_(owner.requires_grad)
                if not torch.equal(copy, owner):
                    copy.copy_(owner)


@contextmanager
def whole_gradients(groups: Sequence[Copies]) -> Iterator[None]:
    """Inside, gradients of the copies start from nothing; at the end each copy has the sum of all of them.

    What the model's own parameter had before is set aside and added again, so that several runs accumulate, and
    `model.zero_grad()` counts for all copies.
    """
    before = [copies[0].grad for copies in groups]
    for copies in groups:
        for tensor in copies:
            tensor.grad = None
    try:
        yield
    except BaseException:
        for copies in groups:
            for tensor in copies:
                tensor.grad = None
        raise
    else:
        for copies in groups:
            sum_gradients(copies)
    finally:
        for copies, old in zip(groups, before):
            for tensor in copies:
                tensor.grad = add_gradients(old, tensor.grad)


def sum_gradients(copies: Copies) -> None:
    """Give every copy of a replicated parameter the sum of all copies' gradients, added in the order of the stages."""
    total = None
    for tensor in copies:
        total = add_gradients(total, tensor.grad)
    for tensor in copies:
        tensor.grad = None if total is None else total.clone()
