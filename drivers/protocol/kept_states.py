"""Copies of what workers hold, in the memory of their neighbours."""

from dataclasses import dataclass

from pippy.drivers.plan.language.instructions import Instruction
from pippy.drivers.protocol.peers import NeedsPeers, others_in


@dataclass(frozen=True)
class KeepState(NeedsPeers):
    """Copy what the worker holds, and exchange copies with neighbours, as ``order`` says.

    Copies of other points than ``before`` are dropped.
    """

    point: int
    before: int | None
    order: tuple[Instruction, ...]

    def peers(self, worker: int) -> set[int]:
        """The neighbours."""
        return others_in(self.order)


@dataclass(frozen=True)
class TakeKept(NeedsPeers):
    """Go back to a point. By ``order``, send the copies that other workers lack, and take those that this worker lacks.

    The stages that the worker has now were on the workers ``sources`` then: it takes their state from the copies of these.
    """

    point: int
    order: tuple[Instruction, ...]
    sources: tuple[int, ...]

    def peers(self, worker: int) -> set[int]:
        """The workers that copies go to, or come from."""
        return others_in(self.order)
