"""Compares the pipeline with its witness, within a `Budget`: on a few rows, or on all of them by the program of the step.

the witness     the user's model on all of these rows    or, where no process holds it, the pipeline on all of them
the trial       the workers, in micro-batches
again           the witness in 64 bits, or rows turned   if there are differences, which may be rounding

`Comparisons.cuts` cuts a few rows into two uneven micro-batches in two places: the first two may agree by chance.
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
from pippy.drivers.driver.check.differences import ComparedKey, Comparison, Difference, Numbers
from pippy.drivers.driver.check.rows import CannotCompare, TriedRows, WholeRows
from pippy.drivers.driver.check.trial_steps import HowTried, TrialSteps, Tried
from pippy.drivers.driver.check.witness import HowWitnessed, Witness, WitnessStep
from pippy.drivers.protocol.state import TensorLocation
from pippy.drivers.worker.measure.live_storages import LiveStorages
from pippy.ir.base.errors import PippyError
from pippy.ir.base.readable import brief
from pippy.ir.record.compiled import Compiled

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


@dataclass(frozen=True)
class Compared:
    """Rows of which a trial was compared with the witness: what the witness has ``found``, the ``right`` numbers and their
    tolerances, and the pipeline's ``numbers``."""

    rows: TriedRows
    reduction: LossReduction
    found: WitnessStep
    right: Comparison
    numbers: Numbers
    trial: Tried

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
        disagreeing = [Difference("buffer", name, math.inf, 0.0) for name in sorted(self.trial.disagreeing)]
        return disagreeing + self.right.differences(self.numbers)

    def misses(self, weights: Sequence[float]) -> float:
        """How far the losses of micro-batches with these weights are from the loss of the whole; 0 if that is rounding."""
        total = sum(weight * loss for weight, loss in zip(weights, self.trial.losses) if weight)
        off, allowed = abs(total - self.loss), self.right.allowed(("loss", ""))
        return 0.0 if off <= allowed else off / max(abs(self.loss), allowed)


