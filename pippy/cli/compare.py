"""`pippy compare`: every schedule for the same workers, micro-batches and costs, the fastest first."""

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import click

from pippy.cli.schedule import costs_of, share, with_costs, with_sizes
from pippy.cli.show import count_for_call, given_pipe, made_inputs, parsed
from pippy.ir.base.readable import bytes_text
from pippy.ir.show.tables import text_table

if TYPE_CHECKING:
    from pippy.drivers.plan import Costs, Program
    from pippy.drivers.plan.cost.held_bytes import PipeBytes
    from pippy.drivers.plan.orders.registry import RegisteredSchedule
    from pippy.ir.pipe import Pipe

SLOW = (
    5000  # with more micro-batches on all workers than this, the figures of each schedule are said when they are known
)
SEARCHED_BY_COMMAND = 1000  # with more computations than this, the list scheduler takes many seconds


@click.command(no_args_is_help=True, short_help="Compare all schedules.")
@with_sizes
@with_costs
@click.option(
    "--memory", metavar="TARGET", help="Also what workers hold of this model, which is cut for each schedule."
)
@click.option(
    "--example",
    "inputs",
    multiple=True,
    metavar="[NAME=]DTYPE[SIZES]",
    help="An input of its mini-batch, the target too.",
)
@click.option("--loss", metavar="NAME", help="Its loss of (output, target): MSELoss of torch, or model.py:loss.")
def compare(
    workers: int,
    chunks: int,
    stages_per_worker: int | None,
    memory: str | None,
    inputs: tuple[str, ...],
    loss: str | None,
    **costs: Any,
) -> None:
    """Compare all schedules for the same model: how long they take, how long workers idle, how much they hold.

    \b
    makespan   from the first forward to the end of the last backward
    bubble     the share of that time in which workers idle
    peak       the most micro-batches that a worker holds, in units of all of its stages
    sends      the number of values that are sent between workers
    steps      the most computations of a worker
    memory     the bytes of the worker that holds most, without the state of an optimizer, if --memory names a model

    A single cost is for all stages of a worker together, so schedules with different numbers of stages run the same
    model. Without -v, each schedule gets the fewest stages that make sense for it: two on each worker for those that
    interleave.

    \b
    Examples:
      pippy compare -p 4 -m 16
      pippy compare -p 4 -m 16 --forward 1 --input 1.2 --weight 0.8 --comm 0.1
      pippy compare -p 2 -m 8 --forward 1,2,2,1
      pippy compare -p 2 -m 8 --memory model.py:Net --loss MSELoss --example 'float32[64,8]' --example 'float32[64,1]'
    """
    from pippy.drivers.plan.language.errors import ScheduleError
    from pippy.drivers.plan.orders.registry import REGISTRY

    priced = costs_of(**costs)
    peaks = None if memory is None else ModelPeaks(memory, loss, inputs, chunks)
    rows, left_out, slow = [], [], workers * chunks >= SLOW
    for number, (name, entry) in enumerate(REGISTRY.items(), 1):
        if slow:
            click.echo(f"{number} of {len(REGISTRY)}: {name} ", err=True, nl=False)
        try:
            program = compared_program(name, entry, workers, chunks, stages_per_worker, priced)
            by, cells = comparison_row(program, priced)
            rows.append((by, cells if peaks is None else [*cells, peaks.text(program)]))
            done = f"makespan {cells[2]}, bubble {cells[3]}, peak {cells[4]}"
        except ScheduleError as error:
            left_out.append(f"{name}: {error}")
            done = "left out"
        if slow:
            click.echo(done, err=True)
    if rows:
        heads = [
            "schedule",
            "stages",
            "makespan",
            "bubble",
            "peak",
            "sends",
            "steps",
            *["memory"] * (peaks is not None),
        ]
        rows.sort(key=lambda each: each[0])
        click.echo(text_table(heads, [cells for _, cells in rows]))
    if left_out:
        click.echo(("\n" if rows else "") + "\n".join(["left out:", *(f"  {line}" for line in left_out)]))
    if not rows:
        raise click.ClickException("no schedule fits; the lines above say why")


def compared_program(
    name: str, entry: "RegisteredSchedule", workers: int, chunks: int, stages_per_worker: int | None, costs: "Costs"
) -> "Program":
    """The program of a schedule. Raises an error if there is none to compare."""
    from pippy.drivers.plan import make_schedule
    from pippy.drivers.plan.language.errors import ArgumentError

    if not entry.training:
        raise ArgumentError("it does not train")
    each = stages_per_worker or _stages(entry, workers, costs)
    if name != "list":
        return make_schedule(name, workers=workers, chunks=chunks, stages_per_worker=each)
    if 3 * workers * chunks * each > SEARCHED_BY_COMMAND:
        raise ArgumentError(f"a search over so many computations takes long; ask for it: pippy schedule {name} …")
    return make_schedule(name, workers=workers, chunks=chunks, stages_per_worker=each, costs=costs)


def _stages(entry: "RegisteredSchedule", workers: int, costs: "Costs") -> int:
    """The number of stages on each worker: as many as there are costs for, or else as few as make sense."""
    for given in (costs.forward, costs.backward_input, costs.backward_weight, costs.backward):
        if isinstance(given, list):
            return max(1, len(given) // workers)
    return 2 if entry.placement == "looped" else entry.stages_per_worker


def comparison_row(program: "Program", costs: "Costs") -> tuple[tuple[float, float], list[str]]:
    """What to sort by, and the cells."""
    from pippy.drivers.plan import add_communication, simulate_with
    from pippy.drivers.plan.language.instructions import Send

    lowered = add_communication(program)
    result = simulate_with(lowered, costs)
    sends = sum(isinstance(each, Send) for order in lowered.orders for each in order)
    peak = max(live / len(program.placement.stages_of(worker)) for worker, live in enumerate(program.peak_live))
    makespan = float(result.makespan)
    return (makespan, peak), [
        program.schedule,
        str(program.stages),
        f"{makespan:g}",
        share(sum(result.idle), result.makespan * program.workers),
        f"{peak:g}",
        str(sends),
        str(max(map(len, program.computations))),
    ]


class ModelPeaks:
    """The most that a worker holds when a model runs under a schedule. The model is cut into as many stages as that has."""

    def __init__(self, target: str, loss: str | None, inputs: Sequence[str], chunks: int) -> None:
        self.target, self.loss, self.chunks = target, loss, chunks
        self.args, self.kwargs = made_inputs([parsed(each) for each in inputs])
        if not inputs:
            raise click.UsageError(
                "--memory counts for the inputs of a mini-batch; give them, the target included: --example 'float32[32,16]'"
            )

    @cache  # noqa: B019
    def of_stages(self, stages: int) -> "tuple[Pipe, PipeBytes]":
        """The model in so many stages, and their bytes."""
        pipe = given_pipe(self.target, {}, (), stages, False, self.loss, None, self.args, self.kwargs)
        return pipe, count_for_call(pipe, self.chunks, self.args, self.kwargs)

    def text(self, program: "Program") -> str:
        """The bytes of the worker that holds most."""
        from pippy.drivers.lowering.lower import lower
        from pippy.drivers.plan.cost.held_bytes import peak_bytes

        pipe, sizes = self.of_stages(program.stages)
        return bytes_text(max(peak_bytes(lower(pipe, program).program, sizes)))
