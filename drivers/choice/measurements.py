"""The steps that `schedule="auto"` measures for one number of micro-batches."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pippy.drivers.base.errors import DriverError, StepError
from pippy.drivers.plan.choice.choose import Choice
from pippy.drivers.plan.choice.fitted import Fitted
from pippy.drivers.plan.cost.costs import Costs
from pippy.drivers.plan.language.program import Program
from pippy.drivers.protocol.steps import StepResult
from pippy.drivers.report.measured import measured_costs
from pippy.drivers.report.record import Recording


@dataclass(frozen=True)
class StepPurpose:
    """The purpose of a step: the name of its program, and whether it is recorded, or measures the bytes that stages keep."""

    program: str
    record: bool = False
    weigh: bool = False


UNMEASURED = StepPurpose("")  # a step of any other schedule
MEASURED_STEPS = (
    StepPurpose("first", weigh=True),
    StepPurpose("whole", record=True),
    StepPurpose("whole", record=True),
    StepPurpose("halves"),
    StepPurpose("halves", record=True),
    StepPurpose("halves", record=True),
)
CHOSEN = StepPurpose("chosen")

Answers = Callable[[], Mapping[int, StepResult]]  # waits for a step, and gives what the workers answered


@dataclass
class Measurements(ABC):
    """The measurements so far, and the choice once they are complete."""

    programs: dict[str, Program]
    done: int = 0
    step_under_way: tuple[Answers, Callable[[Mapping[int, StepResult]], None]] | None = None
    recording: Recording = field(default_factory=Recording)
    choice: Choice | Fitted | None = None
    error: DriverError | None = None
    costs: Costs | None = None  # as they were measured

    @property
    def purpose(self) -> StepPurpose:
        """The purpose of the next step that is measured."""
        return MEASURED_STEPS[min(self.done, len(MEASURED_STEPS) - 1)]

    @abstractmethod
    def next_step(self) -> tuple[StepPurpose, Program]:
        """The purpose of the next step, and its program."""

    @abstractmethod
    def choose(self, costs: Costs) -> Choice | Fitted:
        """The schedule that is the fastest by these costs."""

    @abstractmethod
    def weighed(self, kept: Mapping[int, tuple[int, int]]) -> None:
        """Use the bytes that each stage keeps for its backward, and the part of them that are its inputs."""

    def begin(self, program: Program, ranks: Sequence[int]) -> Callable[[Answers], None]:
        """Begin to measure a step. Returns a function to call after sending, with what waits for the step."""
        if self.choice is not None:
            return lambda answers: None
        purpose = MEASURED_STEPS[self.done]
        note = self.recording.begin(program, ranks, [str(rank) for rank in ranks])

        def use_answers(results: Mapping[int, StepResult]) -> None:
            if purpose.record:
                note(results)
            if purpose.weigh:
                self.weighed({stage: each for rank in ranks for stage, each in (results[rank].kept or {}).items()})

        def sent(answers: Answers) -> None:
            self.step_under_way = answers, use_answers

        return sent

    def finish_step(self) -> None:
        """Wait for the step that is under way and use what it measured. After the last one, choose."""
        if self.error is not None:
            raise self.error
        if self.choice is not None or self.step_under_way is None:
            return
        (answers, use_answers), self.step_under_way = self.step_under_way, None
        try:
            results = answers()
        except StepError:  # the caller of that step's result() gets the error
            return
        self.done += 1
        try:
            use_answers(results)
            if self.done == len(MEASURED_STEPS):
                self.costs = measured_costs(self.recording.steps)
                self.choice = self.choose(self.costs)
                self.recording = Recording()
        except DriverError as error:
            self.error = error
            raise
