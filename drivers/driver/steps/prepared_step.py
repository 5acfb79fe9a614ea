"""A step before it is sent: the call, and a message for each worker. They are made from plain values; nothing is sent here.

args, kwargs ──▶ StepRequest ─┐
program, as sent ───────────┼──▶ prepare ──▶ a Step for each worker ──▶ DriverCommands.post_step
weights, hooks, flags ──────┘
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pippy.drivers.batch.columns import Column
from pippy.drivers.batch.division import Division
from pippy.drivers.driver.data import SentDatasets
from pippy.drivers.driver.steps.graphs import GraphPart, StepPlan
from pippy.drivers.driver.steps.programs import SentProgram
from pippy.drivers.driver.steps.results import Results, values_to_return
from pippy.drivers.protocol.steps import GraphStep, Step, StepReturning
from pippy.drivers.session.driver_commands import Flags, Hooks
from pippy.ir.base.surroundings import Surroundings


@dataclass(frozen=True)
class StepRequest:
    """What a step is asked to do: by which graphs of the model its micro-batches go, whether it leaves gradients, and what it
    gives beside the loss.

    ``division`` is the mini-batch as the first of these graphs takes it. ``columns`` are the parts of the rows that workers
    load, ``surroundings`` what was in force around the call, and ``hooks`` the hooks of parameters then. If there is a
    ``scale``, the loss is multiplied by it for the backward.
    """

    plan: StepPlan
    division: Division
    columns: Sequence[Column]
    trains: bool
    outputs: bool | None
    surroundings: Surroundings
    hooks: Hooks
    scale: float | None

    def message(self, sent: SentProgram, weights: tuple[float, ...], reduce: bool) -> Step:
        """The message to all workers. `prepare` adds what is for one worker alone."""
        unsure = self.plan.unsure
        return Step(sent.number, self.trains, self.division, weights, reduce=reduce, scale=self.scale, unsure=unsure)


def prepare(
    call: StepRequest,
    message: Step,
    sent: Sequence[SentProgram],
    results: Results,
    ranks: Sequence[int],
    datasets: SentDatasets,
    told: tuple[Flags, Hooks] | None,
) -> dict[int, Step]:
    """The message for each of the workers ``ranks``: its part of the rows, and flags and hooks, if they have changed.

    ``sent`` has the program of each part of the step.
    """
    plan, (flags, hooks) = call.plan, told or ({}, {})
    weigher, workers = _weigher(plan.parts[0], sent[0], results, ranks), sent[0].lowered.program.placement.workers
    first, *others = [_part(call, part, its, results, ranks, datasets, weigher) for part, its in zip(plan.parts, sent)]
    steps: dict[int, Step] = {}
    for at, rank in enumerate(ranks):
        own = first[rank]
        step = replace(message, inputs=own.inputs, weights=own.weights, flags=flags.get(rank), hooks=hooks.get(rank))
        if at % workers == weigher:
            step = replace(step, weighed=True)
        steps[rank] = step if own.returns is None else StepReturning(**vars(step), returns=own.returns)
    of_graphs = {part.graph.number: part.graph.flags() for part in plan.parts if part.graph.number}
    if not of_graphs:
        return steps
    return {
        rank: replace(
            step,
            then=tuple(each[rank] for each in others),
            graph_flags={number: its[rank] for number, its in of_graphs.items()},
        )
        for rank, step in steps.items()
    }


def _part(
    call: StepRequest,
    part: GraphPart,
    sent: SentProgram,
    results: Results,
    ranks: Sequence[int],
    datasets: SentDatasets,
    weigher: int | None,
) -> Mapping[int, GraphStep]:
    """What each worker is told of the micro-batches that go by one graph."""
    placed, plan = part.graph.placed, call.plan
    inputs = plan.inputs(part, call.division if part.graph is plan.graph else None)
    divisions = datasets.divisions(inputs, sent.lowered, ranks, weigher)
    weights = results.weights[part.first : part.end] if len(plan.parts) > 1 else results.weights
    returned = values_to_return(placed.compiled, call.outputs)
    returns: Mapping[int, Any] = {} if returned is None else placed.returns(returned)
    return {rank: GraphStep(sent.number, divisions[rank], weights, returns.get(rank)) for rank in ranks}


def _weigher(part: GraphPart, sent: SentProgram, results: Results, ranks: Sequence[int]) -> int | None:
    """The place in a pipeline of the worker that computes the weights of the losses; None if they are known here."""
    placed = part.graph.placed
    _, loss_call = placed.loss_call(sent.lowered) if results.weighs_elsewhere else (None, None)
    return None if loss_call is None else ranks.index(placed.worker_of(loss_call.call))
