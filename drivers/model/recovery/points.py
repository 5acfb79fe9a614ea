"""Points of a run from which `driver.recover` can go on, as the controller knows them."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pippy.drivers.model.optimizers.grad_scaler import PipelineGradScaler
from pippy.drivers.model.optimizers.optimizer import PipelineOptimizer
from pippy.drivers.plan.language.exchanges import ExchangeProgram
from pippy.drivers.plan.language.instructions import Payload
from pippy.drivers.plan.passes.communicate import exchange
from pippy.drivers.protocol.state import TakeKept
from pippy.drivers.session.driver_commands import DriverCommands
from pippy.ir.run.random_state import RandomState


@dataclass(frozen=True)
class ControllerState:
    """What the controller has of a driver, while the workers have their part: it is taken, and put in place.

    ``mementos`` put back what it knows of the workers. ``stepped`` has the numbers of the optimizers that had made a step,
    ``options`` the options of each optimizer, by its number.
    """

    mementos: Sequence[Callable[[], None]]
    stepped: frozenset[int]
    options: Mapping[int, list[dict[str, Any]]]
    scaler: dict[str, Any] | None
    random: RandomState

    @classmethod
    def current(
        cls, commands: DriverCommands, optimizers: Iterable[PipelineOptimizer], scaler: PipelineGradScaler | None
    ) -> "ControllerState":
        """The state as it is now. No step may be running."""
        all_optimizers = list(optimizers)
        return cls(
            [commands.memento(), commands.nonfinite.memento(), *(each.memento() for each in all_optimizers)],
            frozenset(each.number for each in all_optimizers if each.stepped),
            {each.number: each.named_groups() for each in all_optimizers},
            None if scaler is None else scaler.state_dict(),
            RandomState.current(),
        )

    def put_back(self) -> None:
        """Have it again when the workers have all again that they had."""
        for put_back in self.mementos:
            put_back()
        self.random.restore()

    def restore(
        self, commands: DriverCommands, optimizers: Iterable[PipelineOptimizer], scaler: PipelineGradScaler | None
    ) -> None:
        """Go back to it when the workers have the parameters and states that they had. Gradients are dropped."""
        self.put_back()
        commands.begin_update()
        for optimizer in optimizers:
            if optimizer.number in self.options:
                optimizer.take_options(self.options[optimizer.number])
            optimizer.stepped = optimizer.number in self.stepped
        if scaler is not None:
            scaler.begin_again(self.scaler)


def exchange_of_states(moves: Iterable[tuple[int, int, int]]) -> ExchangeProgram:
    """The program that moves copies of states. A move has the worker that a copy is of, who has it, and to whom it goes."""
    return exchange("states", Payload.STATE, moves)


@dataclass(frozen=True)
class MemoryPoint:
    """A point in the memory of the workers, made by `protect`: each has a copy of its own state and of a neighbour's.

    ``values`` and ``states`` are plain values: those that were given, and the states of ``objects``. ``stages`` has the stages
    that each worker had, ``holders`` the workers with a copy of its state, and ``starts`` which process of each those are:
    another process has no copies. If ``divided``, no replica of the pipeline has the whole state of the optimizers.
    """

    number: int
    values: Mapping[str, Any]
    states: Mapping[str, Any]
    extra: Mapping[str, Any]
    objects: Mapping[str, Any]
    stages: Mapping[int, Collection[str]]
    holders: Mapping[int, Sequence[int]]
    starts: Sequence[int]
    divided: bool
    state: ControllerState

    def left(self, starts: Sequence[int]) -> "MemoryPoint":
        """What is left of it, if these are the processes of the workers now."""
        return replace(
            self,
            holders={
                worker: [each for each in holders if starts[each] == self.starts[each]]
                for worker, holders in self.holders.items()
            },
        )

    def gone(self) -> set[int]:
        """The workers of whose state there is no copy, and which have something that no other replica has."""
        lacking = {worker for worker, holders in self.holders.items() if not holders}
        kept = {stage for worker in self.stages.keys() - lacking for stage in self.stages[worker]}
        return {worker for worker in lacking if self.divided or not kept.issuperset(self.stages[worker])}

    def sources(self, worker: int, stages: Iterable[str]) -> list[int]:
        """The workers from whose copies a worker takes the state of these stages: its own, and those that it has, if it can."""
        found: list[int] = []
        for stage in stages:
            had = [each for each, its in self.stages.items() if stage in its and self.holders[each]]
            had.sort(key=lambda each: (each != worker, worker not in self.holders[each]))
            found += had if self.divided else had[:1]
        return list(dict.fromkeys(found))

    def moves(self, sources: Mapping[int, Iterable[int]]) -> list[tuple[int, int, int]]:
        """What is moved so that each worker has the copies that it takes, and each of these copies is on two workers."""
        workers = list(sources)
        has = {(of, worker) for of, holders in self.holders.items() for worker in holders if worker in sources}
        taken = {(of, worker) for worker, own in sources.items() for of in own}
        for of in {of for of, _ in taken}:
            there = [worker for worker in workers if (of, worker) in has | taken]
            if len(there) == 1 < len(workers):
                taken.add((of, workers[(workers.index(there[0]) + 1) % len(workers)]))
        return [(of, self.holders[of][0], worker) for of, worker in sorted(taken - has)]

    def moved(
        self, moves: Iterable[tuple[int, int, int]], workers: Collection[int], starts: Sequence[int]
    ) -> "MemoryPoint":
        """The point when that was done: these workers are left, and have copies."""
        holders = {of: [each for each in holders if each in workers] for of, holders in self.holders.items()}
        for of, _, to in moves:
            holders[of] = [*holders[of], to]
        return replace(self, holders=holders, starts=tuple(starts))

    def bodies(
        self, sources: Mapping[int, Sequence[int]], moves: Iterable[tuple[int, int, int]]
    ) -> dict[int, TakeKept]:
        """The message for each worker that goes back to this point, or has a copy that another one takes."""
        program = exchange_of_states(moves)
        senders = [worker for worker in range(program.workers) if program.order_of(worker)]
        return {
            worker: TakeKept(self.number, program.order_of(worker), tuple(sources.get(worker, ())))
            for worker in dict.fromkeys([*sources, *senders])
        }


@dataclass(frozen=True)
class DiskPoint:
    """A checkpoint that was saved or loaded. ``objects`` are those whose states are in it, by their names in `load`."""

    path: str
    objects: Mapping[str, Any]
    state: ControllerState
    is_whole: bool = True  # or it has a part of the model, and the rest is as it was first

    @property
    def optimizers(self) -> frozenset[int]:
        """The numbers of the optimizers whose state is in the checkpoint."""
        return frozenset(each.number for each in self.objects.values() if isinstance(each, PipelineOptimizer))

    @property
    def lacks(self) -> frozenset[int]:
        """The numbers of optimizers that had made steps, but have no state in the checkpoint: a run cannot go on from it."""
        return self.state.stepped - self.optimizers
