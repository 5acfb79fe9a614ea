"""Sends trials to the workers of a driver: a few rows in some micro-batches, or the step itself. Nothing of them stays."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pippy.drivers.batch.division import Division
from pippy.drivers.compare.trial_notes import TrialNotes
from pippy.drivers.driver.check.differences import ComparedKey
from pippy.drivers.driver.data.sent_datasets import SentDatasets
from pippy.drivers.driver.steps.asked_outputs import values_to_return
from pippy.drivers.driver.steps.programs import DriverPrograms
from pippy.drivers.placement.placed_pipe import PlacedPipe
from pippy.drivers.protocol.state import TensorLocation
from pippy.drivers.protocol.steps import RunTrial, Step, StepResult, StepReturning, TrialResult
from pippy.drivers.session.driver_commands import DriverCommands, Hooks
from pippy.ir.base.names import LOSS, named_state
from pippy.ir.run.keyed_draws import RandomStep
from pippy.ir.run.stage_backward import loss_inside

BufferPlaces = Mapping[str, Collection[TensorLocation]]


@dataclass(frozen=True)
class Tried:
    """The numbers of a trial: digests of gradients and of changed buffers, by the user's names, and the losses.

    ``weights`` are those of the losses of micro-batches. ``disagreeing`` are the buffers of which micro-batches make different
    things, and ``places`` says where each buffer is. ``asked`` is what the model asked of numbers.
    """

    losses: tuple[float, ...]
    weights: tuple[float, ...]
    numbers: Mapping[ComparedKey, Any]
    places: BufferPlaces = field(default_factory=dict)
    disagreeing: frozenset[str] = frozenset()
    asked: TrialNotes = field(default_factory=TrialNotes)

    @property
    def loss(self) -> float:
        """The loss of all rows. A micro-batch of weight 0 does not count, even if its loss is not finite."""
        return sum(weight * loss for weight, loss in zip(self.weights, self.losses) if weight)


@dataclass(frozen=True)
class HowTried:
    """How a trial is run. ``number`` keys random numbers; the other fields are those of `RunTrial`."""

    watch: bool = False
    single_loss: bool = False
    wide: bool = False
    number: int = 0
    written: frozenset[str] = frozenset()
    follow: frozenset[TensorLocation] = frozenset()


class TrialSteps:
    """The trials of one driver. ``limit`` is how many seconds each may take.

    With ``buffers``, the buffers that forward changes are compared, too. ``hooks`` are those of parameters now.
    """

    def __init__(
        self,
        placed: PlacedPipe,
        programs: DriverPrograms,
        commands: DriverCommands,
        datasets: SentDatasets,
        limit: float | None,
        device_type: str,
        buffers: bool,
    ) -> None:
        self.placed, self.programs, self.commands, self.datasets = placed, programs, commands, datasets
        self.limit, self.device_type, self.buffers = limit, device_type, buffers
        self.hooks: Hooks = {}

    @property
    def calls_hooks(self) -> bool:
        """Whether trials of a few rows call the hooks of parameters: not with replicas, of which they run one."""
        return len(self.placed.replicas) == 1

    def run(self, division: Division, weights: Sequence[float], how: HowTried) -> Tried:
        """Run a trial with the rows of ``division``, on the workers of the first replica."""
        sent = self.programs.for_trial(division.row_chunks, how.single_loss, division.slices)
        ranks = list(dict.fromkeys(self.placed.ranks[stage] for stage in _first_stages(sent.lowered.program.placement)))
        name, call = self.placed.loss_call(sent.lowered)
        divisions = self.datasets.divisions(division, sent.lowered, ranks, None)
        flags, returned = self.placed.flags(), values_to_return(self.placed.compiled, False)
        assert returned is not None
        returns = self.placed.returns(returned)
        steps = {
            rank: StepReturning(
                sent.number,
                True,
                divisions[rank],
                tuple(weights),
                flags[rank],
                hooks=self.hooks.get(rank) if self.calls_hooks else None,
                reduce=self.calls_hooks,
                random=RandomStep(0, how.number),
                alike=True,
                watch=how.watch,
                returns=returns[rank],
            )
            for rank in ranks
        }
        answers = self._answers(steps, how, few=True)
        losses = _losses(answers[self.placed.worker_of(call.call)].result.values[name], self.placed.compiled.loss.seed)  # type: ignore[union-attr]
        summed = torch.stack([loss.reshape(()) * weight for loss, weight in zip(losses, weights) if weight]).sum()
        numbers, places, disagreeing = self._numbers(answers, summed=not self.calls_hooks)
        return Tried(
            tuple(float(each) for each in losses),
            tuple(weights),
            {("loss", ""): summed, **numbers},
            places,
            disagreeing,
            TrialNotes(
                tuple(dict.fromkeys(each for rank in ranks for each in answers[rank].result.asked.questions)),
                tuple(each for rank in ranks for each in answers[rank].result.asked.chosen),
            ),
        )

    def of_step(
        self, steps: Mapping[int, Step], written: frozenset[str], follow: Collection[TensorLocation]
    ) -> tuple[dict[int, StepResult], dict[ComparedKey, Any], BufferPlaces, frozenset[str]]:
        """Run the messages of a step as a trial: the answers; digests; where buffers are, and about which micro-batches
        disagree."""
        answers = self._answers(steps, HowTried(written=written, follow=frozenset(follow)), few=False)
        results = {rank: answer.result for rank, answer in answers.items()}
        return results, *self._numbers(answers, summed=False)

    def _answers(self, steps: Mapping[int, Step], how: HowTried, few: bool) -> dict[int, TrialResult]:
        written = self.placed.for_all_copies(dict.fromkeys(how.written))
        bodies = {
            rank: RunTrial(step, few, how.wide, tuple(written.get(rank, ())), tuple(how.follow))
            for rank, step in steps.items()
        }
        return self.commands.call(bodies, self.limit)

    def _numbers(
        self, answers: Mapping[int, TrialResult], summed: bool
    ) -> tuple[dict[ComparedKey, Any], BufferPlaces, frozenset[str]]:
        """The gradients and buffers by the user's names; where buffers are, and about which micro-batches disagree. If workers
        did not add up the gradients of copies, they are ``summed`` here: digests are linear."""
        names, owned = self._names(), {} if summed else self._names(owned=True)
        numbers: dict[ComparedKey, Any] = {}
        places: dict[str, list[TensorLocation]] = {}
        for rank, answer in answers.items():
            for place, gradient in answer.gradients.items():
                name = self._name(names, rank, place)
                key = ("gradient", name)
                if key in numbers and summed:
                    numbers[key] = numbers[key] + gradient
                elif key not in numbers and (summed or (rank, place) in owned or (rank, place) not in names):
                    numbers[key] = gradient
            for place, buffer in answer.buffers.items() if self.buffers else ():
                name = self._name(names, rank, place)
                numbers.setdefault(("buffer", name), buffer)
                places.setdefault(name, []).append(place)
        disagreeing = frozenset(
            self._name(names, rank, place) for rank, answer in answers.items() for place in answer.disagreeing
        )
        return numbers, places, disagreeing

    def _names(self, owned: bool = False) -> dict[tuple[int, TensorLocation], str]:
        """The user's name of each parameter and buffer that a worker has. With ``owned``, of those that it adds up."""
        first = {id(each): name for name, each in [*named_state(self.programs.pipe)][::-1]}
        where = self.placed.owned if owned else self.placed.locations
        return {copy: name for name in first.values() for copy in where(name)}

    def _name(self, names: Mapping[tuple[int, TensorLocation], str], rank: int, place: TensorLocation) -> str:
        found = names.get((rank, place))
        if found is not None:
            return found
        local = f"{place.call}.{place.name}"
        return local if place.call == LOSS else self.placed.compiled.remap_qualname(local)


def _losses(packed: Any, seed: Any) -> list[torch.Tensor]:
    if isinstance(packed, torch.Tensor):
        return list(packed.unbind())
    return [each if isinstance(each, torch.Tensor) else loss_inside(seed, each) for each in packed]


def _first_stages(placement: Any) -> list[int]:
    """A stage of each worker of a pipeline, in the order of the workers."""
    return [placement.stages_of(worker)[0] for worker in range(placement.workers)]
