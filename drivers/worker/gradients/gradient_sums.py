"""Adds up the gradients of parameters of which several workers have copies: of replicated parameters, and of replicas.

Parameters that the same workers hold go in buckets, one message for each. One of the workers owns a bucket: it adds up, in the
order of the copies, so that the sums are the same in every run, and on every worker.

    worker 1 ──its gradients──▶ the owner, worker 0 ──the sums──▶ worker 1

Where the state of an optimizer is divided among the workers, the sums stay with the owner. A worker sends the gradients of a
bucket as soon as the last backward of its stages is over, while other stages still compute. All gradients are sent before any
are waited for, and the sums that others wait for come first. So no two workers wait for each other.
"""

from collections.abc import Callable, Sequence, Set
from typing import Any, Protocol

import torch

from pippy.drivers.protocol.gradients import GradientBucket
from pippy.drivers.protocol.parameters import TensorLocation
from pippy.drivers.wire.received_values import ValueKey
from pippy.ir.run.stage_backward import add_gradients

Gradient = torch.Tensor | None
FIRST_NUMBER = 1 << 24  # of the buckets in the keys of messages; no program has as many values
FIRST_SHARE = 1 << 25  # of the buckets in the keys of messages with updated parameters: parameter_shares.py


class Messages(Protocol):
    """What carries gradients between workers."""

    def send(self, to: int, key: ValueKey, value: Any) -> None:
        """Send a value."""

    def receive(self, key: ValueKey, source: int) -> Any:
        """Wait for a value, and take it."""


