"""The search for the fastest program of a problem that keeps all limits, and if there is none, for the nearest.

    for each number of micro-batches    costs and bytes of one of them
      for each schedule                 on the placement, as it is when nothing is computed again
        for each worker                 the fewest stages that compute again, so that it keeps its limits
          simulate                      how long the step takes
    then the list scheduler             for the best number of micro-batches

Candidates whose times differ by less than `TIE` count as equally fast. Of those, the one that holds least is chosen.

Where nothing fits, `unfit` says what is nearest, and what would fit: this limit, so many micro-batches, so many workers.

So that an order keeps limits, as few stages as possible compute forwards again. They are found for each worker alone. What a
worker holds depends on its own order and on its own stages. So each worker tries the modes of its stages by itself, and one
candidate counts one try of every worker. A mode that computes more again than another one that fits is left out: it takes at
least as long.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, pairwise, product
from math import prod

from pippy.drivers.plan.choice.choice import Choice
from pippy.drivers.plan.choice.problem import (
    TIE,
    Candidate,
    Limit,
    MemoryLimit,
    MicroBatch,
    Modes,
    Problem,
    byte_count,
    byte_text,
    lightest_of_fastest,
)
from pippy.drivers.plan.cost.held_bytes import held_bytes
from pippy.drivers.plan.language.errors import ArgumentError, ScheduleError
from pippy.drivers.plan.language.instructions import Op
from pippy.drivers.plan.language.placement import SHAPES, make_placement
from pippy.drivers.plan.language.program import Program
from pippy.drivers.plan.orders.registry import REGISTRY
from pippy.drivers.plan.passes.rewrites import Checkpoint, add_recompute, modes_of

ORDER = ("never", "except_last", "always")  # what is computed again, from least to most
FEW_STAGES = 3  # a worker with more stages than this tries no longer all modes of them
FEW_PROGRAMS = 16  # up to so many programs are simulated; of more, the workers' cheapest modes are taken

Tries = list[tuple[Modes, tuple[int, ...]]]  # modes of one worker's stages, and what it holds with them for each limit


class TriedModes:
    """One order, and what each worker holds with the modes that ``checkpoint`` gives its stages; without it, with all to try.

    A worker that keeps its limits when it computes nothing again, which is tried first, tries nothing else.

    >>> from pippy.drivers.plan import make_schedule
    >>> from pippy.drivers.plan.choice.problem import MemoryLimit
    >>> from pippy.drivers.plan.cost.held_bytes import PipeBytes, StageBytes
    >>> micro_batch = MicroBatch(sizes=PipeBytes((StageBytes(kept=10), StageBytes(kept=9))))
    >>> tried = TriedModes(make_schedule("1f1b", workers=2, chunks=4), micro_batch, [MemoryLimit((19, 19))])
    >>> for modes, held in tried.tries[0]:
    ...     print(modes, held)
    {0: 'never'} (20,)
    {0: 'except_last'} (20,)
    {0: 'always'} (10,)
    >>> [candidate.modes for candidate in tried.fitting()]
    [{0: 'always', 1: 'never'}]
    """

    def __init__(
        self, program: Program, micro_batch: MicroBatch, limits: Sequence[Limit], checkpoint: Checkpoint | None = None
    ) -> None:
        self.program, self.micro_batch, self.limits = program, micro_batch, limits
        self._candidates: dict[tuple[str, ...], Candidate] = {}
        self.tries = self._tries(self._options(checkpoint))

    @property
    def first(self) -> Candidate:
        """The candidate that computes least again, whatever the limits."""
        return self._candidate([tries[0][0] for tries in self.tries])

    @property
    def fits(self) -> bool:
        """Whether each worker can keep its limits."""
        return all(self._fitting_modes())

    def fitting(self) -> Iterator[Candidate]:
        """The candidates with which each worker keeps its limits, and computes no more again than it must."""
        needed = [least_modes(modes) for modes in self._fitting_modes()]
        if prod(map(len, needed)) > FEW_PROGRAMS:
            again = self.micro_batch.costs.resolve(self.program).stages[Op.RECOMPUTE]

            def added(modes: Modes) -> float:
                return sum(float(again[stage]) * ORDER.index(mode) for stage, mode in modes.items())

            needed = [[min(modes, key=added)] for modes in needed]
        yield from map(self._candidate, product(*needed))

    def nearest(self) -> Candidate:
        """The candidate in which each worker lacks least, the first limits first; and of those, computes least again."""

        def lack(worker: int, modes: Modes, held: Sequence[int]) -> tuple[int, ...]:
            over = [max(each, limit.most[worker]) for each, limit in zip(held, self.limits)]
            return *over, sum(map(ORDER.index, modes.values()))

        return self._candidate([
            min(tries, key=lambda each: lack(worker, *each))[0] for worker, tries in enumerate(self.tries)
        ])  # fmt: skip

    def _options(self, checkpoint: Checkpoint | None) -> list[list[Modes]]:
        """For each worker the modes that its stages may have."""
        stages_of = [self.program.placement.stages_of(worker) for worker in range(self.program.workers)]
        if checkpoint is None:
            return [[dict(zip(stages, modes)) for modes in _options(len(stages))] for stages in stages_of]
        given = modes_of(checkpoint, self.program.stages)
        return [[{stage: given[stage] for stage in stages}] for stages in stages_of]

    def _tries(self, options: list[list[Modes]]) -> list[Tries]:
        tries: list[Tries] = [[] for _ in options]
        number = 0
        while number < max(map(len, options)):
            modes_of_all = [each[min(number, len(each) - 1)] for each in options]
            candidate = self._candidate(modes_of_all)
            held = list(zip(*(limit.held(candidate) for limit in self.limits))) or [()] * len(options)
            for worker, modes in enumerate(modes_of_all):
                if number < len(options[worker]):
                    tries[worker].append((modes, held[worker]))
            if number == 0:
                options = [
                    each[:1] if self._keeps(worker, held[worker]) else each for worker, each in enumerate(options)
                ]
            number += 1
        return tries

    def _keeps(self, worker: int, held: Sequence[int]) -> bool:
        return all(limit.keeps(worker, each) for each, limit in zip(held, self.limits))

    def _fitting_modes(self) -> list[list[Modes]]:
        return [
            [modes for modes, held in tries if self._keeps(worker, held)] for worker, tries in enumerate(self.tries)
        ]

    def _candidate(self, modes_of_all: Sequence[Mapping[int, str]]) -> Candidate:
        modes = {stage: mode for each in modes_of_all for stage, mode in sorted(each.items())}
        key = tuple(modes.values())
        if key not in self._candidates:
            self._candidates[key] = Candidate(add_recompute(self.program, modes), self.micro_batch, modes)
        return self._candidates[key]


def least_modes(fitting: Sequence[Modes]) -> list[Modes]:
    """Those that do not compute more again than another one.

    >>> least_modes([{0: "always", 1: "never"}, {0: "never", 1: "always"}, {0: "always", 1: "always"}])
    [{0: 'always', 1: 'never'}, {0: 'never', 1: 'always'}]
    """

    def needless(modes: Modes, than: Modes) -> bool:
        return modes != than and all(ORDER.index(than[stage]) <= ORDER.index(modes[stage]) for stage in modes)

    return [modes for modes in fitting if not any(needless(modes, other) for other in fitting)]


def _options(stages: int) -> Iterator[tuple[str, ...]]:
    if stages <= FEW_STAGES:
        yield from product(ORDER, repeat=stages)
        return
    for less, more in pairwise(ORDER):
        yield from ((more,) * count + (less,) * (stages - count) for count in range(stages))
    yield (ORDER[-1],) * stages


SEARCHED = 2000  # with more computations than this, the list scheduler takes many seconds
MOST_COMPUTATIONS = 2000  # of a program, where micro-batches are chosen: a larger one takes long to simulate


def choose(problem: Problem) -> Choice:
    """The best answer to a problem, and what would be faster on other placements. Raises if nothing keeps the limits.

    >>> from pippy.drivers.plan import Costs, make_schedule
    >>> from pippy.drivers.plan.choice.problem import LiveLimit
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
    >>> from pippy.drivers.plan.choice.problem import MemoryLimit
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
    >>> from pippy.drivers.plan.choice.problem import MemoryLimit
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


def unfit(choice: Choice, shown: str, more_chunks: Sequence[int] = (), option: str = "memory=") -> str:
    """What to say of a problem that nothing solves. ``shown`` is its limit of bytes as the user gave it, as the ``option``.

    It says what would fit: this limit, so many micro-batches, so many workers. ``more_chunks`` are the numbers of micro-batches
    that could be taken instead, the smallest first.
    """
    problem, nearest = choice.problem, choice.nearest
    memory = next(limit for limit in problem.limits if isinstance(limit, MemoryLimit))
    if nearest is None or any(limit.refusal(nearest) for limit in problem.limits if limit is not memory):
        return choice.refusal
    limits = _enough(memory.held(nearest), memory.most)
    others = [f"{count} micro-batches" for count in islice(_chunks_that_fit(problem, nearest.name, more_chunks), 1)]
    others += [f"{count} workers for these stages" for count in islice(_workers_that_fit(problem, nearest), 1)]
    advice = [
        f"{option}{_as_given(limits, len(set(memory.most)) == 1, option)}",
        *(others or ["a cut into more stages on more workers"]),
    ]
    return f"{option}{shown} is too little: {_held(nearest, memory)}. What would fit: {', or '.join(advice)}"


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
