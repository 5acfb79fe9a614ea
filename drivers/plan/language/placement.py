"""Which worker holds which stage."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle, pairwise

from pippy.drivers.plan.language.errors import ArgumentError, PlacementError, beginning


@dataclass(frozen=True)
class Run:
    """Adjacent stages on one worker. Values between them stay on the worker, so they work as one stage."""

    worker: int
    stages: tuple[int, ...]


@dataclass(frozen=True)
class Placement:
    """The worker of every stage, in the order of the stages.

    >>> Placement((0, 1, 1, 0)).stages_of(0)
    (0, 3)
    >>> Placement((0, 2))
    Traceback (most recent call last):
    pippy.drivers.plan.language.errors.PlacementError: worker 1 holds no stage in placement 0 2; give it one, or \
number the workers without holes
    """

    worker_of: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.worker_of:
            raise PlacementError("the placement () holds no stage; place at least one")
        for worker in self.worker_of:
            if not is_count(worker, least=0):
                raise PlacementError(
                    f"{beginning(worker)} is no worker's number in placement {self}; number workers from 0"
                )
        held = set(self.worker_of)
        empty = next((worker for worker in range(max(held)) if worker not in held), None)
        if empty is not None:
            raise PlacementError(
                f"worker {empty} holds no stage in placement {self}; give it one, or number the workers without holes"
            )

    def __str__(self) -> str:
        return " ".join(map(str, self.worker_of))

    @property
    def stages(self) -> int:
        return len(self.worker_of)

    @cached_property
    def workers(self) -> int:
        return max(self.worker_of) + 1

    def stages_of(self, worker: int) -> tuple[int, ...]:
        return self._stages_by_worker[worker]

    @cached_property
    def _stages_by_worker(self) -> tuple[tuple[int, ...], ...]:
        held: list[list[int]] = [[] for _ in range(self.workers)]
        for stage, worker in enumerate(self.worker_of):
            held[worker].append(stage)
        return tuple(map(tuple, held))

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """The placement as runs of adjacent stages, from the first stage to the last.

        >>> [run.stages for run in Placement((0, 1, 1, 0)).runs]
        [(0,), (1, 2), (3,)]
        """
        cuts = [stage for stage in range(1, self.stages) if self.worker_of[stage] != self.worker_of[stage - 1]]
        return tuple(
            Run(self.worker_of[start], tuple(range(start, stop))) for start, stop in pairwise([0, *cuts, self.stages])
        )

    def one_run_each(self) -> bool:
        """Whether every worker holds one run of adjacent stages."""
        return len(self.runs) == self.workers


def linear(counts: Sequence[int]) -> Placement:
    """Blocks of adjacent stages: the first ``counts[0]`` on worker 0, and so on.

    >>> print(linear([1, 2, 1]))
    0 1 1 2
    """
    return Placement(tuple(worker for worker, count in enumerate(counts) for _ in range(count)))


def looped(counts: Sequence[int]) -> Placement:
    """Give the workers a stage each, round and round, until each has its number.

    >>> print(looped([2, 2, 1]))
    0 1 2 0 1
    """
    return deal(counts, cycle([range(len(counts))]))


def v_shaped(counts: Sequence[int]) -> Placement:
    """Give out the stages to the workers in order, then in reverse order: the first worker holds both ends of the V.

    >>> print(v_shaped([2, 2, 2]))
    0 1 2 2 1 0
    """
    workers = range(len(counts))
    return deal(counts, cycle([workers, workers[::-1]]))


def deal(counts: Sequence[int], rounds: Iterator[Iterable[int]]) -> Placement:
    room = list(counts)
    dealt: list[int] = []
    while any(room):
        for worker in next(rounds):
            if room[worker]:
                room[worker] -= 1
                dealt.append(worker)
    return Placement(tuple(dealt))


SHAPES = {"linear": linear, "looped": looped, "v": v_shaped}


def make_placement(
    workers: int, stages_per_worker: int | Sequence[int] = 1, placement: str | Mapping[int, int] | Placement = "linear"
) -> Placement:
    """A placement from its shape ("linear", "looped", "v") and sizes, or from a dict of stage to worker.

    >>> print(make_placement(2, 2, "v"))
    0 1 1 0
    >>> print(make_placement(2, placement={0: 1, 1: 0, 2: 1}))
    1 0 1
    """
    require_count("workers", workers)
    counts = stage_counts(workers, stages_per_worker)
    if isinstance(placement, str):
        if placement not in SHAPES:
            raise PlacementError(
                f"placement {beginning(placement)} is unknown; take one of {', '.join(SHAPES)}, or a dict"
            )
        return SHAPES[placement](counts)
    chosen = placement if isinstance(placement, Placement) else from_mapping(placement)
    if chosen.workers != workers:
        raise PlacementError(f"placement {chosen} is for {chosen.workers} workers, not for workers={workers}")
    if stages_per_worker != 1 and counts != [len(chosen.stages_of(worker)) for worker in range(workers)]:
        raise PlacementError(
            f"placement {chosen} does not hold stages_per_worker={stages_per_worker}; leave stages_per_worker out"
        )
    return chosen


def stage_counts(workers: int, stages_per_worker: int | Sequence[int]) -> list[int]:
    if not isinstance(stages_per_worker, Sequence):
        require_count("stages_per_worker", stages_per_worker)
        return [stages_per_worker] * workers
    for count in stages_per_worker:
        require_count("stages_per_worker", count)
    if len(stages_per_worker) != workers:
        raise ArgumentError(
            f"stages_per_worker={stages_per_worker} has {len(stages_per_worker)} entries for workers={workers}; "
            "give one number for all workers, or one each"
        )
    return list(stages_per_worker)


def from_mapping(placement: Mapping[int, int]) -> Placement:
    if not isinstance(placement, Mapping):
        raise PlacementError(f"placement {beginning(placement)} is unknown; take one of {', '.join(SHAPES)}, or a dict")
    for stage in range(len(placement)):
        if stage not in placement:
            raise PlacementError(
                f"stage {stage} has no worker in placement {dict(placement)}; number the stages from 0 without holes"
            )
    return Placement(tuple(placement[stage] for stage in range(len(placement))))


def is_count(value: object, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def require_count(name: str, value: object) -> None:
    """Refuse a size that is not a whole number of at least 1."""
    if not is_count(value):
        raise ArgumentError(f"{name}={beginning(value)} must be a whole number of at least 1")
