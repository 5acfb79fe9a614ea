"""An optimizer whose state is divided among the replicas of the pipeline: who updates what, and who is sent it.

The owner of a bucket, which adds up the gradients of its parameters, has their state, updates them, and sends them to the
workers that have copies. The sums of the gradients stay with the owner.

    worker 0 ──its gradients of b──▶ worker 2: the sums, the state and the update of b ──b, updated──▶ worker 0
    worker 2 ──its gradients of a──▶ worker 0: the sums, the state and the update of a ──a, updated──▶ worker 2
"""

from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import torch

from pippy.drivers.protocol.state import GradientBucket, TensorLocation


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
        return [at for at, (sum, _) in self.held.items() if sum == receive.sum]

    @torch.no_grad()
    def take(self, number: int, value: list[torch.Tensor]) -> None:
        """Have the parameters of a bucket as another worker has updated them."""
        for updated, copies in zip(value, self.held[number][1]):
            for copy in copies:
                copy.copy_(updated)
