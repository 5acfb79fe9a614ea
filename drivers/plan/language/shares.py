"""How the micro-batches of a mini-batch are shared among replicas: to each a run of them, as many as to the others or one more.

9 micro-batches, 2 replicas     0 1 2 3 4 | 5 6 7 8
"""

from itertools import accumulate, pairwise

from pippy.drivers.plan.language.errors import ArgumentError, beginning
from pippy.drivers.plan.language.placement import require_count


def shares(chunks: int, replicas: int, slices: int = 1) -> tuple[range, ...]:
    """The micro-batches of each replica. The ``slices`` of a row stay together.

    >>> shares(chunks=5, replicas=2)
    (range(0, 3), range(3, 5))
    >>> shares(chunks=6, replicas=2, slices=2)
    (range(0, 4), range(4, 6))
    >>> shares(chunks=1, replicas=2)
    Traceback (most recent call last):
    pippy.drivers.plan.language.errors.ArgumentError: chunks=1 for 2 replicas of the pipeline: each needs a micro-batch; ...
    """
    require_count("replicas", replicas)
    if chunks % slices:
        raise ArgumentError(
            f"chunks={beginning(chunks)} for {beginning(slices)} slices of each sequence: a row of micro-batches has as many "
            f"as there are slices; give a multiple of {beginning(slices)}"
        )
    rows = chunks // slices
    if rows < replicas:
        raise ArgumentError(
            f"chunks={beginning(rows)} for {beginning(replicas)} replicas of the pipeline: each needs a "
            f"micro-batch; give {beginning(replicas)} or more"
        )
    sizes = [slices * (rows // replicas + (replica < rows % replicas)) for replica in range(replicas)]
    return tuple(range(start, stop) for start, stop in pairwise(accumulate(sizes, initial=0)))
