"""An optimizer whose state is divided among the replicas of the pipeline: who updates what, and who is sent it.

The owner of a bucket, which adds up the gradients of its parameters, has their state, updates them, and sends them to the
workers that have copies. The sums of the gradients stay with the owner.

    worker 0 ──its gradients of b──▶ worker 2: the sums, the state and the update of b ──b, updated──▶ worker 0
    worker 2 ──its gradients of a──▶ worker 0: the sums, the state and the update of a ──a, updated──▶ worker 2
"""

from collections.abc import Callable, Container, Sequence

import torch

from pippy.drivers.protocol.gradients import GradientBucket
from pippy.drivers.protocol.parameters import TensorLocation
from pippy.drivers.wire.transport import Transport


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
        self.index = index
        self.held: list[tuple[int, GradientBucket, list[list[torch.Tensor]]]] = []
        for at, bucket in enumerate(buckets):
            own = [each for each in bucket.parameters if each.name in names]
            if own and index in bucket.workers:
                places = [[place for worker, place in each.copies if worker == index] for each in own]
                self.held.append((at, bucket, [list(map(tensor, each)) for each in places]))
        self.copies = {id(copy) for *_, here in self.held for copies in here for copy in copies}

    @torch.no_grad()
    def exchange(self, number: int, transport: Transport, first: int) -> None:
        """Send what this worker has updated, in the command with this number, and take what others have. ``first`` numbers the
        messages of the first bucket."""
        for at, bucket, here in self.held:
            if bucket.owner == self.index:
                updated = [copies[0].detach() for copies in here]
                for worker in bucket.workers:
                    if worker != self.index:
                        transport.send(worker, (number, first + at, worker), updated)
        for at, bucket, here in self.held:
            if bucket.owner != self.index:
                received = transport.receive((number, first + at, self.index), bucket.owner)
                for value, copies in zip(received, here):
                    for copy in copies:
                        copy.copy_(value)
