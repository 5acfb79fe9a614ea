"""The running statistics of deferred batch norms, over the steps of a driver: one update for each call of a norm in forward.

A step may fail on another worker after it has ended here. So what the statistics were is kept until the step is settled.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from itertools import count
from typing import Any

import torch
from torch import nn

from pippy.ir.batch_norm.deferred_batch_norm import DeferredBatchNorm, Noted
from pippy.ir.run.given_inputs import check_unchanged


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
