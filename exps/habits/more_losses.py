"""Losses that read the model, couple the rows of a batch, keep something, or ask how many rows there are."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd import grad
from torch.nn import functional as F

from exps.habits.functions import square
from exps.habits.losses import CLASS_WEIGHTS, IGNORED, Loss, entropies, flat

SETTINGS = {"smoothing": 0.0, "factor": 1.0}  # globals that a loss reads, and a script changes


def entropy(h: Any, target: Any) -> Any:
    return F.cross_entropy(*flat(h, target))


def decayed(model: Any) -> Callable[[Any, Any], Any]:
    return lambda h, t: entropy(h, t) + 0.01 * sum(each.square().sum() for each in model.parameters())


def decayed_by_list(model: Any) -> Callable[[Any, Any], Any]:
    weights = [each for name, each in model.named_parameters() if name.endswith("weight")]

    def loss(h: Any, target: Any) -> Any:
        return entropy(h, target) + 0.01 * torch.stack([each.square().sum() for each in weights]).sum()

    return loss


def decayed_by_default(model: Any) -> Callable[[Any, Any], Any]:
    return lambda h, t, weight=model.first.weight: entropy(h, t) + 0.01 * weight.abs().sum()  # type: ignore[misc]


def tied(model: Any) -> Callable[[Any, Any], Any]:
    """The classes are the rows of the first layer's weight."""
    return lambda h, t: entropy(h @ model.first.weight, t)


class Regularized:
    """A loss that is an object, no module."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, h: Any, target: Any) -> Any:
        return entropy(h, target) + 0.01 * self.model.last.weight.square().sum()


class RegularizedModule(nn.Module):
    """A loss that is a module, and hides the model in a list."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.models = [model]

    def forward(self, h: Any, target: Any) -> Any:
        return entropy(h, target) + 0.01 * self.models[0].first.weight.square().sum()


class Running:
    """Divides by a running mean of itself."""

    def __init__(self) -> None:
        self.mean = torch.ones((), dtype=torch.float64)

    def __call__(self, h: Any, target: Any) -> Any:
        loss = entropy(h, target)
        self.mean = 0.9 * self.mean + 0.1 * loss.detach()
        return loss / self.mean


class RunningModule(nn.Module):
    """The running mean is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.ones((), dtype=torch.float64))

    def forward(self, h: Any, target: Any) -> Any:
        loss = entropy(h, target)
        self.mean.mul_(0.9).add_(0.1 * loss.detach())
        return loss / self.mean


class Counting:
    """A penalty grows with the number of calls, as in a schedule that the loss keeps itself."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, h: Any, target: Any) -> Any:
        self.calls += 1
        return entropy(h, target) * (1 + 0.5 * self.calls)


def clip(model: Any) -> Callable[[Any, Any], Any]:
    """Both halves of the features are told apart by row, with a temperature of the model."""

    def loss(h: Any, target: Any) -> Any:
        images, texts = F.normalize(h[:, :2], dim=1), F.normalize(h[:, 2:], dim=1)
        logits, labels = model.last.bias[0].exp() * images @ texts.t(), torch.arange(h.shape[0])
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2

    return loss


def simclr(h: Any, target: Any) -> Any:
    views = F.normalize(torch.cat([h[:, :2], h[:, 2:]]), dim=1)
    logits = (views @ views.t() / 0.5).masked_fill(torch.eye(len(views), dtype=torch.bool), -torch.inf)
    return F.cross_entropy(logits, torch.arange(len(views)).roll(h.shape[0]))


def normalized(h: Any, target: Any) -> Any:
    return entropy((h - h.mean(0)) / (h.std(0) + 0.1), target)


def hardest(h: Any, target: Any) -> Any:
    losses = entropies(h, target)
    return losses.topk(min(8, losses.shape[0])).values.mean()


def six_rows(h: Any, target: Any) -> Any:
    return entropy(h[:6], target[:6])


def many_rows(h: Any, target: Any) -> Any:
    return entropy(h, target) * (2 if h.shape[0] > 6 else 1)


def weakly_supervised(h: Any, target: Any) -> Any:
    """The first rows have labels, of the others those count of which the model is sure."""
    labelled = entropy(h[:3], target[:3])
    sure = h[3:].detach().softmax(-1).amax(-1) > 0.5
    unlabelled = entropies(h[3:], h[3:].detach().argmax(-1))
    return labelled + (unlabelled * sure.flatten()).mean()


