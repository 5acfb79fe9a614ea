"""The commands about schedules.

`pippy schedule` shows one schedule as a grid with its figures, and writes it to files; `pippy validate` proves programs;
`pippy compare` has a line for every schedule.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache
from math import isfinite, nan
from typing import TYPE_CHECKING, Any

import click

from pippy.cli.problems import check_can_be_written, with_options, write
from pippy.cli.show import Target, count_for_call
from pippy.ir.base.readable import bytes_text, count_with_noun, near_names, text_table

if TYPE_CHECKING:
    from pippy.drivers.plan import Costs, Program, Simulation, Timeline
    from pippy.drivers.plan.cost.held_bytes import PipeBytes
    from pippy.drivers.plan.orders.registry import RegisteredSchedule
    from pippy.ir.pipe import Pipe


# The options for sizes and costs, which the commands about schedules share.


class CostOption(click.ParamType):
    """A number, or one for each stage, with commas between them."""

    name = "cost"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number, or the list of numbers."""
        if not isinstance(value, str):
            return value
        try:
            costs = [float(each) for each in value.split(",")]
        except ValueError:
            costs = [nan]
        if not all(isfinite(each) and each >= 0 for each in costs):
            self.fail(f"{value!r} is no cost; give a number of at least 0, or one for each stage: 1,2.5,1", param, ctx)
        return costs if "," in value else costs[0]


OTHER_NAMES = {"gpipe": "fill_drain", "interleaved": "interleaved_1f1b"}  # as papers call them, without punctuation


class ScheduleName(click.ParamType):
    """The name of a schedule, in any case and with any punctuation."""

    name = "schedule"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The name as the registry has it."""
        from pippy.drivers.plan.orders.registry import REGISTRY

        known = OTHER_NAMES | {plain(name): name for name in REGISTRY}
        if plain(value) in known:
            return known[plain(value)]
        near = near_names(plain(value), known, cutoff=0.6)
        near += [name for name in known if plain(value) and plain(value) in name and name not in near]
        hint = (
            f"Did you mean {' or '.join(known[name] for name in near)}?"
            if near
            else f"Take one of {', '.join(REGISTRY)}."
        )
        return self.fail(f"there is no schedule {value!r}. {hint}", param, ctx)


def plain(name: str) -> str:
    """A name without its punctuation.

    >>> plain("ZB-H1")
    'zbh1'
    """
    return re.sub(r"[^a-z0-9]", "", name.lower())


def with_sizes(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options for the numbers of workers, chunks and stages."""
    return with_options(
        command,
        click.option("-p", "--workers", type=click.IntRange(1), required=True, help="How many workers."),
        click.option("-m", "--chunks", type=click.IntRange(1), required=True, help="How many micro-batches."),
        click.option("-v", "--stages-per-worker", type=click.IntRange(1), help="How many stages each worker holds."),
    )


