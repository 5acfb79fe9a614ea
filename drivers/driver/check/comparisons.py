"""Compares the pipeline with its witness, within a `Budget`: on a few rows, in two uneven micro-batches, cut in two places.

the witness     the user's model on all of these rows    or, where no process holds it, the pipeline on all of them
begun           two micro-batches
by              two micro-batches                        with another reduction
measured        the witness in 64 bits, or rows turned   if differences may be rounding, or a buffer changes once in a step
elsewhere       two other micro-batches                  as the first two may agree by chance

`WholeStep` compares a step of a driver, by its own program and on all of its rows.
"""

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from pippy.drivers.base.errors import ClusterError, DriverError
from pippy.drivers.base.free_memory import free_bytes
from pippy.drivers.batch.division import Division
from pippy.drivers.batch.loss_weights import loss_weights
from pippy.drivers.compare.tolerance import ACROSS, LEAST, NARROW, digest, floor_of
from pippy.drivers.compare.trial_notes import TrialNotes
from pippy.drivers.driver.check.differences import Apart, ComparedKey, Comparison, Difference, Numbers
from pippy.drivers.driver.check.rows import TriedRows, WholeRows
from pippy.drivers.driver.check.trial_steps import BufferPlaces, HowTried, TrialSteps, Tried
from pippy.drivers.driver.check.witness import HowWitnessed, Witness, WitnessStep, rounded_otherwise, turned_numbers
from pippy.drivers.protocol.state import TensorLocation
from pippy.drivers.worker.measure.live_storages import LiveStorages
from pippy.ir.base.errors import PippyError
from pippy.ir.base.readable import brief

SECONDS = 2.0
_PART = 0.5  # of the free memory
# Runs a step of a driver as a trial, on these rows. The names are of parameters that forward changes; buffers are followed.
RunWhole = Callable[[Division, frozenset[str], Collection[TensorLocation]], Tried]


@dataclass(frozen=True)
class Cost:
    """What so many rows have cost in the plain model: seconds, and the most bytes beside its parameters."""

    rows: int
    seconds: float
    bytes: int


@dataclass(frozen=True)
class Budget:
    """How long the plain model may run for a comparison, and by how much of the free memory. The fewest rows may take longer.

    >>> Budget.of(True), Budget.of("full"), Budget.of(10), Budget.of(False)
    (Budget(seconds=2.0), Budget(seconds=inf), Budget(seconds=10.0), None)
    """

    seconds: float = SECONDS

    @classmethod
    def of(cls, check: object) -> "Budget | None":
        """The budget that the argument ``check`` of a driver gives; None if nothing is to be checked."""
        if isinstance(check, bool):
            return cls() if check else None
        if check == "full":
            return cls(math.inf)
        if isinstance(check, (int, float)) and check > 0:
            return cls(float(check))
        raise DriverError(
            f"check={brief(check)}: give True, a number of seconds for which the plain model may run, 'full' for all rows "
            "however long they take, or False for no check"
        )

    def rows(self, cost: Cost, device: torch.device) -> float:
        """How many rows fit, if they cost as these do.

        >>> Budget(2.0).rows(Cost(rows=5, seconds=0.5, bytes=1), torch.device("cpu"))
        20.0
        """
        return cost.rows * min(self.seconds / max(cost.seconds, 1e-9), room(device) / max(cost.bytes, 1))

    def is_over_memory(self, cost: Cost | None, rows: int, device: torch.device) -> bool:
        """Whether so many rows would take too much memory."""
        return cost is not None and cost.bytes * rows > room(device) * cost.rows


def room(device: torch.device) -> float:
    """The bytes that the plain model may take on a device."""
    return free_bytes(device) * _PART


@dataclass(frozen=True)
class LossReduction:
    """How the losses of micro-batches become that of the mini-batch: by a reduction, or ``single``, over all rows."""

    how: str | Callable[..., Any] | None
    single: bool = False


class Unlike(Exception):
    """Raised if nothing can be compared. The message says why."""


