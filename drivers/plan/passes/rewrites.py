"""Programs made of others: with forwards that run again, with backwards in halves, and with slices of sequences.

Adds the instruction R to any schedule: forwards keep their inputs only, and run again right before their backwards.

    never          F0 F1 F2 B0 B1 B2              all that the backwards need is kept
    always         F0 F1 F2 R0 B0 R1 B1 R2 B2     each micro-batch is computed again
    except_last    F0 F1 F2 R0 B0 R1 B1 B2        but the last of each stage, and where the backward is next in its stage:
                   F0 B0 F1 B1 F2 B2              these would hardly be held for less time

R stands before the receive of the gradients (`add_communication`), so that it is done while the worker would wait for them.

Makes of any order of micro-batches one of slices of sequences: forward slice by slice, backward from the last to the first.

                       4 micro-batches                     2 rows (0 1, 2 3) of 2 slices each
    1f1b, worker 0     F0 F1 B0 F2 B1 F3 B2 B3             F0 F1 F2 B1 F3 B0 B3 B2
          worker 1     F0 B0 F1 B1 F2 B2 F3 B3             F0 F1 B1 F2 B0 F3 B3 B2

1. The last slice of a row is the first one to go backward. So the backward of each micro-batch is that of the slice which is as
   far from the end of its row as the micro-batch is from the beginning.
2. Each stage runs ahead by the slices of a row but one: its first forward is followed at once by so many others, and then each
   forward takes the place of the one that many before it.

If the order of micro-batches works, so does that of slices. Take each forward for the one whose place it has, and each backward
for the one whose place it has: then whatever a computation needs came before it in the old order, too. A worker holds no more
than before, and besides the slices that its stages run ahead.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from pippy.drivers.plan.language.edges import Checkpoints
from pippy.drivers.plan.language.errors import ArgumentError, beginning, require
from pippy.drivers.plan.language.instructions import Compute, Op
from pippy.drivers.plan.language.program import Program

MODES = ("always", "except_last", "never")
Checkpoint = str | Mapping[int, str]


def add_recompute(program: Program, checkpoint: Checkpoint) -> Program:
    """Put an R before the backward of each micro-batch that ``checkpoint`` names: a mode, or one by stage.

    A stage that a dict does not name keeps what it computes.

    >>> from pippy.drivers.plan import make_schedule
    >>> program = make_schedule("fill_drain", workers=2, chunks=2)
    >>> [str(each) for each in add_recompute(program, {1: "except_last"}).orders[1]]
    ['F1.0', 'F1.1', 'R1.0', 'B1.0', 'B1.1']
    """
    require("program", program, Program, "make one with make_schedule, or read its text with parse_program")
    modes = modes_of(checkpoint, program.stages)
    if all(mode == "never" for mode in modes):
        return program
    if program.lowered or program.checkpoints:
        raise ArgumentError(
            f"checkpoint={beginning(checkpoint)}: the program already has "
            f"{'its sends' if program.lowered else 'instructions R'}; leave "
            "checkpoint out to run it as it is, or give the program as make_schedule makes it"
        )
    checkpoints = [
        Checkpoints(stage, chosen) for stage in program.backward if (chosen := chosen_of(program, stage, modes))
    ]
    if not checkpoints:
        return program
    again = {(each.stage, microbatch) for each in checkpoints for microbatch in each.microbatches}
    orders = tuple(tuple(with_recomputes(order, again)) for order in program.computations)
    recomputing = replace(program, orders=orders, checkpoints=tuple(checkpoints))
    return recomputing if recomputing.memory is None else replace(recomputing, memory=recomputing.peak_live)


def modes_of(checkpoint: object, stages: int) -> list[str]:
    """The mode of each stage.

    >>> modes_of({1: "always"}, stages=2)
    ['never', 'always']
    """
    by_stage: Mapping[int, Any] = (
        checkpoint if isinstance(checkpoint, Mapping) else dict.fromkeys(range(stages), checkpoint)
    )
    for stage, mode in by_stage.items():
        if mode not in MODES:
            raise ArgumentError(
                f"checkpoint={beginning(checkpoint)}: {beginning(mode)} is no mode; take one of "
                f"{', '.join(map(repr, MODES))}, or a dict of stage to mode"
            )
        if isinstance(stage, bool) or stage not in range(stages):
            raise ArgumentError(
                f"checkpoint={beginning(checkpoint)}: there is no stage {beginning(stage)}; there are 0 to {stages - 1}"
            )
    return [by_stage.get(stage, "never") for stage in range(stages)]


def chosen_of(program: Program, stage: int, modes: Sequence[str]) -> tuple[int, ...]:
    """The micro-batches that a stage computes again."""
    if modes[stage] == "never":
        return ()
    chosen = set(range(program.chunks))
    if modes[stage] == "except_last":
        for worker in program.workers_of(stage):
            order = program.computations[worker]
            chosen -= set(held_anyway([each for each in order if each.stage == stage]))
    return tuple(sorted(chosen))


def held_anyway(order: Sequence[Compute]) -> Iterator[int]:
    """The last micro-batch of a stage, and those whose backward comes next: to compute them again would gain little."""
    yield [each.microbatch for each in order if each.op == Op.FORWARD][-1]
    for one, other in pairwise(order):
        if one.op == Op.FORWARD and other.kind.phase == "B" and one.microbatch == other.microbatch:
            yield one.microbatch


def with_recomputes(order: Sequence[Compute], again: set[tuple[int, int]]) -> Iterator[Compute]:
    """An order with R right before the backwards of these stages and micro-batches."""
    for each in order:
        if each.kind.phase == "B" and (each.stage, each.microbatch) in again:
            yield replace(each, op=Op.RECOMPUTE)
        yield each


def has_halves(program: Program) -> bool:
    """Whether a backward of a program is done in halves.

    >>> from pippy.drivers.plan import make_schedule
    >>> has_halves(make_schedule("1f1b", workers=2, chunks=4)), has_halves(make_schedule("zb_h1", workers=2, chunks=4))
    (False, True)
    """
    return any(each.op == Op.BACKWARD_INPUT for order in program.computations for each in order)


def in_halves(program: Program) -> Program:
    """The same order, with each backward as its two halves, one after the other.

    >>> from pippy.drivers.plan import make_schedule
    >>> print(*in_halves(make_schedule("1f1b", workers=1, chunks=1)).orders[0])
    F0.0 I0.0 W0.0
    """
    return program.with_orders(
        [each for compute in order for each in _halves(compute)] for order in program.computations
    )


def _halves(compute: Compute) -> list[Compute]:
    if compute.op != Op.BACKWARD:
        return [compute]
    return [replace(compute, op=op) for op in (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)]


def in_slices(order: Sequence[Compute], slices: int) -> list[Compute]:
    """A worker's order of micro-batches as one of slices.

    >>> from pippy.drivers.plan.language.instructions import parse_instruction
    >>> order = [parse_instruction(text) for text in ("F0.0", "B0.0", "F0.1", "B0.1", "F0.2", "B0.2", "F0.3", "B0.3")]
    >>> print(*in_slices(order, slices=2))
    F0.0 F0.1 B0.1 F0.2 B0.0 F0.3 B0.3 B0.2
    """
    forwards: dict[int, list[Compute]] = defaultdict(list)
    for compute in order:
        if compute.op == Op.FORWARD:
            forwards[compute.stage].append(compute)
    return list(_placed(order, {stage: iter(its) for stage, its in forwards.items()}, slices))


def _placed(order: Sequence[Compute], left: dict[int, Iterator[Compute]], slices: int) -> Iterator[Compute]:
    begun: set[int] = set()
    for compute in order:
        if compute.op != Op.FORWARD:
            first = compute.microbatch - compute.microbatch % slices
            yield replace(compute, microbatch=2 * first + slices - 1 - compute.microbatch)
            continue
        ahead = 0 if compute.stage in begun else slices - 1
        begun.add(compute.stage)
        for _, forward in zip(range(1 + ahead), left[compute.stage]):
            yield forward
