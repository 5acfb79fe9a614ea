"""schedule="auto": the first steps are measured, then the schedule runs that is the fastest by what was measured.

The steps that are measured are ordinary training steps. For each number of micro-batches:

    1        1F1B; how many bytes each stage keeps for its backward
    2, 3     1F1B, recorded: the times of F and B of each stage, and of each transfer
    4        the same order with backwards in halves
    5, 6     the same, recorded: the times of I and W of each stage
    then     every schedule that fits the placement and the limits is simulated, and the best is run from now on

1F1B is measured because it holds few activations. If it breaks the limits, an order that keeps them is measured instead. A
step that fails is measured again. With ``memory=``, auto_memory.py says what is measured.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from pippy.drivers.base.errors import DriverError
from pippy.drivers.choice.given_limit import GivenLimit
from pippy.drivers.choice.measurements import Answers, Measurements, StepPurpose
from pippy.drivers.choice.memory_fit import DividedCall
from pippy.drivers.choice.within_limits import GivenLimits, WithinLimits
from pippy.drivers.plan.choice.choose import Choice
from pippy.drivers.plan.choice.fitted import Fitted
from pippy.drivers.plan.language.placement import Placement
from pippy.drivers.plan.language.program import Program
from pippy.drivers.plan.passes.recompute import Checkpoint
from pippy.ir.base.brief import brief

_log = logging.getLogger(__name__)

Make = Callable[[int], Program]  # makes the program of 1F1B for a number of micro-batches
Measured = TypeVar("Measured", bound=Measurements)


class Auto(ABC, Generic[Measured]):
    """Chooses the schedule of one driver, for each number of micro-batches that it runs.

    >>> AutoWithinLimits(max_live=-1)
    Traceback (most recent call last):
    pippy.drivers.base.errors.DriverError: max_live=-1: give how many stage-micro-batches each worker may hold, \
one number or one for each worker
    """

    counts_bytes = False  # whether it needs the edges of the Pipe, and the call that is to be run

    def __init__(self, max_live: Any = None) -> None:
        self._live = GivenLimit("max_live", max_live, "how many stage-micro-batches each worker may hold")
        self._measured: dict[int, Measured] = {}
        self._latest: Measured | None = None

    @property
    def choice(self) -> Choice | Fitted | None:
        """The choice for the number of micro-batches of the latest step; None while its steps are measured."""
        if self._latest is None:
            return None
        self._finish_step(self._latest)
        return self._latest.choice

    def check(self, placement: Placement) -> None:
        """Raise unless the limits leave room for one micro-batch in each stage."""
        for worker, limit in enumerate(self._live.of_workers(placement) or ()):
            least = len(placement.stages_of(worker))
            if limit < least:
                raise DriverError(
                    f"{self._live} leaves worker {worker} no room for one micro-batch in each of its stages; give it at least "
                    f"{least}"
                )

    def next(self, chunks: int, make: Make, call: DividedCall | None = None) -> tuple[StepPurpose, Program]:
        """The purpose and the program of the next step with ``chunks`` micro-batches. Waits first for a step that is measured.

        ``make`` makes the program of 1F1B; where bytes are counted, it has the edges of the Pipe. ``call`` is the call to run.
        """
        measurements = self._latest = self._measurements_for(chunks, make, call)
        self._finish_step(measurements)
        return measurements.next_step()

    def peek(self, chunks: int, make: Make) -> tuple[StepPurpose, Program]:
        """The purpose and the program of the next step, as far as they are known now. Does not wait."""
        return self._measurements_for(chunks, make, None).next_step()

    def begin(self, chunks: int, program: Program, ranks: Sequence[int]) -> Callable[[Answers], None]:
        """Begin to measure the step that `next` gave. Returns a function to call after sending, with what waits for it."""
        return self._measured[chunks].begin(program, ranks)

    @abstractmethod
    def _measurements_for(self, chunks: int, make: Make, call: DividedCall | None) -> Measured:
        """The measurements for a number of micro-batches."""

    def _finish_step(self, measurements: Measured) -> None:
        known = measurements.choice
        measurements.finish_step()
        if measurements.choice is not known:
            _log.info("schedule='auto': %s", measurements.choice)


class AutoWithinLimits(Auto[WithinLimits]):
    """Without limits, or with ``memory_limit=`` and ``max_live=``.

    >>> AutoWithinLimits(memory_limit=-1)
    Traceback (most recent call last):
    pippy.drivers.base.errors.DriverError: memory_limit=-1: give the bytes that the activations on each worker may take, \
one number or one for each worker
    """

    def __init__(self, memory_limit: Any = None, max_live: Any = None, checkpoint: Checkpoint | None = None) -> None:
        super().__init__(max_live)
        given = GivenLimit("memory_limit", memory_limit, "the bytes that the activations on each worker may take")
        self._limits = GivenLimits(given, self._live)
        self.checkpoint: Checkpoint = "never" if checkpoint is None else checkpoint

    def check(self, placement: Placement) -> None:
        super().check(placement)
        self._limits.bytes.of_workers(placement)

    def _measurements_for(self, chunks: int, make: Make, call: DividedCall | None) -> WithinLimits:
        if chunks not in self._measured:
            self._measured[chunks] = WithinLimits.of(make(chunks), self._limits, self.checkpoint)
        return self._measured[chunks]


def auto_placement(options: Mapping[str, Any], per_worker: Sequence[int]) -> dict[str, Any]:
    """Where the stages are put: as the options say, or else so that the best schedules for their number fit.

    >>> auto_placement({}, [2, 2])
    {'stages_per_worker': [2, 2], 'placement': 'v'}
    """
    for name, value in options.items():
        if name != "placement":
            raise DriverError(
                f"{name}={brief(value)}: schedule='auto' takes memory, max_live, memory_limit and placement"
            )
    placement = options.get("placement")
    if isinstance(placement, Mapping | Placement):
        return {"placement": placement}
    if placement is None:
        even = set(per_worker)
        placement = "linear" if len(even) > 1 or 1 in even else "v" if even == {2} else "looped"
    return {"stages_per_worker": list(per_worker), "placement": placement}
