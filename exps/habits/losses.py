"""Losses of every kind, and how each is reduced: the count of what a micro-batch holds, if there is one that fits."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

IGNORED = -100
CLASS_WEIGHTS = torch.tensor([0.5, 2.0, 0.25, 1.0], dtype=torch.float64)


@dataclass(frozen=True)
class Loss:
    """A loss of values and targets, and the reduction that fits: rows if it is None, and "none" if none does."""

    function: Callable[[Any, Any], Any]
    fits: str | Callable[..., Any] | None = None
    numbers: bool = False  # whether targets are numbers, where nan is padding, and not classes
    tokens: bool | None = None  # whether it is for sequences: True, False, or both
    of_model: Callable[[Any], Callable[[Any, Any], Any]] | None = None  # makes the function, of the model that it reads

    def made(self, model: Any) -> Callable[[Any, Any], Any]:
        """The loss of one script: a new object, so that what a script changes in it does not outlive the script."""
        return self.function if self.of_model is None else self.of_model(model)


def flat(h: Any, target: Any) -> tuple[Any, Any]:
    return h.flatten(0, -2), target.flatten()


def entropies(h: Any, target: Any) -> Any:
    """One for each target; 0 for padding."""
    return F.cross_entropy(*flat(h, target), reduction="none", ignore_index=IGNORED)


def counted(target: Any) -> Any:
    return (target != IGNORED).sum()


def present(target: Any) -> Any:
    return (target == target).sum()


def class_weights(target: Any) -> Any:
    return (CLASS_WEIGHTS[target.clamp(min=0)] * (target != IGNORED)).sum()


def next_tokens(target: Any) -> Any:
    return (target[:, 1:] != IGNORED).sum()


def shifted(h: Any, target: Any) -> Any:
    return F.cross_entropy(*flat(h[:, :-1], target[:, 1:]), ignore_index=IGNORED)


def selected(h: Any, target: Any) -> Any:
    keep = target != IGNORED
    return F.cross_entropy(h[keep], target[keep])


def masked(h: Any, target: Any) -> Any:
    return entropies(h, target).sum() / (target != IGNORED).sum()


def masked_safely(h: Any, target: Any) -> Any:
    return entropies(h, target).sum() / (target != IGNORED).sum().clamp(min=1)


def of_rows(h: Any, target: Any) -> Any:
    """Each row by its own count."""
    losses = entropies(h, target).unflatten(0, target.shape).flatten(1).sum(1)
    return (losses / (target != IGNORED).flatten(1).sum(1).clamp(min=1)).mean()


def missing(h: Any, target: Any) -> Any:
    keep = target == target
    return F.mse_loss(h[..., 0][keep], target[keep])


def missing_are_zero(h: Any, target: Any) -> Any:
    return (h[..., 0] - target.nan_to_num()).square().mean()


def contrastive(h: Any, target: Any) -> Any:
    h = F.normalize(h.flatten(1), dim=1)
    return F.cross_entropy(h @ h.t(), torch.arange(h.shape[0]))


def weighted_rows(h: Any, target: Any) -> Any:
    weights = (target + 1).clamp(min=0).flatten()
    return (entropies(h, target) * weights).sum() / weights.sum()


def weights_of_rows(target: Any) -> Any:
    return (target + 1).clamp(min=0).sum()


def worst(h: Any, target: Any) -> Any:
    return entropies(h, target).max()


def by_hand(h: Any, target: Any) -> Any:
    return -h.log_softmax(-1).gather(-1, target.clamp(min=0).unsqueeze(-1)).mean()


LOSSES: dict[str, Loss] = {
    "cross entropy": Loss(lambda h, t: F.cross_entropy(*flat(h, t)), counted),
    "module": Loss(nn.CrossEntropyLoss(), counted, tokens=False),
    "sum": Loss(lambda h, t: F.cross_entropy(*flat(h, t), reduction="sum"), "sum"),
    "weights": Loss(lambda h, t: F.cross_entropy(*flat(h, t), CLASS_WEIGHTS), class_weights),
    "smoothed": Loss(lambda h, t: F.cross_entropy(*flat(h, t), label_smoothing=0.1), counted),
    "weights, smoothed": Loss(
        lambda h, t: F.cross_entropy(*flat(h, t), CLASS_WEIGHTS, label_smoothing=0.1), class_weights
    ),
    "shifted": Loss(shifted, next_tokens, tokens=True),
    "selected": Loss(selected, counted),
    "masked": Loss(masked, counted),
    "masked safely": Loss(masked_safely, counted),
    "of rows": Loss(of_rows, tokens=True),
    "by hand": Loss(by_hand),
    "squares": Loss(lambda h, t: F.mse_loss(h[..., 0], t.nan_to_num()), numbers=True),
    "squares, summed": Loss(lambda h, t: F.mse_loss(h[..., 0], t.nan_to_num(), reduction="sum"), "sum", numbers=True),
    "broadcast": Loss(lambda h, t: ((h[:, :1] - t.nan_to_num()) ** 2).mean(), "none", numbers=True, tokens=False),
    "missing": Loss(missing, present, numbers=True),
    "missing are zero": Loss(missing_are_zero, numbers=True),
    "root": Loss(lambda h, t: F.mse_loss(h[..., 0], t.nan_to_num()).sqrt(), "none", numbers=True),
    "contrastive": Loss(contrastive, "none"),
    "deviation": Loss(lambda h, t: h.std(0).mean(), "none"),
    "weighted rows": Loss(weighted_rows, weights_of_rows),
    "worst": Loss(worst, "none"),
    "two terms": Loss(lambda h, t: F.cross_entropy(*flat(h, t)) + 0.1 * h.square().mean(), "none"),
    "times rows": Loss(lambda h, t: F.mse_loss(h[..., 0], t.nan_to_num()) * h.shape[0], "sum", numbers=True),
    "batchmean": Loss(lambda h, t: F.kl_div(h.log_softmax(-1), torch.full_like(h, 0.25), reduction="batchmean")),
}

# What may be given as loss_reduction, beside the one that fits.
REDUCTIONS: dict[str, str | Callable[..., Any] | None] = {
    "omitted": None,
    "sum": "sum",
    "mean": "mean",
    "rows": lambda target: len(target),
    "counted": counted,
    "present": present,
}
