"""Which worker adds up the gradients of which parameters, and what goes in one message."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from pippy.drivers.control.messages import GradientBucket, ReplicatedParameter

BUCKET_BYTES = 8 << 20  # a message has no more, unless one parameter has

Sized = tuple[ReplicatedParameter, int]


def gradient_buckets(parameters: Sequence[ReplicatedParameter], sizes: Mapping[str, int]) -> tuple[GradientBucket, ...]:
    """Buckets of parameters, of which each of their workers adds up about as many bytes. ``sizes`` are the bytes by name.

    >>> parameters = [ReplicatedParameter(name, ((0, None), (2, None))) for name in "abc"]
    >>> buckets = gradient_buckets(parameters, {"a": 100, "b": 300, "c": 200})
    >>> [(bucket.owner, [each.name for each in bucket.parameters]) for bucket in buckets]
    [(0, ['b']), (2, ['a', 'c'])]
    """
    by_workers: dict[tuple[int, ...], list[Sized]] = {}
    for each in parameters:
        workers = tuple(dict.fromkeys(worker for worker, _ in each.copies))
        by_workers.setdefault(workers, []).append((each, sizes[each.name]))
    return tuple(
        GradientBucket(owner, bucket)
        for workers, own in by_workers.items()
        for owner, parts in _divided(workers, own).items()
        for bucket in _filled(parts)
    )


def _divided(workers: Iterable[int], sized: Sequence[Sized]) -> dict[int, list[Sized]]:
    """The parameters that each worker adds up: the largest first, each to the worker that has the least so far."""
    bytes_of = dict.fromkeys(workers, 0)
    owners: dict[str, int] = {}
    for each, size in sorted(sized, key=lambda pair: -pair[1]):
        owners[each.name] = owner = min(bytes_of, key=bytes_of.__getitem__)
        bytes_of[owner] += size
    return {worker: [pair for pair in sized if owners[pair[0].name] == worker] for worker in bytes_of}


def _filled(sized: Iterable[Sized]) -> Iterator[tuple[ReplicatedParameter, ...]]:
    """Parameters in buckets, in order."""
    full = total = 0
    numbered = []
    for each, size in sized:
        if total and total + size > BUCKET_BYTES:
            full, total = full + 1, 0
        total += size
        numbered.append((full, each))
    for _, bucket in groupby(numbered, key=lambda pair: pair[0]):
        yield tuple(each for _, each in bucket)