def with_costs(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options for the costs of computations and transfers. A single cost is for all stages of a worker together."""
    stage = "for a worker's stages together, or 1,2,… for each stage"
    return with_options(
        command,
        click.option("--forward", type=CostOption(), default=1.0, help=f"Cost of a forward, {stage}.  [1]"),
        click.option(
            "--input", type=CostOption(), default=1.0, help="Of the half of a backward that others wait for.  [1]"
        ),
        click.option("--weight", type=CostOption(), default=1.0, help="Of the half for the weights.  [1]"),
        click.option("--backward", type=CostOption(), help="Of a whole backward.  [input + weight]"),
        click.option("--comm", type=float, default=0.0, help="Time from worker to worker.  [0]"),
    )


def costs_of(forward: Any, input: Any, weight: Any, backward: Any, comm: float) -> "Costs":
    """The costs from the options.

    >>> costs_of(1.0, 1.0, 2.0, None, 0.5).latency
    0.5
    """
    from pippy.drivers.plan import Costs

    return Costs(forward=forward, backward_input=input, backward_weight=weight, backward=backward, latency=comm)


def share(part: Any, whole: Any) -> str:
    """A share in per cent.

    >>> share(1, 3), share(0, 0)
    ('33.3%', '0.0%')
    """
    return f"{100 * float(part) / float(whole) if whole else 0:.1f}%"


CHECKPOINT_MODES = ["always", "except_last", "never"]  # those of drivers/plan/passes/rewrites.py
WIDEST_GRID = 320  # columns; beyond that nobody reads a grid


@click.command(no_args_is_help=True, short_help="Draw a schedule, with its figures.")
@click.argument("name", type=ScheduleName())
@with_sizes
@click.option("--placement", type=click.Choice(["linear", "looped", "v"]), help="How stages are dealt to workers.")
@click.option("--memory", type=click.IntRange(1), help="Of list: the most micro-batches that a worker may hold.")
@click.option(
    "--checkpoint", type=click.Choice(CHECKPOINT_MODES), help="What keeps its inputs only, and is computed again (R)."
)
@click.option("--slices", type=click.IntRange(1), default=1, help="Into how many slices sequences are cut.")
@with_costs
@click.option("--step", type=click.FloatRange(0, min_open=True), help="The time that a column of the grid stands for.")
@click.option("--svg", type=click.Path(), help="Write the timeline as a picture to this file.")
@click.option("--trace", type=click.Path(), help="Write it for ui.perfetto.dev or chrome://tracing.")
@click.option("--program", type=click.Path(), help="Write the program, which `pippy validate` reads.")
def schedule(
    name: str,
    workers: int,
    chunks: int,
    stages_per_worker: int | None,
    placement: str | None,
    memory: int | None,
    checkpoint: str | None,
    slices: int,
    step: float | None,
    svg: str | None,
    trace: str | None,
    program: str | None,
    **costs: Any,
) -> None:
    """Draw a schedule, and print how long it takes, how long workers idle, and how much they hold.

    NAME is 1f1b, eager_1f1b, fill_drain, interleaved_1f1b, looped_bfs, zb_h1, zb_h2, zb_v, v_half, v_min, dualpipe_v,
    forward_only or list, in any case and with any punctuation.

    \b
    Examples:
      pippy schedule 1F1B -p 4 -m 8
      pippy schedule interleaved-1f1b -p 4 -m 8 -v 2 --comm 0.25
      pippy schedule 1f1b -p 3 -m 6 --forward 1,3,2 --svg 1f1b.svg
      pippy schedule list -p 4 -m 8 --memory 3 --program mine.txt
      pippy schedule 1f1b -p 4 -m 2 --slices 4
    """
    from pippy.drivers.plan import make_schedule, render_svg, render_trace, simulate_with

    for output in filter(None, (svg, trace, program)):
        check_can_be_written(output)
    priced = costs_of(**costs)
    options: dict[str, Any] = {"memory": memory} if memory is not None else {}
    made_program = make_schedule(
        name,
        workers=workers,
        chunks=chunks,
        stages_per_worker=stages_per_worker,
        placement=placement,
        checkpoint=checkpoint or "never",
        slices=slices,
        **options | ({"costs": priced} if name == "list" else {}),
    )
    result = simulate_with(made_program, priced)
    click.echo(head(made_program))
    click.echo(f"\n{grid(result.timeline, step)}\n")
    click.echo(figures(made_program, priced, result))
    for path, text in (
        (svg, lambda: render_svg(result.timeline)),
        (trace, lambda: render_trace(result.timeline)),
        (program, lambda: str(made_program)),
    ):
        if path is not None:
            write(path, text())


def head(program: "Program") -> str:
    """One line about a program.

    >>> from pippy.drivers.plan import make_schedule
    >>> head(make_schedule("zb_v", workers=2, chunks=4))
    'zb_v: 2 workers, 4 stages (placement 0 1 1 0), 4 micro-batches'
    """
    workers, stages = count_with_noun(program.workers, "worker"), count_with_noun(program.stages, "stage")
    placement = f" (placement {program.placement})" if program.stages != program.workers else ""
    slices = f" ({count_with_noun(program.rows, 'row')} in {program.slices} slices)" * (program.slices > 1)
    return (
        f"{program.schedule}: {workers}, {stages}{placement}, {count_with_noun(program.chunks, 'micro-batch')}{slices}"
    )


def grid(timeline: "Timeline", step: float | None = None) -> str:
    """The grid, and the time of a column if it is not 1.

    If the costs have no simple common divisor, a column is half of the shortest computation.
    """
    from pippy.drivers.plan import render_text
    from pippy.drivers.plan.drawings import common_step

    column = common_step(timeline) if step is None else Fraction(step)
    if step is None and timeline.makespan > WIDEST_GRID * column:
        shortest = min((span.duration for spans in timeline.spans for span in spans if span.duration), default=column)
        column = max(column, Fraction(shortest) / 2)
        if timeline.makespan > WIDEST_GRID * column:
            return "The grid is too wide to be read; --svg or --trace draws it, and --step gives it longer columns."
    said = "" if column == 1 else f"\na column is {float(column):.4g}"
    return render_text(timeline, column) + said


def figures(program: "Program", costs: "Costs", result: "Simulation") -> str:
    """The results of the simulation: for all workers together, and for each of them."""
    rows = [
        [
            f"worker {worker}",
            f"{float(result.makespan - idle):g}",
            f"{float(idle):g}",
            share(idle, result.makespan),
            str(peak),
        ]
        for worker, (idle, peak) in enumerate(zip(result.idle, result.peak_live))
    ]
    bubble = share(sum(result.idle), result.makespan * program.workers)
    return f"makespan {float(result.makespan):g}, bubble {bubble}\n\n" + text_table(
        ["", "busy", "idle", "bubble", "peak"], rows
    )


# `pippy validate`: proves that programs can run, or says what is wrong with them.


SHOWN_FAULTS = 10


@click.command("validate", no_args_is_help=True, short_help="Prove that programs can run.")
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, allow_dash=True))
@click.option("--buffer", type=click.IntRange(1), help="Validate for channels that hold this many values.")
@click.option("--mark", is_flag=True, help="Also print the program, with its faults marked.")
def validate_files(files: tuple[str, ...], buffer: int | None, mark: bool) -> None:
    """Prove that the programs in FILES can run: nothing is missing, no workers wait for one another in a circle, and the
    memory limit holds.

    `pippy schedule --program` and `Program.save` write such files; - is the standard input. The exit status is 1 if a
    program cannot run.

    \b
    Examples:
      pippy schedule 1f1b -p 4 -m 8 --program mine.txt && pippy validate mine.txt
      pippy validate lowered.txt --buffer 2
    """
    wrong = [name for name in files if not _is_right(name, buffer, mark)]
    if wrong:
        raise click.exceptions.Exit(1)


def _is_right(name: str, buffer: int | None, mark: bool) -> bool:
    from pippy.drivers.plan import parse_program
    from pippy.drivers.plan import validate as prove
    from pippy.drivers.plan.language.errors import ParseError, ProgramError, ScheduleError

    shown = "standard input" if name == "-" else name
    try:
        program = parse_program(_text(name))
        prove(program, buffer)
    except ParseError as error:
        place = f"{shown}:{error.line}:{error.column}"
        click.echo(f"{place}: {str(error).partition(': ')[2]}", err=True)
        return False
    except ProgramError as error:
        click.echo(f"{shown}: {error if mark else _first_faults(error)}", err=True)
        return False
    except (ScheduleError, OSError, UnicodeDecodeError) as error:
        click.echo(f"{shown}: {error}", err=True)
        return False
    click.echo(f"{shown}: OK: {_described(program)}")
    return True


def _text(name: str) -> str:
    with click.open_file(name, encoding="utf-8") as file:
        return str(file.read())


def _first_faults(error: Exception) -> str:
    faults = getattr(error, "faults", ())
    lines = [str(error).partition("\n")[0], *(f"- {fault}" for fault in faults[:SHOWN_FAULTS])]
    return "\n".join(lines + ([f"… and {len(faults) - SHOWN_FAULTS} more"] if len(faults) > SHOWN_FAULTS else []))


def _described(program: "Program") -> str:
    count = sum(map(len, program.orders))
    communication = "communication in it" if program.lowered else "communication implied"
    return f"{head(program)}, {count} instructions, {communication}"


# `pippy compare`: every schedule for the same workers, micro-batches and costs, the fastest first.


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
        self.target, self.chunks = Target(target, inputs, loss=loss), chunks
        if not inputs:
            raise click.UsageError(
                "--memory counts for the inputs of a mini-batch; give them, the target included: --example 'float32[32,16]'"
            )

    @cache  # noqa: B019
    def of_stages(self, stages: int) -> "tuple[Pipe, PipeBytes]":
        """The model in so many stages, and their bytes."""
        pipe = replace(self.target, num_stages=stages).pipe()
        return pipe, count_for_call(pipe, self.chunks, *self.target.example)

    def text(self, program: "Program") -> str:
        """The bytes of the worker that holds most."""
        from pippy.drivers.lowering.lower import lower
        from pippy.drivers.plan.cost.held_bytes import peak_bytes

        pipe, sizes = self.of_stages(program.stages)
        return bytes_text(max(peak_bytes(lower(pipe, program).program, sizes)))