class GradientSums:
    """Adds up on worker ``index``, for all ``buckets``. ``tensor`` gives its parameter at a location.

    >>> GradientSums([], index=0, tensor=lambda place: torch.zeros(1)).copies
    set()
    """

    def __init__(
        self, buckets: Sequence[GradientBucket], index: int, tensor: Callable[[TensorLocation], torch.Tensor]
    ) -> None:
        self.buckets, self.index = buckets, index
        # For each bucket and parameter, the copies on this worker by their numbers.
        self.here = [
            [{at: tensor(place) for at, (worker, place) in enumerate(each.copies) if worker == index} for each in own]
            for own in (bucket.parameters for bucket in buckets)
        ]
        self.copies = {id(copy) for own in self.here for local in own for copy in local.values()}
        self.leaving = {  # for each bucket that another worker owns, the stages here that have its parameters
            at: {place.call for each in bucket.parameters for worker, place in each.copies if worker == index}
            for at, bucket in enumerate(self.buckets)
            if bucket.owner != index and index in bucket.workers
        }
        self.divided: set[str] = set()  # parameters of optimizers that are divided among their workers
        self.undivided: set[str] = set()  # parameters of others

    def copies_in(self, at: int) -> list[int]:
        """The ids of the copies on this worker of the parameters in a bucket."""
        return [id(copy) for local in self.here[at] for copy in local.values()]

    def send(self, number: int, at: int, gradients: dict[int, Gradient], messages: Messages) -> None:
        """Send the gradients of a bucket to its owner. They are taken out of ``gradients``."""
        own = [gradients.pop(copy) for copy in self.copies_in(at)]
        messages.send(self.buckets[at].owner, _key(number, at, self.index), own)

    def of(
        self,
        number: int,
        gradients: dict[int, Gradient],
        messages: Messages,
        private: Set[int] = frozenset(),
        sent: Set[int] = frozenset(),
        finish: Callable[[int, Gradient], Gradient] = lambda key, gradient: gradient,
    ) -> dict[int, Gradient]:
        """The sum for every copy that is here, by its id, from their gradients, which are taken out of ``gradients``.

        ``number`` is that of the command. Only ``private`` gradients, which nobody else needs, are written into. The buckets
        with the numbers ``sent`` were sent before. ``finish`` makes what counts of a sum that this worker has added up, for
        the copy with that id.
        """
        held = [(at, *each) for at, each in enumerate(zip(self.buckets, self.here)) if any(each[1])]
        for at in self.leaving.keys() - sent:  # before the sums come, which take as much memory
            self.send(number, at, gradients, messages)
        sums: dict[int, Gradient] = {}
        for owned in (True, False):  # first the sums that other workers wait for
            for at, bucket, here in held:
                if (bucket.owner == self.index) == owned:
                    if owned:
                        totals = self._add_up(number, at, gradients, messages, private, finish)
                    elif self._stays(bucket):
                        totals = [None] * len(here)
                    else:
                        totals = self._received(number, at, messages)
                    for total, local in zip(totals, here):
                        first, *others = map(id, local.values())
                        sums[first] = total
                        sums |= {other: None if total is None else total.clone() for other in others}
        return sums

    def _add_up(
        self,
        number: int,
        at: int,
        gradients: dict[int, Gradient],
        messages: Messages,
        private: Set[int],
        finish: Callable[[int, Gradient], Gradient],
    ) -> Sequence[Gradient]:
        bucket = self.buckets[at]
        others = [worker for worker in bucket.workers if worker != self.index]
        theirs = {worker: iter(messages.receive(_key(number, at, worker), worker)) for worker in others}
        totals: list[Gradient] = []
        for parameter, local in zip(bucket.parameters, self.here[at]):
            total = _Sum()
            for copy, (worker, _) in enumerate(parameter.copies):
                if copy in local:
                    total.add(gradients.pop(id(local[copy])), private=id(local[copy]) in private)
                else:
                    total.add(next(theirs[worker]), private=True)
            totals.append(finish(id(next(iter(local.values()))), total.taken()))
        for worker in others if not self._stays(bucket) else ():
            messages.send(worker, _key(number, at, worker), totals)
        return totals

    def _received(self, number: int, at: int, messages: Messages) -> Sequence[Gradient]:
        return messages.receive(_key(number, at, self.index), self.buckets[at].owner)

    def _stays(self, bucket: GradientBucket) -> bool:
        """Whether only the owner needs the sums."""
        names = {each.name for each in bucket.parameters}
        return names <= self.divided and names.isdisjoint(self.undivided)

    def named(self, value_number: int, worker: int) -> str:
        """What a message carries, and which worker sends it. The arguments are the last two parts of its key."""
        updated = value_number >= FIRST_SHARE
        bucket = self.buckets[value_number - (FIRST_SHARE if updated else FIRST_NUMBER)]
        first, *others = (parameter.name for parameter in bucket.parameters)
        what = f"{first!r}{f' and {len(others)} more' * bool(others)}"
        if updated:
            return f"{what}, updated, from worker {bucket.owner}"
        if bucket.owner == self.index:
            return f"the gradients of {what}, from worker {worker}"
        return f"the sums of the gradients of {what}, from worker {bucket.owner}"


class _Sum:
    """A sum of gradients. It writes only into those that are ``private``, as those are that came from another worker."""

    value: Gradient = None
    private = True

    def add(self, gradient: Gradient, private: bool) -> None:
        if gradient is None:
            return
        if self.value is None:
            self.value, self.private = gradient, private
        elif (self.private or private) and _alike(self.value, gradient):
            into, other = (self.value, gradient) if self.private else (gradient, self.value)
            self.value, self.private = into.add_(other), True  # the sum of two does not depend on their order
        else:
            self.value, self.private = add_gradients(self.value, gradient), True

    def taken(self) -> Gradient:
        """The sum, in memory of its own."""
        return self.value if self.private or self.value is None else self.value.clone()


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    kinds = [(type(each), each.layout, each.dtype, each.shape, each.requires_grad) for each in (one, other)]
    return kinds[0] == kinds[1] == (torch.Tensor, torch.strided, one.dtype, one.shape, False)


def _key(number: int, at: int, worker: int) -> tuple[int, int, int]:
    """The key of a message about a bucket: the gradients that a worker sends to its owner, or the sums that it is sent."""
    return number, FIRST_NUMBER + at, worker
