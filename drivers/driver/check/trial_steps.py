"""Sends trials to the workers of a driver: a few rows as one micro-batch, and as two."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pippy.drivers.batch.division import Division
from pippy.drivers.compare.trial_notes import TrialNotes
from pippy.drivers.driver.data.sent_datasets import SentDatasets
from pippy.drivers.driver.steps.asked_outputs import values_to_return
from pippy.drivers.driver.steps.programs import DriverPrograms
from pippy.drivers.placement.placed_pipe import PlacedPipe
from pippy.drivers.protocol.steps import StepReturning
from pippy.drivers.protocol.trials import ForgetTrials, Purpose, RunTrial, TrialDifference
from pippy.drivers.session.driver_commands import DriverCommands
from pippy.ir.run.keyed_draws import RandomStep
from pippy.ir.run.stage_backward import loss_inside


@dataclass(frozen=True)
class Tried:
    """The result of a trial: the losses of micro-batches, their weights, the differences, and what the model asked.

    ``is_finite`` says whether the tensors that it is compared with are finite.
    """

    losses: tuple[float, ...]
    weights: tuple[float, ...]
    dtype: torch.dtype
    differences: tuple[TrialDifference, ...]
    asked: TrialNotes
    is_finite: bool

    @property
    def loss(self) -> float:
        """The loss of all rows. A micro-batch of weight 0 does not count, even if its loss is not finite."""
        return sum(weight * loss for weight, loss in zip(self.weights, self.losses) if weight)


class TrialSteps:
    """The trials of one driver. ``limit`` is how many seconds each may take.

    With ``buffers``, the buffers that forward changes are compared, too.
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
        self._remembered = False

    def run(
        self,
        division: Division,
        weights: Sequence[float],
        purpose: Purpose,
        watch: bool = False,
        single_loss: bool = False,
        number: int = 0,
        follow: bool = False,
    ) -> Tried:
        """Run a trial with the rows of ``division``. Random numbers are keyed by ``number``.

        With ``follow``, the buffers that differ change from now on once in a step.
        """
        sent = self.programs.for_trial(division.row_chunks, single_loss, division.slices)
        ranks = list(dict.fromkeys(self.placed.ranks[stage] for stage in _first_stages(sent.lowered.program.placement)))
        name, call = self.placed.loss_call(sent.lowered)
        worker = self.placed.worker_of(call.call)
        divisions = self.datasets.divisions(division, sent.lowered, ranks, None)
        flags = self.placed.flags()
        returned = values_to_return(self.placed.compiled, False)
        assert returned is not None
        returns = self.placed.returns(returned)
        bodies = {
            rank: RunTrial(
                StepReturning(
                    sent.number,
                    True,
                    divisions[rank],
                    tuple(weights),
                    flags[rank],
                    random=RandomStep(0, number),
                    returns=returns[rank],
                ),
                purpose,
                watch,
                self.buffers and follow,
            )
            for rank in ranks
        }
        self._remembered = True
        answers = self.commands.call(bodies, self.limit)
        losses = _losses(answers[worker].values[name], self.placed.compiled.loss.seed)  # type: ignore[union-attr]
        return Tried(
            tuple(float(each) for each in losses),
            tuple(weights),
            losses[0].dtype,
            tuple(
                each for rank in ranks for each in answers[rank].differences if self.buffers or each.kind != "buffer"
            ),
            TrialNotes(
                tuple(dict.fromkeys(each for rank in ranks for each in answers[rank].asked.questions)),
                tuple(each for rank in ranks for each in answers[rank].asked.chosen),
            ),
            all(answers[rank].is_finite for rank in ranks),
        )

    def forget(self) -> None:
        """Drop what the workers hold for trials."""
        if self._remembered:
            self._remembered = False
            self.commands.call({worker: ForgetTrials() for worker in self.placed.workers})


def _losses(packed: Any, seed: Any) -> list[torch.Tensor]:
    if isinstance(packed, torch.Tensor):
        return list(packed.unbind())
    return [each if isinstance(each, torch.Tensor) else loss_inside(seed, each) for each in packed]


def _first_stages(placement: Any) -> list[int]:
    """A stage of each worker of a pipeline, in the order of the workers."""
    return [placement.stages_of(worker)[0] for worker in range(placement.workers)]
