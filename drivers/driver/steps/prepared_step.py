"""A step before it is sent: the call, and a message for each worker. They are made from plain values; nothing is sent here.

args, kwargs ──▶ StepCall ──┐
program, as sent ───────────┼──▶ prepare ──▶ a Step for each worker ──▶ DriverCommands.post_step
weights, hooks, flags ──────┘
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pippy.drivers.batch.columns import Column
from pippy.drivers.batch.division import Division
from pippy.drivers.driver.data.sent_datasets import SentDatasets
from pippy.drivers.driver.steps.asked_outputs import values_to_return
from pippy.drivers.driver.steps.programs import SentProgram
from pippy.drivers.driver.steps.results import Results
from pippy.drivers.placement.placed_pipe import PlacedPipe
from pippy.drivers.protocol.steps import Step, StepReturning
from pippy.drivers.session.driver_commands import Flags, Hooks
from pippy.ir.base.surroundings import Surroundings


@dataclass(frozen=True)
class StepCall:
    """A call of a step: its rows, whether it leaves gradients, and what it gives beside the loss.

    ``columns`` are the parts of the rows that workers load, ``surroundings`` what was in force around the call, and ``hooks``
    the hooks of parameters then. If there is a ``scale``, the loss is multiplied by it for the backward.
    """

    division: Division
    columns: Sequence[Column]
    trains: bool
    outputs: bool | None
    surroundings: Surroundings
    hooks: Hooks
    scale: float | None

    def message(self, sent: SentProgram, weights: tuple[float, ...], reduce: bool) -> Step:
        """The message to all workers. `prepare` adds what is for one worker alone."""
        return Step(sent.number, self.trains, self.division, weights, reduce=reduce, scale=self.scale)


def prepare(
    call: StepCall,
    message: Step,
    sent: SentProgram,
    results: Results,
    placed: PlacedPipe,
    ranks: Sequence[int],
    datasets: SentDatasets,
    told: tuple[Flags, Hooks] | None,
) -> dict[int, Step]:
    """The message for each of the workers ``ranks``: its part of the rows, and flags and hooks, if they have changed."""
    _, loss_call = placed.loss_call(sent.lowered) if results.weighs_elsewhere else (None, None)
    weigher = None if loss_call is None else ranks.index(placed.worker_of(loss_call.call))
    divisions = datasets.divisions(call.division, sent.lowered, ranks, weigher)
    flags, hooks = told or ({}, {})
    steps = {
        rank: replace(message, inputs=divisions[rank], flags=flags.get(rank), hooks=hooks.get(rank)) for rank in ranks
    }
    returned = values_to_return(placed.compiled, call.outputs)
    if returned is None:
        return steps
    returns = placed.returns(returned)
    return {rank: StepReturning(**vars(step), returns=returns[rank]) for rank, step in steps.items()}
