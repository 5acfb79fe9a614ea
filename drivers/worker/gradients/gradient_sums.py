"""Adds up the gradients of parameters of which several workers have copies: of replicated parameters, and of replicas.

Parameters that the same workers hold go in buckets, one message for each; a sum of a program is one or more of them. One of the
workers owns a bucket: it adds up, in the order of the copies, so that the sums are the same in every run, and on every worker.

    worker 1 ──its gradients──▶ the owner, worker 0 ──the sums──▶ worker 1

The state of an optimizer may be divided among the replicas of the pipeline. Then the sums of the gradients stay with the owner
of a bucket, who has the state of its parameters, updates them, and sends them to the workers that have copies.

    worker 0 ──its gradients of b──▶ worker 2: the sums, the state and the update of b ──b, updated──▶ worker 0
    worker 2 ──its gradients of a──▶ worker 0: the sums, the state and the update of a ──a, updated──▶ worker 2

The instructions of a program say when a worker does which of this.
"""

from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import torch

from pippy.drivers.protocol.state import GradientBucket, TensorLocation
from pippy.ir.run.stage_backward import add_gradients

Gradient = torch.Tensor | None
Own = Callable[[Sequence[int]], list[tuple[Gradient, bool]]]


class GradientSums:
    """What worker ``index`` has of all ``buckets``. ``tensor`` gives its parameter at a location.

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
        self.divided: set[str] = set()  # parameters of optimizers that are divided among their workers
        self.undivided: set[str] = set()  # parameters of others

    def buckets_of(self, name: str) -> list[int]:
        """The numbers of the buckets of a sum, of those that have to do with this worker."""
        return [at for at, each in enumerate(self.buckets) if each.sum == name and any(self.here[at])]

    def copies_in(self, at: int) -> list[int]:
        """The ids of the copies on this worker of the parameters in a bucket."""
        return [id(copy) for local in self.here[at] for copy in local.values()]

    def stays(self, at: int) -> bool:
        """Whether only the owner needs the sums of a bucket."""
        names = {each.name for each in self.buckets[at].parameters}
        return names <= self.divided and names.isdisjoint(self.undivided)


class AddingUp:
    """The sums of one command: ``totals`` has that of each copy on this worker, by its id.

    ``own`` gives the gradients of some copies, by their ids, each with whether nobody else needs it, so that it may be written
    into. ``finish`` makes what counts of a sum that this worker has added up, for the copy with that id.
    """

    def __init__(
        self, sums: GradientSums, own: Own, finish: Callable[[int, Gradient], Gradient] = lambda key, gradient: gradient
    ) -> None:
        self.sums, self.own, self.finish = sums, own, finish
        self.totals: dict[int, Gradient] = dict.fromkeys(sums.copies)
        self.made: dict[int, Sequence[Gradient]] = {}  # the sums of each bucket that is added up here
        self._begun: dict[int, _Bucket] = {}

    def leaving(self, name: str) -> Iterator[tuple[int, list[Gradient]]]:
        """This worker's gradients of a sum, which another adds up: each bucket with its number."""
        for at in self.sums.buckets_of(name):
            yield at, [gradient for gradient, _ in self.own(self.sums.copies_in(at))]

    def arrived(self, at: int, worker: int, gradients: list[Gradient], whole: bool) -> None:
        """Take another worker's gradients of a bucket. If this worker's own are ``whole``, add them up at once: so few
        buckets wait in memory."""
        bucket = self._bucket(at)
        bucket.theirs[worker] = gradients
        if whole:
            bucket.add_up()

    def add_up(self, name: str) -> None:
        """Add up what is left of a sum."""
        for at in self.sums.buckets_of(name):
            totals = self._bucket(at).add_up(all=True)
            del self._begun[at]
            firsts = [id(next(iter(local.values()))) for local in self.sums.here[at]]
            self.made[at] = [self.finish(first, total.taken()) for first, total in zip(firsts, totals)]
            self.take(at, self.made[at])

    def leaving_sums(self, name: str) -> Iterator[tuple[int, Sequence[Gradient]]]:
        """The sums that this worker has made, if others need them: each bucket with its number."""
        return ((at, self.made[at]) for at in self.awaited(name))

    def awaited(self, name: str) -> list[int]:
        """The buckets of a sum that others than the owner need."""
        return [at for at in self.sums.buckets_of(name) if not self.sums.stays(at)]

    def take(self, at: int, totals: Sequence[Gradient]) -> None:
        """Take the sums of a bucket: each copy has one of its own."""
        for total, local in zip(totals, self.sums.here[at]):
            first, *others = map(id, local.values())
            self.totals[first] = total
            self.totals |= {other: None if total is None else total.clone() for other in others}

    def _bucket(self, at: int) -> "_Bucket":
        return self._begun.setdefault(at, _Bucket(self.sums, at, self.own))


