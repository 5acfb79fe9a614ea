"""Compares a few rows as one micro-batch with the same rows as two micro-batches, cut in two places, for one `LossReduction`.

    begun        reference · two micro-batches
    by           two micro-batches                      with another reduction
    measured     noise · two micro-batches              if differences may be rounding, or a buffer that changes once in a step
    elsewhere    two other micro-batches                as the first two may agree by chance

Each is compared with the reference that was run last.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from pippy.drivers.base.errors import ClusterError
from pippy.drivers.batch.division import Division
from pippy.drivers.batch.loss_weights import loss_weights
from pippy.drivers.compare.tolerance import LEAST, Tolerance, floor_of
from pippy.drivers.driver.check.rows import TriedRows
from pippy.drivers.driver.check.trial_steps import TrialSteps, Tried
from pippy.drivers.protocol.trials import Purpose, TrialDifference
from pippy.ir.base.errors import PippyError


@dataclass(frozen=True)
class LossReduction:
    """How the losses of micro-batches become that of the mini-batch: by a reduction, or ``single``, over all rows."""

    how: str | Callable[..., Any] | None
    single: bool = False


@dataclass(frozen=True)
class RowComparison:
    """The comparison of some rows: the reference, two micro-batches, and the differences.

    ``elsewhere`` is the comparison of two other micro-batches; it is made if the first two agree.
    """

    rows: TriedRows
    reduction: LossReduction
    whole: Tried
    parts: Tried
    allowed: float  # of the loss
    elsewhere: "RowComparison | None" = None

    @property
    def loss_differs(self) -> bool:
        return not abs(self.parts.loss - self.whole.loss) <= self.allowed

    @property
    def buffers_differ(self) -> bool:
        return any(each.kind == "buffer" for each in self.parts.differences)

    @property
    def differences(self) -> list[TrialDifference]:
        """The differences, the worst first."""
        return sorted(self.parts.differences, key=lambda each: -each.share)

    @property
    def agrees(self) -> bool:
        return self.wrong is None

    @property
    def wrong(self) -> "RowComparison | None":
        """The comparison that does not agree, of this one and that of two other micro-batches; None if both agree."""
        if self.loss_differs or self.parts.differences:
            return self
        return None if self.elsewhere is None else self.elsewhere.wrong

    def both(self) -> "Iterator[RowComparison]":
        """This comparison, and that of two other micro-batches if there is one."""
        yield self
        if self.elsewhere is not None:
            yield self.elsewhere

    def misses(self, weights: Sequence[float]) -> float:
        """How far the sum of the losses with these weights is from the loss, relative to it; 0 if they are equal."""
        total = sum(weight * loss for weight, loss in zip(weights, self.parts.losses) if weight)
        off = abs(total - self.whole.loss)
        return 0.0 if off <= self.allowed else off / max(abs(self.whole.loss), self.allowed)


class Unlike(Exception):
    """Raised if nothing can be compared. The message says why."""


class NotFinite(Unlike):
    """Raised if the loss is not finite. Another step may be compared."""


class Comparisons:
    """The comparisons of one driver."""

    def __init__(self, trials: TrialSteps) -> None:
        self.trials, self.compiled = trials, trials.placed.compiled

    def weights(self, division: Division, reduction: LossReduction) -> tuple[float, ...]:
        """The weights of micro-batches' losses."""
        if reduction.single:
            return (1.0,) * division.chunks
        return loss_weights(self.compiled.loss_module, division, self.compiled.target_name, reduction.how)

    def counting(self, rows: TriedRows, reduction: LossReduction) -> TriedRows:
        """The rows in an order in which both micro-batches have a weight, if there is one; else nothing would be compared."""
        turned = (rows.rotated(by) for by in range(sum(rows.sizes)))
        return next((each for each in turned if all(self.weights(each.divided(2), reduction))), rows)

    def begun(self, rows: TriedRows, reduction: LossReduction, watch: bool = False) -> RowComparison:
        """Compare once. With ``watch``, workers note what the model asks. Raises `Unlike` if there is nothing to compare."""
        rows = self.counting(rows, reduction)
        whole = self._tried(rows, reduction, Purpose.REFERENCE, watch)
        if not (math.isfinite(whole.loss) and whole.is_finite):
            raise NotFinite(f"the loss of a few rows is {whole.loss}, or a gradient is no number")
        return RowComparison(
            rows, reduction, whole, self._tried(rows, reduction, Purpose.COMPARED), self._allowed(whole, 0.0)
        )

    def by(self, comparison: RowComparison, reduction: LossReduction) -> RowComparison:
        """The comparison that was begun last, with another reduction."""
        return replace(comparison, reduction=reduction, parts=self._tried(comparison.rows, reduction, Purpose.COMPARED))

    def measured(self, comparison: RowComparison) -> RowComparison:
        """The comparison with measured rounding. Rounding is measured only if it may explain the differences."""
        off = abs(comparison.parts.loss - comparison.whole.loss)
        if comparison.agrees or (off > self._allowed(comparison.whole, math.inf) and not comparison.buffers_differ):
            return comparison
        turned = self._tried(comparison.rows, comparison.reduction, Purpose.NOISE)
        parts = self._tried(comparison.rows, comparison.reduction, Purpose.COMPARED, follow=True)
        if any(each.kind == "buffer" for each in parts.differences):
            # Buffers change once in a step now.
            parts = self._tried(comparison.rows, comparison.reduction, Purpose.COMPARED, follow=True)
        allowed = self._allowed(comparison.whole, abs(turned.loss - comparison.whole.loss))
        return replace(comparison, parts=parts, allowed=allowed)

    def cut_elsewhere(self, comparison: RowComparison) -> RowComparison:
        """Compare two other micro-batches too, if the first two agree."""
        if not comparison.agrees or sum(comparison.rows.sizes) == 2:
            return comparison
        rows = self.counting(comparison.rows.cut_elsewhere(), comparison.reduction)
        other = replace(comparison, rows=rows, parts=self._tried(rows, comparison.reduction, Purpose.COMPARED))
        return replace(comparison, elsewhere=self.measured(other))

    def compared(self, rows: TriedRows, reduction: LossReduction) -> RowComparison:
        """Compare the rows, cut in two places."""
        return self.cut_elsewhere(self.measured(self.begun(rows, reduction)))

    def fit(self, every: Sequence[TriedRows], reduction: LossReduction) -> bool:
        """Whether all these sets of rows agree with this reduction."""
        try:
            return all(self.compared(rows, reduction).agrees for rows in every)
        except (Unlike, PippyError):
            return False

    def draws(self, comparison: RowComparison) -> bool:
        """Whether the same rows give other numbers when they are computed again."""
        division = comparison.rows.divided(1)
        weights = self.weights(division, comparison.reduction)
        self.trials.run(division, weights, Purpose.REFERENCE, single_loss=comparison.reduction.single)
        again = self.trials.run(division, weights, Purpose.COMPARED, single_loss=comparison.reduction.single, number=1)
        return bool(again.differences) or not abs(again.loss - comparison.whole.loss) <= comparison.allowed

    def _tried(
        self, rows: TriedRows, reduction: LossReduction, purpose: Purpose, watch: bool = False, follow: bool = False
    ) -> Tried:
        """Run a trial. Raises `Unlike` if it cannot be computed."""
        division = rows.divided(2 if purpose is Purpose.COMPARED else 1, turned=purpose is Purpose.NOISE)
        weights = self.weights(division, reduction)
        try:
            return self.trials.run(division, weights, purpose, watch, reduction.single, follow=follow)
        except ClusterError:
            raise
        except PippyError as error:
            part = "a part" if purpose is Purpose.COMPARED else "a few"
            raise Unlike(f"{part} of the rows cannot be computed alone: {error}") from error

    def _allowed(self, whole: Tried, noise: float) -> float:
        size = abs(whole.loss)
        return Tolerance(size, noise, size, self._floor(whole)).allowed

    def _floor(self, tried: Tried) -> float:
        device = self.trials.device_type
        casts = [torch.get_autocast_dtype(device)] if torch.is_autocast_enabled(device) else []
        dtypes = [each.dtype for _, stage in self.compiled.stages() for each in stage.parameters()]
        return max(LEAST, floor_of(tried.dtype, *casts, *dtypes))
