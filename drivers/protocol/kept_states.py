"""Copies of what workers hold, in the memory of their neighbours."""

from dataclasses import dataclass

from pippy.drivers.protocol.peers import NeedsPeers


@dataclass(frozen=True)
class KeepState(NeedsPeers):
    """Copy what the worker holds, send the copy to worker ``to``, and keep that of worker ``of`` beside it.

    Copies of other points than ``before`` are dropped.
    """

    point: int
    before: int | None
    to: int
    of: int

    def peers(self, worker: int) -> set[int]:
        """The neighbours."""
        return {self.to, self.of} - {worker}


@dataclass(frozen=True)
class TakeKept(NeedsPeers):
    """Go back to a point: send the copies that other workers lack, and take those that this worker lacks.

    For each copy, ``sends`` has the worker that it is of, and the one that it goes to; ``receives`` the one that it comes from.
    """

    point: int
    sends: tuple[tuple[int, int], ...]
    receives: tuple[tuple[int, int], ...]

    def peers(self, worker: int) -> set[int]:
        """The workers that copies go to, or come from."""
        return {other for _, other in (*self.sends, *self.receives)} - {worker}
