"""A step that runs on the workers while the script goes on."""

from collections.abc import Callable, Mapping
from typing import Any

from pippy.drivers.batch.divide import advising
from pippy.drivers.driver.steps.results import Results, joined_micro_batches
from pippy.drivers.protocol.steps import StepResult
from pippy.drivers.session.command_log import PendingCommand
from pippy.drivers.session.session import Session


class RunningStep:
    """A step that was dispatched with `run_async`. ``note`` is given the answers, if the step is recorded.

    ``accepted`` is called with the answers when none was refused, and may refuse them. ``rows`` is the number of rows; None if
    the mini-batch has none.
    """

    def __init__(
        self,
        session: Session,
        results: Results,
        accepted: Callable[[Mapping[int, StepResult]], Any] = lambda answers: None,
    ) -> None:
        self._session, self._accepted = session, accepted
        self._results: Results | None = results
        self.rows = results.division.rows
        self._posted: PendingCommand | None = None
        self._result: Any = None

    def posted(self, posted: PendingCommand, note: Callable[[Mapping[int, StepResult]], None] | None) -> "RunningStep":
        """The step was sent."""
        self._posted, self._note = posted, note
        return self

    def accept(self, answers: Mapping[int, StepResult]) -> None:
        """Make the result from the answers. If that fails, the step has failed."""
        assert self._results is not None
        values: dict[str, Any] = {}
        for answer in answers.values():  # in the order of the replicas
            self._results.weights = answer.weights or self._results.weights
            for name, value in answer.values.items():
                values[name] = joined_micro_batches(values[name], value) if name in values else value
        by_chance = [each for answer in answers.values() for each in answer.by_chance]
        self._result = self._results.assemble(values, by_chance)
        self._accepted(answers)

    def __repr__(self) -> str:
        return f"<RunningStep, {'done' if self._posted is None else 'not waited for'}>"

    def result(self) -> Any:
        """Wait for the step, and return what `run` returns."""
        posted, results = self._posted, self._results
        if posted is not None and results is not None:
            with advising(results.division):
                self._end(self._session.wait(posted))
        return self._result

    def _end(self, answers: Mapping[int, StepResult]) -> None:
        with self._session.lock:
            if self._posted is None:  # another thread was here
                return
            self.peak_live = {worker: answer.peak_live for worker, answer in answers.items()}
            if self._note is not None:
                self._note(answers)
            self._posted = self._results = None  # they hold the inputs and the outputs of the micro-batches
