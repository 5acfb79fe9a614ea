"""Limits: predicates of candidates. Each says what a candidate holds that is too much, and how much there is room for."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from pippy.drivers.plan.choice.byte_sizes import byte_text
from pippy.drivers.plan.choice.candidate import Candidate
from pippy.drivers.plan.cost.held_bytes import PipeBytes
from pippy.drivers.plan.language.errors import ArgumentError
from pippy.drivers.plan.language.placement import Placement

_ANY = 2**31  # stage-micro-batches: more than any program has
_NOT_COUNTED = "a limit of bytes needs the bytes of a micro-batch; give the problem sizes="


@dataclass(frozen=True)
class Limit(ABC):
    """The most that each worker may hold of something.

    ``counts_inputs`` says whether it counts the inputs that a forward leaves which is computed again.
    """

    most: tuple[int, ...]
    counts_inputs: ClassVar[bool]
    noun: ClassVar[str]  # what is limited

    @abstractmethod
    def held(self, candidate: Candidate) -> tuple[int, ...]:
        """The most that each worker holds of it."""

    @abstractmethod
    def text(self, held: int, most: int) -> str:
        """What a worker holds, and its limit, as reports show them."""

    @abstractmethod
    def room(self, worker: int, stages: Sequence[int], sizes: PipeBytes | None) -> int:
        """How many stage-micro-batches a worker with these stages has room for, whichever they are."""

    def keeps(self, worker: int, held: int) -> bool:
        """Whether a worker that holds so much keeps the limit."""
        return held <= self.most[worker]

    def refusal(self, candidate: Candidate) -> str:
        """Says why a candidate is refused. It is empty if the candidate keeps the limit.

        >>> from pippy.drivers.plan import make_schedule
        >>> from pippy.drivers.plan.choice.candidate import MicroBatch
        >>> LiveLimit((1, 1)).refusal(Candidate(make_schedule("1f1b", workers=2, chunks=4), MicroBatch()))
        'it holds 2 stage-micro-batches on worker 0, and the limit is 1'
        """
        for worker, held in enumerate(self.held(candidate)):
            if not self.keeps(worker, held):
                return f"it holds {held:,} {self.noun} on worker {worker}, and the limit is {self.most[worker]:,}"
        return ""


class LiveLimit(Limit):
    """The most stage-micro-batches whose forward has run, or has run again, and whose backward has not."""

    noun = "stage-micro-batches"
    counts_inputs = False

    def held(self, candidate: Candidate) -> tuple[int, ...]:
        return candidate.peak_live

    def text(self, held: int, most: int) -> str:
        return f"{held} of {most} {self.noun}"

    def room(self, worker: int, stages: Sequence[int], sizes: PipeBytes | None) -> int:
        return self.most[worker]


class MemoryLimit(Limit):
    """The most bytes, of what is counted of a micro-batch."""

    noun = "bytes"
    counts_inputs = True

    def held(self, candidate: Candidate) -> tuple[int, ...]:
        if candidate.peak_bytes is None:
            raise ArgumentError(_NOT_COUNTED)
        return candidate.peak_bytes

    def text(self, held: int, most: int) -> str:
        return f"{byte_text(held)} of {byte_text(most)}"

    def room(self, worker: int, stages: Sequence[int], sizes: PipeBytes | None) -> int:
        if sizes is None:
            raise ArgumentError(_NOT_COUNTED)
        own = [sizes.stages[stage] for stage in stages]
        largest = max(stage.kept for stage in own)
        free = self.most[worker] - sum(stage.persistent + stage.gradients for stage in own)
        return free // largest if largest else _ANY


def live_counts(
    limits: Sequence[Limit],
    placement: Placement,
    chunks: int,
    sizes: PipeBytes | None = None,
    modes: Sequence[str] = (),
) -> list[int] | None:
    """How many stage-micro-batches each worker has room for, and at least its number of stages. None without a limit.

    If the ``modes`` of all stages of a worker compute forwards again, it may begin any number, unless a limit counts inputs.

    >>> from pippy.drivers.plan.cost.held_bytes import StageBytes
    >>> sizes = PipeBytes((StageBytes(kept=30), StageBytes(kept=40)))
    >>> live_counts([MemoryLimit((100, 100))], Placement((0, 1)), 8, sizes)
    [3, 2]
    >>> live_counts([LiveLimit((2, 2))], Placement((0, 1)), 8, modes=["never", "always"])
    [2, 8]
    """
    if not limits:
        return None
    inputs_count = any(limit.counts_inputs for limit in limits)
    counts = []
    for worker in range(placement.workers):
        stages = placement.stages_of(worker)
        count = max(len(stages), min(limit.room(worker, stages, sizes) for limit in limits))
        if modes and not inputs_count and all(modes[stage] != "never" for stage in stages):
            count = max(count, chunks * len(stages))
        counts.append(count)
    return counts
