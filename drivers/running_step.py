"""A step that the workers do while the script goes on."""

from collections.abc import Callable, Mapping
from typing import Any

from pippy.drivers.control.dispatch import Dispatch, PendingCommand
from pippy.drivers.control.messages import StepResult
from pippy.drivers.results import Results


class RunningStep:
    """A step that was dispatched with `run_async`. ``note`` is given the answers, if the step is recorded."""

    def __init__(
        self,
        dispatch: Dispatch,
        posted: PendingCommand,
        results: Results,
        note: Callable[[Mapping[int, StepResult]], None] | None,
    ) -> None:
        self._dispatch, self._posted, self._results, self._note = dispatch, posted, results, note

    def result(self) -> Any:
        """Wait for the step, and give what `run` would have given."""
        answers = self._dispatch.wait(self._posted)
        self.peak_live = {worker: answer.peak_live for worker, answer in answers.items()}
        if self._note is not None:
            self._note(answers)
        return self._results.assemble({name: v for answer in answers.values() for name, v in answer.values.items()})
