"""Points of a run from which `driver.recover` can go on: what the controller remembers of each."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pippy.drivers.model.optimizers.grad_scaler import PipelineGradScaler
from pippy.drivers.model.optimizers.optimizer import PipelineOptimizer
from pippy.drivers.protocol.kept_states import TakeKept
from pippy.drivers.session.driver_commands import DriverCommands
from pippy.drivers.session.step_numbers import StepNumbers
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
        cls, commands: DriverCommands, optimizers: Iterable[PipelineOptimizer], scaler: PipelineGradScaler | None
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
        self, commands: DriverCommands, optimizers: Iterable[PipelineOptimizer], scaler: PipelineGradScaler | None
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
class MemoryPoint:
    """A point that workers hold, each its own state and that of a neighbour: `protect` made it.

    ``values`` and ``states`` are those of what was given, as plain values; ``objects`` what has the states. ``holders`` has
    for each worker the one that holds its copy.
    """

    number: int
    values: Mapping[str, Any]
    states: Mapping[str, Any]
    extra: Mapping[str, Any]
    objects: Mapping[str, Any]
    holders: Mapping[int, int]
    state: ControllerState

    def gone(self, lost: Collection[int]) -> set[int]:
        """The workers whose state is nowhere when these are lost."""
        return {worker for worker in lost if self.holders[worker] in lost}

    def bodies(self, lost: Collection[int]) -> dict[int, TakeKept]:
        """What each worker is told to go back to this point, when some hold nothing."""
        held = {holder: worker for worker, holder in self.holders.items()}  # whose copy each worker holds
        moves = [(worker, self.holders[worker], worker) for worker in lost]
        moves += [(held[worker], held[worker], worker) for worker in lost]
        return {
            worker: TakeKept(
                self.number,
                tuple((of, to) for of, source, to in moves if source == worker),
                tuple((of, source) for of, source, to in moves if to == worker),
            )
            for worker in self.holders
        }


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
