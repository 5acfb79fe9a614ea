"""Gradients of a scaled loss become those of the loss, and those that are not finite are found."""

from collections import defaultdict
from collections.abc import Mapping

import torch

from pippy.ir.base.trees import form_and_parts, is_sparse


def unscaled(gradients: Mapping[int, torch.Tensor], scale: float) -> tuple[dict[int, torch.Tensor], list[int]]:
    """Gradients divided by the scale of the loss, and the keys of those that are not finite.

    Those of 16 bits become float32: float16 would lose again what the scale has kept. Others are divided in place, by torch's
    own function for it, so that the numbers are those of `torch.amp.GradScaler`.

    >>> unscaled({7: torch.tensor([8.0]), 9: torch.tensor([torch.inf])}, scale=4.0)
    ({7: tensor([2.]), 9: tensor([inf])}, [9])
    """
    found = {key: gradient.float() if gradient.dtype.itemsize == 2 else gradient for key, gradient in gradients.items()}
    values = {
        key: form_and_parts(gradient)[1][-1] if is_sparse(gradient) else gradient for key, gradient in found.items()
    }
    alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    for each in values.values():
        alike[each.device, each.dtype].append(each)
    inverse = torch.tensor(scale, dtype=torch.float64).reciprocal().float()
    overflowed = [_unscale(each, inverse) for each in alike.values()]
    if any(overflowed):
        return found, [key for key, each in values.items() if not bool(each.isfinite().all())]
    return found, []


@torch.no_grad()
def _unscale(tensors: list[torch.Tensor], inverse: torch.Tensor) -> bool:
    """Multiply tensors of one device and dtype by a number. Returns whether one of them was not finite."""
    device = tensors[0].device
    not_finite = torch.zeros((), dtype=torch.float32, device=device)
    torch._amp_foreach_non_finite_check_and_unscale_(tensors, not_finite, inverse.to(device))
    return bool(not_finite)
