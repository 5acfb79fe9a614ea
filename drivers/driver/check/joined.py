"""The value of a stage for the mini-batch, made of its values for the micro-batches."""

from collections.abc import Sequence
from typing import Any

import torch

from pippy.ir.base.trees import children, with_children


class NotJoined(Exception):
    """Raised if the value for the mini-batch does not follow from those for the micro-batches."""


def joined_rows(parts: Sequence[Any], like: Any, weights: Sequence[float]) -> Any:
    """Join the values of micro-batches to one with the shape of ``like``. Numbers without rows are summed by ``weights``.

    Raises `NotJoined` if the shapes do not fit.

    >>> joined_rows([torch.ones(2, 1), torch.zeros(1, 1)], torch.ones(3, 1), weights=(0.5, 0.5)).shape
    torch.Size([3, 1])
    >>> joined_rows([torch.tensor(4.0), torch.tensor(2.0)], torch.tensor(3.1), (0.5, 0.5))
    tensor(3.)
    """
    held = children(like)
    if held is not None:
        items = zip(*(children(each) or () for each in parts), strict=True)
        return with_children(like, [joined_rows(each, item, weights) for each, item in zip(items, held, strict=True)])
    if not isinstance(like, torch.Tensor):
        return like
    if all(each.shape == like.shape for each in parts):
        return _without_rows(parts, weights)
    return _concatenated(parts, like)


def joined_gradient(parts: Sequence[Any], like: Any) -> Any:
    """The gradient of ``like`` from those of its parts: tuples stand for containers, and None for no gradient."""
    if all(each is None for each in parts):
        return None
    held = children(like)
    if held is not None:
        return tuple(joined_gradient(each, item) for each, item in zip(zip(*parts, strict=True), held, strict=True))
    if all(each.shape == like.shape for each in parts):
        return torch.stack(list(parts)).sum(0)
    return _concatenated(parts, like)


def _concatenated(parts: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    for dim in range(like.dim()):
        lengths = [each.shape[dim] for each in parts]
        rest = {(*each.shape[:dim], *each.shape[dim + 1 :]) for each in parts}
        if sum(lengths) == like.shape[dim] and rest == {(*like.shape[:dim], *like.shape[dim + 1 :])}:
            return torch.cat(list(parts), dim)
    raise NotJoined


def _without_rows(parts: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    if all(torch.equal(each, parts[0]) for each in parts):
        return parts[0]
    if not parts[0].is_floating_point():
        raise NotJoined
    return torch.stack([each * weight for each, weight in zip(parts, weights) if weight]).sum(0)
