"""Sends trials to the workers of a driver: a few rows in some micro-batches, or the step itself. Nothing of them stays.

`TrialBytes` counts what they take there, before they run.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from pippy.drivers.batch.division import Division
from pippy.drivers.choice.given_limits import GivenLimits
from pippy.drivers.compare.tolerance import bytes_of_digest
from pippy.drivers.compare.trial_notes import TrialNotes
from pippy.drivers.count.optimizer_bytes import CountedOptimizer
from pippy.drivers.count.pipe_bytes import count_pipe
from pippy.drivers.driver.check.differences import ComparedKey, Numbers
from pippy.drivers.driver.check.rows import CannotCompare, TriedRows, WholeRows
from pippy.drivers.driver.data import SentDatasets
from pippy.drivers.driver.steps.programs import DriverPrograms
from pippy.drivers.driver.steps.results import values_to_return
from pippy.drivers.lowering.lower import lower
from pippy.drivers.placement.placed_pipe import PlacedPipe
from pippy.drivers.plan import make_schedule
from pippy.drivers.plan.cost.held_bytes import PipeBytes, peak_bytes
from pippy.drivers.plan.language.placement import Placement
from pippy.drivers.protocol.state import TensorLocation
from pippy.drivers.protocol.steps import RunTrial, Step, StepResult, StepReturning, TrialResult
from pippy.drivers.session.driver_commands import DriverCommands, Hooks
from pippy.ir.base.names import LOSS, first_names, named_state
from pippy.ir.pipe import Pipe, compiled_of
from pippy.ir.run.random_state import RandomStep
from pippy.ir.run.stage_backward import loss_inside

BufferPlaces = Mapping[str, Collection[TensorLocation]]


@dataclass(frozen=True)
class Tried:
    """The numbers of a trial: digests of gradients and of changed buffers, by the user's names, and the losses of a few rows.

    ``weights`` are those of the losses of micro-batches. ``disagreeing`` are the buffers of which micro-batches make different
    things, and ``places`` says where each buffer is. ``asked`` is what the model asked of numbers.
    """

    numbers: Mapping[ComparedKey, Any]
    weights: tuple[float, ...]
    places: BufferPlaces
    disagreeing: frozenset[str]
    losses: tuple[float, ...] = ()
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
        asked = [answers[rank].result.asked for rank in ranks]
        return replace(
            self._tried(answers, {("loss", ""): summed}, weights, summed=not self.calls_hooks),
            losses=tuple(float(each) for each in losses),
            asked=TrialNotes(
                tuple(dict.fromkeys(question for each in asked for question in each.questions)),
                tuple(choice for each in asked for choice in each.chosen),
            ),
        )

    def of_step(
        self,
        steps: Mapping[int, Step],
        written: frozenset[str],
        follow: Collection[TensorLocation],
        result: Callable[[Mapping[int, StepResult]], Numbers],
        weights: Sequence[float],
    ) -> Tried:
        """Run the messages of a step as a trial. ``result`` puts together what the step returns."""
        answers = self._answers(steps, HowTried(written=written, follow=frozenset(follow)), few=False)
        returned = result({rank: answer.result for rank, answer in answers.items()})
        return self._tried(answers, returned, weights, summed=False)

    def _answers(self, steps: Mapping[int, Step], how: HowTried, few: bool) -> dict[int, TrialResult]:
        written = self.placed.for_all_copies(dict.fromkeys(how.written))
        bodies = {
            rank: RunTrial(step, few, how.wide, tuple(written.get(rank, ())), tuple(how.follow))
            for rank, step in steps.items()
        }
        return self.commands.call(bodies, self.limit)

    def _tried(
        self, answers: Mapping[int, TrialResult], returned: Numbers, weights: Sequence[float], summed: bool
    ) -> Tried:
        """What was ``returned``, with the gradients and buffers by the user's names. If workers did not add up the gradients of
        copies, they are ``summed`` here: digests are linear."""
        names, owned = self._names(), {} if summed else self._names(owned=True)
        numbers: dict[ComparedKey, Any] = dict(returned)
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
        return Tried(numbers, tuple(weights), places, disagreeing)

    def _names(self, owned: bool = False) -> dict[tuple[int, TensorLocation], str]:
        """The user's name of each parameter and buffer that a worker has. With ``owned``, of those that it adds up."""
        where = self.placed.owned if owned else self.placed.locations
        return {copy: name for name in first_names(self.programs.pipe).values() for copy in where(name)}

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


