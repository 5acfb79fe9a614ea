"""What to say where nothing fits: what is nearest, and what would fit: this limit, so many micro-batches, so many workers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pippy.drivers.plan.choice.byte_sizes import byte_count, byte_text
from pippy.drivers.plan.choice.candidate import Candidate
from pippy.drivers.plan.choice.choice import Choice
from pippy.drivers.plan.choice.limits import MemoryLimit
from pippy.drivers.plan.choice.problem import Problem
from pippy.drivers.plan.choice.search import fits
from pippy.drivers.plan.cost.held_bytes import held_bytes
from pippy.drivers.plan.language.placement import make_placement


@dataclass(frozen=True)
class Unfit:
    """Why nothing fits, and what would: these limits, or so many micro-batches or workers, or None where that is not known."""

    message: str
    limits: tuple[int, ...] = ()
    chunks: int | None = None
    workers: int | None = None

    def __str__(self) -> str:
        return self.message


def unfit(choice: Choice, shown: str, more_chunks: Sequence[int] = (), option: str = "memory=") -> Unfit:
    """What to say of a problem that nothing solves. ``shown`` is its limit of bytes as the user gave it, as the ``option``.

    ``more_chunks`` are the numbers of micro-batches that could be taken instead, the smallest first.
    """
    problem, nearest = choice.problem, choice.nearest
    memory = next(limit for limit in problem.limits if isinstance(limit, MemoryLimit))
    if nearest is None or any(limit.refusal(nearest) for limit in problem.limits if limit is not memory):
        return Unfit(choice.refusal)
    limits = _enough(memory.held(nearest), memory.most)
    chunks = next(_chunks_that_fit(problem, nearest.name, more_chunks), None)
    workers = next(_workers_that_fit(problem, nearest), None)
    advice = [f"{option}{_as_given(limits, len(set(memory.most)) == 1, option)}"]
    advice += [f"{chunks} micro-batches"] if chunks is not None else []
    advice += [f"{workers} workers for these stages"] if workers is not None else []
    if chunks is None and workers is None:
        advice.append("a cut into more stages on more workers")
    message = f"{option}{shown} is too little: {_held(nearest, memory)}. What would fit: {', or '.join(advice)}"
    return Unfit(message, limits, chunks, workers)


def _held(nearest: Candidate, memory: MemoryLimit) -> str:
    """What the worker that lacks most would hold."""
    assert nearest.micro_batch.sizes is not None
    workers = held_bytes(nearest.program, nearest.micro_batch.sizes)
    worker = max(range(len(workers)), key=lambda each: workers[each].peak.total / memory.most[each])
    peak = workers[worker].peak
    kinds = sorted(((size, kind) for kind, size in peak._asdict().items() if size), reverse=True)
    parts = ", ".join(f"{byte_text(size)} {kind}" for size, kind in kinds)
    again = list(map(str, nearest.checkpoint))
    computed = f", with forwards of stage{'s' * (len(again) > 1)} {' '.join(again)} computed again" if again else ""
    return (
        f"the nearest, {nearest.name} with {nearest.chunks} micro-batch{'es' * (nearest.chunks != 1)}{computed}, holds "
        f"{byte_text(peak.total)} on worker {worker} ({parts})"
    )


def _enough(held: Sequence[int], limits: Sequence[int]) -> tuple[int, ...]:
    """Limits that the nearest keeps, in few digits."""
    return tuple(limit if peak <= limit else byte_count(byte_text(peak)) for peak, limit in zip(held, limits))


def _as_given(limits: Sequence[int], one_for_all: bool, option: str) -> str:
    """Limits as the user may write them: in Python, or on the command line."""
    if one_for_all:
        return repr(_written(max(limits)))
    texts = [_written(limit) for limit in limits]
    return str(texts) if option.endswith("=") else repr(",".join(texts))


def _written(limit: int) -> str:
    """A size without a space, as a command line wants it."""
    return byte_text(limit).replace(" ", "")


def _chunks_that_fit(problem: Problem, schedule: str, counts: Sequence[int]) -> Iterator[int]:
    yield from (count for count in counts if fits(replace(problem, chunks=(count,)), [schedule]))


def _workers_that_fit(problem: Problem, nearest: Candidate) -> Iterator[int]:
    """More workers for the same stages, each with as many as the next, if all have the same limit, and only this one."""
    program, (limit, *others) = problem.program, problem.limits
    if others or len(set(limit.most)) > 1:
        return
    for workers in range(program.workers + 1, program.stages + 1):
        each = [program.stages // workers + (worker < program.stages % workers) for worker in range(workers)]
        spread = problem.on(make_placement(workers, each))
        spread = replace(spread, limits=(replace(limit, most=limit.most[:1] * workers),), chunks=(nearest.chunks,))
        if fits(spread, [nearest.name, "1f1b"]):
            yield workers
