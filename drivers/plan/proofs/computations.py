"""Checks that a program computes each pass once, on the right worker, after what it needs, within the memory limit."""

from collections.abc import Iterator
from itertools import product

from pippy.drivers.plan.language.edges import Pass
from pippy.drivers.plan.language.instructions import KINDS, Compute, Op
from pippy.drivers.plan.language.program import Program
from pippy.drivers.plan.proofs.faults import Faults

Done = set[tuple[Op, int, int]]

_READS = "whose keys and values it reads: slices of a sequence go forward in order"
_GIVES = "which gives gradients of its keys and values: slices of a sequence go backward from the last to the first"


def check_computations(program: Program, faults: Faults) -> None:
    """Note every computation that is misplaced, out of order, repeated, missing, or more than the memory allows."""
    done: Done = set()
    for worker, order in enumerate(program.orders):
        for index, compute in enumerate(order):
            if not isinstance(compute, Compute):
                if not program.lowered:
                    faults.at(worker, index, "is not a computation, and the program says that communication is implied")
            elif misplaced := where_else(program, worker, compute):
                faults.at(worker, index, misplaced)
            else:
                for problem in problems(program, compute, done):
                    faults.at(worker, index, problem)
                done.add((compute.op, compute.stage, compute.microbatch))
    check_complete(program, done, faults)
    check_memory(program, faults)


def where_else(program: Program, worker: int, compute: Compute) -> str | None:
    if not 0 <= compute.stage < program.stages:
        return f"there is no stage {compute.stage}; the program has {program.stages}"
    if not 0 <= compute.microbatch < program.chunks:
        return f"there is no micro-batch {compute.microbatch}; the program has {program.chunks}"
    home = program.home(compute.stage, compute.microbatch)
    if home != worker:
        where = f" for micro-batch {compute.microbatch}" * (program.replicas > 1)
        return f"stage {compute.stage} is on worker {home}{where}"
    if compute.op == Op.CHOOSE:
        chosen = any(edge.source == Pass("C", compute.stage) for edge in program.flow)
        return None if chosen else "the program has no edge from it"
    if compute.op != Op.FORWARD and compute.stage not in program.backward:
        return f"stage {compute.stage} has no backward"
    return None


def problems(program: Program, compute: Compute, done: Done) -> Iterator[str]:
    stage, chunk = compute.stage, compute.microbatch
    checkpointed = (stage, chunk) in program.checkpointed
    if compute.op == Op.RECOMPUTE and not checkpointed:
        yield f"has nothing to compute again: {Compute(Op.FORWARD, stage, chunk)} keeps what the backward needs"
    if compute.kind.phase == "B" and checkpointed and (Op.RECOMPUTE, stage, chunk) not in done:
        yield f"comes before {Compute(Op.RECOMPUTE, stage, chunk)}: the forward kept its inputs only"
    if (compute.op, stage, chunk) in done:
        yield "is computed twice"
    for op in compute.kind.after:
        if (op, stage, chunk) not in done:
            yield f"comes before {Compute(op, stage, chunk)}"
    before = program.slice_before(compute)
    if before is not None and not any((op, stage, before.microbatch) in done for op in _passes_like(compute)):
        yield f"comes before {before}, {_READS if compute.op == Op.FORWARD else _GIVES}"
    for op in compute.kind.excludes:
        if (op, stage, chunk) in done:
            yield f"is computed in {Compute(op, stage, chunk)} already"


def _passes_like(compute: Compute) -> list[Op]:
    """The passes that make the same values: a whole backward, and the half that does."""
    return [op for op in Op if KINDS[op].phase == compute.kind.phase]


def check_complete(program: Program, done: Done, faults: Faults) -> None:
    backward = frozenset(program.backward)
    for stage, chunks in product(range(program.stages), program.shares):
        worker = program.home(stage, chunks[0])
        for chunk in chunks:
            for op in missing_passes(program, stage, chunk, stage in backward, done):
                faults.at_end(worker, f"{Compute(op, stage, chunk)} is missing")


def missing_passes(program: Program, stage: int, chunk: int, backward: bool, done: Done) -> list[Op]:
    wanted = [Op.FORWARD, *([Op.RECOMPUTE] if (stage, chunk) in program.checkpointed else [])]
    wanted += [Op.CHOOSE for edge in program.flow if edge.source == Pass("C", stage)]
    if backward and (Op.BACKWARD, stage, chunk) not in done:
        halves = [Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT]
        wanted += halves if any((half, stage, chunk) in done for half in halves) else [Op.BACKWARD]
    return [op for op in wanted if (op, stage, chunk) not in done]


def check_memory(program: Program, faults: Faults) -> None:
    if program.memory is None:
        return
    for worker, (peak, limit) in enumerate(zip(program.peak_live, program.memory)):
        if peak > limit:
            faults.overall(f"worker {worker} holds {peak} stage-micro-batches at its peak; the stated limit is {limit}")