class _Bucket:
    """A bucket that is added up: ``theirs`` has the gradients that came, by worker. One that has no backward sends none."""

    def __init__(self, sums: GradientSums, at: int, own: Own) -> None:
        self.sums, self.at, self.own = sums, at, own
        self.theirs: dict[int, list[Gradient]] = {}
        self.totals = [_Sum() for _ in sums.buckets[at].parameters]
        self.workers = [worker for worker, _ in sums.buckets[at].parameters[0].copies]
        self.next = 0  # the copy that is to be added

    def add_up(self, all: bool = False) -> "list[_Sum]":
        """Add the gradients that are here, as far as the order of the copies goes."""
        while self.next < len(self.workers):
            worker, before = self.workers[self.next], self.workers[: self.next].count(self.workers[self.next])
            if worker == self.sums.index:
                copies = [id(local[self.next]) for local in self.sums.here[self.at]]
                for total, (gradient, private) in zip(self.totals, self.own(copies)):
                    total.add(gradient, private)
                    del gradient
            elif worker in self.theirs:
                theirs, each = self.theirs[worker], self.workers.count(worker)
                for number, total in enumerate(self.totals):
                    total.add(theirs[number * each + before], private=True)
                    theirs[number * each + before] = None
            elif not all:
                break
            self.next += 1
        return self.totals


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


class ParameterShares:
    """The parameters with these ``names``, on worker ``index``. ``tensor`` gives its parameter at a location.

    >>> ParameterShares([], (), index=0, tensor=lambda place: torch.zeros(1)).copies
    set()
    """

    def __init__(
        self,
        buckets: Sequence[GradientBucket],
        names: Container[str],
        index: int,
        tensor: Callable[[TensorLocation], torch.Tensor],
    ) -> None:
        self.held: dict[
            int, tuple[str, list[list[torch.Tensor]]]
        ] = {}  # by the number of messages, behind those of sums
        for number, bucket in enumerate(buckets, len(buckets)):
            own = [each for each in bucket.parameters if each.name in names]
            if own and index in bucket.workers:
                places = [[place for worker, place in each.copies if worker == index] for each in own]
                self.held[number] = bucket.sum, [list(map(tensor, each)) for each in places]
        self.copies = {id(copy) for _, here in self.held.values() for copies in here for copy in copies}

    def leaving(self, send: Any) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """The parameters of a sum, which were updated here: each bucket with its number."""
        return ((at, [copies[0].detach() for copies in self.held[at][1]]) for at in self.awaited(send))

    def awaited(self, receive: Any) -> list[int]:
        """The numbers of the buckets of a sum."""
        return [at for at, (sum, _) in self.held.items() if sum == receive.of]

    @torch.no_grad()
    def take(self, number: int, value: list[torch.Tensor]) -> None:
        """Have the parameters of a bucket as another worker has updated them."""
        for updated, copies in zip(value, self.held[number][1]):
            for copy in copies:
                copy.copy_(updated)