@dataclass(frozen=True)
class RowComparison:
    """The comparison of some rows: the right numbers and their tolerances, the pipeline's, and what the model asks.

    ``elsewhere`` is the comparison of two other micro-batches; it is made if the first two agree.
    """

    rows: TriedRows
    reduction: LossReduction
    right: Comparison
    numbers: Numbers
    parts: Tried
    asked: TrialNotes
    elsewhere: "RowComparison | None" = None

    @property
    def loss(self) -> float:
        """The right loss."""
        return float(self.right.plain["loss", ""])

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of tensors that differ."""
        return frozenset(each.kind for each in self.differences)

    @cached_property
    def differences(self) -> list[Difference]:
        """The differences, the worst first."""
        disagreeing = [Difference("buffer", name, math.inf, 0.0) for name in sorted(self.parts.disagreeing)]
        return disagreeing + self.right.differences(self.numbers)

    @property
    def agrees(self) -> bool:
        return self.wrong is None

    @property
    def wrong(self) -> "RowComparison | None":
        """The comparison that does not agree, of this one and that of two other micro-batches; None if both agree."""
        if self.differences:
            return self
        return None if self.elsewhere is None else self.elsewhere.wrong

    def both(self) -> "Iterator[RowComparison]":
        """This comparison, and that of two other micro-batches if there is one."""
        yield self
        if self.elsewhere is not None:
            yield self.elsewhere

    def misses(self, weights: Sequence[float]) -> float:
        """How far the losses of micro-batches with these weights are from the loss of the whole; 0 if that is rounding."""
        total = sum(weight * loss for weight, loss in zip(weights, self.parts.losses) if weight)
        off, allowed = abs(total - self.loss), self.right.allowed(("loss", ""))
        return 0.0 if off <= allowed else off / max(abs(self.loss), allowed)


class Comparisons:
    """The comparisons of one driver. Without a ``witness``, the pipeline on all rows as one micro-batch stands for it."""

    def __init__(self, trials: TrialSteps, witness: Witness | None) -> None:
        self.trials, self.witness, self.compiled = trials, witness, trials.placed.compiled
        self.narrow = False  # whether the model computes in 16 bits alone: it cannot in 32
        self.follow: frozenset[Any] = frozenset()  # buffers that change once in a step
        self.cost: Cost | None = None
        self._witnessed: dict[Any, tuple[TriedRows, WitnessStep]] = {}

    def forget(self) -> None:
        """Drop the numbers of the witness."""
        self._witnessed.clear()

    def weights(self, division: Division, reduction: LossReduction) -> tuple[float, ...]:
        """The weights of micro-batches' losses."""
        if reduction.single:
            return (1.0,) * division.chunks
        return loss_weights(self.compiled.loss_module, division, self.compiled.target_name, reduction.how)

    def counting(self, rows: TriedRows, reduction: LossReduction) -> TriedRows:
        """The rows in an order in which both micro-batches have a weight, if there is one; else nothing would be compared."""
        turned = (rows.rotated(by) for by in range(sum(rows.sizes)))
        return next((each for each in turned if all(self.weights(each.divided(2), reduction))), rows)

    def begun(self, rows: TriedRows, reduction: LossReduction) -> RowComparison:
        """Compare once. Raises `Unlike` if there is nothing to compare."""
        if self._is_wide(rows.division):
            try:
                return self._begun(rows, reduction)
            except Unlike:
                self.narrow = True
        return self._begun(rows, reduction)

    def _begun(self, rows: TriedRows, reduction: LossReduction) -> RowComparison:
        rows = self.counting(rows, reduction)
        return self._row(rows, reduction, self._tried(rows, reduction))

    def _row(self, rows: TriedRows, reduction: LossReduction, parts: Tried, noise: bool = False) -> RowComparison:
        found, floor = self.witnessed(rows, reduction), self.floor(rows.division)
        again = self._again(rows, reduction, found.numbers) if noise else {}
        plain, numbers = self.beside(found.numbers, parts.numbers)
        right = Comparison(plain, again, floor, self.floor(rows.division, least=0.0))
        return RowComparison(rows, reduction, right, numbers, parts, found.asked)

    def beside(self, plain: Numbers, numbers: Numbers) -> tuple[Numbers, Numbers]:
        """The right numbers and the pipeline's. A buffer that only one side has changed is unchanged on the other."""
        both = {key for key in (*plain, *numbers) if key[0] == "buffer" and self.trials.buffers}
        if self.witness is not None:
            own = {("buffer", name): each for name, each in self.witness.buffers().items()}
            unchanged = {key: digest(own[key]) for key in both if key in own}
            plain, numbers = {**unchanged, **plain}, {**unchanged, **numbers}
            both = both & unchanged.keys()
        outputs = any(kind == "output" for kind, _ in numbers)  # workers may return the loss alone

        def is_compared(key: ComparedKey) -> bool:
            return key in both if key[0] == "buffer" else outputs or key[0] != "output"

        return (
            {key: each for key, each in plain.items() if is_compared(key)},
            {key: each for key, each in numbers.items() if is_compared(key)},
        )

    def by(self, comparison: RowComparison, reduction: LossReduction) -> RowComparison:
        """The comparison with another reduction."""
        return self._row(comparison.rows, reduction, self._tried(comparison.rows, reduction))

    def measured(self, comparison: RowComparison) -> RowComparison:
        """The comparison with measured rounding. Rounding is measured only if it may explain the differences."""
        off = Apart.of(comparison.right.plain["loss", ""], comparison.parts.numbers["loss", ""])
        if comparison.agrees or (off.share > 1e-2 and "buffer" not in comparison.kinds):
            return comparison
        rows, reduction, parts = comparison.rows, comparison.reduction, comparison.parts
        if self.follows_more(comparison.differences, parts.places):
            parts = self._tried(rows, reduction)
        return self._row(rows, reduction, parts, noise=True)

    def follows_more(self, differences: Sequence[Difference], places: BufferPlaces) -> bool:
        """Have the buffers that differ change once in a step from now on; whether there are more of them now."""
        names = {each.name for each in differences if each.kind == "buffer"}
        more = {place for name in names for place in places.get(name, ())} - self.follow
        self.follow |= more
        return bool(more)

    def cut_elsewhere(self, comparison: RowComparison) -> RowComparison:
        """Compare two other micro-batches too, if the first two agree."""
        if not comparison.agrees or sum(comparison.rows.sizes) == 2:
            return comparison
        rows = self.counting(comparison.rows.cut_elsewhere(), comparison.reduction)
        other = self._row(rows, comparison.reduction, self._tried(rows, comparison.reduction))
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
        """Whether the same rows give other numbers when they are computed again, on the workers."""
        rows, reduction = comparison.rows, comparison.reduction
        once, again = self._tried(rows, reduction), self._tried(rows, reduction, number=1)
        return bool(replace(comparison.right, plain=once.numbers).differences(again.numbers))

    def follows(self, rows: TriedRows) -> RowComparison:
        """The comparison of rows that are not cut: whether the stages compute what the witness does."""
        rows, reduction = rows.in_this_order(), LossReduction(None)
        return self._row(rows, reduction, self._tried(rows, reduction, chunks=1), noise=True)

    def witnessed(self, rows: TriedRows, reduction: LossReduction, turned: bool = False) -> WitnessStep:
        """The right numbers of some rows. They are computed once: another order of the rows changes rounding alone."""
        wide = self._is_wide(rows.division)
        order = tuple(rows.order) if reduction.single else ()  # one loss over all rows may depend on it
        key = (rows.key, order, turned, wide)
        if key not in self._witnessed:
            self._witnessed[key] = rows, self._witness(rows, reduction, turned, wide)
        return self._witnessed[key][1]

    def _again(self, rows: TriedRows, reduction: LossReduction, right: Numbers) -> Numbers:
        """The right numbers with other rounding."""

        def turned() -> Numbers:
            return self.witnessed(rows, reduction, turned=True).numbers

        if self.witness is None:
            return turned()
        how = HowWitnessed(hooks=self.trials.calls_hooks)
        return rounded_otherwise(self.witness, rows.divided(1), how, right, turned)

    def _witness(self, rows: TriedRows, reduction: LossReduction, turned: bool, wide: bool) -> WitnessStep:
        with self._surroundings(wide), _unlike("a few of the rows cannot be computed alone"):
            if self.witness is not None:
                how = HowWitnessed(
                    watch=not turned, wide=torch.float32 if wide else None, hooks=self.trials.calls_hooks
                )
                return self._measured_step(self.witness, rows.divided(1, turned=turned), how)
            division = rows.divided(1, turned=turned)
            how_tried = HowTried(watch=not turned, single_loss=reduction.single, wide=wide)
            tried = self.trials.run(division, self.weights(division, reduction), how_tried)
            return WitnessStep(dict(tried.numbers), frozenset(), tried.asked)

    def _measured_step(self, witness: Witness, division: Division, how: HowWitnessed) -> WitnessStep:
        """A step of the witness. What the first one costs is noted."""
        if self.cost is not None:
            return witness.step(division, how)
        started, live = time.perf_counter(), LiveStorages()
        with live:
            step = witness.step(division, how)
        self.cost = Cost(division.rows or 1, time.perf_counter() - started, live.most)
        return step

    def _tried(self, rows: TriedRows, reduction: LossReduction, number: int = 0, chunks: int = 2) -> Tried:
        """Run the rows as two micro-batches. Raises `Unlike` if they cannot be computed."""
        division, wide = rows.divided(chunks), self._is_wide(rows.division)
        written = self.witnessed(rows, reduction).written
        how = HowTried(False, reduction.single, wide, number, written, self.follow)
        weights = self.weights(division, reduction) if chunks > 1 else (1.0,)
        with self._surroundings(wide), _unlike("a part of the rows cannot be computed alone"):
            return self.trials.run(division, weights, how)

    # 16 bits, and tolerances

    def _is_wide(self, division: Division) -> bool:
        """Whether a trial computes in 32 bits what the step computes in 16."""
        return not self.narrow and (self._casts() is not None or any(each in NARROW for each in self._dtypes(division)))

    def _casts(self) -> torch.dtype | None:
        """The dtype of autocast, if it is on."""
        device = self.trials.device_type
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None

    @contextmanager
    def _surroundings(self, wide: bool) -> Iterator[None]:
        devices = {self.trials.device_type, *([] if self.witness is None else [self.witness.device.type])}
        with ExitStack() as stack:
            for device in devices if wide else ():
                stack.enter_context(torch.autocast(device, enabled=False))
            yield

    def _dtypes(self, division: Division) -> list[torch.dtype]:
        stages = [each.dtype for _, stage in self.compiled.stages() for each in stage.parameters()]
        return stages + [each.dtype for name in division.arguments for each in division.whole(name)]

    def floor(self, division: Division, least: float = LEAST, wide: bool = True) -> float:
        """The least tolerance for the dtypes that compute: of a trial of a few rows, or not ``wide``, of the step."""
        casts, dtypes = self._casts(), self._dtypes(division)
        dtypes += [] if casts is None else [casts]
        if wide and self._is_wide(division):
            dtypes = [torch.float32 if each in NARROW else each for each in dtypes]
        elsewhere = self.witness is not None and self.witness.device.type != self.trials.device_type
        return max(least, floor_of(*dtypes), ACROSS if elsewhere else 0.0)


