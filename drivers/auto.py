"""schedule="auto": the first steps are measured, then the schedule is chosen that the measurements make the fastest.

The steps that are measured are ordinary training steps. For each number of micro-batches:

    1        1F1B; how many bytes each stage keeps for its backward
    2, 3     1F1B, recorded: the times of F and B of each stage, and of each transfer
    4        the same order with backwards in halves
    5, 6     the same, recorded: the times of I and W of each stage
    then     every schedule that fits the placement and the limits is simulated, and the best is run from now on

1F1B is measured because it holds few activations. If it breaks the limits, an order that keeps them is measured instead. A
step that fails is measured again.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pippy.drivers.control.messages import StepResult
from pippy.drivers.errors import DriverError, StepError
from pippy.drivers.recording.measured import measured_costs
from pippy.drivers.recording.record import Recording
from pippy.drivers.schedules import make_schedule
from pippy.drivers.schedules.choose import Choice, Limits, choose
from pippy.drivers.schedules.errors import ScheduleError
from pippy.drivers.schedules.programs.instructions import Compute, Op
from pippy.drivers.schedules.programs.placement import Placement
from pippy.drivers.schedules.programs.program import Program
from pippy.drivers.schedules.recompute import Checkpoint
from pippy.drivers.schedules.simulation.held_bytes import PipeBytes, StageBytes

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepPurpose:
    """What a step is for: it runs the program of this name, and may be recorded, or weigh what stages keep."""

    program: str
    record: bool = False
    weigh: bool = False


UNMEASURED = StepPurpose("")  # a step of any other schedule
_MEASURED = (
    StepPurpose("first", weigh=True),
    StepPurpose("whole", record=True),
    StepPurpose("whole", record=True),
    StepPurpose("halves"),
    StepPurpose("halves", record=True),
    StepPurpose("halves", record=True),
)
_CHOSEN = StepPurpose("chosen")

Answers = Callable[[], Mapping[int, StepResult]]  # waits for a step, and gives what the workers answered


@dataclass
class _Measurements:
    """The measurements so far for one number of micro-batches."""

    programs: dict[str, Program]
    limits: Limits
    checkpoint: Checkpoint
    done: int = 0
    step_under_way: tuple[Answers, Callable[[Mapping[int, StepResult]], None]] | None = None
    recording: Recording = field(default_factory=Recording)
    choice: Choice | None = None
    error: DriverError | None = None


class Auto:
    """Chooses the schedule of one driver, for each number of micro-batches that it runs.

    >>> Auto(memory_limit=-1)
    Traceback (most recent call last):
    pippy.drivers.errors.DriverError: memory_limit=-1: give the bytes that the activations on each worker may take, \
