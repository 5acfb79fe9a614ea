"""Checks that gradients are added up: each worker does its part of each sum once, when the gradients are there."""

from collections.abc import Iterable

from pippy.drivers.plan.language.instructions import Compute, Instruction, Reduce, SendGradients, SendSum
from pippy.drivers.plan.language.program import Program
from pippy.drivers.plan.language.sums import stages_with_gradients, sum_work
from pippy.drivers.plan.proofs.faults import Faults


def check_sums(program: Program, worker: int, faults: Faults) -> None:
    """Note what a worker does too early for a sum, twice, not at all, or without being asked."""
    order = program.orders[worker]
    last, places = last_backward(order), {each: at for at, each in reversed(list(enumerate(order)))}
    due: dict[Instruction, int] = {}  # each is not to come before the instruction with this index
    for each in program.sums:
        work = sum_work(program, each, worker)
        backward = max((last.get(stage, -1) for stage in stages_with_gradients(program, each, worker)), default=-1)
        for at, instruction in enumerate(work):
            before = max((places.get(other, -1) for other in work[:at]), default=-1)
            due[instruction] = max(
                backward if isinstance(instruction, SendGradients | Reduce) else -1,
                before if isinstance(instruction, Reduce | SendSum) else -1,
            )
    missing, names = set(due), {each.name: each for each in program.sums}
    for at, instruction in enumerate(order):
        if not instruction.kind.adds_up:
            continue
        name = instruction.sum  # type: ignore[attr-defined]
        if name not in names:
            faults.at(worker, at, f"the program has no sum {name}")
        elif instruction not in due:
            faults.at(worker, at, f"does not belong to the sum of {names[name]}")
        elif instruction not in missing:
            faults.at(worker, at, "comes twice")
        elif at < due[instruction]:
            faults.at(worker, at, f"comes before {order[due[instruction]]}")
        missing.discard(instruction)
    for left in sorted(map(str, missing)):
        faults.at_end(worker, f"{left} is missing")


def last_backward(order: Iterable[Instruction]) -> dict[int, int]:
    """The index of each stage's last backward, whole or its weight half."""
    return {
        instruction.stage: index
        for index, instruction in enumerate(order)
        if isinstance(instruction, Compute) and instruction.kind.live < 0
    }