@dataclass(frozen=True)
class WholeStep:
    """The right numbers of a step with their tolerances, and the pipeline's."""

    right: Comparison
    numbers: Numbers
    trial: Tried

    @classmethod
    def of(cls, comparisons: Comparisons, division: Division, run: RunWhole) -> "WholeStep":
        """Run both. Raises `Unlike` if the plain model cannot run the step."""
        witnessed, trial, how = _witnessed(comparisons, division, run)
        plain, numbers = comparisons.beside(witnessed.numbers, trial.numbers)
        floors = comparisons.floor(division, wide=False), comparisons.floor(division, wide=False, least=0.0)
        whole = cls(Comparison(plain, {}, *floors), numbers, trial)
        if not whole.differences:
            return whole
        witness, rows = comparisons.witness, WholeRows(division)
        assert witness is not None
        again = rounded_otherwise(
            witness,
            rows.divided(1) if how.weights is None else division,
            how,
            witnessed.numbers,
            lambda: turned_numbers(witness, division, HowWitnessed()) if how.weights is None else {},
        )
        return replace(whole, right=replace(whole.right, again=again))

    @cached_property
    def differences(self) -> list[Difference]:
        """The differences, the worst first."""
        return self.right.differences(self.numbers)


def _witnessed(comparisons: Comparisons, division: Division, run: RunWhole) -> tuple[WitnessStep, Tried, HowWitnessed]:
    """The step of the witness and of the workers, and how the witness ran it. Where the model cannot run all rows at once, or
    they cannot be put together, it runs micro-batch after micro-batch, as one does without a pipeline."""
    witness, rows, how = comparisons.witness, WholeRows(division), HowWitnessed()
    assert witness is not None
    found: WitnessStep | Exception
    try:
        found = witness.step(rows.divided(1), how)
    except Exception as error:
        found = error
    written = frozenset[str]() if isinstance(found, Exception) else found.written
    trial = run(division, written, comparisons.follow)
    if not isinstance(found, Exception):
        return found, trial, how
    try:
        how = HowWitnessed(weights=trial.weights)
        return witness.step(division, how), trial, how
    except Exception as error:
        why = found if isinstance(found, DriverError) else f"{type(found).__name__}: {found}"
        raise Unlike(f"the plain model cannot run this step: {why}") from error


@contextmanager
def _unlike(what: str) -> Iterator[None]:
    """Raise `Unlike` for what a model, or a worker, raises."""
    try:
        yield
    except (ClusterError, Unlike):
        raise
    except Exception as error:
        raise Unlike(
            f"{what}: {error if isinstance(error, PippyError) else f'{type(error).__name__}: {error}'}"
        ) from error
