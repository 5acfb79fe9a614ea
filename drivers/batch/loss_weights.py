"""The weight of each micro-batch's loss in the loss of the mini-batch.

The loss of the mini-batch is the sum of weight times loss over the micro-batches, and so are its gradients. For a mean over
rows, the weight is the micro-batch's share of the rows. torch's cross entropy is not a mean over rows: it divides by the
number of targets that it does not ignore, or by the sum of their class weights. The weight is then a share of that.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from pippy.drivers.base.errors import MicrobatchError
from pippy.drivers.batch.division import CutTensor, Division
from pippy.ir.base.readable import brief
from pippy.ir.base.trees import describe, is_sparse
from pippy.ir.loss.loss_function import FunctionLoss

_COUNTING_MODULES = (nn.CrossEntropyLoss, nn.NLLLoss, nn.LinearCrossEntropyLoss)
_COUNTING_FUNCTIONS = (F.cross_entropy, F.nll_loss)
IGNORED = -100  # torch's default


@dataclass(frozen=True)
class Reduction:
    """How a loss reduces to one number. ``counts``: a mean over the targets that count, not over rows.

    ``known`` is False for code that only its author knows, a function or a model that returns its loss.
    """

    kind: str = "mean"
    counts: bool = False
    ignore_index: int = IGNORED
    weight: torch.Tensor | None = None
    smooth: bool = False
    known: bool = True


def reduction_of(loss: Callable[..., Any] | None) -> Reduction:
    """How a loss module or function reduces; a mean over rows where nothing is known.

    >>> reduction_of(nn.MSELoss(reduction="sum")).kind
    'sum'
    >>> reduction_of(functools.partial(F.cross_entropy, ignore_index=0)).ignore_index
    0
    """
    loss = loss.function if isinstance(loss, FunctionLoss) else loss
    if isinstance(loss, functools.partial):
        return _of_partial(loss)
    if loss in _COUNTING_FUNCTIONS:
        return Reduction(counts=True)
    kind = getattr(loss, "reduction", None)
    if not isinstance(loss, nn.Module) or not isinstance(kind, str):
        return Reduction(known=getattr(loss, "__module__", None) == F.__name__)
    if any(isinstance(loss, each) and type(loss).forward is each.forward for each in _COUNTING_MODULES):
        ignored = IGNORED if loss.ignore_index is None else loss.ignore_index
        return Reduction(kind, True, ignored, loss.weight, bool(getattr(loss, "label_smoothing", 0)))  # type: ignore[arg-type]
    return Reduction(kind, known=type(loss).forward.__module__.startswith("torch.nn."))


def _of_partial(loss: functools.partial[Any]) -> Reduction:
    keywords, inner = loss.keywords, reduction_of(loss.func)
    kind = keywords.get("reduction", inner.kind)
    if keywords.get("size_average") is False:
        kind = "sum"
    if not inner.counts:
        return Reduction(kind, known=inner.known)
    ignored, smooth = keywords.get("ignore_index", inner.ignore_index), bool(keywords.get("label_smoothing", 0))
    return Reduction(kind, True, ignored, keywords.get("weight"), smooth)


def loss_weights(
    loss: Callable[..., Any] | None,
    division: Division,
    target: str | None = None,
    how: str | Callable[..., Any] | None = None,
) -> tuple[float, ...]:
    """The weight of each micro-batch's loss. ``loss`` is None for a model that returns its loss; ``target`` names the input.

    ``how`` is "mean" (over rows), "sum", or a function that counts what a micro-batch holds: it is called with the target, or
    with inputs that its parameters are named after; see `inputs_of`. Its counts become shares.

    A micro-batch in which nothing counts has weight 0, and its own loss is nan (0 / 0): leave it out of the sum, and run no
    backward for its loss. If nothing counts in any, the weights are those by rows, and the loss is nan, as the model's is.

    >>> from pippy.drivers.batch.divide import divide
    >>> division = divide({"target": torch.tensor([1, 0, -100, -100, 2])}, chunks=2)
    >>> loss_weights(nn.CrossEntropyLoss(), division, "target")  # two targets count, and one
    (0.6666666666666666, 0.3333333333333333)
    >>> loss_weights(nn.MSELoss(), division), loss_weights(nn.MSELoss(reduction="sum"), division)
    ((0.6, 0.4), (1.0, 1.0))
    """
    if callable(how):
        return _shares([_count(how, division, target, index) for index in range(division.chunks)], division)
    reduction = reduction_of(loss) if how is None else Reduction(how)
    empty = set() if how is None or division.chunks == 1 else _all_ignored(reduction_of(loss), division, target)
    if reduction.kind == "sum":
        return tuple(0.0 if index in empty else 1.0 for index in range(division.chunks))
    if reduction.kind not in ("mean", "batchmean", "none"):
        raise MicrobatchError(
            f"the loss's reduction is {brief(reduction.kind)}; only 'mean' and 'sum' are known. Otherwise give a "
            "function that returns the weight of a micro-batch, such as loss_reduction=lambda target: (target != "
            "-100).sum()"
        )
    if division.chunks == 1:
        return (1.0,)
    if reduction.kind == "mean" and reduction.counts and target is not None:
        counts = _counted(reduction, division, target)
        if counts is not None:
            _check_smooth(reduction, division, target, counts)
            return _shares(counts, division)
    weights = _by_rows(division)
    return (
        _exact_shares([0.0 if index in empty else weights[index] for index in range(len(weights))])
        if empty
        else weights
    )


def weighing_inputs(
    division: Division, target: str | None = None, how: str | Callable[..., Any] | None = None
) -> list[str]:
    """The inputs that `loss_weights` may look at, by the names in the Pipe."""
    named = inputs_of(how, division, target) if callable(how) else None
    names = list(named.values()) if named else [target] if target else []
    return [name for name in names if name in division.arguments]


def _all_ignored(reduction: Reduction, division: Division, target: str | None) -> set[int]:
    """The micro-batches in which the loss ignores every target, so that its mean over them is 0 / 0; not if all are so."""
    if not reduction.counts or target is None or target not in division.arguments:
        return set()
    targets = division.arguments[target]
    if not isinstance(targets, CutTensor) or targets.value.dtype != torch.int64 or is_sparse(targets.value):
        return set()
    counts = _counted(replace(reduction, weight=None), division, target) or []
    ignored = {index for index, count in enumerate(counts) if not count}
    return ignored if len(ignored) < len(counts) else set()


def _by_rows(division: Division) -> tuple[float, ...]:
    if division.sizes is None:
        raise MicrobatchError(
            "the losses of the micro-batches cannot be weighted by their rows, because nothing in the mini-batch "
            "has rows; give loss_reduction='sum', or a function that returns the weight of a micro-batch"
        )
    return _exact_shares(division.sizes)


def _exact_shares(counts: Sequence[float]) -> tuple[float, ...]:
    total = sum(counts)
    return tuple(count / total for count in counts)


def _shares(counts: Sequence[float], division: Division) -> tuple[float, ...]:
    if any(counts):
        return _exact_shares(counts)
    return _exact_shares(division.sizes or (1,) * division.chunks)


def _counted(reduction: Reduction, division: Division, target: str) -> list[float] | None:
    """How many targets count in each micro-batch, or the sum of their class weights; None if targets are not class indices."""
    divided = division.arguments[target]
    if isinstance(divided, CutTensor) and not division.mask and division.sizes is not None and division.slices == 1:
        if divided.value.is_floating_point() or is_sparse(divided.value):
            return None
        # one pass over the whole: the work must not grow with the number of micro-batches
        weights, count = _weights_of(divided.value, reduction), divided.value.shape[divided.dim]
        rows = weights.movedim(divided.dim, 0).reshape(count, -1).sum(1)
        owner = torch.arange(division.chunks).repeat_interleave(torch.tensor(division.sizes)).to(rows.device)
        return torch.zeros(division.chunks, dtype=rows.dtype, device=rows.device).index_add_(0, owner, rows).tolist()
    pieces = [division.own_rows(piece, index) for index, piece in enumerate(division.microbatches(target))]
    if not all(isinstance(p, torch.Tensor) and not p.is_floating_point() and not is_sparse(p) for p in pieces):
        return None
    return [_weights_of(piece, reduction).sum().item() for piece in pieces]


def _check_smooth(reduction: Reduction, division: Division, target: str, weights: list[float]) -> None:
    """Refuse smoothed targets that all weigh 0: smoothing gives them a loss, and their mean divides it by 0."""
    if not reduction.smooth or reduction.weight is None or all(weights):
        return
    counts = _counted(replace(reduction, weight=None), division, target) or []
    for index, (count, weight) in enumerate(zip(counts, weights)):
        if count and not weight:
            raise MicrobatchError(
                f"the mean loss of micro-batch {index} is infinite: the class weight of all its targets is 0, and "
                "label_smoothing gives them a loss; use fewer chunks, or reduction='sum'"
            )


def _weights_of(target: torch.Tensor, reduction: Reduction) -> torch.Tensor:
    """The weight of each target: 0 or 1, or that of its class."""
    counts = target != reduction.ignore_index
    if reduction.weight is None:
        return counts.long()
    weight = reduction.weight.detach().to(target.device, torch.float64)
    inside = counts & (target >= 0) & (target < len(weight))  # others are for the loss to refuse
    return torch.where(inside, weight[torch.where(inside, target, 0).long()], 0.0)


def _count(how: Callable[..., Any], division: Division, target: str | None, index: int) -> float:
    names = inputs_of(how, division, target)
    if names is None:
        assert target is not None
        count = how(division.own_rows(division.take(target, index), index))
    else:
        count = how(**{user: division.own_rows(division.take(name, index), index) for user, name in names.items()})
    try:
        number = count.item() if isinstance(count, torch.Tensor) else count
        if 0 <= number < float("inf"):
            return number
    except (TypeError, ValueError, RuntimeError):
        pass
    raise MicrobatchError(
        f"loss_reduction returned {describe(count)} for micro-batch {index}; it must return the weight of the "
        "micro-batch, a number of 0 or more"
    )


def inputs_of(how: Callable[..., Any], division: Division, target: str | None) -> dict[str, str] | None:
    """The inputs that a function that counts is called with, by the names of its parameters; None: with the target alone.

    A function of one argument gets the target. Parameters that are names of inputs get those, if there are several or they
    are marked as keywords: ``lambda *, mask: mask.sum()``; so does a single one where there is no target.
    """
    try:
        parameters = [each for each in inspect.signature(how).parameters.values() if each.kind not in (2, 4)]
    except (TypeError, ValueError):  # written in C
        parameters = None
    if parameters is None:
        if target is not None:
            return None
        raise _not_called(how, division, "(...)")
    needed = [each for each in parameters if each.default is each.empty]
    named = {each.name: division.names[each.name] for each in needed if each.name in division.names}
    alone = len(needed) == 1 and needed[0].kind is not inspect.Parameter.KEYWORD_ONLY
    if alone and target is not None:
        name = needed[0].name
        if named.get(name, target) != target:
            raise MicrobatchError(
                f"loss_reduction{inspect.signature(how)} is ambiguous: a function of one argument gets the target, "
                f"but the parameter is named like the model's input {name!r}. For the target, rename the parameter; "
                f"for the input, write lambda *, {name}: ..."
            )
        return None
    if needed and len(named) == len(needed):
        return {user: name for user, name in named.items() if name in division.arguments}
    if not needed and parameters and target is not None:
        return None
    raise _not_called(how, division, str(inspect.signature(how)))


def _not_called(how: Callable[..., Any], division: Division, signature: str) -> MicrobatchError:
    return MicrobatchError(
        f"loss_reduction{signature} cannot be called: its parameters must have the names of inputs "
        f"({', '.join(division.names)}), or it must take the target alone; rename its parameters"
    )
