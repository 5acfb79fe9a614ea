"""Checks a lowered program worker by worker: each value is there when it is used or sent, and is freed at the end.

A worker that has received a value may hand it on to another that needs it, before a pass of its own takes it.

What workers exchange beside the edges of a program: each does its part once, when what it gives is there.
"""

from collections import Counter
from collections.abc import Container, Iterable

from pippy.drivers.plan.language.edges import Edge, produced_by
from pippy.drivers.plan.language.exchanges import notes_work, stages_with_gradients, sum_work
from pippy.drivers.plan.language.instructions import (
    Add,
    Compute,
    Free,
    Instruction,
    InstructionKey,
    MicrobatchValue,
    Op,
    Payload,
    Reduce,
    SendExchanged,
)
from pippy.drivers.plan.language.program import Program
from pippy.drivers.plan.proofs.faults import Faults

Due = dict[Instruction, int]  # each is not to come before the instruction with this index
_SEND_GRADIENTS: InstructionKey = SendExchanged, Payload.GRADIENTS
_SEND_SUM: InstructionKey = SendExchanged, Payload.SUM


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
                backward if instruction.key in (_SEND_GRADIENTS, Reduce) else -1,
                before if instruction.key in (Reduce, _SEND_SUM) else -1,
            )
    return due


def due_of_notes(program: Program, worker: int) -> Due:
    last = last_forward(program.orders[worker], program.noting(worker))
    return {each: last if isinstance(each, SendExchanged) else -1 for each in notes_work(program, worker)}


def why_stray(program: Program, instruction: Instruction) -> str:
    """Why an instruction of an exchange is none of this worker's."""
    if not instruction.kind.exchange.in_steps:  # type: ignore[union-attr]
        return "is in no step: workers do it in a program of its own"
    if instruction.kind.exchange == Payload.NOTES:
        return "these workers have no notes of batch norms to tell each other"
    name = instruction.of  # type: ignore[attr-defined]
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


def check_values(program: Program, faults: Faults) -> None:
    """Note values that are used too early or too late, sent to a wrong worker or never freed, and wrong sums and notes."""
    frees = any(instruction.key is Free for order in program.orders for instruction in order)
    for worker in range(program.workers):
        WorkerValues(program, worker, faults).check(frees)
        check_exchanges(program, worker, faults)


