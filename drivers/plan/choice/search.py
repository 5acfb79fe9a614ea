"""The fastest way to run a step within so many bytes on each worker, and if there is none, the nearest.

    for each number of micro-batches    costs and bytes of one of them
      for each schedule                 on this placement, as it is when nothing is computed again
        for each worker                 the fewest stages that compute again, so that it keeps its limit
          simulate                      how long the step takes

As in `choose`, ways whose times differ by less than `TIE` count as equally fast. Of those, the one that holds least is taken.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pippy.drivers.plan.choice.choose import SEARCHED, Candidate, lightest_of_fastest, made_like
from pippy.drivers.plan.choice.recomputed_stages import ORDER, Modes, Tries, fitting_modes, tried_modes
from pippy.drivers.plan.cost.costs import Costs
from pippy.drivers.plan.cost.held_bytes import PipeBytes, peak_bytes
from pippy.drivers.plan.cost.simulate import simulate_with
from pippy.drivers.plan.language.errors import ArgumentError, ScheduleError
from pippy.drivers.plan.language.program import Program
from pippy.drivers.plan.orders.registry import REGISTRY
from pippy.drivers.plan.passes.recompute import Checkpoint, add_recompute

MOST_COMPUTATIONS = 2000  # of a program, where micro-batches are chosen: a larger one takes long to simulate


@dataclass(frozen=True)
class MicroBatch:
    """What one micro-batch costs each stage, and how many bytes each stage and value of it takes."""

    costs: Costs
    sizes: PipeBytes


@dataclass(frozen=True)
class Problem:
    """What is to fit where.

    ``program`` is any program with the placement, and the edges between the stages. ``limits`` are the bytes that each worker
    may hold, ``live`` the stage-micro-batches. ``micro_batch`` gives the figures when the mini-batch is cut into so many, and
    ``chunks`` how many it may be cut into. Without ``checkpoint``, the stages that compute forwards again are chosen.
    """

    program: Program
    limits: tuple[int, ...]
    micro_batch: Callable[[int], MicroBatch]
    chunks: tuple[int, ...]
    checkpoint: Checkpoint | None = None
    live: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Way(Candidate):
    """A way to run the step: a program, its time, its peaks, and which stages compute again."""

    modes: Modes = field(default_factory=dict)

    @property
    def chunks(self) -> int:
        """How many micro-batches."""
        return self.program.chunks


@dataclass(frozen=True)
class Found:
    """What a search found. ``ways`` fit, the fastest first. ``unlimited`` is the fastest if there were no limit.

    ``nearest`` is what lacks least where nothing fits. ``left_out`` has schedules that cannot be run so, each with the reason.
    """

    ways: tuple[Way, ...]
    unlimited: Way | None
    nearest: Way | None
    left_out: tuple[tuple[str, str], ...]


def search(problem: Problem, thorough: bool = True) -> Found:
    """Find what fits. With ``thorough``, the list scheduler searches an order for the best number of micro-batches, too.

    >>> from pippy.drivers.plan import make_schedule
    >>> from pippy.drivers.plan.cost.held_bytes import StageBytes
    >>> micro_batch = MicroBatch(Costs(), PipeBytes((StageBytes(kept=10), StageBytes(kept=10))))
    >>> problem = Problem(make_schedule("1f1b", workers=2, chunks=1), (10, 10), lambda chunks: micro_batch, (4,))
    >>> [(way.seconds, way.modes) for way in search(problem, thorough=False).ways if way.name == "1f1b"]
    [(17.0, {0: 'always', 1: 'never'})]
    """
    return _Search(problem).run(thorough)


def fits(problem: Problem, names: Sequence[str] = ()) -> bool:
    """Whether anything fits, or one of these schedules, without the times.

    >>> from pippy.drivers.plan import make_schedule
    >>> from pippy.drivers.plan.cost.held_bytes import StageBytes
    >>> micro_batch = MicroBatch(Costs(), PipeBytes((StageBytes(kept=10), StageBytes(kept=10))))
    >>> program = make_schedule("1f1b", workers=2, chunks=1)
    >>> [fits(Problem(program, (limit, limit), lambda chunks: micro_batch, (4,))) for limit in (9, 10)]
    [False, True]
    """
    search = _Search(problem)
    return any(search.fits(name, chunks) for chunks in problem.chunks for name in names or schedules())


def schedules() -> list[str]:
    """The names of the schedules that are tried for each number of micro-batches."""
    return [name for name, entry in REGISTRY.items() if entry.training and name != "list"]


class _Search:
    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.ways: list[Way] = []
        self.unlimited: list[Way] = []
        self.short: list[Way] = []  # what needs least in each order that does not fit
        self.left_out: dict[str, str] = {}

    def run(self, thorough: bool) -> Found:
        for chunks in self.problem.chunks:
            for name in schedules():
                self.try_schedule(name, chunks)
        if thorough and self.ways:
            self.try_schedule("list", lightest_of_fastest(self.ways).chunks)
        self.ways.sort(key=lambda way: way.seconds)
        nearest = min(self.short, key=self._lack) if self.short and not self.ways else None
        unlimited = min(self.unlimited, key=lambda way: way.seconds, default=None)
        known = {way.name for way in (*self.ways, *self.short)}
        left_out = tuple((name, why) for name, why in self.left_out.items() if name not in known)
        return Found(tuple(self.ways), unlimited, nearest, left_out)

    def _lack(self, way: Way) -> tuple[float, float]:
        assert way.peak_bytes is not None
        return max(peak / limit for peak, limit in zip(way.peak_bytes, self.problem.limits)), way.seconds

    def try_schedule(self, name: str, chunks: int) -> None:
        """Find the ways to run one schedule with so many micro-batches."""
        micro_batch = self.problem.micro_batch(chunks)
        try:
            made, tried = self._tried(name, chunks, micro_batch)
        except ScheduleError as error:
            self.left_out[name] = str(error).partition("; ")[0]
            return
        free = self._way(made, _first(tried), micro_batch)  # as if there were no limit
        self.unlimited.append(free)
        fitting = list(fitting_modes(made, tried, self.problem.limits, micro_batch.costs))
        ways = [free if modes == free.modes else self._way(made, modes, micro_batch) for modes in fitting]
        if ways:
            self.ways.append(min(ways, key=lambda way: way.seconds))
        else:
            self.short.append(self._way(made, _nearest(tried, self.problem.limits), micro_batch))

    def fits(self, name: str, chunks: int) -> bool:
        """Whether one schedule fits with so many micro-batches."""
        try:
            _, tried = self._tried(name, chunks, self.problem.micro_batch(chunks))
        except ScheduleError:
            return False
        return all(min(peak for _, peak in tries) <= limit for tries, limit in zip(tried, self.problem.limits))

    def _tried(self, name: str, chunks: int, micro_batch: MicroBatch) -> tuple[Program, list[Tries]]:
        """One schedule, and what each worker holds with the modes that it may have."""
        made = self._made(name, chunks, micro_batch)
        limits = self.problem.limits if self.problem.live is None else None
        tried = tried_modes(made, micro_batch.sizes, self.problem.checkpoint, limits)
        if self.problem.live is not None:
            tried = [self._few_enough(made, worker, tries) for worker, tries in enumerate(tried)]
            if not all(tried):
                raise ArgumentError("it holds more stage-micro-batches than max_live")
        return made, tried

    def _made(self, name: str, chunks: int, micro_batch: MicroBatch) -> Program:
        program, options = self.problem.program, dict[str, Any]()
        computations = 3 * program.stages * chunks
        if (
            computations > SEARCHED
            if name == "list"
            else len(self.problem.chunks) > 1 and computations > MOST_COMPUTATIONS
        ):
            raise ArgumentError(f"with {chunks} micro-batches it has too many computations to try")
        if name == "list":
            live = self._live_counts(micro_batch.sizes)
            options = {"costs": micro_batch.costs, "memory": live, "edges": program.edges}
        return made_like(program, name, program.placement, chunks, **options)

    def _live_counts(self, sizes: PipeBytes) -> list[int]:
        """How many stage-micro-batches each worker has room for beside what is always there."""
        found = []
        for worker, limit in enumerate(self.problem.limits):
            stages = [sizes.stages[stage] for stage in self.problem.program.placement.stages_of(worker)]
            room = limit - sum(stage.persistent + stage.gradients for stage in stages)
            largest = max(stage.kept for stage in stages)
            count = max(len(stages), room // largest if largest else 2**31)
            found.append(count if self.problem.live is None else min(count, self.problem.live[worker]))
        return found

    def _few_enough(self, made: Program, worker: int, tries: Tries) -> Tries:
        assert self.problem.live is not None
        most = self.problem.live[worker]
        return [each for each in tries if add_recompute(made, each[0]).peak_live[worker] <= most]

    def _way(self, made: Program, modes: Modes, micro_batch: MicroBatch) -> Way:
        program = add_recompute(made, modes)
        seconds = float(simulate_with(program, micro_batch.costs).makespan)
        return Way(program, seconds, peak_bytes(program, micro_batch.sizes), modes)


def _first(tried: Sequence[Tries]) -> Modes:
    return {stage: mode for tries in tried for stage, mode in tries[0][0].items()}


def _nearest(tried: Sequence[Tries], limits: Sequence[int]) -> Modes:
    """Of each worker the modes with which it lacks least, and of those the ones that compute least again."""
    found: Modes = {}
    for tries, limit in zip(tried, limits):
        modes, _ = min(tries, key=lambda each: (max(each[1], limit), sum(map(ORDER.index, each[0].values()))))
        found.update(modes)
    return found
