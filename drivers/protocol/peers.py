"""Messages after which workers need connections with each other."""

from abc import ABC, abstractmethod
from collections.abc import Iterable

from pippy.drivers.plan.language.instructions import Instruction


class NeedsPeers(ABC):
    """A message after which a worker passes values to other workers, or takes theirs."""

    @abstractmethod
    def peers(self, worker: int) -> set[int]:
        """The other workers, if the message goes to this one."""


def others_in(order: Iterable[Instruction]) -> set[int]:
    """The workers that instructions send to, or receive from."""
    return {other(each) for each in order if (other := each.kind.sends_to or each.kind.receives_from)}
