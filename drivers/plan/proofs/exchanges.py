"""Checks what workers exchange beside the edges of a program: each does its part once, when what it gives is there."""

from collections.abc import Container, Iterable

from pippy.drivers.plan.language.exchanges import notes_work, stages_with_gradients, sum_work
from pippy.drivers.plan.language.instructions import (
    Compute,
    Exchange,
    Instruction,
    Op,
    Reduce,
    SendGradients,
    SendNotes,
    SendSum,
)
from pippy.drivers.plan.language.program import Program
from pippy.drivers.plan.proofs.faults import Faults

Due = dict[Instruction, int]  # each is not to come before the instruction with this index


def check_exchanges(program: Program, worker: int, faults: Faults) -> None:
    """Note what a worker does too early for a sum or for notes, twice, not at all, or without being asked."""
    order = program.orders[worker]
    due = due_of_sums(program, worker) | due_of_notes(program, worker)
    missing = set(due)
    for at, instruction in enumerate(order):
        if instruction.kind.exchange is None:
            continue
        if instruction not in due:
            faults.at(worker, at, why_stray(program, instruction))
        elif instruction not in missing:
            faults.at(worker, at, "comes twice")
        elif at < due[instruction]:
            faults.at(worker, at, f"comes before {order[due[instruction]]}")
        missing.discard(instruction)
    for left in sorted(map(str, missing)):
        faults.at_end(worker, f"{left} is missing")


def due_of_sums(program: Program, worker: int) -> Due:
    order = program.orders[worker]
    last, places = last_backward(order), {each: at for at, each in reversed(list(enumerate(order)))}
    due: Due = {}
    for gradient_sum in program.sums:
        work = sum_work(program, gradient_sum, worker)
        backward = max(
            (last.get(stage, -1) for stage in stages_with_gradients(program, gradient_sum, worker)), default=-1
        )
        for at, instruction in enumerate(work):
            before = max((places.get(other, -1) for other in work[:at]), default=-1)
            due[instruction] = max(
                backward if isinstance(instruction, SendGradients | Reduce) else -1,
                before if isinstance(instruction, Reduce | SendSum) else -1,
            )
    return due


def due_of_notes(program: Program, worker: int) -> Due:
    last = last_forward(program.orders[worker], program.noting(worker))
    return {each: last if isinstance(each, SendNotes) else -1 for each in notes_work(program, worker)}


def why_stray(program: Program, instruction: Instruction) -> str:
    """Why an instruction of an exchange is none of this worker's."""
    if not instruction.kind.exchange.in_steps:  # type: ignore[union-attr]
        return "is in no step: workers do it in a program of its own"
    if instruction.kind.exchange == Exchange.NOTES:
        return "these workers have no notes of batch norms to tell each other"
    name = instruction.sum  # type: ignore[attr-defined]
    known = next((each for each in program.sums if each.name == name), None)
    return f"the program has no sum {name}" if known is None else f"does not belong to the sum of {known}"


def last_backward(order: Iterable[Instruction]) -> dict[int, int]:
    """The index of each stage's last backward, whole or its weight half."""
    return {
        instruction.stage: index
        for index, instruction in enumerate(order)
        if isinstance(instruction, Compute) and instruction.kind.live < 0
    }


def last_forward(order: Iterable[Instruction], stages: Container[int]) -> int:
    """The index of the last forward of these stages; -1 if there is none."""
    forwards = (
        index
        for index, instruction in enumerate(order)
        if isinstance(instruction, Compute) and instruction.op == Op.FORWARD and instruction.stage in stages
    )
    return max(forwards, default=-1)