class TrialBytes:
    """Counts the bytes that each worker of a pipeline holds in a trial.

    >>> from pippy.drivers.batch.divide import divide
    >>> pipe = Pipe.from_sequential(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()), torch.nn.MSELoss())
    >>> rows = divide({"input_1": torch.zeros(5, 4), "target": torch.zeros(5, 4)}, chunks=1)
    >>> counted = TrialBytes(pipe, Placement((0, 1)), torch.device("cpu"))
    >>> counted.of(rows)[0] > 4 * 80, counted.fit(rows, GivenLimits([300, 1 << 20]))
    (True, False)
    """

    def __init__(self, pipe: Pipe, placement: Placement, device: torch.device) -> None:
        self.pipe, self.placement, self.device = pipe, placement, device

    def of(self, rows: Division, optimizers: Sequence[CountedOptimizer] = ()) -> tuple[int, ...]:
        """The most bytes that each worker holds for these rows as one micro-batch. As two micro-batches they take no more."""
        return self._peaks(self._sizes(rows, optimizers))

    def _sizes(self, rows: Division, optimizers: Sequence[CountedOptimizer]) -> PipeBytes:
        return count_pipe(self.pipe, rows, self.device, True, optimizers, halves=False)

    def _peaks(self, sizes: PipeBytes) -> tuple[int, ...]:
        order = make_schedule("fill_drain", workers=self.placement.workers, chunks=1, placement=self.placement)
        return self._with_digests(peak_bytes(lower(self.pipe, order).program, sizes))

    def _with_digests(self, peaks: Sequence[int]) -> tuple[int, ...]:
        """The most bytes that workers hold, with digests of all gradients."""
        stages = [each for _, each in compiled_of(self.pipe).stages()]
        digests = [sum(bytes_of_digest(each) for each in stage.parameters() if each.requires_grad) for stage in stages]
        workers = self.placement.workers
        return tuple(
            peak + sum(digests[stage] for stage in self.placement.stages_of(worker % workers))
            for worker, peak in enumerate(peaks)
        )

    def of_witness(self, division: Division, room: float) -> int:
        """The most bytes that the plain model takes for a mini-batch in the script's process: its numbers thrice (those of the
        workers, and two copies that are put back), gradients, and what a forward keeps; if ``room`` is less, for a few rows."""
        state = sum(each.nbytes for _, each in named_state(self.pipe))
        whole = 2 * state + sum(self.of(WholeRows(division).divided(1)))
        with suppress(CannotCompare):
            return whole if whole <= room else 2 * state + sum(self.of(TriedRows(division).divided(1)))
        return whole

    def fit(self, rows: Division, limits: GivenLimits, optimizers: Sequence[CountedOptimizer] = ()) -> bool:
        """Whether no worker holds more bytes than its limit."""
        peaks = self._peaks(limits.limited(self._sizes(rows, optimizers)))
        return all(map(int.__le__, peaks, limits.of_bytes(self.placement)))

    def of_first_step(
        self, division: Division, optimizers: Sequence[CountedOptimizer], peaks: Sequence[int]
    ) -> tuple[int, ...]:
        """The most bytes that each worker holds in the check before a first step, in which it holds at most these ``peaks``: of
        a few rows, and of the step itself."""
        whole = self._with_digests(peaks)
        with suppress(CannotCompare):
            few = self.of(TriedRows(division).divided(1), optimizers) if division.is_cut else ()
            return tuple(map(max, whole, [*few, *[0] * len(whole)]))
        return whole
