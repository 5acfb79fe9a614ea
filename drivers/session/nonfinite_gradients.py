"""Which gradients on the workers are not finite, as far as steps with a scaled loss have reported it."""

from collections.abc import Iterable, Mapping

from pippy.drivers.placement.placed_pipe import PlacedPipe
from pippy.drivers.protocol.steps import StepResult
from pippy.drivers.session.command_log import AcceptAnswers


class NonFiniteGradients:
    """Follows the gradients of a driver by the names of parameters, from the step that made them until they are dropped.

    Gradients may be dropped while the step that makes them still runs, so that the answer comes later. So steps are numbered,
    and what is dropped is noted with the number of the last step that was posted.
    """

    def __init__(self, placed: PlacedPipe, names: Iterable[str]) -> None:
        self.placed, self.parameters = placed, tuple(names)
        self.steps = self._all_dropped = 0
        self._dropped: dict[str, int] = {}
        self._names: set[str] = set()

    def step(self, accept: AcceptAnswers) -> AcceptAnswers:
        """A step with a scaled loss is posted. Returns what accepts its answers, ``accept`` first."""
        self.steps += 1
        number = self.steps

        def accept_and_note(answers: Mapping[int, StepResult]) -> None:
            accept(answers)
            self._names.update(name for name in self._named(answers) if self._dropped_at(name) < number)

        return accept_and_note

    def _named(self, answers: Mapping[int, StepResult]) -> list[str]:
        """The parameters that the workers found a gradient of which is not finite, in any copy."""
        reported = {(worker, place) for worker, answer in answers.items() for place in answer.nonfinite}
        return [name for name in self.parameters if reported and not reported.isdisjoint(self.placed.locations(name))]

    def _dropped_at(self, name: str) -> int:
        return max(self._all_dropped, self._dropped.get(name, 0))

    def drop_all(self) -> None:
        """All gradients are dropped."""
        self._all_dropped = self.steps
        self._dropped.clear()
        self._names.clear()

    def drop(self, names: Iterable[str]) -> None:
        """The gradients of some parameters are dropped."""
        dropped = dict.fromkeys(names, self.steps)
        self._dropped.update(dropped)
        self._names -= dropped.keys()

    def stepped(self, names: Iterable[str]) -> bool:
        """Whether a step with a scaled loss was posted since the gradients of these parameters were dropped."""
        return any(self._dropped_at(name) < self.steps for name in names)

    def among(self, names: Iterable[str]) -> set[str]:
        """Those of the parameters whose gradient is not finite. All steps must have been waited for."""
        return self._names.intersection(names)
