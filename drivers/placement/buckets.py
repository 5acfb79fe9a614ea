"""Gradients and parameters of copies: which worker adds up what, who passes on what is updated, and who calls which hooks."""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from pippy.drivers.plan.language.exchange_program import ExchangeProgram
from pippy.drivers.plan.language.instructions import ReceiveParameters, SendParameters
from pippy.drivers.plan.passes.exchange import exchange
from pippy.drivers.protocol.state import GradientBucket, ReplicatedParameter

# Which worker adds up the gradients of which parameters, and what goes in one message.


BUCKET_BYTES = 8 << 20  # a message has no more, unless one parameter has

Sized = tuple[ReplicatedParameter, int]


def gradient_buckets(parameters: Sequence[ReplicatedParameter], sizes: Mapping[str, int]) -> tuple[GradientBucket, ...]:
    """Divide parameters into buckets. All workers with copies add up about as many bytes. ``sizes`` are the bytes by name.

    Parameters of different stages are in different buckets, as their gradients are complete at different times.

    >>> from pippy.drivers.protocol.state import TensorLocation
    >>> places = {name: TensorLocation(f"submod_{stage}", name) for name, stage in [("a", 0), ("b", 0), ("c", 0), ("d", 2)]}
    >>> parameters = [ReplicatedParameter(name, ((0, place), (2, place))) for name, place in places.items()]
    >>> buckets = gradient_buckets(parameters, {"a": 100, "b": 300, "c": 200, "d": 50})
    >>> [(bucket.owner, [each.name for each in bucket.parameters]) for bucket in buckets]
    [(0, ['b']), (2, ['a', 'c']), (0, ['d'])]
    """
    by_stages: dict[tuple[Any, ...], list[Sized]] = {}
    for each in parameters:
        key = tuple(worker for worker, _ in each.copies), tuple(place.call for _, place in each.copies)
        by_stages.setdefault(key, []).append((each, sizes[each.name]))
    loads: dict[tuple[int, ...], dict[int, int]] = {}  # for the same workers, the bytes that each of them adds up
    return tuple(
        GradientBucket(owner, bucket)
        for (workers, _), sized in by_stages.items()
        for owner, parts in _divided(sized, loads.setdefault(workers, dict.fromkeys(workers, 0))).items()
        for bucket in _filled(parts)
    )


def _divided(sized: Sequence[Sized], loads: dict[int, int]) -> dict[int, list[Sized]]:
    """The parameters that each worker adds up: the largest first, each to the worker that has the least so far."""
    owners: dict[str, int] = {}
    for each, size in sorted(sized, key=lambda pair: -pair[1]):
        owners[each.name] = owner = min(loads, key=loads.__getitem__)
        loads[owner] += size
    return {worker: [pair for pair in sized if owners[pair[0].name] == worker] for worker in loads}


def _filled(sized: Iterable[Sized]) -> Iterator[tuple[ReplicatedParameter, ...]]:
    """The parameters of one worker in buckets, in their order."""
    full = total = 0
    numbered = []
    for each, size in sized:
        if total and total + size > BUCKET_BYTES:
            full, total = full + 1, 0
        total += size
        numbered.append((full, each))
    for _, bucket in groupby(numbered, key=lambda pair: pair[0]):
        yield tuple(each for _, each in bucket)


# Who sends which updated parameters to whom, for an optimizer whose state is divided among replicas of the pipeline.


def passing_on(buckets: Iterable[GradientBucket], names: Container[str]) -> ExchangeProgram:
    """The program that follows an update of the parameters with these names: who adds up their gradients updates them.

    >>> from pippy.drivers.protocol.state import ReplicatedParameter
    >>> buckets = [GradientBucket(2, (ReplicatedParameter("weight", ((0, "here"), (2, "there"))),), "stage 0 part 1")]
    >>> print(passing_on(buckets, {"weight"}))
    exchange parameters
    worker 0
      receive parameters of stage 0 part 1 from 2
    worker 2
      send parameters of stage 0 part 1 to 0
    """
    own = [bucket for bucket in buckets if any(each.name in names for each in bucket.parameters)]
    moved = dict.fromkeys((each.sum, each.owner, to) for each in own for to in each.workers if to != each.owner)
    return exchange(
        "parameters", ((SendParameters(sum, to), ReceiveParameters(sum, owner)) for sum, owner, to in moved)
    )
