"""A step of a driver, by its own program and on all of its rows, beside the same step of the witness."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from pippy.drivers.base.errors import DriverError
from pippy.drivers.batch.division import Division
from pippy.drivers.driver.check.comparisons import Comparisons, Unlike
from pippy.drivers.driver.check.differences import Comparison, Difference, Numbers
from pippy.drivers.driver.check.disagreement import lines_of
from pippy.drivers.driver.check.rows import WholeRows
from pippy.drivers.driver.check.trial_steps import BufferPlaces
from pippy.drivers.driver.check.witness import HowWitnessed, WitnessStep, turned_numbers
from pippy.drivers.placement.placed_pipe import PlacedPipe
from pippy.drivers.protocol.state import TensorLocation
from pippy.ir.record.compiled import Compiled


@dataclass(frozen=True)
class WholeTrial:
    """What a step gave as a trial: its numbers, the weights of its losses, and where its buffers are."""

    numbers: Numbers
    weights: tuple[float, ...]
    places: BufferPlaces
    disagreeing: frozenset[str]


class RunWhole(Protocol):
    """Runs a step of a driver as a trial, on these rows. ``written`` are the parameters that forward changes."""

    def __call__(
        self, division: Division, written: frozenset[str], follow: Collection[TensorLocation]
    ) -> WholeTrial: ...


@dataclass(frozen=True)
class WholeStep:
    """The right numbers of a step with their tolerances, and the pipeline's."""

    right: Comparison
    numbers: Numbers
    trial: WholeTrial

    @classmethod
    def of(cls, comparisons: Comparisons, division: Division, run: RunWhole) -> "WholeStep":
        """Run both. Raises `Unlike` if the plain model cannot run the step."""
        witnessed, trial = _witnessed(comparisons, division, run)
        plain, numbers = comparisons.beside(witnessed.numbers, trial.numbers)
        floors = comparisons.floor(division, wide=False), comparisons.floor(division, wide=False, least=0.0)
        whole = cls(Comparison(plain, {}, *floors), numbers, trial)
        if not whole.differences:
            return whole
        assert comparisons.witness is not None
        turned = turned_numbers(comparisons.witness, division, HowWitnessed())
        return replace(whole, right=replace(whole.right, turned=turned))

    @cached_property
    def differences(self) -> list[Difference]:
        """The differences, the worst first."""
        return self.right.differences(self.numbers)

    def said(self, compiled: Compiled, placed: PlacedPipe) -> str:
        """The error for a step of which only the run on the workers is wrong."""
        return (
            "the step was run by the plain model and, as a trial, by the workers. Numbers differ by more than rounding, "
            "though they agree when the same micro-batches are run all forwards first:\n"
            f"{lines_of(compiled, placed, self.differences)}\n"
            "This is a fault of a worker, of what is sent, or of pippy: please report it"
        )


def _witnessed(comparisons: Comparisons, division: Division, run: RunWhole) -> tuple[WitnessStep, WholeTrial]:
    """The step of the witness, and of the workers. Where the model cannot run all rows at once, or they cannot be put together,
    it runs micro-batch after micro-batch, as one does without a pipeline."""
    witness, rows = comparisons.witness, WholeRows(division)
    assert witness is not None
    found: WitnessStep | Exception
    try:
        found = witness.step(rows.divided(1), HowWitnessed())
    except Exception as error:
        found = error
    written = frozenset[str]() if isinstance(found, Exception) else found.written
    trial = run(division, written, comparisons.follow)
    if not isinstance(found, Exception):
        return found, trial
    try:
        return witness.step(division, HowWitnessed(weights=trial.weights)), trial
    except Exception as error:
        why = found if isinstance(found, DriverError) else f"{type(found).__name__}: {found}"
        raise Unlike(f"the plain model cannot run this step: {why}") from error
