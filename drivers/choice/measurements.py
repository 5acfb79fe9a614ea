"""The steps that `schedule="auto"` measures for one number of micro-batches."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pippy.drivers.base.errors import DriverError, StepError
from pippy.drivers.choice.divided_call import CallShapes
from pippy.drivers.choice.given_limits import GivenLimits
from pippy.drivers.choice.measured_programs import MeasuredPrograms
from pippy.drivers.plan.choice.choice import Choice
from pippy.drivers.plan.choice.problem import Problem
from pippy.drivers.plan.cost.costs import Costs
from pippy.drivers.plan.language.program import Program
from pippy.drivers.protocol.steps import StepResult
from pippy.drivers.report.record import Recording
from pippy.drivers.report.step_data import measured_costs


@dataclass(frozen=True)
class StepPurpose:
    """The purpose of a step: the name of its program, and whether it is recorded."""

    program: str
    record: bool = False


UNMEASURED = StepPurpose("")  # a step of any other schedule
MEASURED_STEPS = (
    StepPurpose("whole"),
    StepPurpose("whole", record=True),
    StepPurpose("whole", record=True),
    StepPurpose("halves"),
    StepPurpose("halves", record=True),
    StepPurpose("halves", record=True),
)
CHOSEN = StepPurpose("chosen")

Answers = Callable[[], Mapping[int, StepResult]]  # waits for a step, and gives what the workers answered


@dataclass
class Measurements:
    """The measurements so far, and the choice once they are complete."""

    problem: Problem
    limits: GivenLimits
    programs: MeasuredPrograms | None = None
    costs: Costs | None = None  # as they were measured
    choice: Choice | None = None
    shapes: CallShapes = ()  # the largest for which bytes were counted
    version: int = 0  # how often they had to be counted again for larger shapes
    done: int = 0
    step_under_way: tuple[Answers, Callable[[Mapping[int, StepResult]], None]] | None = None
    recording: Recording = field(default_factory=Recording)
    error: DriverError | None = None

    def next_step(self) -> tuple[StepPurpose, Program]:
        """The purpose of the next step, and its program."""
        if self.choice is not None:
            purpose, program = CHOSEN, self.choice.program
        else:
            assert self.programs is not None
            purpose = self._purpose
            program = self.programs.halves if purpose.program == "halves" else self.programs.whole
        name = f"{purpose.program} {self.version}" if self.version else purpose.program
        return replace(purpose, program=name), program

    @property
    def _purpose(self) -> StepPurpose:
        """The purpose of the next step that is measured."""
        return MEASURED_STEPS[min(self.done, len(MEASURED_STEPS) - 1)]

    def begin(self, program: Program, ranks: Sequence[int]) -> Callable[[Answers], None]:
        """Begin to measure a step. Returns a function to call after sending, with what waits for the step."""
        if self.choice is not None:
            return lambda answers: None
        note = self.recording.begin(program, ranks, [str(rank) for rank in ranks])

        def sent(answers: Answers) -> None:
            self.step_under_way = answers, note

        return sent

    def finish_step(self) -> None:
        """Wait for the step that is under way and use what it measured. After the last one, choose."""
        if self.error is not None:
            raise self.error
        if self.choice is not None or self.step_under_way is None:
            return
        (answers, note), self.step_under_way = self.step_under_way, None
        try:
            results = answers()
        except StepError:  # the caller of that step's result() gets the error
            return
        if self._purpose.record:
            if any(each.prepared for each in results.values()):
                return  # its times are those of recording and compiling
            note(results)
        self.done += 1
        if self.done == len(MEASURED_STEPS):
            self._choose()

    def _choose(self) -> None:
        self.costs = measured_costs(self.recording.steps)
        problem = replace(self.problem, program=self.recording.steps[-1].program)  # which has the edges
        try:
            self.choice = self.limits.best(with_measured_costs(problem, self.costs))
        except DriverError as error:
            self.error = error
            raise
        self.recording = Recording()


def with_measured_costs(problem: Problem, costs: Costs | Callable[[int], Costs]) -> Problem:
    """The problem with measured costs in place of guessed ones: for all numbers of micro-batches, or for each."""
    guessed, known = problem.micro_batch, costs if callable(costs) else lambda _: costs
    return replace(problem, micro_batch=lambda chunks: replace(guessed(chunks), costs=known(chunks)))