def confident(h: Any, target: Any) -> Any:
    """A mean over the rows of which the model is sure."""
    keep = (8 * h.detach()).softmax(-1).amax(-1) > 0.53
    return h[keep].logsumexp(-1).mean()


def not_negative(h: Any, target: Any) -> Any:
    """Padding is selected away by an order, not by its number."""
    keep = target >= 0
    return F.cross_entropy(h[keep], target[keep])


def by_places(h: Any, target: Any) -> Any:
    places = (target.flatten() != IGNORED).nonzero().squeeze(-1)
    return F.cross_entropy(h.flatten(0, -2).index_select(0, places), target.flatten()[places])


def masked_select(h: Any, target: Any) -> Any:
    losses = entropies(h, target)
    return losses.masked_select(target.flatten() != IGNORED).mean()


def balanced(h: Any, target: Any) -> Any:
    """A mean for each of two kinds of rows."""
    losses, first = entropies(h, target), target.flatten() % 2 == 0
    return losses[first].sum() / first.sum().clamp(min=1) + losses[~first].sum() / (~first).sum().clamp(min=1)


def penalized(h: Any, target: Any) -> Any:
    loss = entropy(h, target)
    return loss + grad(loss, h, create_graph=True)[0].square().sum()


def penalized_by(name: str) -> Callable[[Any], Callable[[Any, Any], Any]]:
    """A penalty on the gradient by a layer's weight."""

    def of_model(model: Any) -> Callable[[Any, Any], Any]:
        def loss(h: Any, target: Any) -> Any:
            value = entropy(h, target)
            weight = getattr(model, name).weight
            return value + grad(value, weight, create_graph=True)[0].square().sum()

        return loss

    return of_model


def with_settings(h: Any, target: Any) -> Any:
    """A global dict is read."""
    return F.cross_entropy(*flat(h, target), label_smoothing=SETTINGS["smoothing"]) * SETTINGS["factor"]


class Shuffled:
    """Negatives are other rows, chosen at random; where numbers are compared, always the same."""

    def __init__(self) -> None:
        self.draws = True

    def __call__(self, h: Any, target: Any) -> Any:
        others = h[torch.randperm(h.shape[0])] if self.draws else h.roll(1, 0)
        return entropy(h, target) + 0.1 * F.cosine_similarity(h, others, dim=-1).mean()


def of(make: Callable[[Any], Any], **more: Any) -> Loss:
    """A loss that is made for a model."""
    return Loss(entropy, of_model=make, **more)


def rows_only(function: Callable[[Any, Any], Any], fits: Any = None) -> Loss:
    return Loss(function, fits, tokens=False)


def counted(target: Any) -> Any:
    return (target != IGNORED).sum()


MORE_LOSSES: dict[str, Loss] = {
    "decayed": of(decayed),
    "decayed by a list": of(decayed_by_list),
    "decayed by default": of(decayed_by_default),
    "decayed by an object": of(Regularized),
    "decayed by a module": of(RegularizedModule),
    "decayed by a method": of(lambda model: model.decayed),
    "tied": of(tied),
    "running": of(lambda _: Running()),
    "running module": of(lambda _: RunningModule()),
    "counting calls": of(lambda _: Counting()),
    "custom function": rows_only(lambda h, t: square(h - F.one_hot(t.clamp(min=0), 4)).mean()),
    "CLIP": of(clip, fits="none", tokens=False),
    "SimCLR": rows_only(simclr, "none"),
    "normalized": rows_only(normalized, "none"),
    "hardest": rows_only(hardest, "none"),
    "six rows": rows_only(six_rows, "none"),
    "many rows": rows_only(many_rows),
    "weakly supervised": rows_only(weakly_supervised, "none"),
    "confident": Loss(confident, "none"),
    "not negative": Loss(not_negative, counted),
    "by places": Loss(by_places, counted),
    "masked select": Loss(masked_select, counted),
    "balanced": Loss(balanced, "none"),
    "penalized": Loss(penalized, "none"),
    "penalized by the last": of(penalized_by("last"), fits="none"),
    "penalized by the first": of(penalized_by("first"), fits="none"),
    "settings": Loss(with_settings, counted),
    "options": of(lambda _: nn.CrossEntropyLoss(), fits=counted, tokens=False),
    "weighted options": of(lambda _: nn.CrossEntropyLoss(CLASS_WEIGHTS.clone()), fits="none", tokens=False),
    "shuffled": of(lambda _: Shuffled(), fits="none"),
}
