"""The search for the fastest program of a problem that keeps all limits, and if there is none, for the nearest.

    for each number of micro-batches    costs and bytes of one of them
      for each schedule                 on the placement, as it is when nothing is computed again
        for each worker                 the fewest stages that compute again, so that it keeps its limits
          simulate                      how long the step takes
    then the list scheduler             for the best number of micro-batches

Candidates whose times differ by less than `TIE` count as equally fast. Of those, the one that holds least is chosen.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from pippy.drivers.plan.choice.candidate import TIE, Candidate, lightest_of_fastest
from pippy.drivers.plan.choice.choice import Choice
from pippy.drivers.plan.choice.problem import Problem
from pippy.drivers.plan.choice.recomputed_stages import TriedModes
from pippy.drivers.plan.language.errors import ArgumentError, ScheduleError
from pippy.drivers.plan.language.placement import SHAPES, make_placement
from pippy.drivers.plan.orders.registry import REGISTRY

SEARCHED = 2000  # with more computations than this, the list scheduler takes many seconds
MOST_COMPUTATIONS = 2000  # of a program, where micro-batches are chosen: a larger one takes long to simulate


def choose(problem: Problem) -> Choice:
    """The best answer to a problem, and what would be faster on other placements. Raises if nothing keeps the limits.

    >>> from pippy.drivers.plan import Costs, make_schedule
    >>> from pippy.drivers.plan.choice.limits import LiveLimit
    >>> slow = Costs(forward=[0.001, 0.003], backward_input=0.001, backward_weight=0.001)
    >>> program = make_schedule("1f1b", workers=2, chunks=4)
    >>> choice = choose(Problem.of(program, slow))
    >>> print(choice.schedule, f"{choice.chosen.seconds:.3f}")
    zb_h1 0.021
    >>> choose(Problem.of(program, slow, [LiveLimit((1, 1))])).chosen.peak_live
    (1, 1)
    """
    choice = search(problem)
    if not choice.candidates:
        raise ArgumentError(choice.refusal)
    return replace(choice, elsewhere=tuple(_elsewhere(choice)))


def search(problem: Problem, thorough: bool = True, measured: bool = True) -> Choice:
    """All that keeps the limits. With ``thorough``, the list scheduler searches an order, too.

    >>> from pippy.drivers.plan import Costs, make_schedule
    >>> from pippy.drivers.plan.choice.limits import MemoryLimit
    >>> from pippy.drivers.plan.cost.held_bytes import PipeBytes, StageBytes
    >>> program, sizes = make_schedule("1f1b", workers=2, chunks=4), PipeBytes((StageBytes(kept=10), StageBytes(kept=10)))
    >>> problem = Problem.of(program, Costs(), [MemoryLimit((10, 10))], checkpoint=None, sizes=sizes)
    >>> [(each.seconds, each.modes) for each in search(problem, thorough=False).candidates if each.name == "1f1b"]
    [(17.0, {0: 'always', 1: 'never'})]
    """
    return _Search(problem).run(thorough, measured)


def fits(problem: Problem, names: Sequence[str] = ()) -> bool:
    """Whether anything keeps the limits, or one of these schedules, without the times.

    >>> from pippy.drivers.plan import Costs, make_schedule
    >>> from pippy.drivers.plan.choice.limits import MemoryLimit
    >>> from pippy.drivers.plan.cost.held_bytes import PipeBytes, StageBytes
    >>> program, sizes = make_schedule("1f1b", workers=2, chunks=4), PipeBytes((StageBytes(kept=10), StageBytes(kept=10)))
    >>> limits = [MemoryLimit((9, 9))], [MemoryLimit((10, 10))]
    >>> [fits(Problem.of(program, Costs(), each, checkpoint=None, sizes=sizes)) for each in limits]
    [False, True]
    """
    search = _Search(problem)
    return any(search.fits(name, chunks) for chunks in problem.chunks for name in names or schedules())


def schedules() -> list[str]:
    """The names of the schedules that are tried for each number of micro-batches."""
    return [name for name, entry in REGISTRY.items() if entry.training and name != "list"]


def _elsewhere(choice: Choice) -> Iterator[tuple[str, Candidate]]:
    """The fastest candidate on each other placement, if it is faster than the chosen one."""
    placement = choice.program.placement
    seen = {placement}
    counts = [len(placement.stages_of(worker)) for worker in range(placement.workers)]
    for shape in SHAPES:
        other = make_placement(placement.workers, counts, shape)
        if other not in seen:
            seen.add(other)
            there = search(replace(choice.problem.on(other), chunks=(choice.chunks,)), thorough=False)
            if there.candidates and there.candidates[0].seconds * (1 + TIE) < choice.chosen.seconds:
                yield shape, there.candidates[0]


class _Search:
    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.candidates: list[Candidate] = []
        self.unlimited: list[Candidate] = []
        self.refused: list[Candidate] = []  # what lacks least in each order that breaks a limit
        self.errors: dict[str, str] = {}  # of schedules that cannot be made

    def run(self, thorough: bool, measured: bool) -> Choice:
        for chunks in self.problem.chunks:
            for name in schedules():
                self.try_schedule(name, chunks)
        nearest = min(self.refused, key=self._lack, default=None)
        counts = (lightest_of_fastest(self.candidates).chunks,) if self.candidates else self.problem.chunks
        if thorough and len(counts) == 1:
            self.try_schedule("list", counts[0])
        return Choice(
            self.problem,
            tuple(sorted(self.candidates, key=lambda each: each.seconds)),
            min(self.unlimited, key=lambda each: each.seconds, default=None),
            None if self.candidates else nearest,
            self._left_out(),
            measured,
        )

    def try_schedule(self, name: str, chunks: int) -> None:
        """Find the fastest candidate of one schedule with so many micro-batches, or the one that lacks least."""
        try:
            tried = self._tried(name, chunks)
            tried.first.seconds  # noqa: B018  # refuses costs that are not those of the stages
        except ScheduleError as error:
            self.errors[name] = str(error).partition("; ")[0]
            return
        self.unlimited.append(tried.first)
        fitting = min(tried.fitting(), key=lambda each: each.seconds, default=None)
        if fitting is None:
            self.refused.append(tried.nearest())
        else:
            self.candidates.append(fitting)

    def fits(self, name: str, chunks: int) -> bool:
        """Whether one schedule keeps the limits with so many micro-batches."""
        try:
            return self._tried(name, chunks).fits
        except ScheduleError:
            return False

    def _tried(self, name: str, chunks: int) -> TriedModes:
        """One schedule, and what each worker holds with the modes that it may have."""
        problem = self.problem
        computations = 3 * problem.program.stages * chunks
        if name == "list" and computations > SEARCHED:
            raise ArgumentError("a search over so many computations takes long")
        if len(problem.chunks) > 1 and computations > MOST_COMPUTATIONS:
            raise ArgumentError(f"with {chunks} micro-batches it has too many computations to try")
        made = problem.made(name, chunks)
        return TriedModes(made, problem.micro_batch(chunks), problem.limits, problem.checkpoint)

    def _left_out(self) -> tuple[tuple[str, str], ...]:
        """The schedules of which there is no candidate. If one breaks a limit, the reason is that of the nearest."""
        reasons = dict(self.errors)
        for each in sorted(self.refused, key=self._lack, reverse=True):
            chunks = (
                f"with {each.chunks} micro-batch{'es' * (each.chunks != 1)} " if len(self.problem.chunks) > 1 else ""
            )
            reasons[each.name] = chunks + self.problem.refusal(each)
        with_candidates = {each.name for each in self.candidates}
        return tuple((name, reasons[name]) for name in REGISTRY if name in reasons and name not in with_candidates)

    def _lack(self, candidate: Candidate) -> tuple[float, ...]:
        return *self.problem.lack(candidate), candidate.seconds
