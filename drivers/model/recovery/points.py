"""Points of a run from which `driver.recover` can go on, as the controller knows them."""

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
    """The controller's part of a point, beside the objects given by name.

    ``options`` has the options of each optimizer, by its number; ``stepped`` the numbers of those that had made a step.
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
        """The state as it is now. No step may be running."""
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
    """A point in the memory of the workers, made by `protect`: each has a copy of its own state and of a neighbour's.

    ``values`` and ``states`` are plain values: those that were given, and the states of ``objects``. ``holders`` has for each
    worker the neighbour with the copy of its state.
    """

    number: int
    values: Mapping[str, Any]
    states: Mapping[str, Any]
    extra: Mapping[str, Any]
    objects: Mapping[str, Any]
    holders: Mapping[int, int]
    state: ControllerState

    def gone(self, lost: Collection[int]) -> set[int]:
        """The workers whose state is lost with these workers."""
        return {worker for worker in lost if self.holders[worker] in lost}

    def bodies(self, lost: Collection[int]) -> dict[int, TakeKept]:
        """The message for each worker to go back to this point; the workers ``lost`` have no copies."""
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
    """A checkpoint that was saved or loaded. ``given`` has the objects whose states are in it, by their names in `load`."""

    path: str
    given: Mapping[str, Any]
    state: ControllerState
    whole: bool = True  # or it has a part of the model, and the rest is as it was first

    @property
    def optimizers(self) -> frozenset[int]:
        """The numbers of the optimizers whose state is in the checkpoint."""
        return frozenset(each.number for each in self.given.values() if isinstance(each, PipelineOptimizer))

    @property
    def lacks(self) -> frozenset[int]:
        """The numbers of optimizers that had made steps, but have no state in the checkpoint: a run cannot go on from it."""
        return self.state.stepped - self.optimizers