one number or one for each worker
    """

    def __init__(self, memory_limit: Any = None, max_live: Any = None, checkpoint: Checkpoint = "never") -> None:
        self._bytes = _numbers("memory_limit", memory_limit, "the bytes that the activations on each worker may take")
        self._live = _numbers("max_live", max_live, "how many stage-micro-batches each worker may hold")
        self.checkpoint = checkpoint
        self._measured: dict[int, _Measurements] = {}
        self._latest: _Measurements | None = None

    @property
    def choice(self) -> Choice | None:
        """What was chosen for the number of micro-batches of the latest step; None while that is being measured."""
        if self._latest is not None and self._latest.choice is None:
            self._finish_step(self._latest)
        return None if self._latest is None else self._latest.choice

    def check(self, placement: Placement) -> None:
        """Raise unless the limits leave room for one micro-batch in each stage."""
        for worker, limit in enumerate(_each("max_live", self._live, placement) or ()):
            least = len(placement.stages_of(worker))
            if limit < least:
                raise DriverError(
                    f"max_live={_shown(self._live)} leaves worker {worker} no room for one micro-batch in each of its stages; "
                    f"give it at least {least}"
                )
        _each("memory_limit", self._bytes, placement)

    def next(self, chunks: int, make: Callable[[], Program]) -> tuple[StepPurpose, Program]:
        """What the next step with ``chunks`` micro-batches is for, and its program. Waits for a measured step first.

        ``make`` makes the program of 1F1B.
        """
        measurements = self._latest = self._measurements_for(chunks, make)
        if measurements.choice is None:
            self._finish_step(measurements)
        return _step(measurements)

    def peek(self, chunks: int, make: Callable[[], Program]) -> tuple[StepPurpose, Program]:
        """What the next step would be, as far as is known now. Does not wait."""
        return _step(self._measurements_for(chunks, make))

    def begin(self, chunks: int, program: Program, ranks: Sequence[int]) -> Callable[[Answers], None]:
        """Begin to measure the step that `next` gave. Gives a function to call, after sending, with how to wait for it."""
        measurements = self._measured[chunks]
        if measurements.choice is not None:
            return lambda answers: None
        purpose = _MEASURED[measurements.done]
        note = measurements.recording.begin(program, ranks, [str(rank) for rank in ranks])

        def use_answers(results: Mapping[int, StepResult]) -> None:
            if purpose.record:
                note(results)
            if purpose.weigh:
                self._weighed(measurements, [results[rank] for rank in ranks])

        def sent(answers: Answers) -> None:
            measurements.step_under_way = answers, use_answers

        return sent

    def _measurements_for(self, chunks: int, make: Callable[[], Program]) -> _Measurements:
        if chunks not in self._measured:
            plain = make()
            limits = Limits(
                _each("max_live", self._live, plain.placement), _each("memory_limit", self._bytes, plain.placement)
            )
            self._measured[chunks] = _Measurements(_programs(plain, limits, self.checkpoint), limits, self.checkpoint)
        return self._measured[chunks]

    def _finish_step(self, measurements: _Measurements) -> None:
        """Wait for the step that is under way and use what it measured. After the last one, choose."""
        if measurements.error is not None:
            raise measurements.error
        if measurements.step_under_way is not None:
            (answers, use_answers), measurements.step_under_way = measurements.step_under_way, None
            try:
                results = answers()
            except StepError:  # the caller of that step's result() gets the error
                return
            measurements.done += 1
            try:
                use_answers(results)
                if measurements.done == len(_MEASURED):
                    _choose(measurements)
            except DriverError as error:
                measurements.error = error
                raise

    def _weighed(self, measurements: _Measurements, results: Sequence[StepResult]) -> None:
        kept = {stage: weight for result in results for stage, weight in (result.kept or {}).items()}
        plain = measurements.programs["plain"]
        weights, inputs = zip(*(kept.get(stage, (0, 0)) for stage in range(plain.stages)))
        stages = [
            StageBytes(kept=each, forward=each, deferred=each, repeating=own) for each, own in zip(weights, inputs)
        ]
        measurements.limits = replace(measurements.limits, sizes=PipeBytes(tuple(stages)))
        for worker, limit in enumerate(measurements.limits.bytes or ()):
            least = sum(weights[stage] for stage in plain.placement.stages_of(worker))
            if least > limit:
                raise DriverError(
                    f"memory_limit={_shown(self._bytes)} leaves worker {worker} no room for one micro-batch in each of its "
                    f"stages, which takes {least:,} bytes; raise it, or cut the mini-batch into more micro-batches"
                )
        if measurements.limits.bytes is not None:
            measurements.programs = _programs(plain, measurements.limits, measurements.checkpoint)


def _step(measurements: _Measurements) -> tuple[StepPurpose, Program]:
    """What the next step is for. The first step has a program of its own only if there is a limit of bytes."""
    if measurements.choice is not None:
        return _CHOSEN, measurements.choice.program
    purpose = _MEASURED[min(measurements.done, len(_MEASURED) - 1)]
    if purpose.program == "first" and measurements.limits.bytes is None:
        purpose = replace(purpose, program="whole")
    return purpose, measurements.programs["whole" if purpose.program == "first" else purpose.program]


def _choose(measurements: _Measurements) -> None:
    steps = measurements.recording.steps
    try:
        choice = choose(steps[-1].program, measured_costs(steps), measurements.limits, measurements.checkpoint)
    except ScheduleError as error:
        raise DriverError(
            f"{error}\nraise memory_limit or max_live, or cut the mini-batch into more micro-batches"
        ) from error
    measurements.choice = choice
    measurements.recording = Recording()
    _log.info("schedule='auto': %s", choice)


def _programs(plain: Program, limits: Limits, checkpoint: Checkpoint) -> dict[str, Program]:
    """The programs to measure. They keep the limits, as far as the bytes that stages keep are known."""
    counts = limits.counts(plain.placement)
    whole = plain
    if counts is not None and not _fits(plain, counts, limits):
        whole = make_schedule(
            "list",
            workers=plain.workers,
            chunks=plain.chunks,
            placement=plain.placement,
            checkpoint=checkpoint,
            memory=counts,
            halves=False,
        )
    return {"plain": plain, "whole": whole, "halves": in_halves(whole)}


def _fits(program: Program, counts: Sequence[int], limits: Limits) -> bool:
    if limits.bytes is None or limits.sizes is None:
        return all(peak <= count for peak, count in zip(program.peak_live, counts))
    peaks = limits.peaks(program)
    assert peaks is not None
    live = limits.live or program.peak_live
    return all(map(int.__le__, peaks, limits.bytes)) and all(map(int.__le__, program.peak_live, live))


def in_halves(program: Program) -> Program:
    """The same order, with each backward as its two halves, one after the other.

    >>> print(*in_halves(make_schedule("1f1b", workers=1, chunks=1)).orders[0])
    F0.0 I0.0 W0.0
    """
    return program.with_orders(
        [each for compute in order for each in _halves(compute)] for order in program.computations
    )


def _halves(compute: Compute) -> list[Compute]:
    if compute.op != Op.BACKWARD:
        return [compute]
    return [replace(compute, op=op) for op in (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)]


def auto_placement(options: Mapping[str, Any], per_worker: Sequence[int]) -> dict[str, Any]:
    """Where the stages are put: as the options say, or else so that the best schedules for their number fit.

    >>> auto_placement({}, [2, 2])
    {'stages_per_worker': [2, 2], 'placement': 'v'}
    """
    for name, value in options.items():
        if name != "placement":
            raise DriverError(f"{name}={value!r}: schedule='auto' takes memory_limit, max_live and placement")
    placement = options.get("placement")
    if isinstance(placement, Mapping | Placement):
        return {"placement": placement}
    if placement is None:
        even = set(per_worker)
        placement = "linear" if len(even) > 1 or 1 in even else "v" if even == {2} else "looped"
    return {"stages_per_worker": list(per_worker), "placement": placement}


def _numbers(name: str, given: Any, what: str) -> int | tuple[int, ...] | None:
    several = isinstance(given, Sequence) and not isinstance(given, str)
    numbers = list(given) if several else [] if given is None else [given]
    if (several and not numbers) or not all(
        isinstance(each, int) and not isinstance(each, bool) and each > 0 for each in numbers
    ):
        raise DriverError(f"{name}={given!r}: give {what}, one number or one for each worker")
    return tuple(numbers) if several else given


def _each(name: str, given: int | tuple[int, ...] | None, placement: Placement) -> tuple[int, ...] | None:
    if given is None or isinstance(given, int):
        return None if given is None else (given,) * placement.workers
    if len(given) != placement.workers:
        raise DriverError(
            f"{name}={list(given)} has {len(given)} limits for {placement.workers} workers; give one, or one each"
        )
    return given


def _shown(given: Any) -> Any:
    return list(given) if isinstance(given, tuple) else given