class WorkerValues:
    """Goes through one worker's instructions, and knows which values it holds."""

    def __init__(self, program: Program, worker: int, faults: Faults) -> None:
        self.program = program
        self.worker = worker
        self.faults = faults
        self.ends = {
            edge.value: (
                program.beside(worker, edge.source.stage),
                [] if edge.value in program.sum_of else takers(program, edge, worker),
            )
            for edge in program.flow
        }
        # What is to be added to values that this worker makes, in order, but for what was added.
        self.lacking: dict[MicrobatchValue, list[str]] = {
            (value, chunk): list(summands[1:])
            for value, summands in program.summands.items()
            if self.ends[value][0] == worker
            for chunk in range(program.chunks)
        }
        self.held: set[MicrobatchValue] = set()
        self.gone: set[MicrobatchValue] = set()
        self.first_use: dict[MicrobatchValue, Compute] = {}
        self.left: set[MicrobatchValue] = set()  # what this worker keeps for its own next run
        self.unsent: Counter[tuple[MicrobatchValue, int]] = Counter()  # what it has to send to the next run of others
        for edge in program.flow:
            if edge.goes_on and self.ends[edge.value][0] == worker:
                values = [(edge.value, chunk) for chunk in range(program.chunks)]
                self.unsent.update((value, to) for value in values for to in self.ends[edge.value][1])
                if any(program.beside(worker, target.stage) == worker for target in edge.targets):
                    self.left.update(values)
        if program.continues:
            self.held |= self.left

    def check(self, frees: bool) -> None:
        """Walk through the worker's order; ``frees`` says whether the program frees its values at all."""
        for index, instruction in enumerate(self.program.orders[self.worker]):
            for problem in self.step(instruction):
                self.faults.at(self.worker, index, problem)
        if frees:
            for value, chunk in sorted(self.held - self.left):
                self.faults.at_end(self.worker, f"{value}.{chunk} is never freed")
        for value, chunk in sorted(self.left - self.held):
            self.faults.at_end(self.worker, f"{value}.{chunk} is not here for the next run")
        for ((value, chunk), to), missing in sorted(self.unsent.items()):
            if missing:
                how = "never sent" if missing > 0 else "sent twice"
                self.faults.at_end(self.worker, f"{value}.{chunk}, for the next run, is {how} to worker {to}")

    def step(self, instruction: Instruction) -> list[str]:
        if isinstance(instruction, Compute):
            return self.compute(instruction)
        kind = instruction.kind
        if kind.exchange:  # see exchanges.py
            return []
        problems: list[str] = []
        if kind.takes:
            held = kind.takes(instruction)
            wrong = self.wrong_way(held, self.worker, kind.sends_to(instruction)) if kind.sends_to else []
            problems = wrong or self.absent(held)
            if kind.sends_to and not problems:
                problems = self.late(held)
            if not (wrong or isinstance(instruction, Add)):
                problems = problems + self.not_whole(held)
            if kind.sends_to and held[0] in self.program.going_on:
                self.unsent[held, kind.sends_to(instruction)] -= 1
        if kind.gives:
            held = kind.gives(instruction)
            if held[0] in self.program.going_on and not self.program.continues:
                return [*problems, f"no run before has chosen {held[0]}.{held[1]}"]
            wrong = self.wrong_way(held, kind.receives_from(instruction), self.worker) if kind.receives_from else []
            problems = problems + (wrong or self.arrive(held))
        if isinstance(instruction, Add):
            problems += self.addition(instruction)
        if kind.drops:
            held = kind.drops(instruction)
            self.held.discard(held)
            self.gone.add(held)
        return problems

    def compute(self, compute: Compute) -> list[str]:
        done = produced_by(compute)
        if done is None:
            return []
        used = [(edge.value, compute.microbatch) for edge in self.program.takes.get(done, ()) if self.is_used(edge)]
        problems = [problem for held in used for problem in (*self.absent(held), *self.not_whole(held))]
        for held in used:
            self.first_use.setdefault(held, compute)
        self.held.update((edge.value, compute.microbatch) for edge in self.program.gives.get(done, ()))
        return problems

    def is_used(self, edge: Edge) -> bool:
        """Whether passes take the value itself: of gradients, the sum; and what goes on, in the next run."""
        return edge.value not in self.program.sum_of and (self.program.continues or not edge.goes_on)

    def absent(self, held: MicrobatchValue) -> list[str]:
        if held in self.held:
            return []
        return [f"needs {held[0]}.{held[1]}, which {'was freed' if held in self.gone else 'is not here yet'}"]

    def late(self, held: MicrobatchValue) -> list[str]:
        """What is wrong with handing the value on now: a pass that has taken it may have changed it in place."""
        if held not in self.first_use or self.ends[held[0]][0] == self.worker:
            return []
        return [f"hands on {held[0]}.{held[1]} after {self.first_use[held]}, which may have changed it"]

    def addition(self, add: Add) -> list[str]:
        """What is wrong with adding this value to that one now."""
        into = add.into, add.microbatch
        if self.program.sum_of.get(add.value) != add.into:
            return [f"{add.value} is no part of the sum {add.into} on this worker"]
        lacking = self.lacking.get(into, [])
        if add.value not in lacking:
            return [*self.absent(into), f"{add.value} was added before"]
        wrong = self.absent(into) + [f"comes before {Add(lacking[0], add.microbatch, add.into)}"] * (
            lacking[0] != add.value
        )
        lacking.remove(add.value)
        return wrong

    def not_whole(self, held: MicrobatchValue) -> list[str]:
        return [f"comes before {Add(value, held[1], held[0])}" for value in self.lacking.get(held, ())[:1]]

    def arrive(self, held: MicrobatchValue) -> list[str]:
        if held in self.held or held in self.gone:
            return ["was received before"]
        self.held.add(held)
        return []

    def wrong_way(self, held: MicrobatchValue, source: int, to: int) -> list[str]:
        """What is wrong with moving the value between these workers."""
        value, chunk = held
        if not 0 <= chunk < self.program.chunks:
            return [f"there is no micro-batch {chunk}; the program has {self.program.chunks}"]
        if value not in self.ends:
            return [f"no edge of the program is called {value}"]
        makes, needs = self.ends[value]
        if source != makes and (source not in needs or value in self.program.going_on):
            return [f"{value} is made on worker {makes}"]
        if to not in needs or to == source:
            return [f"{value} is not needed on worker {to}; {' '.join(map(str, needs)) or 'no other worker'} needs it"]
        return []


def takers(program: Program, edge: Edge, worker: int = 0) -> list[int]:
    """The workers to which a value has to be sent, in the replica of a worker."""
    needing = {program.beside(worker, target.stage) for target in edge.targets}
    return sorted(needing - {program.beside(worker, edge.source.stage)})
