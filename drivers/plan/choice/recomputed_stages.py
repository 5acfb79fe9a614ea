"""Which stages of an order compute forwards again so that it keeps limits: as few as possible, found for each worker alone.

What a worker holds depends on its own order and on its own stages. So each worker tries the modes of its stages by itself, and
one candidate counts one try of every worker. A mode that computes more again than another one that fits is left out: it takes
at least as long.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, product
from math import prod

from pippy.drivers.plan.choice.candidate import Candidate, MicroBatch, Modes
from pippy.drivers.plan.choice.limits import Limit
from pippy.drivers.plan.language.instructions import Op
from pippy.drivers.plan.language.program import Program
from pippy.drivers.plan.passes.recompute import Checkpoint, add_recompute, modes_of

ORDER = ("never", "except_last", "always")  # what is computed again, from least to most
FEW_STAGES = 3  # a worker with more stages than this tries no longer all modes of them
FEW_PROGRAMS = 16  # up to so many programs are simulated; of more, the workers' cheapest modes are taken

Tries = list[tuple[Modes, tuple[int, ...]]]  # modes of one worker's stages, and what it holds with them for each limit


class TriedModes:
    """One order, and what each worker holds with the modes that ``checkpoint`` gives its stages; without it, with all to try.

    A worker that keeps its limits when it computes nothing again, which is tried first, tries nothing else.

    >>> from pippy.drivers.plan import make_schedule
    >>> from pippy.drivers.plan.choice.limits import MemoryLimit
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
        self,
        program: Program,
        micro_batch: MicroBatch,
        limits: Sequence[Limit],
        checkpoint: Checkpoint | None = None,
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
