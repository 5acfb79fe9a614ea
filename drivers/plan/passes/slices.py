"""Makes of any order of micro-batches one of slices of sequences: forward slice by slice, backward from the last to the first.

                       4 micro-batches                     2 rows (0 1, 2 3) of 2 slices each
    1f1b, worker 0     F0 F1 B0 F2 B1 F3 B2 B3             F0 F1 F2 B1 F3 B0 B3 B2
          worker 1     F0 B0 F1 B1 F2 B2 F3 B3             F0 F1 B1 F2 B0 F3 B3 B2

1. The last slice of a row is the first one to go backward. So the backward of each micro-batch is that of the slice which is as
   far from the end of its row as the micro-batch is from the beginning.
2. Each stage runs ahead by the slices of a row but one: its first forward is followed at once by so many others, and then each
   forward takes the place of the one that many before it.

If the order of micro-batches works, so does that of slices. Take each forward for the one whose place it has, and each backward
for the one whose place it has: then whatever a computation needs came before it in the old order, too. A worker holds no more
than before, and besides the slices that its stages run ahead.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from pippy.drivers.plan.language.instructions import Compute, Op


def in_slices(order: Sequence[Compute], slices: int) -> list[Compute]:
    """A worker's order of micro-batches as one of slices.

    >>> from pippy.drivers.plan.language.instructions import parse_instruction
    >>> order = [parse_instruction(text) for text in ("F0.0", "B0.0", "F0.1", "B0.1", "F0.2", "B0.2", "F0.3", "B0.3")]
    >>> print(*in_slices(order, slices=2))
    F0.0 F0.1 B0.1 F0.2 B0.0 F0.3 B0.3 B0.2
    """
    forwards: dict[int, list[Compute]] = defaultdict(list)
    for compute in order:
        if compute.op == Op.FORWARD:
            forwards[compute.stage].append(compute)
    return list(_placed(order, {stage: iter(its) for stage, its in forwards.items()}, slices))


def _placed(order: Sequence[Compute], left: dict[int, Iterator[Compute]], slices: int) -> Iterator[Compute]:
    begun: set[int] = set()
    for compute in order:
        if compute.op != Op.FORWARD:
            first = compute.microbatch - compute.microbatch % slices
            yield replace(compute, microbatch=2 * first + slices - 1 - compute.microbatch)
            continue
        ahead = 0 if compute.stage in begun else slices - 1
        begun.add(compute.stage)
        for _, forward in zip(range(1 + ahead), left[compute.stage]):
            yield forward