class Comparisons:
    """The comparisons of one driver. Without a ``witness``, the pipeline on all rows as one micro-batch stands for it."""

    def __init__(self, trials: TrialSteps, witness: Witness | None) -> None:
        self.trials, self.witness, self.compiled = trials, witness, trials.placed.compiled
        self.narrow = False  # whether the model computes in 16 bits alone: it cannot in 32
        self.follow: frozenset[Any] = frozenset()  # buffers that change once in a step
        self.cost: Cost | None = None
        self._witnessed: dict[Any, WitnessStep] = {}
        self._compared: dict[Any, Compared] = {}

    def forget(self) -> None:
        """Drop all numbers."""
        self._witnessed.clear()
        self._compared.clear()

    def weights(self, division: Division, reduction: LossReduction) -> tuple[float, ...]:
        """The weights of micro-batches' losses."""
        if reduction.single:
            return (1.0,) * division.chunks
        return loss_weights(self.compiled.loss_module, division, self.compiled.target_name, reduction.how)

    # Rows in micro-batches

    def cuts(self, rows: TriedRows, reduction: LossReduction) -> list[Compared]:
        """Compare the rows in two micro-batches; and if these agree, cut in another place."""
        first = self.of_rows(rows, reduction)
        if first.differences or sum(first.rows.sizes) == 2:
            return [first]
        return [first, self.of_rows(first.rows.cut_elsewhere(), reduction)]

    def fit(self, every: Sequence[TriedRows], reduction: LossReduction) -> bool:
        """Whether all these sets of rows agree with this reduction."""
        try:
            return not any(each.differences for rows in every for each in self.cuts(rows, reduction))
        except (CannotCompare, PippyError):
            return False

    def of_rows(self, rows: TriedRows, reduction: LossReduction, chunks: int = 2) -> Compared:
        """Compare the rows once, with the witness's on all of them. Raises `CannotCompare` if one side cannot compute them."""
        if self._is_wide(rows.division):
            try:
                return self._of_rows(rows, reduction, chunks)
            except CannotCompare:
                self.narrow = True
        return self._of_rows(rows, reduction, chunks)

    def _of_rows(self, rows: TriedRows, reduction: LossReduction, chunks: int) -> Compared:
        rows = self._counting(rows, reduction) if chunks > 1 else rows
        weights = self.weights(rows.divided(chunks), reduction) if chunks > 1 else (1.0,)
        is_wide = self._is_wide(rows.division)
        key = rows.key, rows.sizes, weights, reduction.single, is_wide
        if key not in self._compared:
            found = self._witness_of(rows, is_wide)
            self._compared[key] = self._compare(
                (rows, reduction, found),
                lambda: self._trial(rows, reduction, weights),
                lambda: self._again(rows, found.numbers, is_wide),
                is_wide,
            )
        known = self._compared[key]
        return known if known.reduction == reduction else replace(known, reduction=reduction)

    def _counting(self, rows: TriedRows, reduction: LossReduction) -> TriedRows:
        """The rows in an order in which both micro-batches have a weight, if there is one; else nothing would be compared."""
        turned = (rows.rotated(by) for by in range(sum(rows.sizes)))
        return next((each for each in turned if all(self.weights(each.divided(2), reduction))), rows)

    def draws(self, compared: Compared) -> bool:
        """Whether the same rows give other numbers when they are computed again, on the workers."""
        given = compared.rows, compared.reduction, compared.trial.weights
        once, again = self._trial(*given), self._trial(*given, number=1)
        return bool(replace(compared.right, plain=once.numbers).differences(again.numbers))

    def _trial(self, rows: TriedRows, reduction: LossReduction, weights: tuple[float, ...], number: int = 0) -> Tried:
        """Run the rows on the workers. Raises `CannotCompare` if they cannot be computed."""
        wide = self._is_wide(rows.division)
        written = self._witness_of(rows, wide).written
        how = HowTried(False, reduction.single, wide, number, written, self.follow)
        with self._surroundings(wide), _cannot("a part of the rows cannot be computed alone"):
            return self.trials.run(rows.divided(min(2, len(weights))), weights, how)

    def _witness_of(self, rows: TriedRows, wide: bool, turned: bool = False) -> WitnessStep:
        """The right numbers of some rows, which are computed once; with other rounding if the rows are ``turned``."""
        key = rows.key, turned, wide
        if key not in self._witnessed:
            with self._surroundings(wide), _cannot("a few of the rows cannot be computed alone"):
                self._witnessed[key] = self._computed(rows.divided(1, turned=turned), wide, watch=not turned)
        return self._witnessed[key]

    def _computed(self, division: Division, wide: bool, watch: bool) -> WitnessStep:
        if self.witness is not None:
            return self._measured_step(self.witness, division, replace(self._how(wide), watch=watch))
        tried = self.trials.run(division, (1.0,), HowTried(watch=watch, wide=wide))
        return WitnessStep(dict(tried.numbers), frozenset(), tried.asked)

    def _how(self, wide: bool) -> HowWitnessed:
        return HowWitnessed(wide=torch.float32 if wide else None, hooks=self.trials.calls_hooks)

    def _again(self, rows: TriedRows, right: Numbers, wide: bool) -> Numbers:
        """The right numbers with other rounding."""
        if self.witness is None:
            return self._witness_of(rows, wide, turned=True).numbers
        with self._surroundings(wide), _cannot("a few of the rows cannot be computed alone"):
            return self.witness.rounded_otherwise(rows, self._how(wide), right)

    def _measured_step(self, witness: Witness, division: Division, how: HowWitnessed) -> WitnessStep:
        """A step of the witness. What the first one costs is noted."""
        if self.cost is not None:
            return witness.step(division, how)
        started, live = time.perf_counter(), LiveStorages()
        with live:
            step = witness.step(division, how)
        self.cost = Cost(division.rows or 1, time.perf_counter() - started, live.most)
        return step

    # The whole mini-batch

    def whole(self, division: Division, run: RunWhole, reduction: LossReduction) -> Compared:
        """Compare all rows, by the step's own program. Raises `CannotCompare` if the plain model cannot run the step.

        Where the model cannot run all rows at once, or they cannot be put together, it runs micro-batch after micro-batch, as
        one does without a pipeline.
        """
        witness, rows, how = self.witness, WholeRows(division), HowWitnessed()
        assert witness is not None
        try:
            found = witness.step(rows.divided(1), how)
        except Exception as error:
            try:
                how = HowWitnessed(weights=self.weights(division, reduction))
                found = witness.step(division, how)
            except Exception:
                run(division, frozenset(), self.follow)  # raises what a worker says of it, if its call fails, too
                why = error if isinstance(error, DriverError) else f"{type(error).__name__}: {error}"
                raise CannotCompare(f"the plain model cannot run this step: {why}") from error
        return self._compare(
            (rows, reduction, found),
            lambda: run(division, found.written, self.follow),
            lambda: witness.rounded_otherwise(rows, how, found.numbers),
            is_wide=False,
        )

    # Numbers, and tolerances

    def _compare(
        self,
        given: tuple[TriedRows, LossReduction, WitnessStep],
        run: Callable[[], Tried],
        again: Callable[[], Numbers],
        is_wide: bool,
    ) -> Compared:
        """Compare a trial with the witness, and once more if a buffer may change once in a step. Rounding is measured only if
        there are differences."""
        rows, _, found = given
        floor = self._floor(rows.division, is_wide)

        def beside(trial: Tried) -> Compared:
            plain, numbers = self.beside(found.numbers, trial.numbers)
            return Compared(*given, Comparison(plain, {}, max(LEAST, floor), floor), numbers, trial)

        compared = beside(run())
        if self._follows_more(compared):
            compared = beside(run())
        if not compared.differences:
            return compared
        return replace(compared, right=replace(compared.right, again=again()))

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

    def _follows_more(self, compared: Compared) -> bool:
        """Have the buffers that differ change once in a step from now on; whether there are more of them now."""
        names = {each.name for each in compared.differences if each.kind == "buffer"}
        more = {place for name in names for place in compared.trial.places.get(name, ())} - self.follow
        self.follow |= more
        return bool(more)

    def _is_wide(self, division: Division) -> bool:
        """Whether a trial computes in 32 bits what the step computes in 16."""
        return not self.narrow and any(each in NARROW for each in self._dtypes(division))

    def _dtypes(self, division: Division) -> list[torch.dtype]:
        return computing_dtypes(self.compiled, division, self.trials.device_type)

    @contextmanager
    def _surroundings(self, wide: bool) -> Iterator[None]:
        devices = {self.trials.device_type, *([] if self.witness is None else [self.witness.device.type])}
        with ExitStack() as stack:
            for device in devices if wide else ():
                stack.enter_context(torch.autocast(device, enabled=False))
            yield

    def _floor(self, division: Division, is_wide: bool) -> float:
        """The least tolerance. A model that is ``is_wide`` computes in 32 bits at least."""
        dtypes = [torch.float32 if is_wide and each in NARROW else each for each in self._dtypes(division)]
        return floor_between(dtypes, self.trials.device_type, self.witness)


def computing_dtypes(compiled: Compiled, division: Division, device_type: str) -> list[torch.dtype]:
    """The dtypes that compute: of parameters, of what is given, and of autocast, if it is on."""
    found = [each.dtype for _, stage in compiled.stages() for each in stage.parameters()]
    found += [each.dtype for name in division.arguments for each in division.whole(name)]
    return [*found, torch.get_autocast_dtype(device_type)] if torch.is_autocast_enabled(device_type) else found


def floor_between(dtypes: Sequence[torch.dtype], device_type: str, witness: Witness | None) -> float:
    """The least tolerance between workers and their witness, which may compute on another kind of device."""
    elsewhere = witness is not None and witness.device.type != device_type
    return max(floor_of(*dtypes), ACROSS if elsewhere else 0.0)


@contextmanager
def _cannot(what: str) -> Iterator[None]:
    """Raise `CannotCompare` for what a model, or a worker, raises."""
    try:
        yield
    except (ClusterError, CannotCompare):
        raise
    except Exception as error:
        raise CannotCompare(
            f"{what}: {error if isinstance(error, PippyError) else f'{type(error).__name__}: {error}'}"
        ) from error
