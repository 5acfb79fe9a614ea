"""Messages after which workers need connections with each other."""

from abc import ABC, abstractmethod


class NeedsPeers(ABC):
    """A message after which a worker passes values to other workers, or takes theirs."""

    @abstractmethod
    def peers(self, worker: int) -> set[int]:
        """The other workers, if the message goes to this one."""
