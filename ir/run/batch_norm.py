"""`DeferredBatchNorm`: it normalizes each micro-batch by itself, and notes what running statistics need of it.

    forward of micro-batch 1     ─▶ noted: mean, variance, number of values ─┐
    forward of micro-batch 0     ─▶ noted                                    ├─▶ one update of the running statistics,
    ... computed again for R     ─▶ an attribute, which is put back          │   when the step ends (`StepStatistics`)
    forward of micro-batch 2     ─▶ noted ───────────────────────────────────┘

What is noted is an attribute of the module: so whoever runs a forward once more and leaves no trace of it, leaves none here.

A step may fail on another worker after it has ended here. So what the statistics were is kept until the step is settled.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized

from pippy.ir.base.errors import BatchNormError
from pippy.ir.base.public_calls import placing_words
from pippy.ir.run.in_place import check_unchanged

_NARROW = (torch.float16, torch.bfloat16)
NoteStatistics = Callable[["DeferredBatchNorm", int, torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True, eq=False)
class Noted:
    """What a batch norm saw in one call: how many values in each channel, their mean and their (unbiased) variance.

    ``turn`` numbers the calls of a worker.
    """

    microbatch: int
    turn: int
    values: int
    mean: torch.Tensor
    variance: torch.Tensor


class DeferredBatchNorm(_BatchNorm):
    """A batch norm whose running statistics are those of the whole mini-batch, in a pipeline too.

    In training, each micro-batch is normalized by its own mean and variance. The running statistics change once, at the end of
    a step, by the mean and the variance of all micro-batches together: as those of `nn.BatchNorm1d`, `2d` and `3d` change
    that get the mini-batch as one batch. Without a pipeline, and in evaluation, it is such a module. Its arguments are theirs.

    `convert_deferred_batch_norm` makes them of a model's batch norms.

    >>> norm = DeferredBatchNorm(3)
    >>> norm(torch.ones(4, 3, 2, 2)).shape, norm.num_batches_tracked
    (torch.Size([4, 3, 2, 2]), tensor(1))
    """

    replaced: type[_BatchNorm] = nn.SyncBatchNorm  # whose dimensions an input must have: of that, two or more
    note: NoteStatistics | None = (
        None  # in a step of a driver: takes the number of values, their mean and their variance
    )
    noted: tuple[Noted, ...] = ()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize a batch, or a micro-batch of a step."""
        if self.note is None or not self.training or not self.track_running_stats or self.running_mean is None:
            return super().forward(input)
        self._check_input_dim(input)
        is_wide = self.running_mean.dtype not in _NARROW
        if is_wide:  # they are written by F.batch_norm
            mean, variance = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_mean)
        else:
            others = [dim for dim in range(input.dim()) if dim != 1]
            with torch.no_grad():
                variance, mean = torch.var_mean(input.detach().float(), others, correction=1)
        # Noted before they are written: where torch.utils.checkpoint runs it again, autograd may leave in the midst of it.
        self.note(self, input.numel() // max(1, input.shape[1]), mean, variance)
        written = (mean, variance) if is_wide else (None, None)
        return F.batch_norm(input, written[0], written[1], self.weight, self.bias, True, 1.0, self.eps)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        self.replaced._check_input_dim(self, input)


_CONVERTED = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@placing_words()
def convert_deferred_batch_norm(model: nn.Module) -> nn.Module:
    """Make all batch norms of a model update their running statistics once for each mini-batch, and return the model.

    The modules stay the same objects, with their parameters, buffers, hooks and flags; their class becomes
    `DeferredBatchNorm`. Convert the model before the Pipe is made, or after. Batch norms of other classes than
    `nn.BatchNorm1d`, `2d` and `3d` are refused, if they have running statistics.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())
    >>> convert_deferred_batch_norm(model)
    Sequential(
      (0): Linear(in_features=4, out_features=4, bias=True)
      (1): DeferredBatchNorm(4, eps=1e-05, momentum=0.1, affine=True, bias=True, track_running_stats=True)
      (2): ReLU()
    )
    """
    norms = {path: each for path, each in model.named_modules() if isinstance(each, _BatchNorm)}
    refused = [f"{path!r}: {reason}" for path, each in norms.items() if (reason := _reason_against(each))]
    if refused:
        raise BatchNormError(
            "batch norms that cannot be converted:\n  " + "\n  ".join(refused) + "\nNothing was converted. What to do "
            "without: convert the other parts of the model one by one, convert_deferred_batch_norm(model.part)"
        )
    for each in norms.values():
        if type(each) in _CONVERTED:
            each.replaced = type(each)  # type: ignore[assignment]
            each.__class__ = DeferredBatchNorm
    return model


def _reason_against(norm: _BatchNorm) -> str | None:
    """Why a batch norm cannot be converted; None if it can be, or need not be."""
    name = type(norm).__name__
    if isinstance(norm, LazyModuleMixin):
        return f"a {name} does not know its channels yet; call the model once before"
    if isinstance(norm, DeferredBatchNorm) or norm.running_mean is None:
        return None
    if is_parametrized(norm):
        return "it is parametrized; convert it before"
    if isinstance(norm, nn.SyncBatchNorm):
        return f"a {name} normalizes over several processes; take nn.BatchNorm1d, 2d or 3d"
    if type(norm) not in _CONVERTED:
        return (
            f"{name} is a class of its own, and may compute anything; derive it from pippy.DeferredBatchNorm, and let its "
            "forward call super().forward"
        )
    return "its forward was replaced by a function; put that back" if "forward" in vars(norm) else None


@dataclass(frozen=True)
class _Update:
    """The tensors that the end of a step has changed, each as it was before."""

    step: int
    before: Sequence[tuple[torch.Tensor, torch.Tensor]]


_FIELDS = [each.name for each in fields(Noted)]
Notes = list[tuple[Any, ...]]  # what a norm has noted


class StepStatistics:
    """The deferred batch norms of some stages. ``microbatch`` is the one that runs now.

    Where other workers run the same stages on other micro-batches of a step, each ``takes`` the ``notes`` of the others.

    ``constant`` names the tensors of each stage that other stages read, too: an update of these is refused.
    """

    def __init__(self, stages: Mapping[str, nn.Module], constant: Mapping[str, Sequence[str]]) -> None:
        self.stages, self.constant = stages, constant
        norms = [each for stage in stages.values() for each in stage.modules() if isinstance(each, DeferredBatchNorm)]
        self.norms = list(dict.fromkeys(norms))
        self.microbatch = 0
        self._others: list[Sequence[Notes]] = []  # what the norms of other workers have noted in this step
        self._turns = count()
        self._updates: list[_Update] = []

    @classmethod
    def of(cls, stages: Mapping[str, nn.Module], constant: Mapping[str, Sequence[str]]) -> "StepStatistics | None":
        """Those of the batch norms in these stages; None if there are none."""
        found = cls(stages, constant)
        return found if found.norms else None

    @contextmanager
    def step(self, number: int = 0) -> Iterator[None]:
        """A step of one mini-batch. If it succeeds, running statistics are updated at its end."""
        for norm in self.norms:
            norm.note, norm.noted = self._noted, ()
        try:
            yield
            for notes in self._others:
                for norm, of_norm in zip(self.norms, notes):
                    norm.noted = (*norm.noted, *(Noted(*each) for each in of_norm))
            self._update(number)
        finally:
            self._others = []
            for norm in self.norms:
                norm.note, norm.noted = None, ()

    @property
    def counts(self) -> bool:
        """Whether this step may change running statistics."""
        return any(norm.training and norm.note is not None for norm in self.norms)

    def notes(self) -> list[Notes]:
        """What each norm has noted here in this step, in plain values."""
        return [[tuple(getattr(each, name) for name in _FIELDS) for each in norm.noted] for norm in self.norms]

    def take(self, notes: Sequence[Notes]) -> None:
        """Count what the norms of another worker have noted, too."""
        self._others.append(notes)

    def settle(self, through: int) -> None:
        """Note that the steps up to a number have succeeded everywhere."""
        if self._updates:
            self._updates = [each for each in self._updates if each.step > through]

    def drop(self, first: int, last: int) -> None:
        """Put back what the steps from ``first`` to ``last`` have changed, which were given up."""
        with torch.no_grad():
            for update in reversed(self._updates):
                for tensor, before in update.before if first <= update.step <= last else ():
                    tensor.copy_(before)
        self._updates = [each for each in self._updates if not first <= each.step <= last]

    def _noted(self, norm: DeferredBatchNorm, values: int, mean: torch.Tensor, variance: torch.Tensor) -> None:
        norm.noted = (*norm.noted, Noted(self.microbatch, next(self._turns), values, mean, variance))

    def _update(self, number: int) -> None:
        calls = sorted((each for norm in self.norms for each in _calls(norm)), key=lambda call: call[1][0].turn)
        changed = {id(each): each for norm, _ in calls for each in _statistics(norm)}.values()
        self._updates.append(_Update(number, [(tensor, tensor.clone()) for tensor in changed]))
        with ExitStack() as stack, torch.no_grad():
            for name, tensors in self.constant.items():
                stack.enter_context(check_unchanged(name, self.stages[name], tensors))
            for norm, parts in calls:
                _count(norm, parts)


def _calls(norm: DeferredBatchNorm) -> Iterator[tuple[DeferredBatchNorm, list[Noted]]]:
    """The calls of a norm in forward, each with what it saw of all micro-batches, in their order."""
    by_microbatch: dict[int, list[Noted]] = {}
    for noted in sorted(norm.noted, key=lambda each: (each.microbatch, each.turn)):
        by_microbatch.setdefault(noted.microbatch, []).append(noted)
    for call in range(max(map(len, by_microbatch.values()), default=0)):
        yield norm, [turns[call] for turns in by_microbatch.values() if call < len(turns)]


def _statistics(norm: DeferredBatchNorm) -> list[torch.Tensor]:
    return [each for each in (norm.running_mean, norm.running_var, norm.num_batches_tracked) if each is not None]


def _count(norm: DeferredBatchNorm, parts: Sequence[Noted]) -> None:
    """Count what a call saw of all micro-batches as one batch."""
    share = norm.momentum or 0.0
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        if norm.momentum is None:
            share = 1.0 / float(norm.num_batches_tracked)
    for running, seen in zip((norm.running_mean, norm.running_var), together(parts)):
        assert running is not None
        running.copy_(share * seen + (1 - share) * running.double())


def together(parts: Sequence[Noted]) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean and the unbiased variance of the values of all parts.

    >>> x = torch.tensor([[1.0], [2.0], [6.0], [7.0]], dtype=torch.float64)
    >>> [mean, variance] = together([Noted(0, 0, len(x), x.mean(0), x.var(0)) for x in (x[:2], x[2:])])
    >>> mean, bool(torch.isclose(variance, x.var(0)))
    (tensor([4.], dtype=torch.float64), True)
    """
    means, variances = (torch.stack(each).double() for each in zip(*((part.mean, part.variance) for part in parts)))
    if len(parts) == 1:
        return means[0], variances[0]
    values = torch.tensor([[part.values] for part in parts], dtype=torch.float64, device=means.device)
    total = values.sum()
    mean = (values * means).sum(0) / total
    squares = ((values - 1) * variances + values * (means - mean) ** 2).sum(0)
    return mean, squares / (total - 1)
