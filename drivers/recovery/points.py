"""Points of a run from which `driver.recover` can go on: what the controller remembers of each."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pippy.drivers.commands import Commands
from pippy.drivers.grad_scaler import PipelineGradScaler
from pippy.drivers.optimizer import PipelineOptimizer
from pippy.drivers.step_numbers import StepNumbers
from pippy.ir.run.random_state import RandomState


@dataclass(frozen=True)
class ControllerState:
    """What the controller of a driver had at a point, beside what was given by name.

    ``options`` has those of each optimizer, by its number; ``stepped`` the numbers of those that had made a step.
    """

    numbers: StepNumbers | None
    random: RandomState
    steps_of_last_update: int
    options: Mapping[int, list[dict[str, Any]]]
    stepped: frozenset[int]
    scaler: dict[str, Any] | None

    @classmethod
    def current(
        cls, commands: Commands, optimizers: Iterable[PipelineOptimizer], scaler: PipelineGradScaler | None
    ) -> "ControllerState":
        """As it is now. All steps must have been waited for."""
        own = list(optimizers)
        return cls(
            commands.numbers,
            RandomState.current(),
            commands.steps_of_last_update,
            {each.number: each.named_groups() for each in own},
            frozenset(each.number for each in own if each.stepped),
            None if scaler is None else scaler.state_dict(),
        )

    def restore(
        self, commands: Commands, optimizers: Iterable[PipelineOptimizer], scaler: PipelineGradScaler | None
    ) -> None:
        """Go back to it."""
        for optimizer in optimizers:
            if optimizer.number in self.options:
                optimizer.take_options(self.options[optimizer.number])
            optimizer.stepped = optimizer.number in self.stepped
        if scaler is not None:
            scaler.begin_again(self.scaler)
        commands.zero_grad()
        commands.go_back(self.numbers, self.steps_of_last_update)
        self.random.restore()


@dataclass(frozen=True)
class DiskPoint:
    """A checkpoint that was saved or loaded. ``given`` has what has a state in it, by name, as `load` takes it."""

    path: str
    given: Mapping[str, Any]
    state: ControllerState
    whole: bool = True  # or it has a part of the model, and the rest is as it was first

    @property
    def optimizers(self) -> frozenset[int]:
        """The numbers of the optimizers that it has the state of."""
        return frozenset(each.number for each in self.given.values() if isinstance(each, PipelineOptimizer))

    @property
    def lacks(self) -> frozenset[int]:
        """The numbers of the optimizers that had made steps, and that it has no state of: nobody can go on from it."""
        return self.state.stepped - self.optimizers
