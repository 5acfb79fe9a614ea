"""What to say where nothing fits: what is nearest, and what would fit: this limit, so many micro-batches, so many workers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pippy.drivers.plan.choice.byte_sizes import byte_count, byte_text
from pippy.drivers.plan.choice.search import Found, Problem, Way, fits
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


def unfit(
    problem: Problem, found: Found, shown: str, more_chunks: Sequence[int] = (), option: str = "memory="
) -> Unfit:
    """What to say of a problem that nothing solves. ``shown`` is the limit as the user gave it, as the ``option``.

    ``more_chunks`` are the numbers of micro-batches that could be taken instead, the smallest first.
    """
    nearest = found.nearest
    if nearest is None:
        reasons = "".join(f"\n  {name}: {why}" for name, why in found.left_out)
        return Unfit(f"no schedule can be run so:{reasons}")
    limits = _enough(nearest, problem.limits)
    chunks = next(_chunks_that_fit(problem, nearest.name, more_chunks), None)
    workers = next(_workers_that_fit(problem, nearest), None)
    advice = [f"{option}{_as_given(limits, len(set(problem.limits)) == 1, option)}"]
    advice += [f"{chunks} micro-batches"] if chunks is not None else []
    advice += [f"{workers} workers for these stages"] if workers is not None else []
    if chunks is None and workers is None:
        advice.append("a cut into more stages on more workers")
    message = f"{option}{shown} is too little: {_held(problem, nearest)}. What would fit: {', or '.join(advice)}"
    return Unfit(message, limits, chunks, workers)


def _held(problem: Problem, nearest: Way) -> str:
    """What the worker that lacks most would hold."""
    micro_batch = problem.micro_batch(nearest.chunks)
    workers = held_bytes(nearest.program, micro_batch.sizes)
    worker = max(range(len(workers)), key=lambda each: workers[each].peak.total / problem.limits[each])
    peak = workers[worker].peak
    kinds = sorted(((size, kind) for kind, size in peak._asdict().items() if size), reverse=True)
    parts = ", ".join(f"{byte_text(size)} {kind}" for size, kind in kinds)
    again = [str(stage) for stage, mode in sorted(nearest.modes.items()) if mode != "never"]
    computed = f", with forwards of stage{'s' * (len(again) > 1)} {' '.join(again)} computed again" if again else ""
    return (
        f"the nearest, {nearest.name} with {nearest.chunks} micro-batch{'es' * (nearest.chunks != 1)}{computed}, holds "
        f"{byte_text(peak.total)} on worker {worker} ({parts})"
    )


def _enough(nearest: Way, limits: Sequence[int]) -> tuple[int, ...]:
    """Limits that the nearest keeps, in few digits."""
    assert nearest.peak_bytes is not None
    return tuple(
        limit if peak <= limit else byte_count(byte_text(peak)) for peak, limit in zip(nearest.peak_bytes, limits)
    )


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


def _workers_that_fit(problem: Problem, nearest: Way) -> Iterator[int]:
    """More workers for the same stages, each with as many as the next, if all have the same limit."""
    given = problem.program
    if len(set(problem.limits)) > 1 or problem.live is not None:
        return
    for workers in range(given.workers + 1, given.stages + 1):
        each = [given.stages // workers + (worker < given.stages % workers) for worker in range(workers)]
        spread = replace(
            given, placement=make_placement(workers, each), orders=((),) * workers, memory=None, checkpoints=()
        )
        limits = problem.limits[:1] * workers
        if fits(replace(problem, program=spread, limits=limits, chunks=(nearest.chunks,)), [nearest.name, "1f1b"]):
            yield workers
