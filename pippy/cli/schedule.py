"""`pippy schedule`: shows one schedule as a grid with its figures, and writes it to files."""

from fractions import Fraction
from typing import TYPE_CHECKING, Any

import click

from pippy.cli.costs import ScheduleName, costs_of, share, with_costs, with_sizes
from pippy.cli.problems import check_can_be_written, write
from pippy.ir.base.readable import count_with_noun
from pippy.ir.show.tables import text_table

if TYPE_CHECKING:
    from pippy.drivers.plan import Costs, Program, Simulation, Timeline

CHECKPOINT_MODES = ["always", "except_last", "never"]  # those of drivers/plan/passes/recompute.py
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
    from pippy.drivers.plan.drawings.text import common_step

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
