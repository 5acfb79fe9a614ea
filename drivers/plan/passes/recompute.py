"""Adds the instruction R to any schedule: forwards keep their inputs only, and run again right before their backwards.

    never          F0 F1 F2 B0 B1 B2              all that the backwards need is kept
    always         F0 F1 F2 R0 B0 R1 B1 R2 B2     each micro-batch is computed again
    except_last    F0 F1 F2 R0 B0 R1 B1 B2        but the last of each stage, and where the backward is next in its stage:
                   F0 B0 F1 B1 F2 B2              these would hardly be held for less time

R stands before the receive of the gradients (`add_communication`), so that it is done while the worker would wait for them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from pippy.drivers.plan.language.checkpoints import Checkpoints
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
